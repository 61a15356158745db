"""conf/sweep/NAME.yaml: a grid of runs of one experiment, as data.

exp:      the experiment, a file of conf/exp
seeds:    one run with each
rates:    learning rates, one run with each; left out: the experiment's own
methods:  {optimizer: {keys: arguments, settings: [their values, ...]}}; {} is the optimizer as the experiment has it
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, model_validator

from experiments.config.data_files import Data, DataFiles
from launch.errors import UserError


class Method(Data):
    """One optimizer's part of a grid."""

    keys: list[str] = Field(default_factory=list)
    settings: list[list[int | float]] = Field(default=[[]])

    @model_validator(mode="after")
    def fits(self) -> Method:
        for setting in self.settings:
            if len(setting) != len(self.keys):
                raise ValueError(f"{setting} has {len(setting)} values for the {len(self.keys)} keys {self.keys}")
        return self

    @property
    def overrides(self) -> list[list[str]]:
        """Of each setting."""
        return [[f"optimizer.{k}={v:g}" for k, v in zip(self.keys, s, strict=True)] for s in self.settings]


class Sweep(Data):
    """A file of conf/sweep. See the module's docstring."""

    exp: str
    seeds: list[int] = Field(min_length=1)
    rates: list[float] | None = None
    methods: dict[str, Method]


FILES = DataFiles("sweep", Sweep)
names, load = FILES.names, FILES.load


@dataclass(frozen=True)
class Row:
    """One run. overrides: of the composition, without the user's own."""

    optimizer: str
    overrides: tuple[str, ...]

    @property
    def title(self) -> str:
        return ", ".join([self.optimizer, *(o.removeprefix("optimizer.") for o in self.overrides[2:])])


def rows(
    sweep: Sweep, methods: list[str] | None = None, rates: list[float] | None = None, seeds: list[int] | None = None
) -> list[Row]:
    """All runs of the grid, or those of some methods, rates and seeds. Raises UserError for an unknown method."""
    if unknown := [m for m in methods or () if m not in sweep.methods]:
        raise UserError(f"this sweep has no '{unknown[0]}'; it has: {', '.join(sweep.methods)}")
    every: list[float | None] = list(rates if rates is not None else sweep.rates or [])
    found = []
    for optimizer, method in sweep.methods.items():
        if methods is not None and optimizer not in methods:
            continue
        for setting in method.overrides:
            for rate in every or (None,):
                lr = [] if rate is None else [f"optimizer.lr={rate:g}"]
                for seed in seeds if seeds is not None else sweep.seeds:
                    mine = (f"+exp={sweep.exp}", f"optimizer={optimizer}", *setting, *lr, f"seed={seed}")
                    found.append(Row(optimizer, mine))
    return found
