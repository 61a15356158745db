"""conf/sweep/NAME.yaml: a grid of runs of one experiment, as data.

exp:       the experiment, a file of conf/exp
seeds:     one run with each
rates:     learning rates, one run with each; left out: the experiment's own
choose:    true: all rates are run with the first seed, and only the best of a setting with the others: by the held-out
           part of the training data where the workload keeps one, else by the metric itself
choose_seeds: so many of the seeds, the first ones, choose, by their mean; default 1
choose_at: further keys of the runs that choose, for example fewer epochs: they are separate runs then, and the first
           seed is run with the best rate as the others are. One rate alone (--rates) is not chosen
overrides: further keys of every run, as on the command line
methods:   {optimizer: {keys: arguments, settings: [their values, ...], rates: instead of those above, overrides: further
           keys}}; {} is the optimizer as the experiment has it. An optimizer's second entry has another name, and
           `optimizer` says which
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator

from experiments.config.data_files import DataFiles, PlainData
from launch.errors import UserError
from launch.words import there_are

Value = bool | int | float | str | None


class SweepMethod(PlainData):
    """One optimizer's part of a grid. optimizer: None: it has the name of the entry."""

    optimizer: str | None = None
    overrides: list[str] = Field(default_factory=list)
    keys: list[str] = Field(default_factory=list)
    settings: list[list[Value]] = Field(default=[[]])
    rates: list[float] | None = None

    @model_validator(mode="after")
    def fits(self) -> SweepMethod:
        for setting in self.settings:
            if len(setting) != len(self.keys):
                raise ValueError(f"{setting} has {len(setting)} values for the {len(self.keys)} keys {self.keys}")
        return self

    @property
    def each(self) -> list[list[str]]:
        """The overrides of each setting."""
        return [[f"optimizer.{k}={_typed(v)}" for k, v in zip(self.keys, s, strict=True)] for s in self.settings]


class Sweep(PlainData):
    """A file of conf/sweep. See the module's docstring."""

    exp: str
    seeds: list[int] = Field(min_length=1)
    rates: list[float] | None = None
    choose: bool = False
    choose_seeds: int = Field(1, ge=1)
    choose_at: list[str] = Field(default_factory=list)
    overrides: list[str] = Field(default_factory=list)
    methods: dict[str, SweepMethod]

    @model_validator(mode="after")
    def chooses(self) -> Sweep:
        if self.choose_at and not self.choose:
            raise ValueError("choose_at is of the runs that choose: say choose: true")
        if self.choose_seeds > len(self.seeds):
            raise ValueError(f"choose_seeds: {self.choose_seeds} of {len(self.seeds)} seeds")
        return self


FILES = DataFiles("sweep", Sweep)
names, load = FILES.names, FILES.load


@dataclass(frozen=True)
class SweepRun:
    """One run. overrides: of the composition, without the user's own.

    candidates: overrides of the runs that choose, some for each rate, of which those at `place` have this row's rate: the row
            is run if their mean is best. Empty: it is run in any case.
    """

    overrides: tuple[str, ...]
    candidates: tuple[tuple[tuple[str, ...], ...], ...] = ()
    place: int = 0

    @property
    def title(self) -> str:
        optimizer = next(i for i, o in enumerate(self.overrides) if o.startswith("optimizer="))
        return ", ".join(re.sub("^optimizer[=.]", "", o) for o in self.overrides[optimizer:])


def rows(
    sweep: Sweep, methods: list[str] | None = None, rates: list[float] | None = None, seeds: list[int] | None = None
) -> list[SweepRun]:
    """All runs of the grid, or those of some methods, rates and seeds. Raises UserError for an unknown method.

    With `choose` the runs of a setting that choose come before its others. Of one rate, further seeds are run in any case.
    """
    if unknown := [m for m in methods or () if m not in sweep.methods]:
        raise UserError(f"this sweep has no '{unknown[0]}'{there_are(unknown[0], sweep.methods)}")
    wanted = seeds if seeds is not None else sweep.seeds
    found = []
    for name, method in sweep.methods.items():
        if methods is not None and name not in methods:
            continue
        optimizer = f"optimizer={method.optimizer or name}"
        own = method.rates if method.rates is not None else sweep.rates
        every: list[float | None] = list(rates if rates is not None else own or []) or [None]
        no_choice = len(every) == 1 and (sweep.choose_at or sweep.seeds[0] not in wanted)
        for setting in method.each:
            common = (f"+exp={sweep.exp}", *sweep.overrides, optimizer, *method.overrides, *setting)
            if sweep.choose and not no_choice:
                by = sweep.seeds[: sweep.choose_seeds]
                found += choosing(common, every, wanted, by, sweep.choose_at)
            else:
                found += [SweepRun(_row(common, rate, seed)) for rate in every for seed in wanted]
    return found


def choosing(
    common: tuple[str, ...],
    rates: Sequence[float | None],
    seeds: Sequence[int],
    by: Sequence[int],
    choose_at: Sequence[str] = (),
) -> list[SweepRun]:
    """The rows of one setting: all rates with those seeds `by` that are among `seeds`, then the best with the others.

    common: the overrides of the setting. choose_at: as in `Sweep`.
    """
    candidates = tuple(tuple((*_row(common, rate, seed), *choose_at) for seed in by) for rate in rates)
    found = [SweepRun(one) for rate in candidates for seed, one in zip(by, rate, strict=True) if seed in seeds]
    choose = {one for rate in candidates for one in rate}
    for place, rate in enumerate(rates):
        made = [_row(common, rate, seed) for seed in seeds]
        found += [SweepRun(one, candidates, place) for one in made if one not in choose]
    return found


def _row(common: tuple[str, ...], rate: float | None, seed: int) -> tuple[str, ...]:
    lr = () if rate is None else (f"optimizer.lr={_typed(rate)}",)
    return (*common, *lr, f"seed={seed}")


def _typed(value: Value) -> str:
    """As it stands on a command line."""
    if isinstance(value, float):
        return short if float(short := f"{value:g}") == value else repr(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
