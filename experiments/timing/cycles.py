"""Which steps of a method are of one kind: its warm-up, and the cycle after which its steps repeat in kind."""

from __future__ import annotations

from typing import Any

from birder import BucketOptimizer, Plan
from launch.errors import UserError

KINDS = ("plan", "resets", "syncs", "synced", "has_variance_round", "sends_gradient")
"""What methods say of a step, given its number; those that a method has."""
LONGEST = 512
"""No cycle longer than this is looked for, and no longer warm-up is run before timing."""
WHOLE = 4
"""A cycle of up to so many times the steps of a round is in each round as a whole; a longer one is spread over them."""


def kind(optimizer: BucketOptimizer, step: int) -> tuple[Any, ...]:
    """What a step does, as far as its number decides it: equal for steps that send the same and cost the same."""
    return tuple(getattr(optimizer, name)(step) for name in KINDS if hasattr(optimizer, name))


def warm_up(optimizer: BucketOptimizer, least: int) -> int:
    """Steps to take before timing: at least `least`, past the dense stage, and one step of the method's own kind.

    Raises UserError for a dense stage that is too long to be run.
    """
    first = optimizer.steps + 1
    limit = getattr(optimizer, "warmup_steps", 0)
    dense = 0
    if optimizer.compressed:
        while optimizer.plan(first + dense) is Plan.DENSE and dense <= LONGEST:
            dense += 1
        # Methods that send messages of another kind in their warm-up, without all-reduce.
        dense = max(dense, limit - optimizer.steps if isinstance(limit, int) else 0)
        if dense > LONGEST:
            raise UserError(
                f"{optimizer.kind} warms up for {limit or dense} steps or more, and timing begins after at most {LONGEST}: "
                "set optimizer.warmup_steps"
            )
    return max(least, dense + 1)


def cycle(optimizer: BucketOptimizer, start: int) -> int:
    """Steps after which the kinds of steps repeat, from step `start` on; 1 where all are of one kind or none repeats."""
    kinds = [kind(optimizer, start + k) for k in range(2 * LONGEST)]
    for period in range(1, LONGEST + 1):
        if all(kinds[k] == kinds[k + period] for k in range(2 * LONGEST - period)):
            return period
    return 1


def lengths(period: int, rounds: int, steps: int, held: bool = True) -> list[int]:
    """How many steps each round has: whole cycles in each, or whole cycles in all of them together.

    Sums to a multiple of `period`; no round is empty. held: False: each round begins the training again.
    """
    if period <= WHOLE * steps or not held:
        return [period * max(1, -(-steps // period))] * rounds
    total = period * max(1, round(rounds * steps / period))
    while total < rounds:
        total += period
    return [(total * (k + 1)) // rounds - (total * k) // rounds for k in range(rounds)]
