"""The site: every page has a place, links leave docs/ and come back, docstrings list their parameters."""

from __future__ import annotations

import pkgutil
import re

import pytest

import birder
from tests.helpers import ROOT, load


def test_every_page_is_in_the_navigation_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    pages = {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    outside = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md"}
    assert sorted(listed) == sorted(pages | outside)


def test_links_between_docs_and_the_repository() -> None:
    pytest.importorskip("mkdocs")
    links = load("docs/site_links.py")
    assert links.target("timing.md", "../results/README.md") == "results/README.md"
    assert links.target("README.md", "docs/start.md") == "docs/start.md"
    assert links.target("methods/birder.md", "../accuracy.md") == "docs/accuracy.md"
    assert links.in_site("docs/start.md") == "start.md"
    assert links.in_site("examples/ddp.py") == "examples/ddp.py.txt"
    assert links.linked("start.md", "[a](predict.md) `[b](absent.md)` [c](#here)") == ["docs/predict.md"]
    with pytest.raises(Exception, match=r"links to absent\.md, which is not there"):
        links.linked("start.md", "[a](absent.md)")


def test_parameters_of_a_docstring_become_a_list() -> None:
    pytest.importorskip("griffe")
    listed = load("docs/site_docstrings.py").listed
    text = "What it does: well.\n\nx:     a number\n       of steps\n`y`: more\n\n    (1) x: y\n\nRaises ValueError: never."
    assert listed(text) == (
        "What it does: well.\n\n- `x`: a number\n       of steps\n- `y`: more\n\n    (1) x: y\n\nRaises ValueError: never."
    )


def test_headings_of_the_api_page_can_be_imported() -> None:
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE):
        if not name.startswith("birder.integrations."):  # these need packages that are extras
            assert pkgutil.resolve_name(name) is not None


def test_the_api_page_has_every_public_name_and_what_the_page_on_predictions_sends_there() -> None:
    shown = set(re.findall(r"^::: birder\.(\S+)$", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(birder.__all__) - shown == {"Plan"}  # in birder.optim.contract, which is shown whole
    (parts,) = re.findall(r"The parts are (.*?) \(\[API\]", (ROOT / "docs/predict.md").read_text(encoding="utf-8"))
    assert {f"predict.{name}" for name in re.findall(r"`(\w+)`", parts)} <= shown
