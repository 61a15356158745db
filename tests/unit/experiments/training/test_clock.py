"""The clock of training steps: on CUDA times are the device's, and a round of steps is waited for once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from experiments.training import clock
from experiments.training.clock import StepClock


class _Event:
    """A device on which every piece of work takes 2 ms, whatever the host does."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = _Event.now
        _Event.now += 2.0

    def synchronize(self) -> None:
        """The device has been waited for."""

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    return waited


def test_a_device_is_waited_for_once_in_a_round(waits: list[torch.device]) -> None:
    timed = StepClock(1, torch.device("cuda"))
    for _ in range(1 + 2 * clock.ROUND + 3):
        timed.start()
        timed.part("data")
        timed.part("forward_backward")
        timed.stop()
    assert len(waits) == 2
    assert len(timed.steps) == 2 * clock.ROUND
    assert timed.unread
    timing = timed.summary(4)
    assert len(waits) == 3
    assert not timed.unread
    assert timing["steps"] == 2 * clock.ROUND + 3  # without the one of the warm-up
    assert timing["median_ms"] == 6.0  # three pieces of work between the first event and the last one
    assert timing["split"] == {"data_ms": 2.0, "forward_backward_ms": 2.0}
    assert timing["samples_per_s"] == pytest.approx(4 / 0.006, rel=1e-3)


def test_the_rate_while_training_is_the_devices_not_that_of_queueing(waits: list[torch.device]) -> None:
    timed = StepClock(1, torch.device("cuda"))
    known = []
    for _ in range(1 + 2 * clock.ROUND):
        timed.start()
        timed.part("forward_backward")
        timed.stop()
        known.append(timed.known)
    assert known[: clock.ROUND] == [None] * clock.ROUND  # the device was not waited for yet
    assert known[clock.ROUND :] == pytest.approx([0.004] * (clock.ROUND + 1))
    cpu = StepClock(5, torch.device("cpu"))
    cpu.start()
    assert cpu.stop() == cpu.known


def test_the_cpu_is_never_waited_for(waits: list[torch.device]) -> None:
    timed = StepClock(0, torch.device("cpu"))
    timed.start()
    timed.part("wire", 0.5)
    assert timed.stop() == timed.steps[0] > 0
    timed.settle()
    assert (waits, timed.unread) == ([], False)
    assert timed.split() == {"wire_ms": 500.0}


def test_the_slowest_rank_counts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = StepClock(0, torch.device("cpu"))
    timed.steps = [0.1, 0.3, 0.1]
    monkeypatch.setattr(clock.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(clock, "gathered", lambda mine: [mine, [0.2, 0.1, 0.4]])
    timing = timed.summary(6)
    assert (timing["median_ms"], timing["mean_ms"]) == (300.0, 300.0)
    assert timing["samples_per_s"] == 20.0


def test_percentiles_are_the_10th_and_the_90th() -> None:
    timing = clock.summary(np.arange(101.0)[::-1], 1, False, {})
    assert (timing["p10_ms"], timing["median_ms"], timing["p90_ms"]) == (10.0, 50.0, 90.0)
