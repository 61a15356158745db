"""The page to look at: its numbers are those of the records and of the predictor; in a browser it shows them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from birder.predict import Cluster, Link, predict
from experiments.cells import timelines
from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import methods_table, page, prediction, speedup
from experiments.report.page import Grid

SMALL = Grid(
    models=(("resnet50_b32_tf32", "ResNet-50"), ("bert_base_b12_tf32", "BERT-Base")), nodes=(2, 8), gbps=(10, 100)
)
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


@pytest.fixture(scope="module")
def records() -> list[ResultRecord]:
    return read_all(PUBLISHED)


@pytest.fixture(scope="module")
def content(records: list[ResultRecord]) -> dict[str, Any]:
    return page.data(PUBLISHED, records, SMALL)


def test_speedups_are_those_of_the_records(records: list[ResultRecord], content: dict[str, Any]) -> None:
    emulated = [r for r in records if r.exp == "resnet50" and r.cluster == "emulated"]
    tables = {t.slug: t for t in speedup.build(emulated)}
    assert {t["slug"] for t in content["speedups"]} <= set(tables)
    assert len(content["speedups"]) == len({(r.nodes, r.ranks_per_node) for r in emulated}) >= 3
    for shown in content["speedups"]:
        table, rows = tables[shown["slug"]], {row["method"]: row for row in shown["rows"]}
        for row in (row for row in table.rows if row.seconds):
            mine = rows[row.label]
            assert mine["ms"] == 1000 * (row.seconds or 0)
            assert mine["fp32"]["value"] == table.speedup(row, "fp32")
            ratio = table.ratio(row, "fp32")
            if ratio is not None and row is not table.baseline("fp32"):
                assert (mine["fp32"]["low"], mine["fp32"]["high"]) == (ratio.low, ratio.high)


def test_accuracies_are_those_of_the_records(records: list[ResultRecord], content: dict[str, Any]) -> None:
    (table,) = methods_table.build(records)
    shown = {row["method"]: row for row in content["accuracy"]["rows"]}
    base = shown["SGDM fp32"]["mean"]
    for line in table.lines:
        if line.best is not None and line.best.mean is not None:
            mine = shown[line.label]
            assert mine["mean"] == line.best.mean
            assert mine["difference"] == pytest.approx(line.best.mean - base)
            assert mine["share"] == table.payload_ratio(line)
    assert content["accuracy"]["failures"] == [said for line in table.lines for said in line.failures]


def test_replays_are_those_of_the_records(records: list[ResultRecord], content: dict[str, Any]) -> None:
    known = {o.case.id: o for o in prediction.evaluate(records, prediction.load(PUBLISHED))}
    sent = [o for o in known.values() if o.case.link == "emulated" and o.sends]
    assert len(content["replays"]) == len(sent) > 200
    assert 2 <= len({row["kind"] for row in content["replays"]}) <= 6  # series that one chart can hold
    for row in content["replays"]:
        assert row["replayed"] == known[row["id"]].measured_ms
        assert row["predicted"] == known[row["id"]].predicted_ms


def test_the_grid_is_the_predictors(content: dict[str, Any]) -> None:
    grid = content["grid"]
    for m, (name, label) in enumerate(SMALL.models):
        assert grid["models"][m] == label
        for n, nodes in enumerate(SMALL.nodes):
            for g, gbps in enumerate(SMALL.gbps):
                p = predict(timelines.load(name), Cluster(nodes, 8, Link(gbps, page.LATENCY_US)), list(SMALL.methods))
                assert grid["ms"][m][n][g] == [round(p[method].ms, 3) for method in SMALL.methods]
    assert grid["methods"][grid["fp32"]] == "DDP fp32"
    assert grid["methods"][grid["bound"]] == "no communication"
    assert "DDP bf16" in grid["methods"]  # the page looks for it by this name


def test_the_page_holds_its_data_and_needs_no_network(content: dict[str, Any]) -> None:
    made = page.html(content, "/* a library with </b> and /*DATA*/ in it */")
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', made, re.DOTALL)
    assert held is not None
    assert json.loads(held[1]) == json.loads(json.dumps(content))
    assert "/*PLOTLY*/" not in made
    own = page.TEMPLATE.read_text()
    assert not re.search(r"https?://|@import|src=|url\(", own)  # nothing is fetched
    for id_ in re.findall(r'\$\("([a-z]+)"\)', own):
        assert f'id="{id_}"' in own, id_
    for control in ("model", "nodes", "gbps"):  # native controls with a label each: the keyboard works
        assert re.search(rf"<label>[^<]+<select id=\"{control}\">", own)


def text_of(dom: str, id_: str) -> str:
    found = re.search(rf'id="{id_}"[^>]*>(.*?)</(?:output|p|table)>', dom, re.DOTALL)
    assert found is not None, id_
    return re.sub(r"<[^>]+>", " ", found[1])


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize(("place", "width"), [("0,1,0", 400), ("1,0,1", 1600)])
def test_a_browser_shows_the_numbers(content: dict[str, Any], tmp_path: Path, place: str, width: int) -> None:
    """Headless, with plotly in the page: the controls stand where the address says, the table has the grid's numbers."""
    from plotly.offline import get_plotlyjs

    path = tmp_path / "index.html"
    path.write_text(page.html(content, get_plotlyjs()), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=10000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}#{place}"]
    done = subprocess.run([str(BROWSER), *flags], capture_output=True, text=True, timeout=120, check=True)
    dom = done.stdout
    assert 'data-ready="yes"' in dom, done.stderr[-2000:]
    m, n, g = map(int, place.split(","))
    grid = content["grid"]
    ms = grid["ms"][m][n][g]
    best = min((value, i) for i, value in enumerate(ms) if i != grid["bound"])
    said = text_of(dom, "answer")
    assert said.startswith(f"{grid['methods'][best[1]]} is the fastest: {float(f'{best[0]:.3g}'):g} ms a step")
    assert f"{ms[grid['fp32']] / best[0]:.2f}x as fast as fp32 DDP" in said
    table = text_of(dom, "predicted")
    for name, value in zip(grid["methods"], ms, strict=True):
        assert name in table
        assert f"{ms[grid['fp32']] / value:.2f}x" in table
    assert dom.count('class="main-svg"') >= 3  # three charts were drawn
    assert f"of {len(content['replays'])} cells are predicted within 10 %" in text_of(dom, "within")
