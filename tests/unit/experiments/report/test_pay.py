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

from birder.predict import METHODS, Cluster, Link, gpus
from birder.predict.answers import answer
from experiments.cells import architectures
from experiments.cells.architectures import Asked
from experiments.records.record import PUBLISHED
from experiments.report import html_page, pay
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


def test_the_grid_is_the_predictors(content: dict[str, Any]) -> None:
    work = architectures.work(Asked("torchvision:resnet18", 64, "bf16"))
    gpu = gpus.find("rtx4090")
    found = answer(
        work.timeline(gpu), Cluster.of_gpus(8, 8, Link(10, 20.0), gpu.link), methods=pay.SHOWN, unsure=gpus.UNSURE
    )
    cell = content["cells"][0][1][1][0][1][1]
    count = len(pay.SHOWN)
    assert cell[:count] == [pytest.approx(found.prediction[m].ms, rel=1e-3) for m in pay.SHOWN]
    for end in (1, 2):
        there = cell[end * count : (end + 1) * count]
        assert there == [pytest.approx(found.saving(m)[end], abs=1e-3) for m in pay.SHOWN]
    assert next(content["methods"][i] for i in content["curves"]) == "DDP bf16"
    assert len(content["curves"]) == 4


def test_the_page_advises_by_the_accuracy_that_the_command_line_goes_by(content: dict[str, Any]) -> None:
    """By the share of studies that a method has lost, where times are near; without a study all count as lost."""
    assert [pay.SHOWN[i] for i in content["compressed"]] == [m for m in pay.SHOWN if not METHODS[m].dense]
    assert set(content["lost"]) == {1.0}
    lost = {"birder": 0.5, "birder_hierarchical": 0.5, "onebit_adam": 0.25}
    found = pay.data(SMALL, lost)
    assert dict(zip(pay.SHOWN, found["lost"], strict=True)) == dict.fromkeys(pay.SHOWN, 1.0) | lost
    gpu = gpus.find("rtx4090")
    there = Cluster.of_gpus(8, 8, Link(10, 20.0), gpu.link)
    work = architectures.work(Asked("torchvision:resnet18", 64, "bf16"))
    best = answer(work.timeline(gpu), there, methods=pay.SHOWN, unsure=gpus.UNSURE, lost=lost).best
    ms = found["cells"][0][1][1][0][1][1]
    ms = [w * ms[found["fp32"]] + (1 - w) * t for w, t in zip(found["warm"], ms, strict=False)]
    least = min(ms[i] for i in found["compressed"])
    near = [i for i in found["compressed"] if ms[i] <= (1 + found["near"]) * least]
    kept = [i for i in near if found["lost"][i] == min(found["lost"][k] for k in near)]
    chosen = next(i for i in kept if ms[i] <= (1 + found["tie"]) * min(ms[k] for k in kept))
    assert best is not None
    assert pay.SHOWN[chosen] == best.name


@pytest.mark.skipif(NODE is None, reason="no node here")
def test_at_the_points_of_the_grid_the_page_says_what_the_predictor_says() -> None:
    """Nodes of one GPU have no hierarchical methods: one of them was advised there."""
    choice = replace(SMALL, models=(replace(SMALL.models[0], batches=(16,)),), gpus=("a100",), ranks=(1, 8))
    lost = {"birder": 0.5, "birder_hierarchical": 0.0, "sigma_delta": -0.4, "sigma_delta_hierarchical": -0.6}
    content, gpu = pay.data(choice, lost), gpus.find("a100")
    t = architectures.work(Asked("torchvision:resnet18", 16, "bf16")).timeline(gpu)
    cases, expected = [], []
    for r, n, g in itertools.product(range(2), range(2), range(3)):
        ranks, nodes, gbps = choice.ranks[r], choice.nodes[n], choice.gbps[g]
        names = [m for m in pay.SHOWN if ranks > 1 or not METHODS[m].hierarchical]
        there = Cluster.of_gpus(nodes, ranks, Link(gbps, 20.0), gpu.link)
        found = answer(t, there, methods=names, unsure=gpus.UNSURE, lost=lost)
        assert found.best is not None
        cases.append({"model": 0, "gpu": 0, "ranks": r, "batch": 16, "nodes": nodes, "gbps": gbps})
        expected.append([found.pays, pay.SHOWN.index(found.best.name)])
    script = html_page.FOLDER.joinpath("pay.js").read_text(encoding="utf-8")
    asked = f"pay = {json.dumps(content)}; const cases = {json.dumps(cases)};"
    shown = "console.log(JSON.stringify(cases.map(payLine).map(([pays, , best]) => [pays, best])));"
    done = subprocess.run([str(NODE), "-"], input=script + asked + shown, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == expected
    assert len({pays for pays, _ in expected}) == 2


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
        PUBLISHED, [], Grid(models=(("resnet50_b32_tf32", "ResNet-50"),), nodes=(2,), gbps=(10,))
    ) | {"pay": content}
    path = tmp_path / "index.html"
    told = (
        "<script>const t = document.createElement('p'); t.id = 'told';"
        " t.textContent = JSON.stringify({said: payLine(chosenPay())[1], ms: payAt(chosenPay(), chosenPay().gbps),"
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
        for i in range(len(pay.SHOWN)):
            assert min(c[i] for c in corners) <= got["ms"][i] <= max(c[i] for c in corners)
