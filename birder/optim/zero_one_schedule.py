"""When 0/1 Adam communicates: pure functions of the step number (from 1), so that nothing has to be counted or saved.

Two rounds are scheduled. A *variance round* sends the gradient in floats; a *sync* sends the momentum buffer in one bit.

    variance   until `warmup_steps`: the gap after the j-th round (j from 0) is 2^floor(j / kappa)
    sync       until `warmup_steps`: every step. Afterwards the interval doubles every `local_doubling` steps, from 1 up
               to `local_limit`

aligned=False is the rule as published: intervals are counted from the round before. aligned=True is that of the reference
implementation (DeepSpeed): rounds are at the multiples of the interval in force.
"""

from __future__ import annotations

import functools


@functools.cache
def variance_steps(warmup_steps: int, kappa: int, aligned: bool = False) -> frozenset[int]:
    """All steps with a variance round."""
    steps: list[int] = []
    step = 1
    while step <= warmup_steps:
        steps.append(step)
        gap = 2 ** (len(steps) // kappa) if aligned else 2 ** ((len(steps) - 1) // kappa)
        step = (step // gap + 1) * gap if aligned else step + gap
    return frozenset(steps)


@functools.cache
def sync_phases(
    warmup_steps: int, local_doubling: int, local_limit: int, aligned: bool = False
) -> tuple[tuple[int, int], ...]:
    """(start, interval): from after step `start` on, up to and including the next phase's start, that is the interval.

    The last phase has no end. Intervals are powers of 2, but for the last one when `local_limit` is none.
    """
    phases = [(warmup_steps, 1)]
    while phases[-1][1] < local_limit:
        start, interval = phases[-1]
        end = warmup_steps + len(phases) * local_doubling
        if not aligned:  # the phase ends with the first round at or after its nominal end
            end = start + -(-(end - start) // interval) * interval
        phases.append((end, min(2 * interval, local_limit)))
    return tuple(phases)


def sync(step: int, warmup_steps: int, local_doubling: int, local_limit: int, aligned: bool = False) -> bool:
    """Whether all ranks have the same model after step `step`: always until `warmup_steps`, then once an interval."""
    if step <= warmup_steps:
        return True
    phases = sync_phases(warmup_steps, local_doubling, local_limit, aligned)
    start, interval = next((p for p in reversed(phases) if p[0] < step), phases[0])
    return (step if aligned else step - start) % interval == 0
