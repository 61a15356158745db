"""Begins a tracked run: which tracker, and the one line that says what is recorded where."""

from __future__ import annotations

from experiments.tracking import tensorboard_run, wandb_run
from experiments.tracking.tracked import About, TrackedRun
from launch.words import say


def start(about: About) -> TrackedRun:
    """The run, begun. Prints what is recorded where, or that nothing is. Does not raise."""
    tracker = about.config.get("tracker", "wandb")
    if tracker == "tensorboard":
        run: TrackedRun = tensorboard_run.begin(about)
    elif tracker == "wandb":
        run = wandb_run.begin(about)
    else:
        run = TrackedRun("tracker: nothing is recorded (tracker=none)")
    if run.line:
        say(run.line)
    return run
