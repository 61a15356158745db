"""Rounds per step, and when the mean of the step times stands for a run instead of the median."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from birder.comm import ByteCounter
from experiments.records import record
from experiments.training.clock import StepClock
from experiments.training.traffic import StepTraffic
from tests.helpers.ranks import fresh_world
from tests.helpers.runs import digits, train


def rounds_of(*sent: int) -> StepTraffic:
    """Steps that send so many bytes, in one collective each; 0: none is started."""
    counter = ByteCounter()
    rounds = StepTraffic(counter)
    for nbytes in sent:
        if nbytes > 0:
            counter.collective(intra=0, inter=nbytes)
        rounds.end_step()
    return rounds


def test_a_round_is_a_step_in_which_anything_is_sent() -> None:
    for sent, wanted in (((), (0, 0)), ((5, 0, 0, 5), (2, 4)), ((0, 0), (0, 2))):
        assert ((found := rounds_of(*sent)).sending, found.steps) == wanted
    counter = ByteCounter(collectives=7, inter=100)
    rounds = StepTraffic(counter)
    counter.collectives = 10
    rounds.end_step()
    counter.reset()
    rounds.reset()
    rounds.end_step()
    assert (rounds.sending, rounds.steps) == (0, 1)  # what was sent before the reset is forgotten


@pytest.mark.parametrize(
    ("sent", "uneven"),
    [
        ([], False),
        ([9] * 8, False),
        ([320, 320, 10, 10, 10, 10, 10, 10], False),  # a dense warm-up
        ([100] * 19 + [101], False),  # flags that are sent now and then
        ([0, 0, 0, 8] * 3, True),  # local steps
        ([1, 1, 1, 8] * 3, True),  # a little every step, much now and then
        ([0] * 8, False),
    ],
)
def test_uneven_steps(sent: list[int], uneven: bool) -> None:
    assert rounds_of(*sent).uneven is uneven


@pytest.mark.parametrize("before", [0, 9, 27])
def test_without_a_warm_up_it_does_not_matter_where_a_cycle_begins(before: int) -> None:
    assert rounds_of(*[0] * before, 8, *[0] * (31 - before)).uneven_from(0)


def test_the_mean_stands_for_uneven_steps() -> None:
    clock = StepClock(0, torch.device("cpu"))
    clock.steps = [0.01, 0.01, 0.01, 0.05]
    even, uneven = clock.summary(4), clock.summary(4, uneven=True)
    assert (even["typical"], even["median_ms"], even["mean_ms"], even["samples_per_s"]) == ("median", 10.0, 20.0, 400.0)
    assert (uneven["typical"], uneven["samples_per_s"]) == ("mean", 200.0)


def test_a_record_says_in_which_share_of_the_steps_anything_was_sent(tmp_path: Path) -> None:
    """Local SGD, H = 4, evaluated in between: the averaging for the evaluation is no round."""
    options = ["cluster.nodes=2", "train.max_steps=15", "train.timing_warmup=3", "train.eval_every=5"]
    spec = digits(tmp_path, *options, "optimizer=local_sgd", "optimizer.reset_every=4")
    fresh_world(train, 2, spec, grouped=False, ranks_per_node=1)
    (found,) = record.read_all(tmp_path / "results")
    assert found.rounds_per_step == 0.25  # 4, 8 and 12 of the steps 4 to 15
    assert found.timing["typical"] == "mean"
    assert found.timing["mean_ms"] > 0
