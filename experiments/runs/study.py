"""Runs that are made once: the engine of sweep.py, tune.py, all_methods.py and compare.py --paper.

What is recorded is not run again, so that the same command continues after an interruption. Processes that run the same
command share the runs. A run whose loss diverged counts as run; one that failed otherwise is tried again the next time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.config.kinds import shown
from experiments.config.same_run import BOOKKEEPING, SAME_NUMBERS, changed_midway, differences, flatten, within
from experiments.config.sweeps import SweepRun
from experiments.records import labels, old_keys, privacy, record
from experiments.records.record import FINGERPRINTS, ResultRecord, is_finite, loss_diverged
from experiments.report.accuracy import HELD_OUT
from experiments.report.comparison import counts
from experiments.runs import command, start
from launch import hosts, lock
from launch.errors import UserError, refused
from launch.failure import RunFailed
from launch.process import Stopped
from launch.slurm import job as slurm_job
from launch.spec import RunSpec
from launch.words import count, say

RECORDED, TO_RUN = "recorded", "to run"
UNDECIDED = "its learning rates are not all recorded"
NOT_BEST = "its learning rate is not the best"
ELSEWHERE = "another process runs it"
POLL_S = 5.0
"""How often the runs of other processes are looked after."""

# ---- which runs are the same ------------------------------------------------------------------------------------------


def asked(overrides: Sequence[str], nodes: int | None = None) -> tuple[tuple[str, str], ...]:
    """What a command line asks to be run: two runs of which this is equal are the same run. The only rule.

    Its keys in any order, without those that only say how a run is kept or, but for times, how its sums are ordered; of a key
    given twice the last. Values are the same however they are written: 1e-5, 1.0e-05; true, True. So are keys under their
    old names. What is not typed does not count, so that a study continues when defaults have changed. Of hosts their
    number counts.

    nodes: of a record, which hides the hosts.
    """
    counted = (_number_of_hosts(o, nodes) for o in overrides)
    clean = (old_keys.override(privacy.clean_text(o, Path.cwd())).lstrip("+").partition("=") for o in counted)
    last = {key: in_one_spelling(value) for key, _, value in clean}
    ignored = (*BOOKKEEPING, *(() if last.get("evaluate") == "false" else SAME_NUMBERS))
    return tuple(sorted((k, v) for k, v in last.items() if not within(k, ignored)))


def _torchruns_world(r: ResultRecord) -> list[str]:
    """The size of a world that torchrun made before the run began: no override of the run's own says it."""
    if r.cluster != "torchrun":
        return []
    return [f"cluster.nodes={r.nodes}", f"cluster.ranks_per_node={r.ranks_per_node}"]


def _number_of_hosts(override: str, nodes: int | None) -> str:
    """A list of hosts as what it says of the run: the number of nodes. Any other override unchanged."""
    sign, key, listed = override.partition("cluster.hosts=")
    if not key or sign.strip("+"):
        return override
    if listed != privacy.HIDDEN:
        with contextlib.suppress(yaml.YAMLError):
            found = yaml.safe_load(listed)
            nodes = len(hosts.parse(found)) if isinstance(found, str | list) else None
    return override if nodes is None else f"cluster.nodes={nodes}"


def in_one_spelling(text: str) -> str:
    """A number, a switch or null in one way of writing it, and text without the quotes that Hydra wants around some."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text.lower() in ("true", "false", "null"):
        return text.lower()
    try:
        return repr(float(text))
    except ValueError:
        return text


def refuse_name(given: Sequence[str]) -> None:
    """Raises UserError where the user names a run: all runs of a study would share its folder, and only one could."""
    for key, name in ((compose.key_of(o), o.partition("=")[2]) for o in given):
        if key == "run_name" and name != "null":
            raise UserError(f"run_name={name} is of one run, and a study makes many: leave run_name out")


def refuse_not_waiting(resolved: dict[str, Any]) -> None:
    """Raises UserError where runs are not waited for and it depends on what they come to which are made next."""
    if not resolved["cluster"].get("wait", True):
        raise UserError("cluster.wait=false would choose learning rates before their runs have ended: leave it true")


def jobs(composed: Sequence[Composed]) -> list[str]:
    """SLURM's jobs that make some of these runs and have not ended. Raises UserError."""
    resolved = compose.resolve(composed[0])
    names, found = {asked(c.overrides) for c in composed}, []
    for script in Path(resolved["output_dir"], resolved["exp"]).glob("*/job.sh"):
        with contextlib.suppress(OSError, yaml.YAMLError, TypeError, KeyError):  # a folder that has been cleared
            spec = RunSpec.load(script.with_name("spec.yaml"))
            parts = spec.config.get("variants") or [{"overrides": spec.overrides}]
            found += [spec.id] * any(asked(part["overrides"]) in names for part in parts)
    with refused("SLURM does not answer", slurm_job.NoController):
        return slurm_job.under_way(found)


# ---- how a run ended --------------------------------------------------------------------------------------------------


def score(r: ResultRecord | None) -> float | None:
    """What a learning rate is chosen by, the larger the better; None for a run that did not end well."""
    if r is None or r.status != "completed":
        return None
    value = r.metric.get("all", {}).get(HELD_OUT, r.metric.get("value"))
    return None if value is None else float(value) * (1 if r.metric.get("higher_is_better", True) else -1)


def outcome(r: ResultRecord) -> str:
    """What a run came to, in a few words."""
    if r.status != "completed":
        return f"failed: {r.reason}"
    if r.metric:
        return f"{r.metric['name']} {r.metric['value']:.2f}" if is_finite(r.metric["value"]) else "diverged"
    return f"{r.timing.get('median_ms', 0):.0f} ms a step"


# ---- the engine -------------------------------------------------------------------------------------------------------


@dataclass
class Study:
    """The runs of one experiment.

    results_dir: where runs are recorded. others: folders whose records count too; nothing is written there.
    config:      of one of the runs, resolved: records of the same workload that read other files at its data.path, or began
                 with other weights of the same name, do not count.
    dry_run:     run nothing, say what would be.
    known:       the latest record of each run, a good one before any other. warned: whether `warn` has said anything.
    failed:      runs that failed otherwise than by their loss. todo: runs that were not recorded.
    """

    exp: str
    results_dir: str
    others: Sequence[Path] = ()
    config: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    known: dict[Hashable, ResultRecord] = field(default_factory=dict)
    failed: int = 0
    todo: int = 0
    warned: bool = False

    def __post_init__(self) -> None:
        own = {"data": compose.data(self.config), "workload": self.config["workload"]} if self.config else {}
        self._own = privacy.clean(own, Path.cwd())
        if others := self.read():
            say(f"{count(others, 'record')} of other files or weights under the same names: not counted")

    def read(self) -> int:
        """Takes in all records there are. Returns how many do not count because of their data."""
        others = 0
        folders = [folder for folder in (*self.others, Path(self.results_dir)) if folder.is_dir()]
        for r in (r for folder in folders for r in record.read_all(folder)):
            if r.exp == self.exp and not changed_midway(r.config):
                if self._reads_others(r.config):
                    others += 1
                    continue
                name = asked([*r.overrides, *_torchruns_world(r)], r.nodes)
                if r.status == "completed" or name not in self.known or self.known[name].status != "completed":
                    self.known[name] = r
        return others

    def _reads_others(self, config: dict[str, Any]) -> bool:
        """Whether a run has read other files, or begun with other weights, than those that lie at the same place now."""
        if not self._own or config.get("workload") != self._own["workload"]:
            return False
        theirs, mine = config.get("data") or {}, self._own["data"]
        apart = [len({theirs.get(what), mine.get(what)} - {None}) > 1 for what in FINGERPRINTS]
        return theirs.get("path") == mine["path"] and any(apart)

    def done(self, name: Hashable) -> ResultRecord | None:
        """The record of a run that need not be made again."""
        there = self.known.get(name)
        return there if there is not None and counts(there) else None

    def lock_of(self, name: Hashable) -> Path:
        """The file that is locked while a process makes the run."""
        return Path(self.results_dir) / "locks" / f"{hashlib.sha256(repr(name).encode()).hexdigest()[:16]}.lock"

    def make(self, name: Hashable, composed: Callable[[], Composed], group: str | None = None) -> bool:
        """Makes a run, unless another process has just ended it. False: another process is at it."""
        with lock.attempted(self.lock_of(name)) as mine:
            if mine:
                self.read()
                if self.done(name) is None:
                    self._launch(composed(), group)
                    self.read()
        return mine

    def close(self, of: str = "", *, written: bool = True) -> int:
        """The end: brings the experiment's tables up to date, says where they are and what failed. The exit status.

        written: whether there is anything new for the tables.
        """
        if written:
            from experiments.report import tables  # loads pandas and matplotlib, which no start should wait for

            tables.write(self.results_dir, self.exp)
            say(f"table:  {Path(self.results_dir) / 'tables' / f'{self.exp}.md'}")
        if self.failed:
            say(f"{self.failed}{of} runs failed: the same command tries them again", sys.stderr)
        return int(self.failed > 0)

    def together(self, composed: Sequence[Composed]) -> str | None:
        """The group in which all of these are recorded, so that they can be compared; None where there is none."""
        there = [self.done(asked(c.overrides)) for c in composed]
        groups = {r.group if r is not None else None for r in there}
        return groups.pop() if len(groups) == 1 else None

    def warn(self, composed: Composed) -> None:
        """Says, once, in what the recorded run of a command line is not what it would be now: defaults that have changed."""
        if self.warned or (there := self.done(asked(composed.overrides))) is None:
            return
        now = privacy.clean(compose.resolve(composed), Path.cwd())
        # A key that one of them lacks is younger than the other.
        keys = (flatten(there.config).keys() & flatten(now).keys()) - set(SAME_NUMBERS)
        if changed := [change for change in differences(there.config, now) if change[0] in keys]:
            key, old, new = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            say(
                f"warning: recorded runs count, and were made with another default: {key} was {shown(old)}, now it is "
                f"{shown(new)}{more}; results_dir=FOLDER makes all of them again",
                sys.stderr,
            )
            self.warned = True

    def _launch(self, composed: Composed, group: str | None) -> None:
        try:
            start.launch(composed, group=group)
        except (RunFailed, UserError) as error:
            command.report(error)
            self.failed += not (isinstance(error, RunFailed) and loss_diverged(str(error)))
        except (KeyboardInterrupt, Stopped):
            say("to continue, type the same command: recorded runs are not run again")
            raise

    def run(
        self, what: str, composed: Composed, group: str | None = None, asked_for: bool = True
    ) -> ResultRecord | None:
        """The record of `composed`, which is run if it is not there and it is asked for. None: there is none."""
        name, title = asked(composed.overrides), f"{labels.method(compose.resolve(composed))}, {what}"
        if (there := self.done(name)) is not None:
            self.warn(composed)
            say(f"{title}: recorded, {outcome(there)}")
        elif asked_for:
            self.todo += 1
            say(f"{title}: {'to run' if self.dry_run else 'runs now'}")
            waits = False
            while not self.dry_run and not self.make(name, lambda: composed, group):
                if not waits:
                    say(ELSEWHERE)
                waits = True
                time.sleep(POLL_S)
        return self.known.get(name)


@dataclass
class SweepQueue:
    """Rows of a study on their way.

    given:   the user's own overrides, of every row. wandb_group: of the runs in W&B, unless the user gives one.
    waits:   runs have ended when they have been made. If not, the same command finds the folder of one that is under way, by
             which its launcher refuses to begin it again.
    patient: a rate is chosen among all of a row's candidates; else among those that are recorded when all were tried.
    tried:   places of rows that this process has run. said: the last word on each row.
    """

    rows: Sequence[SweepRun]
    study: Study
    given: Sequence[str] = ()
    wandb_group: str | None = None
    patient: bool = True
    waits: bool = True
    tried: set[int] = field(default_factory=set)
    elsewhere: set[Hashable] = field(default_factory=set)
    said: dict[int, str] = field(default_factory=dict)

    def name(self, overrides: Sequence[str]) -> Hashable:
        """Of a row, by its overrides: as records have them, which are written of what is composed."""
        return asked(compose.readable([*overrides, *self.given]))

    def composed(self, overrides: Sequence[str]) -> Composed:
        own = [] if self.wandb_group is None else [f"wandb.group={self.wandb_group}"]
        if not self.waits:
            own += [f"run_name={self.study.lock_of(self.name(overrides)).stem}", "resume=auto"]
        return compose.compose([*overrides, *compose.unless_given(own, self.given), *self.given])

    def of(self, overrides: tuple[str, ...]) -> ResultRecord | None:
        return self.study.done(self.name(overrides))

    def is_chosen(self, row: SweepRun) -> bool | None:
        """Whether the row's learning rate did best with the seeds that choose; None where that cannot be said yet."""
        every = [overrides for rate in row.candidates for overrides in rate]
        waits = self.patient or self.study.dry_run or any(self.name(o) in self.elsewhere for o in every)
        if waits and any(self.of(o) is None for o in every):
            return None
        found = [[score(self.of(o)) for o in rate] for rate in row.candidates]
        scores = [statistics.fmean(-math.inf if s is None else s for s in rate) for rate in found]
        return not scores or (max(scores) > -math.inf and scores.index(max(scores)) == row.place)

    def say(self, place: int, what: str) -> None:
        """Prints what happens to a row, unless that was the last word already."""
        if self.said.get(place) != what:
            say(f"[{place + 1}/{len(self.rows)}] {self.rows[place].title}: {what}")
        self.said[place] = what

    def standing(self, row: SweepRun) -> str:
        """RECORDED, or TO_RUN, UNDECIDED or NOT_BEST by its learning rate."""
        if self.of(row.overrides) is not None:
            return RECORDED
        chosen = self.is_chosen(row)
        return UNDECIDED if chosen is None else TO_RUN if chosen else NOT_BEST

    def warn(self) -> None:
        """`Study.warn` of the first row that is recorded."""
        first = next((row for row in self.rows if self.of(row.overrides) is not None), None)
        if first is not None:
            self.study.warn(self.composed(first.overrides))

    def list(self) -> None:
        """Says of each row whether it is recorded or to run."""
        self.warn()
        found = [self.standing(row) for row in self.rows]
        for place, what in enumerate(found):
            self.say(place, "to run if its learning rate does best" if what == UNDECIDED else what)
        waiting = {  # of rows that differ in the learning rate alone only one is run
            (row.candidates, row.overrides[-1]) for row, what in zip(self.rows, found, strict=True) if what == UNDECIDED
        }
        todo = found.count(TO_RUN) + len(waiting)
        say(f"{todo} runs to do{' at most' if waiting else ''}, {found.count(RECORDED)} recorded")

    def run(self) -> None:
        """Runs what is missing and no other process runs, until nothing is left to wait for."""
        self.warn()
        while self.pass_through():
            time.sleep(POLL_S)

    def pass_through(self) -> bool:
        """Goes through all rows once. Returns whether another process runs some of them."""
        self.elsewhere.clear()
        for place, row in enumerate(self.rows):
            what = self.standing(row)
            if what == TO_RUN and place not in self.tried:
                name = self.name(row.overrides)
                if not self.study.make(name, functools.partial(self._begin, place)):
                    what = ELSEWHERE
                    self.elsewhere.add(name)
                elif place not in self.tried:  # another process ended it since the records were last read
                    what = RECORDED
            if what != TO_RUN:
                self.say(place, what)
        self.study.read()
        return bool(self.elsewhere)

    def _begin(self, place: int) -> Composed:
        """Of a row that this process is about to run."""
        self.say(place, "runs now")
        self.tried.add(place)
        return self.composed(self.rows[place].overrides)
