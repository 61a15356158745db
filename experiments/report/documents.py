"""Documents with figures from records: jinja2 templates (experiments/report/pages), one vocabulary (facts.py). No torch.

`pages/README.md.j2` makes README.md of the repository, `pages/docs/results.md.j2` docs/results.md, and so on. In any other
page of docs/ a part that is made stands between two comments and is renewed with the templates:

    <!-- {{ spread("spread", 4) }} -->
    ...
    <!-- end -->

No figure is typed by hand: tests/docs/test_documents.py refuses what its short list of names and settings does not have.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, TemplateError

from experiments.records.record import PUBLISHED, ROOT
from experiments.report import claims, sentences
from experiments.report.facts import Facts
from launch.errors import refused

TEMPLATES = sentences.FOLDER
MADE = "<!-- Made by python experiments/tables.py from experiments/report/pages/{}; do not edit. -->\n"
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
PART = re.compile(r"^<!-- (\{\{.*?\}\}) -->\n.*?^<!-- end -->$", re.DOTALL | re.MULTILINE)


def environment(facts: Facts) -> Environment:
    """What documents can say: `Facts.words`."""
    made = sentences.environment()
    made.globals.update(facts.words())
    made.filters |= {"from_docs": from_docs, "claim_rows": claims.checked}
    return made


def render(results: Path = PUBLISHED, root: Path = ROOT) -> dict[Path, bytes]:
    """Every document, whole, by its path. Raises UserError where a template asks for what no record holds."""
    with_facts = environment(Facts(results))
    found: dict[Path, str] = {}
    for template in [TEMPLATES / "README.md.j2", *sorted((TEMPLATES / "docs").rglob("*.j2"))]:
        name = template.relative_to(TEMPLATES).as_posix()
        text = _made(with_facts, name, template.read_text("utf-8"))
        found[root / name.removesuffix(".j2")] = MADE.format(name) + text
    for page in sorted((root / "docs").rglob("*.md")):
        if page not in found and PART.search(old := page.read_text("utf-8")):
            found[page] = _renewed(with_facts, page.name, old)
    return {path: text.encode() for path, text in found.items()}


def from_docs(text: str) -> str:
    """Text whose links are those of a page of docs/, for a page of docs/appendix/."""
    return LINK.sub(r"](../\1)", text)


def _renewed(environment: Environment, name: str, old: str) -> str:
    """A page with its parts made again."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n\n{_made(environment, name, match[1]).strip()}\n\n<!-- end -->"

    return PART.sub(part, old)


def _made(environment: Environment, name: str, source: str) -> str:
    with refused(name, TemplateError, LookupError, ValueError):
        return environment.from_string(source).render()
