"""`TrackedRun`: one run in an experiment tracker, the interface that W&B and TensorBoard share."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.words import say

Cell = str | int | float | None

running: list[TrackedRun] = []
"""Those that `start.start` has begun and that have not ended."""


@dataclass(frozen=True)
class About:
    """What a tracker gets of a run when it begins.

    id:     of the run or the comparison; no two are the same.
    group:  runs that belong together, such as those of one comparison; None: none.
    job:    "train" for a run, "comparison" for the table of several, "tuning" for the choice of learning rates.
    config: the resolved configuration.
    folder: the tracker's files are written below it, and nowhere else.
    start:  the step after which a resumed run continues; 0 for a new one.
    """

    id: str
    group: str | None
    job: str
    config: Mapping[str, Any]
    folder: Path
    start: int = 0


class TrackedRun:
    """One run in a tracker. This class records nothing; `WandbRun` and `TensorBoardRun` override the methods with `_`.

    No method raises. The first failure prints one line, and from then on nothing more is recorded.

    line: what is recorded where, or that nothing is.
    fresh: whether the tracker has begun another run for one that is resumed, which lacks the steps of before.
    """

    service = "tracker"
    fresh = False

    def __init__(self, line: str = "") -> None:
        self.line = line
        self.active = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of one step. Steps do not go back."""
        self._try(lambda: self._log(step, values))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """A table; a column holds text or numbers, None where nothing was measured."""
        self._try(lambda: self._table(name, list(columns), [list(row) for row in rows]))

    def image(self, name: str, png: Path) -> None:
        """A picture from a PNG file."""
        self._try(lambda: self._image(name, png))

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Last values, and the end. exit_code: other than 0 marks the run as failed, where the tracker knows that."""
        if self.active:
            self._try(lambda: self._finish(summary, exit_code), last=True)
        elif self in running:  # after a failure: W&B would take the next run of this process for this one
            with contextlib.suppress(Exception):
                self._finish({}, exit_code)
        if self in running:
            running.remove(self)

    def resume_hint(self) -> str:
        """What to do with what was recorded before a failure; empty: nothing can be done."""
        return ""

    def _log(self, step: int, values: Mapping[str, float]) -> None: ...

    def _table(self, name: str, columns: list[str], rows: list[list[Cell]]) -> None: ...

    def _image(self, name: str, png: Path) -> None: ...

    def _finish(self, summary: Mapping[str, Any], exit_code: int) -> None: ...

    def _try(self, call: Callable[[], None], last: bool = False) -> None:
        if not self.active:
            return
        self.active = not last
        try:
            call()
        except Exception as error:
            self.active = False
            warn(self.service, f"{error}; nothing more is recorded there{self.resume_hint()}")


def end_all(exit_code: int) -> None:
    """Ends what runs, as this process is about to; called from any thread. A tracker drops what it has not written yet."""
    for run in list(running):
        ending = threading.Thread(target=run.finish, args=({}, exit_code), daemon=True)
        ending.start()
        ending.join(3.0)


def warn(service: str, why: object) -> None:
    """One line on stderr; of a rank, whose stderr is its log, where its other lines for the user go."""
    text = " ".join(str(why).split())
    say(f"warning: {service}: {text}", sys.stdout if "RANK" in os.environ else sys.stderr)
