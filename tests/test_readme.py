"""What the documentation shows is true: its code runs, and the targets, experiments, files, keys and links it names exist."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import birder
from experiments.config import compose

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "results/*.md", "results/published/**/*.md")
    for p in ROOT.glob(pattern)
)
METHODS: dict[str, list[type]] = {
    "birder": [birder.Birder],
    "onebit_adam": [birder.OneBitAdam],
    "lamb": [birder.LAMB],
    "onebit_lamb": [birder.OneBitLAMB],
    "zero_one_adam": [birder.ZeroOneAdam],
    "cser": [birder.CSER, birder.QSparseLocalSGD, birder.EFSGD],
    "slamb": [birder.SLAMB],
    "sparse_loco": [birder.SparseLoCo],
    "dense": [birder.SGDM, birder.AdamW, birder.BertAdam],
}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)


def code(page: str) -> str:
    """Everything on a page that is set as code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text(page), flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", prose)])


def commands(page: str) -> list[list[str]]:
    """Arguments of every call of run.py and compare.py in the page's shell blocks."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            script = next((i for i, w in enumerate(words) if w.startswith("experiments/")), None)
            if script is not None:
                assert (ROOT / words[script]).is_file()
                found.append(words[script + 1 :])
    return found


def torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    """The script on two ranks with gloo, in the script's own folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, cwd=script.parent)


def test_the_readmes_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (block,) = blocks("README.md", "python")
    (tmp_path / "script.py").write_text(block)
    done = torchrun(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    said = [int(sent) for sent in re.findall(r"rank \d sent (\d+) bytes", done.stdout)]
    # 128 elements after padding: 8 bytes up and 8 down in each of 10 steps. In the first step also the map of seen
    # coordinates: two bytes of flags (a whole one for each rank), 128 of coordinates. fp32 would send 1,680.
    assert said == [290, 290]


def test_the_example_file_ends_with_equal_parameters_on_both_ranks() -> None:
    done = torchrun(ROOT / "examples/ddp.py")
    assert done.returncode == 0, done.stderr
    sums = re.findall(r"sum of all parameters ([-\d.]+)", done.stdout)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    losses = [float(v) for v in re.findall(r"loss ([\d.]+),", done.stdout)]
    assert losses[-1] < 0.5 < losses[0] + 0.1


def test_readme_and_example_file_show_the_same_three_lines() -> None:
    lines = text("README.md").splitlines()
    start = lines.index("optimizer = Birder(model.parameters(), lr=1e-3)")
    three = lines[start : start + 3]
    assert three[1:] == ["ddp = DistributedDataParallel(model)", "attachment = attach(ddp, optimizer)"]
    example = [line.strip() for line in text("examples/ddp.py").splitlines()]
    begin = example.index(three[0])
    assert example[begin : begin + 3] == three


@pytest.mark.parametrize("page", [p for p in PAGES if p != "README.md" and blocks(p, "python")])
def test_python_on_other_pages_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(page, "python"):
        names: dict[str, object] = {"__name__": "page"}
        exec(compile(block, page, "exec"), names)
        for value in list(names.values()):  # a method that a page defines: it must step
            if isinstance(value, type) and value.__module__ == "page" and issubclass(value, birder.BucketOptimizer):
                steps_down(value)


def steps_down(method: type) -> None:
    import torch

    x = torch.nn.Parameter(torch.tensor([2.0, -2.0, 2.0]))
    optimizer = method([x], lr=0.5)
    x.square().sum().backward()
    optimizer.step()
    assert x.tolist() == [1.5, -1.5, 1.5]


@pytest.mark.parametrize("page", PAGES)
def test_targets_experiments_and_files_exist(page: str) -> None:
    shown = code(page)
    targets = re.findall(r"^([a-z0-9_-]+):", text("Makefile"), re.MULTILINE)
    targets += text("Makefile").partition("EXPERIMENTS := ")[2].partition("\n")[0].split()
    assert [t for t in re.findall(r"\bmake ([a-z][a-z0-9_-]*)", shown) if t not in targets] == []
    names = re.findall(r"\+exp=([a-z0-9_]+)", shown)
    assert [n for n in names if not (ROOT / f"conf/exp/{n}.yaml").is_file()] == []
    places = "birder|conf|docs|examples|experiments|launch|tests"
    files = re.findall(rf"\b(?:{places})/[a-z0-9_/]+\.(?:py|yaml|md)\b", shown)
    assert [f for f in files if not (ROOT / f).is_file()] == []
    folders = re.findall(rf"(?<![\w/])(?:{places})/(?:[a-z0-9_]+/)*(?=$|\s|`)", shown, re.MULTILINE)
    assert [f for f in folders if not (ROOT / f).is_dir()] == []


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """Names by which the headings of a page can be linked."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize(("page", "arguments"), [(p, a) for p in PAGES for a in commands(p)])
def test_commands_compose(page: str, arguments: list[str]) -> None:
    """Every command line is valid; of a sweep the first job is looked at."""
    overrides = [a for a in arguments if "=" in a and not a.startswith("--")]
    if "-m" in arguments:
        overrides = [re.sub(r"=([^,\[]+),.*", r"=\1", o) for o in overrides]
    if "--methods" in arguments:
        known = {p.stem for p in (compose.CONF / "optimizer").glob("*.yaml")}
        assert set(arguments[arguments.index("--methods") + 1].split(",")) <= known
    compose.resolve(compose.compose(overrides))


def test_configuration_keys_of_the_readme_exist() -> None:
    """Keys in the table of differences: in the configuration, or arguments of the optimizer, added with ++."""
    table = text("README.md").partition("## Differences from the paper")[2].partition("##")[0]
    keys = re.findall(r"`((?:optimizer|train|comm|checkpoint)\.[a-z_]+)`", table)
    assert len(keys) > 5
    config = compose.compose(["+exp=resnet50", "optimizer=birder"]).config
    options = {n for classes in METHODS.values() for c in classes for n in inspect.signature(c).parameters}
    for key in keys:
        section, _, name = key.partition(".")
        assert name in config[section] or (section == "optimizer" and name in options), key


@pytest.mark.parametrize("method", METHODS)
def test_method_pages_name_every_argument(method: str) -> None:
    page = text(f"docs/methods/{method}.md")
    for cls in METHODS[method]:
        names = set(inspect.signature(cls).parameters) - {"params", "options"}
        shown = set(re.findall(r"\w+", code(f"docs/methods/{method}.md")))
        assert names <= shown | set(re.findall(r"`(\w+)`", page)), cls.__name__
