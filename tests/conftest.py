"""For all tests: Ctrl-C reaches the processes that they start, also where pytest itself runs in a shell's background."""

from __future__ import annotations

import os
import signal

import pytest

from experiments.config.compose import WORKER
from launch.base import Launcher

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a background job inherits it, and would hand it on
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["WANDB_MODE"] = "disabled"  # what wandb=auto, the default, goes by; tests of W&B choose a mode themselves


@pytest.fixture(autouse=True)
def launchers_start_ranks_of_this_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that a test makes by hand starts what one from the configuration starts."""
    monkeypatch.setattr(Launcher, "worker", WORKER, raising=False)
