"""Learning-rate schedules: factors of the base rate as a function of the step alone, so that resuming needs no state."""

from __future__ import annotations

import math
from typing import Any

from launch.errors import UserError

KEYS = {
    "constant": {"warmup"},
    "linear": {"warmup", "final"},
    "cosine": {"warmup", "final"},
    "polynomial": {"warmup", "final", "power"},
    "exponential": {"warmup", "gamma", "every"},
    "step": {"warmup", "milestones", "gamma"},
}


def check_keys(schedule: dict[str, Any]) -> None:
    """Raises UserError for a key that the named schedule does not have. A key that is null is not set.

    Names and values are checked by schema.py (`LrSchedule`), once for a run, as this is.
    """
    given = _given(schedule)
    name = given["name"]
    if unknown := sorted(set(given) - KEYS[name] - {"name"}):
        raise UserError(f"lr_schedule {name} has no {', '.join(unknown)}; it takes {', '.join(sorted(KEYS[name]))}")


def factor(schedule: dict[str, Any], step: int, total_steps: int, steps_per_epoch: int) -> float:
    """What the base learning rate is multiplied with in step number `step` (from 1).

    Every schedule may begin with a linear warm-up over `warmup` steps (below 1: a fraction of all steps). Then:
    constant: 1;  linear: falls to `final` at the last step;  cosine: the same along half a cosine;
    polynomial: the same as (what is left of the steps) to the power `power`;
    exponential: times `gamma` after each `every` steps (below 1: a fraction of all steps);
    step: times `gamma` after each number of epochs in `milestones`, such as 1.5.
    """
    given = _given(schedule)
    warm = _steps(given.get("warmup", 0), total_steps)
    if step <= warm:
        return step / warm
    name, final = given["name"], given.get("final", 0.0)
    left = max(0.0, (total_steps - step + 1) / max(1, total_steps - warm))  # from 1 down to 1 / steps
    if name == "linear":
        return final + (1 - final) * left
    if name == "cosine":
        return final + (1 - final) * (1 - math.cos(math.pi * left)) / 2
    if name == "polynomial":
        return final + (1 - final) * left ** given.get("power", 1.0)
    if name == "exponential":
        every = max(1, _steps(given.get("every", 1), total_steps))
        return float(given.get("gamma", 0.99) ** ((step - warm - 1) // every))
    if name == "step":
        epochs = (step - 1) / steps_per_epoch  # not whole ones: a milestone may lie within an epoch
        return float(given.get("gamma", 0.1) ** sum(epochs >= m for m in given.get("milestones", [])))
    return 1.0


def _given(schedule: dict[str, Any]) -> dict[str, Any]:
    # An experiment that chooses another schedule than its workload's sets the latter's keys to null.
    return {key: value for key, value in schedule.items() if value is not None}


def _steps(value: float, total_steps: int) -> int:
    return int(value * total_steps) if value < 1 else int(value)
