"""`Tracker`: what a run tells while it runs: progress on the terminal, curve.csv, W&B or TensorBoard. Rank 0 only."""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.records.record import write_file
from experiments.tracking import start as tracking
from experiments.tracking.tracked import About
from launch.errors import refused
from launch.spec import RunSpec

# ---- the file curve.csv -----------------------------------------------------------------------------------------------

COLUMNS = ("step", "seconds", "loss", "metric")


class CurveFile:
    """Appends rows to `path`, each on disk at once.

    start: the step after which the run continues. Rows of later steps, written before the interruption, are dropped, and so
           is a last row that was torn; 0 begins a new file.
    kept: after construction, the rows of before. seconds: the time of the last of them: where a resumed run's clock starts.
    """

    def __init__(self, path: Path, start: int = 0) -> None:
        self.path = path
        self.kept = _kept(path, start) if start > 0 else []
        self.seconds = float(self.kept[-1][1]) if self.kept else 0.0
        write_file(path, "".join(map(_line, [COLUMNS, *self.kept])).encode(), "curve")
        self._file: TextIO = path.open("a", newline="", encoding="utf-8")

    def add(self, step: int, seconds: float, loss: float | None, metric: float | None) -> None:
        """Appends one row; None leaves a column empty. Raises UserError when the disk is full."""
        cells = [str(step), f"{seconds:.3f}", *["" if v is None else f"{v:.6g}" for v in (loss, metric)]]
        with refused(f"could not write the curve {self.path}", OSError, way_on="free space"):
            self._file.write(_line(cells))
            self._file.flush()

    def close(self) -> None:
        """Closes the file. Rows are on disk already."""
        self._file.close()


def _line(cells: Sequence[str]) -> str:
    return ",".join(cells) + "\n"


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


# ---- a run's tracker --------------------------------------------------------------------------------------------------


CURVE_ROWS = 2000  # at most about as many rows of losses, however long the run; every metric is kept
LINE_EVERY = 10.0  # seconds between lines where there is no terminal
DRAW_EVERY = 0.2  # seconds between changes of the progress bar


class Tracker:
    """Progress, curve and tracker of one run. On ranks other than 0 (`is_main` false) every method does nothing.

    total:  optimizer steps of the whole run.
    start:  the step after which a resumed run continues, 0 for a new one; make the tracker after loading the checkpoint.
    sample: what a sample is called in rates; metric: what the metric is called.

    Raises UserError when the curve cannot be written. A tracker itself never raises.
    """

    def __init__(
        self,
        spec: RunSpec,
        is_main: bool,
        *,
        total: int,
        start: int = 0,
        sample: str = "samples",
        metric: str = "metric",
    ) -> None:
        self.total, self.sample, self.metric = total, sample, metric
        self._closed = not is_main
        if not is_main:
            return
        self._start = start
        self._stride = max(1, -(-total // CURVE_ROWS))
        self._curve = CurveFile(spec.path / "curve.csv", start)
        self._drawn = 0.0
        self._shown: dict[str, Any] = {}
        self._rate: float | None = None
        self._took: list[float] = []  # of each step since the last line, seconds a sample
        self._run = tracking.start(About(spec.id, spec.group, "train", spec.config, spec.path, start))
        if self._run.fresh:
            for step, *cells in self._curve.kept:
                values = zip(COLUMNS[1:], cells, strict=True)
                self._run.log(int(step), {name: float(cell) for name, cell in values if cell})
        self._begin = self._printed = time.monotonic()  # a tracker may take seconds to begin
        self._bar = self._make_bar() if sys.stdout.isatty() else None

    def log(self, step: int, **values: Any) -> None:
        """What is known after optimizer step `step`, counted from 1.

        values: scalars, floats or tensors with one element. Those with a meaning here: `loss`, `metric`, `samples_per_s`
        (over all ranks), `seconds` (training clock; default: time since the tracker was made, resumed runs go on). The
        rest goes to the tracker by its name. Tensors are read only when they are shown or written, so that a loss on a GPU is
        not waited for at every step.
        """
        if self._closed:
            return
        now = time.monotonic()
        known = {k: v for k, v in values.items() if v is not None}
        self._shown.update(known)
        if rate := known.get("samples_per_s"):
            self._took.append(1 / float(rate))
        if "metric" in known or step % self._stride == 0 or step >= self.total:
            known = {k: float(v) for k, v in known.items()}
            seconds = known.pop("seconds", self._curve.seconds + now - self._begin)
            if "loss" in known or "metric" in known:
                self._curve.add(step, seconds, known.get("loss"), known.get("metric"))
            self._run.log(step, {**known, "seconds": seconds})
        self._show(step, now)

    def close(self, summary: dict[str, Any] | None = None, exit_code: int = 0) -> None:
        """Ends progress, curve and tracked run. `summary`: last values for the tracker. Once only; later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
        self._curve.close()
        self._run.finish(summary or {}, exit_code)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.close(exit_code=int(kind is not None))

    def _show(self, step: int, now: float) -> None:
        last = step >= self.total
        if self._bar is not None:
            if last or now - self._drawn >= DRAW_EVERY:
                self._drawn = now
                self._bar.update(self._task, completed=step, shown=self._words())
        elif last or step == self._start + 1 or now - self._printed >= LINE_EVERY:
            self._printed = now
            left = (now - self._begin) / max(1, step - self._start) * (self.total - step)
            parts = [
                f"step {step}/{self.total}",
                self._words(),
                f"time left {datetime.timedelta(seconds=round(left))}",
            ]
            # The first step of a run takes longer than those that follow: no forecast from it.
            print("  ".join(parts if step > self._start + 1 and not last else parts[:2]), flush=True)

    def _words(self) -> str:
        words = []
        if "loss" in self._shown:
            words.append(f"loss {float(self._shown['loss']):.4g}")
        if "metric" in self._shown:
            words.append(f"{self.metric} {float(self._shown['metric']):.4g}")
        if self._took:  # steps have the same number of samples
            self._rate = len(self._took) / sum(self._took)
            self._took.clear()
        if self._rate is not None:
            rate = float(f"{self._rate:.4g}")
            words.append(f"{rate:,.0f} {self.sample}/s" if rate >= 1000 else f"{rate:g} {self.sample}/s")
        return "  ".join(words)

    def _make_bar(self) -> Progress:
        bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),  # what the figures leave of the line
            TextColumn("{task.fields[shown]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = bar.add_task("", total=self.total, completed=self._start, shown="")
        bar.start()
        return bar
