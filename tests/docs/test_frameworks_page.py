"""docs/appendix/frameworks.md quotes step times from published records."""

from __future__ import annotations

from experiments.records import record
from tests.helpers import ROOT

NAMES = {
    "AdamW fp32 hsdp": "AdamW fp32, HSDP",
    "AdamW bf16 hsdp": "AdamW bf16, HSDP",
    "Birder hsdp": "Birder, HSDP",
    "no communication": "AdamW, HSDP, nothing sent between nodes",
    "Birder hierarchical": "Birder, hierarchical DDP",
}


def test_step_times_of_hsdp_are_those_of_the_records() -> None:
    page = (ROOT / "docs/appendix/frameworks.md").read_text()
    everything = record.read_all(ROOT / "results/published/hsdp")
    records = [r for r in everything if r.nodes == 2]
    assert {r.method for r in records} == set(NAMES)
    assert not any(r.git["dirty"] for r in records)
    assert {r.link["mbit_per_s"] > 0 and r.link["shaped"] for r in records} == {True}
    for r in records:
        median, low, high = (r.timing[k] / 1e3 for k in ("median_ms", "p10_ms", "p90_ms"))
        assert f"| {NAMES[r.method]} | {median:.2f} ({low:.2f}–{high:.2f}) |" in page, r.method


def test_so_are_those_of_four_nodes() -> None:
    page = (ROOT / "docs/appendix/frameworks.md").read_text()
    records = [r for r in record.read_all(ROOT / "results/published/hsdp") if r.nodes == 4]
    assert {r.method for r in records} == {"Birder hsdp", "Birder hierarchical"}
    for r in records:
        median, low, high = (r.timing[k] / 1e3 for k in ("median_ms", "p10_ms", "p90_ms"))
        topology = "hierarchical DDP" if "hierarchical" in r.method else "HSDP"
        assert f"{topology} {median:.3f} ({low:.3f}–{high:.3f}) s" in page
