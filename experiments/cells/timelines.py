"""The timelines of results/timelines, when each gradient of a model is ready on some GPU: `birder.predict.Timeline` in files.

experiments/timelines.py lists, makes and records them.
"""

from __future__ import annotations

from pathlib import Path

from birder.predict import timeline as files
from birder.predict.timeline import Timeline
from experiments.records.record import ROOT
from launch.errors import UserError
from launch.words import there_are

FOLDER = ROOT / "results" / "timelines"


def load(name: str | Path) -> Timeline:
    """The timeline `name` of results/timelines, or of a file when `name` is a path. Raises UserError."""
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
    try:
        return files.read(path)
    except FileNotFoundError:
        raise UserError(f"no timeline {name!s}{there_are(str(name), names())}") from None
    except OSError as error:
        raise UserError(f"{path} is not a readable timeline: {error.strerror}") from None
    except ValueError as error:
        raise UserError(str(error)) from None


def names() -> list[str]:
    """All timelines of results/timelines."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def write(timeline: Timeline, path: Path) -> Path:
    """Writes a timeline's file. Raises UserError."""
    try:
        return files.write(timeline, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(str(error)) from None
