"""All habits, by name."""

from __future__ import annotations

from tests.distributed.habits import (  # noqa: F401
    accumulation,
    copies,
    evaluation,
    frameworks,
    frozen,
    gan,
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
    weights,
)
from tests.distributed.habits.base import HABITS

__all__ = ["HABITS"]
