"""Begins a tracked run: which tracker, and the one line that says what is recorded where."""

from __future__ import annotations

from experiments.tracking import tensorboard_run, wandb_run
from experiments.tracking.tracked import About, TrackedRun, running, warn
from launch.words import say


def start(about: About) -> TrackedRun:
    """The run, begun. Prints what is recorded where, or that nothing is. Does not raise."""
    trackers = {"tensorboard": tensorboard_run, "wandb": wandb_run}
    run = TrackedRun("tracker: nothing is recorded (tracker=none)")
    if tracker := trackers.get(about.config.get("tracker", "wandb")):
        try:
            run = tracker.begin(about)
        except Exception as error:
            warn(tracker.SERVICE, f"{error}; nothing is recorded there")
            run = TrackedRun()
    if run.active:
        running.append(run)
    if run.line:
        say(run.line)
    return run
