"""What the documentation shows is true: its code runs, and the targets, experiments, files, keys and links it names exist."""

from __future__ import annotations

import inspect
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import birder
from experiments import predict, replay, tune
from experiments.config import compose, sweeps
from tests.helpers import ROOT
from tests.helpers.ranks import run_script
from tests.helpers.tiers import slow

PAGES = sorted(
    p.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "results/*.md", "results/published/**/*.md")
    for p in ROOT.glob(pattern)
)
PAIRS = (("README.md", 1), ("docs/huggingface.md", 0))
"""Pages with the diff of a Trainer's script, and which of their diffs it is."""
METHODS: dict[str, list[type]] = {
    "birder": [birder.Birder],
    "sigma_delta": [birder.SigmaDeltaAdam],
    "onebit_adam": [birder.OneBitAdam],
    "lamb": [birder.LAMB],
    "onebit_lamb": [birder.OneBitLAMB],
    "zero_one_adam": [birder.ZeroOneAdam],
    "cser": [birder.CSER, birder.QSparseLocalSGD, birder.EFSGD],
    "lion": [birder.Lion],
    "efficient_adam": [birder.EfficientAdam],
    "ef21_sgdm": [birder.EF21SGDM],
    "slamb": [birder.SLAMB],
    "sparse_loco": [birder.SparseLoCo],
    "block_scaled": [birder.BlockScaled],
    "dense": [birder.SGDM, birder.AdamW, birder.BertAdam, birder.Muon],
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
    """Script and arguments of every call of a program of experiments/ in the page's shell blocks."""
    found = []
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            script = next((i for i, w in enumerate(words) if w.startswith("experiments/")), None)
            if script is not None:
                assert (ROOT / words[script]).is_file()
                found.append(words[script:])
    return found


def test_the_readmes_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (block,) = blocks("README.md", "python")
    (tmp_path / "script.py").write_text(block)
    printed = "".join(run_script(tmp_path / "script.py", 2))
    said = [int(sent) for sent in re.findall(r"rank \d sent (\d+) bytes", printed)]
    # 128 elements after padding: 8 bytes up and 8 down in each of 10 steps. In the first step also the map of seen
    # coordinates: one byte of flags, 128 of coordinates. fp32 would send 1,680.
    assert said == [289, 289]


@pytest.mark.slow
def test_the_example_file_ends_with_equal_parameters_on_both_ranks() -> None:
    printed = "".join(run_script(ROOT / "examples/ddp.py", 2))
    sums = re.findall(r"sum of all parameters ([-\d.]+)", printed)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    losses = [float(v) for v in re.findall(r"loss ([\d.]+),", printed)]
    assert losses[-1] < 0.5 < losses[0] + 0.1


def test_readme_and_example_file_show_the_same_three_lines() -> None:
    lines = text("README.md").splitlines()
    start = lines.index("optimizer = Birder(model.parameters(), lr=1e-3)")
    three = lines[start : start + 3]
    assert three[1:] == ["ddp = DistributedDataParallel(model)", "attachment = attach(ddp, optimizer)"]
    example = [line.strip() for line in text("examples/ddp.py").splitlines()]
    begin = example.index(three[0])
    assert example[begin : begin + 3] == three


def test_every_page_gives_the_same_advice_on_the_learning_rate() -> None:
    advice = "Try one, three and six times Adam's learning rate with two seeds, and decay it to nearly zero"
    for page in ("README.md", "docs/start.md", "docs/huggingface.md", "docs/accuracy.md", "docs/methods/birder.md"):
        assert advice in text(page), page


def test_readme_and_hugging_face_page_show_the_same_trainer() -> None:
    shown = [[line for line in blocks(page, "diff")[k].splitlines() if line[:1] in ("+", "-")] for page, k in PAIRS]
    assert shown[0] == shown[1]


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


def test_targets_experiments_and_files_exist() -> None:
    targets = re.findall(r"^([a-z0-9_-]+):", text("Makefile"), re.MULTILINE)
    targets += text("Makefile").partition("EXPERIMENTS := ")[2].partition("\n")[0].split()
    places = "birder|conf|docs|examples|experiments|launch|tests"
    for page in PAGES:
        shown = code(page)
        assert [t for t in re.findall(r"\bmake ([a-z][a-z0-9_-]*)", shown) if t not in targets] == [], page
        names = re.findall(r"\+exp=([a-z0-9_]+)", shown)
        assert [n for n in names if not (ROOT / f"conf/exp/{n}.yaml").is_file()] == [], page
        files = re.findall(rf"\b(?:{places})/[a-z0-9_/]+\.(?:py|yaml|md)\b", shown)
        assert [f for f in files if not (ROOT / f).is_file()] == [], page
        folders = re.findall(rf"(?<![\w/])(?:{places})/(?:[a-z0-9_]+/)*(?=$|\s|`)", shown, re.MULTILINE)
        assert [f for f in folders if not (ROOT / f).is_dir()] == [], page


def test_relative_links_resolve() -> None:
    broken = []
    for page, target in [(p, link) for p in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", text(p))]:
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append((page, target))
    assert broken == []


def test_tests_that_pages_name_exist() -> None:
    there = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    for page in PAGES:
        assert set(re.findall(r"`(test_\w+)`", text(page))) <= there, page


def anchors(page: Path) -> set[str]:
    """Names by which the headings of a page can be linked."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


def shown_commands() -> list[Any]:
    """Every command once, with a page that shows it; those of the appendix alone are slow."""
    once = {tuple(a): p for p in sorted(PAGES, key=lambda p: not p.startswith("docs/appendix/")) for a in commands(p)}
    return [(slow if p.startswith("docs/appendix/") else pytest.param)(p, list(a)) for a, p in once.items()]


@pytest.mark.parametrize(("page", "arguments"), shown_commands())
def test_commands_compose(page: str, arguments: list[str]) -> None:
    """Every command line is valid; of a sweep the first job is looked at."""
    script, *arguments = arguments
    if script == "experiments/replay.py":
        assert replay.parse([a for a in arguments if a != "--gpu"])
        return
    if script == "experiments/predict.py":
        assert predict.ask([a for a in arguments if "=" in a and not a.startswith("--")])
        return
    if script == "experiments/tune.py":
        request = tune.TuneRequest.of([a for a in arguments if a != "--dry-run"])
        for optimizer in request.optimizers:
            compose.resolve(request.compose(optimizer))
        return
    overrides = [a for a in arguments if "=" in a and not a.startswith("--")]
    known = {p.stem for p in (compose.CONF / "optimizer").glob("*.yaml")}
    if script == "experiments/sweep.py":
        grid = sweeps.load(overrides.pop(0).removeprefix("sweep="))
        overrides = [*sweeps.rows(grid)[0].overrides, *overrides]
        known = set(grid.methods)
    if "-m" in arguments:
        overrides = [re.sub(r"=([^,\[]+),.*", r"=\1", o) for o in overrides]
    if "--methods" in arguments:
        assert set(arguments[arguments.index("--methods") + 1].split(",")) <= known
    compose.resolve(compose.compose(overrides))


def rows(markdown: str) -> list[list[str]]:
    """Cells of the rows of all tables, without their headings."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    heads = {i - 1 for i, line in enumerate(lines) if re.fullmatch(r"[|: -]+", line)}
    kept = [line for i, line in enumerate(lines) if i not in heads and i - 1 not in heads]
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in kept]


def test_figures_of_the_readme_are_those_of_the_published_table() -> None:
    """Row by row and to the letter: the table of 4 emulated nodes."""
    page = text("results/published/tables/resnet50.md")
    section = page.partition("### resnet50: 4 nodes x 1 rank, cluster emulated")[2].partition("\n### ")[0]
    names = {"no communication", "SGDM bf16", "1-bit Adam", "SGDM fp32", "Birder"}
    published = {r[0]: r for r in rows(section)}
    shown = rows(text("README.md").partition("## Results")[2].partition("\n## ")[0])
    assert {r[0] for r in shown} == names
    for name, *figures in shown:
        theirs = published[name]
        assert figures == [theirs[2], theirs[4], theirs[5], theirs[6], theirs[8]], name
    said = re.search(r"computes ([\d.]+)x slower than an A100", text("README.md"))
    assert said is not None
    assert f"time dilation {said[1]}," in section


FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)")


def figures(cell: str) -> list[str]:
    return [found.replace(",", "") for found in FIGURE.findall(re.sub(r"\([^()]*\.json\)|\[[^\]]*\]", "", cell))]


def rounds_to(published: float, shown: str) -> bool:
    """Whether a published number, or as a percentage, or in kB instead of MB, is the one shown, to its digits."""
    digits = len(shown.partition(".")[2]) if "e" not in shown else None
    same = (lambda v: math.isclose(v, float(shown))) if digits is None else (lambda v: f"{v:.{digits}f}" == shown)
    # Half a unit in the last place: the published number has been rounded before.
    unit = 0.0 if digits is None else 0.51 * 10.0**-digits
    return any(same(v) or abs(v - float(shown)) <= unit for v in (published, 100 * published, published / 1000))


def quoted() -> list[tuple[str, str]]:
    """(section, its published page) of the results page and its appendix."""
    pages = ("docs/results.md", "docs/appendix/results.md")
    sections = [s for page in pages for s in re.split(r"^## ", text(page), flags=re.MULTILINE)[1:]]
    found = [(s, re.search(r"(?:\.\./)+(results/published/tables/\w+\.md)", s)) for s in sections]
    return [(s, m[1]) for s, m in found if m and rows(s)]


@pytest.mark.parametrize(("section", "page"), quoted(), ids=[s.partition("\n")[0] for s, _ in quoted()])
def test_figures_of_the_results_page_are_in_the_published_tables(section: str, page: str) -> None:
    """A figure is somewhere in the page's tables or their headings, to the digits shown."""
    headings = [line for line in text(page).splitlines() if line.startswith("###")]
    cells = [cell for row in rows(text(page)) for cell in row]
    known = {float(f) for cell in [*cells, *headings] for f in figures(cell)}
    for label, *shown in rows(section):
        absent = [f for cell in shown for f in figures(cell) if not any(rounds_to(k, f) for k in known)]
        assert absent == [], label


def test_a_figure_that_nobody_measured_is_found() -> None:
    assert rounds_to(4.6249, "4.62")
    assert rounds_to(0.603, "60")
    assert rounds_to(162.0, "0.162")
    assert not rounds_to(4.63, "4.6200")
    assert not rounds_to(330.0, "328")


def test_configuration_keys_of_the_differences_exist() -> None:
    """Keys in the table of differences: in the configuration, or arguments of the optimizer, added with ++."""
    table = text("docs/methods/README.md").partition("## Differences from the paper")[2].partition("##")[0]
    keys = re.findall(r"`((?:optimizer|train|comm|checkpoint)\.[a-z_]+)`", table)
    assert len(keys) > 5
    config = compose.compose(["+exp=resnet50", "optimizer=birder"]).config
    options = {name for classes in METHODS.values() for c in classes for name in arguments_of(c)}
    for key in keys:
        section, _, name = key.partition(".")
        assert name in config[section] or (section == "optimizer" and name in options), key


def test_the_tasks_without_a_warm_up_are_those_that_the_differences_name() -> None:
    """Of the Birder paper's tasks."""
    tasks = {"resnet50": "ResNet-50", "cifar100": "CIFAR-100", "bert_squad": "SQuAD", "ptb": "PTB", "wikipedia": "Wiki"}
    row = re.search(r"warm-up of the learning rate \| none for ([^|,]*),", text("docs/methods/README.md"))
    assert row
    for exp, task in tasks.items():
        warms = compose.compose([f"+exp={exp}", "scale=paper"]).config["train"]["lr_schedule"].get("warmup")
        assert bool(warms) == (task not in row[1]), task


def test_the_page_of_methods_has_all_of_them_and_what_may_change_is_what_update_alone_reads() -> None:
    every, late = (rows(part) for part in text("docs/methods/README.md").split("## Common to all", 1))
    named = {name for row in every for name in re.findall(r"`(\w+)`", row[1])}
    assert named == {p.stem for p in (ROOT / "conf/optimizer").glob("*.yaml")}
    labels = {page: label for row in every for label, page in re.findall(r"\[([^]]+)\]\((\w+)\.md\)", row[0])}
    shown = {
        label: set(re.findall(r"`(\w+)`", row[1])) for row in late if len(row) == 2 for label in row[0].split(", ")
    }
    for page, (cls, *_) in METHODS.items():
        if issubclass(cls, birder.BucketOptimizer) and cls.compressed:
            assert shown[labels[page].partition(", ")[0]] == cls.read_in_update, cls.__name__


def arguments_of(cls: type) -> set[str]:
    """Names that a constructor takes: of `__init__`, and of a `__new__` that chooses a variant."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    above = [c for c in cls.__mro__ if c.__name__ == "BlockwiseSGD" and cls is not birder.EF21SGDM]  # passed on to it
    signatures = (inspect.signature(cls), *(inspect.signature(c.__init__) for c in (cls, *above)))
    return {p.name for s in signatures for p in s.parameters.values() if p.kind not in several} - {"self"}


@pytest.mark.parametrize("method", METHODS)
def test_method_pages_name_every_argument(method: str) -> None:
    page = text(f"docs/methods/{method}.md")
    for cls in METHODS[method]:
        names = arguments_of(cls) - {"params", "options"}
        shown = set(re.findall(r"\w+", code(f"docs/methods/{method}.md")))
        assert names <= shown | set(re.findall(r"`(\w+)`", page)), cls.__name__
