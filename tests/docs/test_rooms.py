"""The house: commands at the top of experiments/ and in studies/, all else in rooms.

docs/architecture.md and the contracts name them all.
"""

from __future__ import annotations

import re
import tomllib

from experiments.records.record import ROOT
from tests.helpers.mutations import FAULTS, stale

HOUSE = ROOT / "experiments"
COMMANDS = sorted(p.stem for p in HOUSE.glob("*.py") if not p.stem.startswith("_"))
IDEAS = {"sigma_delta_research"}
"""Of studies/ what is no script, but a class for a sweep."""
STUDIES = sorted({p.stem for p in (ROOT / "studies").glob("*.py") if not p.stem.startswith("_")} - IDEAS)
ROOMS = sorted(p.parent.name for p in HOUSE.glob("*/__init__.py"))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURE = ARCHITECTURE.partition("## Packages")[2].split("```")[1]


def test_the_files_at_the_top_are_the_entry_points_that_the_architecture_lists() -> None:
    listed = re.search(r"entry points +experiments/\*\.py: ([^|]*?)studies/\*\.py: ([^|]*)\|", PICTURE)
    assert listed is not None
    assert [sorted(re.findall(r"\w+", names)) for names in listed.groups()] == [COMMANDS, STUDIES]


def test_every_study_makes_something_that_is_published() -> None:
    """results/README.md says what, with the command."""
    listed = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    assert [name for name in STUDIES if f"`python studies/{name}.py" not in listed] == []


def test_every_room_has_its_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    named = [part.strip() for layer in layers for part in layer.split(":")]
    assert sorted(n for n in named if n.startswith("experiments.")) == sorted(
        f"experiments.{name}" for name in (*COMMANDS, *ROOMS)
    )
    assert {word for word in re.findall(r"\w+", PICTURE) if word in ROOMS} == set(ROOMS)


def test_newcomers_find_what_they_look_for_where_the_architecture_says() -> None:
    """Each row of "Where is ...": its files are there, and what it names is defined in them."""
    rows = [
        line.split("|")[2:4] for line in ARCHITECTURE.partition("## Where is")[2].partition("\n## ")[0].splitlines()
    ]
    named = [re.findall(r"`([^`]+)`", "".join(cells)) for cells in rows if len(cells) == 2 and "`" in cells[0]]
    assert len(named) >= 8
    for words in named:
        files = [ROOT / word for word in words if "/" in word]
        text = "\n".join(file.read_text(encoding="utf-8") for file in files)
        for name in (part for word in words if "/" not in word for part in word.split(".")):
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), name


def test_what_make_mutants_puts_faults_in_is_the_code_of_today() -> None:
    assert stale(FAULTS) == []
