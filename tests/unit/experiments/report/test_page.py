"""The page to look at: its numbers are those of the records and of the predictor; in a browser it shows them."""

from __future__ import annotations

import csv
import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from birder.predict import DEFAULT, METHODS
from experiments import predict as entry
from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import accuracy, answered, curves, html_page, methods_table, prediction, speedup
from experiments.report.formats import number
from experiments.report.html_page import Grid
from tests.helpers import BROWSER
from tests.helpers.tiers import slow

SMALL = Grid(
    models=(("resnet50_b32_tf32", "ResNet-50"), ("bert_base_b12_tf32", "BERT-Base")), nodes=(2, 8), gbps=(10, 100)
)


@pytest.fixture(scope="module")
def records() -> list[ResultRecord]:
    return read_all(PUBLISHED)


@pytest.fixture(scope="module")
def content(records: list[ResultRecord]) -> dict[str, Any]:
    return html_page.data(PUBLISHED, records, answered.known_verdicts(PUBLISHED), SMALL)


def test_speedups_are_those_of_the_records(records: list[ResultRecord]) -> None:
    emulated = [r for r in records if r.exp == "resnet50" and r.cluster == "emulated"]
    tables = {(t.records[0].nodes, t.records[0].ranks_per_node): t for t in speedup.newest(records, "resnet50")}
    shown = html_page.measured(records)
    assert len(shown) == len(tables) == len({(r.nodes, r.ranks_per_node) for r in emulated}) >= 3
    for page, table in zip(shown, tables.values(), strict=True):
        rows = [re.findall(r"<td>(.*?)</td>", row) for row in page["table"].split("<tr>")]
        cells = {row[0]: row[1:] for row in rows if row}
        for row in (row for row in table.rows if row.ms):
            ms, over_fp32, over_bf16, _ = cells[row.label]
            assert number(row.ms) in ms
            for wire, said in (("fp32", over_fp32), ("bf16", over_bf16)):
                found = table.compared(row, wire)
                assert found is not None
                assert said.startswith(f"{found.value:.2f}x")
                if found.low is not None and row is not table.baseline(wire):
                    assert f"[{found.low:.2f}, {found.high:.2f}]" in said


def test_accuracies_are_those_of_the_records(records: list[ResultRecord], content: dict[str, Any]) -> None:
    (table,) = methods_table.build(records)
    headings, _ = methods_table.as_table(table).printed()
    assert len({*headings}) == len(headings)  # what it sends and how fast it is are both held against fp32
    shown = {row["label"]: row for row in content["accuracy"]["rows"]}
    base = shown["SGDM fp32"]["mean"]
    for line in table.lines:
        mean = None if line.best is None else line.best.summary(None)[0]
        if mean is not None:
            mine = shown[line.label]
            assert mine["mean"] == mean
            assert mine["gap"]["value"] == pytest.approx(mean - base)
            assert mine["share"] == table.payload_ratio(line)
            low, high = content["accuracy"]["axis"]
            assert mine["beyond"] or low < mine["gap"]["value"] < high
    # What would hide all others is named next to the axis: a method that learned nothing there.
    assert [name for name, row in shown.items() if row["beyond"] and abs(row["gap"]["value"]) > 20] == ["EF-SGD"]
    assert 0 < sum(row["beyond"] for row in shown.values()) <= 3
    assert content["accuracy"]["failures"] == [said for line in table.lines for said in line.failures]


def test_replays_are_those_of_the_record(content: dict[str, Any]) -> None:
    known = prediction.load(PUBLISHED)
    sent = known[(known.link == "emulated") & (known.sends == 1)]
    assert len(content["replays"]) == len(sent) > 200
    assert 2 <= len({row["kind"] for row in content["replays"]}) <= 6  # series that one chart can hold
    for row in content["replays"]:
        assert row["replayed"] == known.measured_ms[row["id"]]
        assert row["predicted"] == known.predicted_ms[row["id"]]


def test_loss_curves_are_those_of_the_records(records: list[ResultRecord], content: dict[str, Any]) -> None:
    """From the files alone: the last loss is the mean over the last twentieth of the steps, then over seeds."""
    tables = {t.slug: t for t in accuracy.build(records)}
    assert {task["slug"] for task in content["tasks"]} <= set(tables)
    assert len(content["tasks"]) >= 4
    assert max(len(task["methods"]) for task in content["tasks"]) > 6  # more than one chart holds: there is a control
    for task in content["tasks"]:
        table = tables[task["slug"]]
        lasts = {}
        for shown in task["methods"]:
            best = table.bests[shown["method"]]
            assert best is not None
            seeds = {}
            for r in (r for r in best.valid if r.curve):
                with (PUBLISHED / str(r.curve)).open(encoding="utf-8") as file:
                    losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
                count = max(1, round(0.05 * len(losses)))
                seeds[r.seed] = sum(losses[-count:]) / count
            lasts[shown["method"]] = seeds
            assert shown["final"] == pytest.approx(sum(seeds.values()) / len(seeds), rel=1e-4)  # six digits are kept
            assert shown["mean"] == best.summary(None)[0]
            assert shown["lr"] == best.lr
            assert shown["seeds"] == len(seeds)
            assert len(shown["steps"]) == len(shown["loss"]) <= curves.POINTS
            assert all(a <= b + 1e-9 for a, b in zip(shown["low"], shown["high"], strict=True))
        for shown in task["methods"] if task["baseline"] else []:
            if shown["method"] == task["baseline"]:
                assert shown["final_gap"] is shown["difference"] is None
                assert set(shown["gap"]) == {0.0}
                continue
            mine, base = lasts[shown["method"]], lasts[task["baseline"]]
            both = sorted(set(mine) & set(base))
            found = shown["final_gap"]
            assert found["value"] == pytest.approx(sum(mine[s] - base[s] for s in both) / len(both))
            assert (found["low"] is None) == (len(both) == 1)
            if len(both) > 1:
                assert found["low"] < found["value"] < found["high"]


def test_verdicts_are_those_of_the_accuracy_pages(records: list[ResultRecord], content: dict[str, Any]) -> None:
    """Holm's correction and lost seeds among them: an interval alone would say more."""
    tables, alone = {t.slug: t for t in accuracy.build(records)}, []
    for task in content["tasks"]:
        table = tables[task["slug"]]
        for shown in task["methods"]:
            cell = table.bests[shown["method"]]
            assert cell is not None
            assert (shown["verdict"] or "") == ("" if shown["difference"] is None else table.verdict(cell))
            if shown["verdict"] and table.parity and (gap := table.compared(cell)):
                alone.append(gap.verdict(table.parity.margin, table.higher_is_better) != shown["verdict"])
    assert any(alone)
    assert not all(alone)


def test_the_baseline_is_the_one_that_was_stated_or_the_best_in_fp32(records: list[ResultRecord]) -> None:
    for table in accuracy.build(records):
        cell = curves.baseline(table)
        if table.baseline is not None:
            assert cell is table.baseline
        elif cell is not None:
            assert cell.valid[0].wire == "fp32"
    (methods,) = (t for t in accuracy.build(records) if t.cells[0].records[0].exp == "methods")
    assert curves.baseline(methods).label == "SGDM fp32"  # type: ignore[union-attr]


def test_the_grid_says_what_the_command_line_says(content: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """All its methods, what each costs in accuracy, and its words: the page knew seven methods and no accuracy."""
    grid = content["grid"]
    assert grid["methods"] == [METHODS[m].label for m in DEFAULT]
    (m, name), (n, nodes), (g, gbps) = (1, SMALL.models[1][0]), (1, SMALL.nodes[1]), (0, SMALL.gbps[0])
    there = [f"cluster.nodes={nodes}", f"cluster.gbps={gbps}", "cluster.ranks_per_node=8"]
    entry.main([f"timeline={name}", *there])
    said = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert said == grid["answers"][m][n][g]
    entry.main([f"timeline={name}", *there, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["pays"]
    assert DEFAULT[grid["wins"][m][n][g]] == answer["best"]
    ms = {row["method"]: row["ms"] for row in answer["rows"]}
    assert dict(zip(DEFAULT, grid["ms"][m][n][g], strict=True)) == {
        k: pytest.approx(v, abs=1e-3) for k, v in ms.items()
    }
    assert [grid["models"][i] for i in range(2)] == [label for _, label in SMALL.models]
    assert (grid["methods"][grid["fp32"]], grid["methods"][grid["bf16"]]) == ("DDP fp32", "DDP bf16")
    assert grid["methods"][grid["bound"]] == "no communication"
    assert [DEFAULT[i] for i in grid["curves"]] == [m for m in prediction.METHODS if m != "fp32"]
    found = zip(*(itertools.chain(*itertools.chain(*grid[key])) for key in ("answers", "wins")), strict=True)
    for answer, place in found:  # the headline agrees with the matrix
        kind = {None: "Not decided", grid["bf16"]: "Do not compress"}.get(place, "Compress")
        assert answer.startswith(f"{kind}: ")


def test_the_page_holds_its_data_and_needs_no_network(content: dict[str, Any]) -> None:
    made = html_page.html(content, [], "/* a library with </b> and /*DATA*/ in it */")
    held = re.search(r'<script id="data" type="application/json">(.*?)</script>', made, re.DOTALL)
    assert held is not None
    assert json.loads(held[1]) == json.loads(json.dumps(content))
    assert "/*PLOTLY*/" not in made
    assert not re.search(r"/\*(CSS|JS|DATA)\*/", made.replace("/*DATA*/ in it", ""))
    own = "".join((html_page.FOLDER / f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    assert not re.search(r"https?://|@import|src=|url\(", own)  # nothing is fetched
    for id_ in re.findall(r'\$\("([a-z]+)"\)', own):
        assert f'id="{id_}"' in own, id_
    for control in ("model", "nodes", "gbps", "task", "shown"):  # native controls with a label each: the keyboard works
        assert re.search(rf"<label>[^<]+<select id=\"{control}\">", own)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize(("errors", "said"), [([], None), ([0.0, 0.0, 0.5], 67)])
def test_a_folder_without_replays_states_no_share_of_them(errors: list[float], said: int | None) -> None:
    """It was 0 % of the cells."""
    source = (html_page.FOLDER / "page.js").read_text(encoding="utf-8")
    shown = re.search(r"^function showReplays\(\) \{.*?^\}", source, re.DOTALL | re.MULTILINE)
    assert shown is not None
    rows = [{"id": str(k), "kind": "x", "replayed": 1.0, "predicted": 1.0 + e} for k, e in enumerate(errors)]
    script = f"""const data = {json.dumps({"replays": rows})}, narrow = {{}}, symbols = [], within = {{}}, titles = [];
    const $ = () => within, colour = () => "", draw = (id, title) => titles.push(title);
    {shown[0]}; showReplays(); console.log(JSON.stringify([titles[0], within.textContent]));"""
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [re.findall(r"\d+", text) for text in found] == ([[str(said), "10"], ["2", "3", "10"]] if said else [[], []])


def text_of(dom: str, id_: str) -> str:
    found = re.search(rf'id="{id_}"[^>]*>(.*?)</(?:output|p|table)>', dom, re.DOTALL)
    assert found is not None, id_
    return re.sub(r"<[^>]+>", " ", found[1])


MOVES = """
const set = (id, value) => { const e = document.getElementById(id); e.value = value; e.dispatchEvent(new Event("input")); };
const losses = document.getElementById("losses");
const drawn = () => losses.data.filter((trace) => trace.showlegend !== false).map((trace) => trace.name);
const told = document.createElement("p");
told.id = "told";
const first = drawn(), free = [...document.querySelectorAll("#methods input")];
const blocked = free.filter((box) => box.disabled).length;
const taken = free.find((box) => box.checked);
taken.click();
const fewer = drawn();
free.find((box) => !box.checked && box !== taken).click();
const other = drawn();
set("shown", "gap");
const gap = losses.data.length;
set("model", "MODEL"); set("nodes", "NODES"); set("gbps", "GBPS");
told.textContent = JSON.stringify({first, blocked, fewer, other, gap, wide: document.documentElement.scrollWidth,
  view: innerWidth, hash: location.hash});
document.body.append(told);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize(("begin", "place", "width"), [("1,1,1", "0,1,0", 400), slow("0,0,0", "1,0,1", 1600)])
def test_a_browser_shows_the_numbers(
    records: list[ResultRecord], content: dict[str, Any], tmp_path: Path, begin: str, place: str, width: int
) -> None:
    """Headless, plotly in the page: controls are moved, tables and sentences have the records' and the grid's numbers."""
    from plotly.offline import get_plotlyjs

    m, n, g = map(int, place.split(","))
    moves = MOVES.replace("MODEL", str(m)).replace("NODES", str(n)).replace("GBPS", str(g))
    path = tmp_path / "index.html"
    made = html_page.html(content, html_page.measured(records), get_plotlyjs())
    path.write_text(made.replace("</body>", f"<script>{moves}</script></body>"), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=10000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}#{begin}"]
    done = subprocess.run([str(BROWSER), *flags], capture_output=True, text=True, check=True)
    dom = done.stdout
    assert 'data-ready="yes"' in dom, done.stderr[-2000:]
    grid = content["grid"]
    ms = grid["ms"][m][n][g]
    assert html.unescape(text_of(dom, "answer")) == grid["answers"][m][n][g]
    table = text_of(dom, "predicted")
    for name, value in zip(grid["methods"], ms, strict=True):
        assert name in table
        assert f"{ms[grid['fp32']] / value:.2f}x" in table
    assert dom.count('class="main-svg"') >= 4  # four charts were drawn
    assert f"of {len(content['replays'])} cells are predicted within 10 %" in text_of(dom, "within")

    moved = json.loads(html.unescape(text_of(dom, "told")))
    task = content["tasks"][0]
    assert moved["hash"] == f"#{place}"
    assert moved["wide"] <= moved["view"]  # nothing but tables scrolls sideways
    assert moved["first"][0] == task["baseline"]
    assert len(moved["first"]) == 6
    assert moved["blocked"] == len(task["methods"]) - 6
    assert len(moved["fewer"]) == 5
    assert set(moved["other"]) - set(moved["first"])
    assert moved["gap"] == 6  # no bands around differences
    finals = text_of(dom, "finals")
    for curve in task["methods"]:
        assert curve["method"] in finals
        assert f"{curve['final']:.3f}" in finals
        assert f"{curve['mean']:.2f}" in finals
        if curve["final_gap"] is not None:
            value = curve["final_gap"]["value"]
            assert f"{'−' if value < 0 else '+'}{abs(value):.3f}" in finals
    accuracies = text_of(dom, "accuracies")
    for row in content["accuracy"]["rows"]:
        assert row["label"] in accuracies
        assert "failed" in accuracies if row["mean"] is None else f"{row['mean']:.2f}" in accuracies
    for text in content["accuracy"]["failures"]:
        assert html.escape(text, quote=False) in dom
