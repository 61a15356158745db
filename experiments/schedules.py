"""Learning-rate schedules: factors of the base rate as a function of the step alone, so that resuming needs no state."""

from __future__ import annotations

from typing import Any

from experiments.errors import UserError

KEYS = {"constant": {"warmup"}, "linear": {"warmup", "final"}, "step": {"warmup", "milestones", "gamma"}}


def check(schedule: dict[str, Any]) -> None:
    """Raises UserError for an unknown schedule, an unknown key, or a value out of range."""
    name = schedule.get("name")
    if name not in KEYS:
        raise UserError(f"train.lr_schedule.name must be one of {', '.join(KEYS)}, not '{name}'")
    unknown = set(schedule) - KEYS[name] - {"name"}
    if unknown:
        raise UserError(
            f"lr_schedule {name} has no {', '.join(sorted(unknown))}; it takes {', '.join(sorted(KEYS[name]))}"
        )
    warmup = schedule.get("warmup", 0.0)
    if not 0 <= warmup < 1:
        raise UserError(f"train.lr_schedule.warmup is a fraction of all steps, in [0, 1), not {warmup}")


def factor(schedule: dict[str, Any], step: int, total_steps: int, steps_per_epoch: int) -> float:
    """What the base learning rate is multiplied with in step number `step` (from 1).

    Every schedule may begin with a linear warm-up over the fraction `warmup` of all steps. Then:
    constant: 1;  linear: falls to `final` at the last step;  step: times `gamma` after each epoch in `milestones`.
    """
    check(schedule)
    warm = int(schedule.get("warmup", 0.0) * total_steps)
    if step <= warm:
        return step / warm
    if schedule["name"] == "linear":
        final = schedule.get("final", 0.0)
        left = (total_steps - step + 1) / max(1, total_steps - warm)
        return final + (1 - final) * left
    if schedule["name"] == "step":
        epoch = (step - 1) // steps_per_epoch
        return float(schedule.get("gamma", 0.1) ** sum(epoch >= m for m in schedule.get("milestones", [])))
    return 1.0
