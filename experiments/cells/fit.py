"""Fits a `Machine` to cells: their step times, and what encoding and update took in them. Needs scipy, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cells import predicted
from experiments.cells.predicted import Case, Machine
from experiments.records.record import ResultRecord

SCALE = 0.02
"""Errors of a step time that are smaller count as squares, larger ones as their size: some cells are disturbed."""
PARTS = 0.2
"""Weight of encode and update times beside step times, which contain them."""
WIDTH = {"rate": 0.02, "call_us": 0.5, "fast": 0.5, "k4": 0.3, "k8": 0.3, "s4": 0.4, "s8": 0.4, "m4": 0.4, "m8": 0.4}
"""How far a logarithm may easily go from where it began; 1.5 where nothing stands. What is known of a machine is kept so."""
ROUNDS = 12

Pair = tuple[Case, ResultRecord]


def fit(
    pairs: Sequence[Pair], link: str, kernels: Mapping[str, float], begin: Machine | None = None, rounds: int = ROUNDS
) -> Machine:
    """The machine that fits these cells. begin: where to start, if not at `predicted.start`."""
    from scipy.optimize import least_squares

    origin = _logs(predicted.start(link, kernels), link)
    width = np.array([WIDTH.get(n, 1.5) for n in predicted.names(link)])
    if link == "loopback":
        width[predicted.names(link).index("rate")] = 1.5

    # y = 1 + x - origin, x the logarithms: steps of differences are relative to y, which is about 1.
    def residuals(y: Any) -> Any:
        own = _residuals(pairs, _machine(origin + y - 1, link, kernels))
        return np.concatenate([np.array(own) / SCALE, (y - 1) / width])

    first = np.ones_like(origin) if begin is None else 1 + _logs(begin, link) - origin
    found = least_squares(residuals, first, loss="soft_l1", diff_step=1e-2, max_nfev=rounds)
    return _machine(origin + found.x - 1, link, kernels, digits=5)


def _residuals(pairs: Sequence[Pair], machine: Machine) -> list[float]:
    errors: list[float] = []
    for of, record in pairs:
        step, split = predicted.step(of, machine), record.timing["split"]
        errors.append(math.log(step.ms / record.timing["median_ms"]))
        for own, key in ((step.update_ms, "update_ms"), (step.encode_ms, "encode_ms")):
            if split.get(key):  # 0.0: not there, or not recorded
                errors.append(PARTS * SCALE / 0.04 * math.log((own + 0.5) / (split[key] + 0.5)))
    return errors


def _logs(machine: Machine, link: str) -> Any:
    return np.log([machine.values[n] for n in predicted.names(link)])


def _machine(x: Any, link: str, kernels: Mapping[str, float], digits: int = 17) -> Machine:
    values = {n: float(f"{math.exp(v):.{digits}g}") for n, v in zip(predicted.names(link), x, strict=True)}
    return Machine(link, values, kernels)
