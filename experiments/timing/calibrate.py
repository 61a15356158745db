"""Time dilation of runs that are made one after the other: by how much this machine computes slower than the GPU whose
cluster is emulated.

With `cluster.dilation=auto`, D = (forward and backward here, nothing sent, nothing updated) / (a step on the target GPU, from
`timeline`). The emulated link is then D times slower than the real one, so that communication keeps its share of the step.
Measured on the same emulated nodes that the runs will use, by experiments/timing/turns.py, which interleaved comparisons ask
themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from birder.predict.timeline import Timeline
from experiments.cells.timelines import load
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.timing import plan
from launch import lock
from launch.words import say

LEAST = 1.0
"""A machine that is faster than the target emulates it without dilation."""


@dataclass(frozen=True)
class Calibration:
    """What was measured. Times in ms per optimizer step, of `accumulate` micro-batches; a timeline is of one."""

    here_ms: float
    timeline: Timeline
    accumulate: int = 1

    @property
    def there_ms(self) -> float:
        return self.accumulate * self.timeline.step_ms

    @property
    def dilation(self) -> float:
        """Three significant digits: what tables print is what was set, and runs of one comparison share it exactly."""
        return float(f"{max(LEAST, self.here_ms / self.there_ms):.3g}")

    def __str__(self) -> str:
        return (
            f"Time dilation {self.dilation:g}: forward and backward take {self.here_ms:.0f} ms here, "
            f"{self.there_ms:.3g} ms on {self.timeline.gpu} (timeline {self.timeline.name})"
        )


SHOWN = 20.0
"""Stands in for the measured value where nothing is started (dry runs)."""
_PREFIX = "calibration-"
_NEW_S = 600.0
"""A folder that is younger may not have come to its lock yet."""


def settle(composed: list[Composed]) -> None:
    """Replaces `cluster.dilation=auto` in all of `composed` by one number, measured with the first. Raises UserError.

    Does nothing for clusters that have no dilation or a number already, nor where a single node needs no link.
    """
    waiting = [c for c in composed if OmegaConf.select(c.config, "cluster.dilation") == "auto"]
    if not waiting:
        return
    resolved = compose.resolve(waiting[0])
    if not compose.launcher(resolved).shapes:
        dilation = LEAST
    elif resolved["cluster"]["dry_run"]:
        dilation = SHOWN
        say(f"Time dilation is measured at the start of a run; this preview assumes {SHOWN:g}.")
    else:
        calibration = measure(resolved)
        say(str(calibration))
        dilation = calibration.dilation
    for c in waiting:
        with open_dict(c.config):
            c.config.cluster.dilation = dilation


def measure(resolved: dict[str, Any]) -> Calibration:
    """Measures the bound of a resolved configuration. Raises UserError and RunFailed."""
    plan.check_timeline(resolved)
    timeline = load(resolved["timeline"])
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        spec = plan.world(resolved, [], None, "calibration")
        spec = dataclasses.replace(spec, run_dir=str(Path(folder) / "run"))
        plan.launcher(spec.config).launch(spec)
        found = json.loads((spec.path / plan.BOUND_FILE).read_text())
    return Calibration(float(found["step_ms"]), timeline, int(resolved["train"]["accumulate"]))


def _sweep(temporary: Path) -> None:
    """Removes the folders of calibrations that were killed. One that runs holds its run's lock; a new one is let be.

    A folder of that name without such a lock in it is somebody's own.
    """
    for left in temporary.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = left.stat()
            mine = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode) and not left.is_symlink()
            mine = mine and (left / "run" / lock.LOCK).exists()
            if mine and time.time() - about.st_mtime > _NEW_S and not lock.is_held(left / "run"):
                shutil.rmtree(left, ignore_errors=True)
