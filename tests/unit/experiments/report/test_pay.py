"""The page's free choice: its grid is the predictor's, and in a browser what lies between follows the same rule."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from birder.predict import DEFAULT, Cluster, Link, gpus
from birder.predict.answers import answer
from experiments.cells import architectures
from experiments.cells.architectures import Asked
from experiments.records.record import PUBLISHED
from experiments.report import answered, html_page, pay
from experiments.report.html_page import Grid
from experiments.report.pay import Choice, PayModel
from tests.helpers import BROWSER
from tests.helpers.tiers import slow

NODE = shutil.which("node")
SMALL = Choice(
    (PayModel("ResNet-18", "torchvision:resnet18", (16, 64)),), ("a100", "rtx4090"), (8,), (2, 8), (1, 10, 400)
)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return pay.data(SMALL)


def test_the_grid_has_every_method_of_the_command_line(content: dict[str, Any]) -> None:
    """Nine of nineteen were there."""
    work = architectures.work(Asked("torchvision:resnet18", 64, "bf16"))
    gpu = gpus.find("rtx4090")
    there = Cluster.of_gpus(8, 8, Link(10, 20.0), gpu.link)
    found = answer(work.timeline(gpu), there, gpu=gpu, saved_bytes=work.saved_bytes, unsure=gpus.UNSURE)
    assert content["methods"] == [r.method.label for r in found.prediction.rows]
    cell, names = content["cells"][0][1][1][0][1][1], [r.name for r in found.prediction.rows]
    assert cell[: len(names)] == [pytest.approx(r.ms, rel=1e-5) for r in found.prediction.rows]
    able = [names[i] for i in content["compressed"]]
    assert able == [r.name for r in found.prediction.rows if not (r.method.dense or r.method.local)]
    for end in (1, 2):
        ends = cell[len(names) :][(end - 1) * len(able) : end * len(able)]
        assert ends == [pytest.approx(found.saving(m)[end], abs=1e-4) for m in able]
    assert content["gb"][0][1][0][1][:-2] == [pytest.approx(found.memory[m], abs=1e-3) for m in names]
    assert next(content["methods"][i] for i in content["curves"]) == "DDP bf16"
    assert len(content["curves"]) == 4


STUDIES = [
    [["Birder", "worse"], ["1-bit Adam", "worse"], ["Sigma-delta Adam", "parity"]],
    [["Birder one-phase", "worse"], ["Birder", "not decided"]],
]


@pytest.mark.skipif(NODE is None, reason="no node here")
@pytest.mark.parametrize(("room", "latency_us"), [(1.0, 20.0), (1.0, 50_000.0), (0.5, 20.0), (0.0, 20.0)])
def test_at_the_points_of_the_grid_the_page_says_what_the_command_line_says(
    room: float, latency_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sentence, whatever fits. The page advised methods that do not, and knew none of those whose models differ.

    room: of what methods need, from less than the least, 0, to the most, 1.
    """
    gpu = gpus.find("rtx4090")
    monkeypatch.setattr(pay, "LATENCY_US", latency_us)
    work = architectures.work(Asked("torchvision:resnet18", 16, "bf16"))
    every = answer(work.timeline(gpu), Cluster(8, 8, Link(1.0)), gpu=gpu, saved_bytes=work.saved_bytes).memory
    gb = 0.9 * min(every.values()) if not room else (1 - room) * min(every.values()) + room * max(every.values())
    small = replace(gpu, gb=round(gb + 0.01, 2))
    monkeypatch.setitem(gpus.GPUS, "rtx-4090", small)
    models = (replace(SMALL.models[0], batches=(16,)),)
    choice = Choice(models, ("rtx-4090",), ranks=(1, 8), nodes=(2, 64), gbps=(0.01, 1, 10, 60, 400))
    content, t = pay.data(choice, STUDIES), work.timeline(small)
    cases, expected = [], []
    asked: dict[str, Any] = {"saved_bytes": work.saved_bytes, "lost": answered.lost(STUDIES), "recompute": False}
    for r, n, g in itertools.product(range(2), range(2), range(5)):
        there = Cluster.of_gpus(choice.nodes[n], choice.ranks[r], Link(choice.gbps[g], latency_us), small.link)
        found = answer(t, there, gpu=small, unsure=gpus.UNSURE, **asked)
        cases.append({"model": 0, "gpu": 0, "ranks": r, "batch": 16, "nodes": choice.nodes[n], "gbps": choice.gbps[g]})
        best = None if found.best is None else DEFAULT.index(found.best.name)
        expected.append([best, answered.sentences(found, STUDIES)])
    script = html_page.FOLDER.joinpath("pay.js").read_text(encoding="utf-8")
    source = f"pay = {json.dumps(content)}; const cases = {json.dumps(cases)};"
    shown = "console.log(JSON.stringify(cases.map(payAdvice).map((found) => [found.best, paySentences(found)])));"
    done = subprocess.run([str(NODE), "-"], input=script + source + shown, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
    words = " ".join(" ".join(said) for _, said in expected)
    assert ("It does not fit: " in words) == (room == 0)
    assert ("with a model of its own" in words) == (latency_us > 20)
    if room == 1:
        assert "Compress: " in words
        assert "no published study shows parity. Sigma" in words
        assert latency_us > 20 or "Do not compress: " in words


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_between_batches_memory_is_that_of_the_command_line(content: dict[str, Any]) -> None:
    """Activations grow with the batch: a mean of logarithms was too much."""
    work = architectures.work(Asked("torchvision:resnet18", 40, "bf16"))
    there, gpu = Cluster(2, 8, Link(1.0)), gpus.find("a100")
    gb = answer(work.timeline(gpu), there, gpu=gpu, saved_bytes=work.saved_bytes).memory
    script = html_page.FOLDER.joinpath("pay.js").read_text(encoding="utf-8")
    case = {"model": 0, "gpu": 0, "ranks": 0, "batch": 40, "nodes": 2, "gbps": 1}
    source = f"pay = {json.dumps(content)}; console.log(JSON.stringify(payMemory({json.dumps(case)})));"
    done = subprocess.run([str(NODE), "-"], input=script + source, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[:-2] == [pytest.approx(gb[m], abs=0.01) for m in DEFAULT]


def test_every_gpu_of_the_data_file_can_be_chosen_that_computes_so() -> None:
    offered = [gpus.find(name) for name in Choice().gpus]
    assert pay.BEGINS_WITH in Choice().gpus
    assert {g.name for g in offered} == {g.name for g in gpus.GPUS.values()} - {
        "v100-sxm",
        "v100-sxm-16gb",
        "v100-pcie",
        "t4",
    }
    for gpu in offered:
        assert gpu.peak(pay.PRECISION) > 0


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize(
    ("hash_", "width"), [("model=resnet18&gpu=a100&batch=32&nodes=4&ranks=8&gbps=3", 400), slow("", 1600)]
)
def test_a_browser_answers_between_the_points(content: dict[str, Any], tmp_path: Path, hash_: str, width: int) -> None:
    from plotly.offline import get_plotlyjs

    whole = html_page.data(
        PUBLISHED, [], [], Grid(models=(("resnet50_b32_tf32", "ResNet-50"),), nodes=(2,), gbps=(10,))
    ) | {"pay": content}
    path = tmp_path / "index.html"
    told = (
        "<script>const t = document.createElement('p'); t.id = 'told';"
        " t.textContent = JSON.stringify({said: paySentences(payAdvice(chosenPay()))[0],"
        " ms: payAt(chosenPay(), chosenPay().gbps).ms,"
        " wide: document.documentElement.scrollWidth, view: innerWidth,"
        " link: document.getElementById('paylink').getAttribute('href'),"
        " shown: document.getElementById('paycurves').data.filter((x) => x.visible === true).length});"
        " document.body.append(t);</script></body>"
    )
    path.write_text(html_page.html(whole, [], get_plotlyjs()).replace("</body>", told), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900", "--virtual-time-budget=10000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}#{hash_}"]
    dom = subprocess.run([str(BROWSER), *flags], capture_output=True, text=True, check=True).stdout
    found = re.search(r'id="told">(.*?)</p>', dom, re.DOTALL)
    assert found is not None
    got = json.loads(found[1].replace("&amp;", "&"))
    assert got["wide"] <= got["view"]
    assert got["shown"] == 4
    assert got["said"].split(":")[0] in ("Compress", "Do not compress")
    if hash_:
        assert got["link"] == f"#{hash_}"
        table = content["cells"][0]
        corners = [table[b][0][0][n][g] for b in (0, 1) for n in (0, 1) for g in (0, 1)]
        for i in range(len(DEFAULT)):
            assert min(c[i] for c in corners) <= got["ms"][i] <= max(c[i] for c in corners)
