"""Time dilation: by how much this machine computes slower than the GPU whose cluster is emulated.

With `cluster.dilation=auto`, D = (a step without communication here) / (a step on the target GPU, from `timeline`). The
emulated link is then D times slower than the real one, so that communication keeps its share of the step.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from experiments.cells.timelines import Timeline, load
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import record
from launch import lock
from launch.errors import UserError
from launch.spec import RunSpec

STEPS, SKIPPED = 9, 3
"""Steps of the measurement, and how many of them are not timed."""
LEAST = 1.0
"""A machine that is faster than the target emulates it without dilation."""
SHOWN = 20.0
"""Stands in for the measured value where nothing is started (dry runs)."""
_PREFIX = "calibration-"
_NEW_S = 600.0
"""A folder that is younger may not have come to its lock yet."""
_LAUNCHER_KEYS = ("nodes", "ranks_per_node", "backend", "timeout_s")


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured. Times in ms per optimizer step."""

    here_ms: float
    timeline: Timeline

    @property
    def dilation(self) -> float:
        """Three significant digits, so that runs of one comparison share it exactly."""
        return float(f"{max(LEAST, self.here_ms / self.timeline.step_ms):.3g}")

    def __str__(self) -> str:
        return (
            f"Time dilation {self.dilation:g}: a step without communication takes {self.here_ms:.0f} ms here, "
            f"{self.timeline.step_ms:.3g} ms on {self.timeline.gpu} (timeline {self.timeline.name})"
        )


def settle(composed: list[Composed]) -> None:
    """Replaces `cluster.dilation=auto` in all of `composed` by one number, measured with the first. Raises UserError.

    Does nothing for clusters that have no dilation or a number already, nor where a single node needs no link.
    """
    waiting = [c for c in composed if OmegaConf.select(c.config, "cluster.dilation") == "auto"]
    if not waiting:
        return
    resolved = compose.resolve(waiting[0])
    if not shapes(resolved):
        dilation = LEAST
    elif resolved["cluster"]["dry_run"]:
        dilation = SHOWN
        print(f"Time dilation is measured at the start of a run; this preview takes {SHOWN:g}.", flush=True)
    else:
        calibration = measure(resolved)
        print(calibration, flush=True)
        dilation = calibration.dilation
    for c in waiting:
        with open_dict(c.config):
            c.config.cluster.dilation = dilation


def shapes(resolved: dict[str, Any]) -> bool:
    """Whether nodes of this configuration get links of a set rate."""
    return bool(getattr(compose.launcher(resolved), "shapes", False))


def measure(resolved: dict[str, Any]) -> Calibration:
    """Runs a few steps of a resolved configuration without communication. Raises UserError and RunFailed."""
    if resolved["timeline"] is None:
        raise UserError("cluster.dilation=auto needs the target's step time: set timeline=NAME or cluster.dilation=20")
    timeline = load(resolved["timeline"])
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        spec = _spec(resolved, Path(folder))
        compose.launcher(spec.config).launch(spec)
        (done,) = record.read_all(spec.config["results_dir"])
    return Calibration(float(done.timing["median_ms"]), timeline)


def _sweep(temporary: Path) -> None:
    """Removes the folders of calibrations that were killed. One that runs holds its run's lock; a new one is let be."""
    for left in temporary.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = left.stat()
            mine = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode) and not left.is_symlink()
            if mine and time.time() - about.st_mtime > _NEW_S and not lock.is_held(left / "run"):
                shutil.rmtree(left, ignore_errors=True)


def _spec(resolved: dict[str, Any], folder: Path) -> RunSpec:
    config = copy.deepcopy(resolved)
    config["cluster"] = {key: resolved["cluster"][key] for key in _LAUNCHER_KEYS}
    config["cluster"] |= {"_target_": "launch.local.LocalLauncher", "name": "local"}
    # The same for every method that is compared: the model's own work and the cheapest of updates, which changes nothing.
    config["optimizer"] = {"_target_": "birder.SGDM", "lr": 0.0}
    config["comm"] |= {"enabled": False, "topology": "flat"}
    config["train"] |= {"max_steps": STEPS, "timing_warmup": SKIPPED}
    config["checkpoint"] |= {"every": 0}
    config["wandb"] |= {"mode": "disabled"}
    config |= {"results_dir": str(folder / "results"), "resume": "never", "evaluate": False}
    return RunSpec("calibration", None, str(config["exp"]), "", [], config, str(folder / "run"))
