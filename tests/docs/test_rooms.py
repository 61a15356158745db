"""The house: commands at the top of experiments/, all else in rooms; docs/architecture.md and the contracts name them all."""

from __future__ import annotations

import re
import tomllib

import pytest

from experiments.records.record import ROOT

HOUSE = ROOT / "experiments"
COMMANDS = sorted(p.stem for p in HOUSE.glob("*.py") if not p.stem.startswith("_"))
ROOMS = sorted(p.parent.name for p in HOUSE.glob("*/__init__.py"))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PICTURE = ARCHITECTURE.partition("## Rooms")[2].split("```")[1]


def test_the_files_at_the_top_are_the_entry_points_that_the_architecture_lists() -> None:
    listed = re.search(r"entry points +experiments/\*\.py: ([^|]*)\|", PICTURE)
    assert listed is not None
    assert sorted(re.findall(r"\w+", listed[1])) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_file_at_the_top_is_a_command(name: str) -> None:
    """It says how it is called, ends without a word by Ctrl-C while it imports, and tells every error in one line."""
    text = (HOUSE / f"{name}.py").read_text(encoding="utf-8")
    assert f"experiments/{name}.py" in text.split('"""')[1]
    first = text if name == "gpu_check" else (HOUSE / "_script.py").read_text(encoding="utf-8")
    assert re.search(
        r"sys\.path\[0\] = str\(Path\(__file__\)\.resolve\(\)\.parents\[1\]\)\n\s*from launch import interrupt\b", first
    )
    assert first is text or "\nif not __package__:  # run as a script\n    import _script  # noqa: F401\n" in text
    assert "\ndef main(" in text
    assert "@command.told\ndef main(" in text or name == "run"  # Hydra's application goes on after an error: -m
    assert text.endswith('\n\nif __name__ == "__main__":\n    command.start(main)\n')


def test_every_room_has_its_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    named = [part.strip() for layer in layers for part in layer.split(":")]
    assert sorted(n for n in named if n.startswith("experiments.")) == sorted(
        f"experiments.{name}" for name in (*COMMANDS, *ROOMS)
    )
    assert {word for word in re.findall(r"\w+", PICTURE) if word in ROOMS} == set(ROOMS)
