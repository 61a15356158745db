"""All habits, by name."""

from __future__ import annotations

from tests.distributed.habits import (  # noqa: F401
    accumulation,
    copies,
    evaluation,
    frozen,
    gan,
    groups,
    holders,
    layout,
    parameters,
    rates,
    real,
    scalers,
    state,
    steps,
    surgery,
    uneven,
    unused,
    weights,
    with_lightning,
    with_trainer,
)
from tests.distributed.habits.base import HABITS

__all__ = ["HABITS"]
