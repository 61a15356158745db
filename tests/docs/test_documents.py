"""README and docs: every figure is generated from records; text holds none but what a short list names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import nodes as syntax

from experiments.records.record import PUBLISHED, ROOT, read_all
from experiments.report import documents, prediction
from experiments.report.facts import Facts, minutes
from launch.errors import UserError

WHOLE = (
    *("README.md", "docs/results.md", "docs/claims.md", "docs/accuracy.md"),
    *("docs/appendix/accuracy.md", "docs/appendix/claims.md", "docs/appendix/results.md"),
)
"""Pages that are templates from the first line to the last."""
NAMES = (
    *("1-bit", "0/1 Adam", "SQuAD 1.1", "64x64", "95 %", "8-GPU", "8x8", "6-layer"),
    *("images of 100 classes", "Images of 100 classes", "8 to 64 workers"),
    *("Python 3.11", "NeurIPS 2023", "ICML 2021", "Apache-2.0"),
)
"""What holds a digit and is no figure: names, versions, years of papers."""
STATED = {
    "README.md": (
        "more than 5 GB",  # the environment
        "PyTorch 2.11 to 2.14",  # pyproject.toml
        "20-minute tutorial",
        "64 A100",  # the paper's cluster
    ),
    "docs/results.md": (
        "on 2 cores without a GPU",
        "20 GB",
        "windows of 384",
        "1 to 8 nodes of 8 A100",
        "on 64 GPUs",
        "batch 32",
        "batch 12",
        "8 nodes",
        "at 10 Gbit/s",
        "8 processes on 2 cores",
    ),
}
"""What a page states of a setting or a command, and that no record holds."""
FIGURE = re.compile(r"(?<![\w./#])(?<![A-Za-z]-)\d[\d.,]*(?:e-?\d+)?")
RESULT = re.compile(r"[-+]?[\d.,]+ ?(?:x|%|ms|[kMG]B|points)")
"""What is no setting, though it stands in code's letters."""


def literals(source: str) -> str:
    """The text of a template that is printed as it stands, without code, links' targets and headings' marks."""
    text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}", " ", source, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", " ", text)


def typed(name: str, source: str) -> list[str]:
    """Figures in a template's own text that no list names."""
    text = literals(source)
    for known in (*NAMES, *STATED.get(name, ())):
        text = text.replace(known, " ")
    return FIGURE.findall(text) + [code for code in re.findall(r"`([^`\n]*)`", source) if RESULT.fullmatch(code)]


@pytest.fixture(scope="module")
def made() -> dict[Path, str]:
    return {path: content.decode() for path, content in documents.render().items()}


def test_every_document_is_that_of_the_records(made: dict[Path, str]) -> None:
    assert {p.relative_to(ROOT).as_posix() for p in made} >= {
        *WHOLE,
        *("docs/configuration.md", "docs/elastic.md", "docs/predict.md", "docs/timing.md"),
    }
    assert [p.name for p, text in made.items() if p.read_text(encoding="utf-8") != text] == [], "run: make tables"


@pytest.mark.parametrize("name", WHOLE)
def test_no_figure_of_a_page_is_typed_by_hand(name: str) -> None:
    source = (documents.TEMPLATES / f"{name}.j2").read_text(encoding="utf-8")
    assert typed(name, source) == []
    tree = documents.environment(Facts(PUBLISHED)).parse(source)
    for output in tree.find_all(syntax.Output):  # {{ 3.06 }} is typed as well
        for part in output.nodes:
            assert not (isinstance(part, syntax.Const) and isinstance(part.value, int | float)), part.lineno


@pytest.mark.parametrize("name", STATED)
def test_the_list_of_what_is_stated_is_not_longer_than_the_page_needs(name: str) -> None:
    text = literals((documents.TEMPLATES / f"{name}.j2").read_text(encoding="utf-8"))
    assert [known for known in STATED[name] if known not in text] == []


def test_a_typed_figure_is_found() -> None:
    text = "Birder gained 3.06x to 3.26x, -31.3 points, `6.3x`; {{ number(3.0) }}, `lr=0.1`, 1-bit Adam"
    assert typed("x", text) == ["3.06", "3.26", "31.3", "6.3x"]


def test_what_no_record_holds_is_one_clear_line() -> None:
    environment = documents.environment(Facts(PUBLISHED))
    for asked, said in (
        ("{{ steps('resnet50', 3) }}", "0 records or tables answer to resnet50 on 3 nodes"),
        ("{{ study('ptb', '4 epochs').gap('Adagrad') }}", "records or tables answer to"),
        ("{{ nonsense() }}", "'nonsense' is undefined"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            documents._made(environment, "x.md", asked)


def test_links_of_an_appendix_go_one_folder_up() -> None:
    text = "[a](../results/x.md#y) [b](#here) [c](https://e.org) ![d](p.png)"
    assert documents.from_docs(text) == "[a](../../results/x.md#y) [b](#here) [c](https://e.org) ![d](../p.png)"


def test_figures_follow_the_records(tmp_path: Path) -> None:
    """A page of other records has other figures."""
    from tests.helpers.records import run, save

    for ms in (30.0, 40.0):
        folder = tmp_path / str(ms)
        save(folder, run("SGDM fp32", 100.0, cluster="emulated"), run("Birder", ms, cluster="emulated"))
        environment = documents.environment(Facts(folder))
        asked = "{% set t = steps('resnet50', 4) %}{{ versus(t, t.row('Birder'), 'fp32') }}"
        found = documents._made(environment, "x.md", asked)
        assert found == f"{100 / ms:.2f}x"


def test_commands_take_as_long_as_their_records_say() -> None:
    """One source for durations: `make bench` in every place where it is told, and `--validate`."""
    facts = Facts(PUBLISHED)
    bench, paper = (minutes([r for r in facts.replay(name).records.values() if r.turns]) for name in ("bench", "paper"))
    hours = f"{minutes(read_all(PUBLISHED / prediction.VALIDATION)) / 60:.1f}"
    for page, words in (
        ("Makefile", f"the kernels ({bench} minutes)"),
        ("docs/bench.md", f"about {bench} minutes on 2 cores"),
        ("conf/suite/bench.yaml", f"{bench} minutes on 2 cores"),
        ("Makefile", f"replayed ({paper} minutes)"),
        ("docs/replay.md", f"everything, {paper} minutes on 2 cores"),
        ("conf/suite/paper.yaml", f"{paper} minutes on 2 cores"),
        ("docs/predict.md", f"{hours} hours on a quiet machine"),
        ("studies/validate.py", f"{hours} hours on a quiet machine"),
    ):
        assert words in (ROOT / page).read_text(encoding="utf-8"), page
    assert minutes([]) == 0
