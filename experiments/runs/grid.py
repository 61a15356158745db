"""The rows of a sweep on their way: what is recorded, what another process runs, what is left to run here."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.config import compose
from experiments.config.same_run import BOOKKEEPING, SAME_NUMBERS, within
from experiments.config.sweeps import Row
from experiments.records import old_keys, privacy, record
from experiments.records.record import ResultRecord
from experiments.runs import command, recorded, start
from launch import lock
from launch.failure import RunFailed

Asked = frozenset[tuple[str, str]]
Known = dict[Asked, ResultRecord]
NOT_BEST = "its learning rate is not the best"
POLL_S = 5.0
"""How often the runs of other processes are looked after."""


def asked(overrides: Sequence[str]) -> Asked:
    """What a command line asks to be run.

    Its keys in any order, without those that only say how a run is kept or how its sums are ordered; of a key given twice
    the last. Numbers are the same however they are written: 1e-5, 1.0e-05; so are keys under their old names.
    """
    typed = (old_keys.override(o).lstrip("+").partition("=") for o in overrides)
    last = {key: of_number(value) for key, _, value in typed}
    return frozenset((key, value) for key, value in last.items() if not within(key, (*BOOKKEEPING, *SAME_NUMBERS)))


def of_number(text: str) -> str:
    """A number in one way of writing it; any other text as it is."""
    try:
        return repr(float(text))
    except ValueError:
        return text


def known_runs(folders: Sequence[str | Path], exp: str) -> Known:
    """All runs that need not be run again, by what was asked for. Of runs that are the same that of the last folder counts,
    and there the latest."""
    found = [r for folder in folders for r in record.read_all(folder)]
    return {asked(r.overrides): r for r in found if r.exp == exp and recorded.counts(r)}


def is_chosen(row: Row, of: Callable[[Sequence[str]], ResultRecord | None]) -> bool | None:
    """Whether the row's learning rate did best with the first seed; None where not all of these runs are recorded.

    of: the record of a run, by its overrides.
    """
    rivals = [of(overrides) for overrides in row.rivals]
    if any(r is None for r in rivals):
        return None
    scores = [s if (s := recorded.score(r)) is not None else -math.inf for r in rivals]
    return not rivals or (max(scores) > -math.inf and scores.index(max(scores)) == row.place)


@dataclass
class Grid:
    """The rows of a sweep on their way.

    given:  the user's own overrides, of every row.
    wandb_group: group of the runs in W&B, unless the user gives one.
    others: folders besides results_dir whose records count too; nothing is written there.
    tried:  places of rows that this process has run; failed: how many of them failed otherwise than by their loss.
    said:   the last word on each row.
    """

    rows: Sequence[Row]
    exp: str
    given: Sequence[str]
    results_dir: str
    others: Sequence[Path] = ()
    wandb_group: str | None = None
    known: Known = field(default_factory=dict)
    tried: set[int] = field(default_factory=set)
    failed: int = 0
    said: dict[int, str] = field(default_factory=dict)

    def read(self) -> None:
        self.known = known_runs([*self.others, self.results_dir], self.exp)

    def of(self, overrides: Sequence[str]) -> ResultRecord | None:
        return self.known.get(self.asked(overrides))

    def asked(self, overrides: Sequence[str]) -> Asked:
        """By the overrides of a row, as a record keeps them."""
        return asked([privacy.clean_text(o, Path.cwd()) for o in [*overrides, *self.given]])

    def say(self, place: int, what: str) -> None:
        """Prints what happens to a row, unless that was the last word already."""
        if self.said.get(place) != what:
            print(f"[{place + 1}/{len(self.rows)}] {self.rows[place].title}: {what}", flush=True)
        self.said[place] = what

    def list(self) -> None:
        """Says of each row whether it is recorded or to run."""
        todo = done = 0
        waiting: set[object] = set()  # of rows that differ in the learning rate alone only one is run
        for place, row in enumerate(self.rows):
            chosen = is_chosen(row, self.of)
            if self.of(row.overrides) is not None:
                done += 1
                self.say(place, "recorded")
            elif chosen is None:
                waiting.add((row.rivals, row.overrides[-1]))
                self.say(place, "to run if its learning rate does best")
            else:
                todo += chosen
                self.say(place, "to run" if chosen else NOT_BEST)
        print(f"{todo + len(waiting)} runs to do{' at most' if waiting else ''}, {done} recorded")

    def run(self) -> None:
        """Runs what is missing and no other process runs, until nothing is left to wait for."""
        while self.pass_through():
            time.sleep(POLL_S)

    def pass_through(self) -> bool:
        """Goes through all rows once. Returns whether another process runs some of them."""
        elsewhere = False
        for place, row in enumerate(self.rows):
            chosen = is_chosen(row, self.of)
            if self.of(row.overrides) is not None:
                self.say(place, "recorded")
            elif chosen is None:
                self.say(place, "its learning rates are not all recorded")
            elif not chosen:
                self.say(place, NOT_BEST)
            elif place not in self.tried:
                with lock.attempted(self.lock_of(row)) as mine:
                    if mine:
                        self.start(place)
                    else:
                        self.say(place, "another process runs it")
                        elsewhere = True
        self.read()
        return elsewhere

    def lock_of(self, row: Row) -> Path:
        """The file that is locked while a process runs the row."""
        name = hashlib.sha256(repr(sorted(self.asked(row.overrides))).encode()).hexdigest()[:16]
        return Path(self.results_dir) / "locks" / f"{name}.lock"

    def start(self, place: int) -> None:
        """Runs a row that this process holds the lock of, unless another has just ended it."""
        self.read()
        own = [] if self.wandb_group is None else [f"wandb.group={self.wandb_group}"]
        overrides = [*self.rows[place].overrides, *compose.unless_given(own, self.given), *self.given]
        if self.of(self.rows[place].overrides) is not None:
            return
        self.say(place, "")
        self.tried.add(place)
        try:
            start.launch(compose.compose(overrides), command=command.typed("run", overrides))
        except RunFailed as error:
            command.report(error)
            self.failed += not recorded.diverged(str(error))
        self.read()
