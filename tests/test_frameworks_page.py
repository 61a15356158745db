"""docs/frameworks.md quotes step times from published records."""

from __future__ import annotations

from pathlib import Path

from experiments.records import record

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "AdamW fp32 hsdp": "AdamW fp32, HSDP",
    "AdamW bf16 hsdp": "AdamW bf16, HSDP",
    "Birder hsdp": "Birder, HSDP",
    "no communication": "AdamW, HSDP, nothing sent between nodes",
    "Birder hierarchical": "Birder, hierarchical DDP",
}


def test_step_times_of_hsdp_are_those_of_the_records() -> None:
    page = (ROOT / "docs/frameworks.md").read_text()
    records = record.read_all(ROOT / "results/published/hsdp")
    assert {r.method for r in records} == set(NAMES)
    assert not any(r.git["dirty"] for r in records)
    assert {r.link["mbit_per_s"] > 0 and r.link["shaped"] for r in records} == {True}
    for r in records:
        median, low, high = (r.timing[k] / 1e3 for k in ("median_ms", "p10_ms", "p90_ms"))
        assert f"| {NAMES[r.method]} | {median:.2f} ({low:.2f}–{high:.2f}) |" in page, r.method
