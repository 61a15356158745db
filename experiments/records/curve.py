"""`Curve`: the file curve.csv of a run, with columns step, seconds, loss, metric. Survives a crash and a resume."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TextIO

from experiments.records.record import write_file
from launch.errors import UserError

COLUMNS = ("step", "seconds", "loss", "metric")


class Curve:
    """Appends rows to `path`, each on disk as soon as it is written.

    start: the step after which the run continues. Rows of later steps, written before the interruption, are dropped, and so
           is a last row that was torn; 0 begins a new file.
    seconds: after construction, the time of the last row kept: where the clock of a resumed run starts.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        rows = _kept(path, start) if start > 0 else []
        self.seconds = float(rows[-1][1]) if rows else 0.0
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
        write_file(path, text.getvalue().encode(), "curve")
        self._file: TextIO = path.open("a", newline="", encoding="utf-8")

    def add(self, step: int, seconds: float, loss: float | None, metric: float | None) -> None:
        """Appends one row; None leaves a column empty. Raises UserError when the disk is full."""
        cells = [str(step), f"{seconds:.3f}", *["" if v is None else f"{v:.6g}" for v in (loss, metric)]]
        try:
            self._file.write(",".join(cells) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(f"could not write the curve {self.path}: {error.strerror}; free space") from error

    def close(self) -> None:
        """Closes the file. Rows are on disk already."""
        self._file.close()


def _kept(path: Path, start: int) -> list[list[str]]:
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True)[1:]:
        cells = line.rstrip("\n").split(",")
        # A row without its line end was torn by a crash: its last number may lack digits.
        if len(cells) == len(COLUMNS) and line.endswith("\n") and cells[0].isdigit() and int(cells[0]) <= start:
            rows.append(cells)
    return rows
