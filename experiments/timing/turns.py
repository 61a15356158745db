"""Interleaved timing of methods: one world of ranks, one model, one set of data; in every round each method runs a few steps.

Every rank runs `train`. The order of turns is shuffled in every round, the same on all ranks. Each method trains for itself:
parameters, buffers, random state and batches are its own, and its steps those of a single run. A method whose turn has
ended leaves the ranks no sooner than the slowest of them: a turn is as long as on the slowest rank.

    warm up   each method, past its dense stage; emulated links have no rate yet
    bound     forward and backward alone, nothing sent, nothing updated; the dilation and the links' rate follow from it
    rounds    each method, the bound among them; before each the links are set again from the bound's last turns. Next to some
              of them dense methods on unthrottled links, and their exchange alone (experiments/timing/opened.py)
    check     the bound again; if the links did not keep up with this machine's pace the rounds are repeated, once

Where memory does not hold all methods at once, each is made, warmed up and freed in every turn; the bound then has a step
of warming up as well.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from experiments.records import record
from experiments.timing import plan, results
from experiments.timing.entries import Bound, Entry, Shared, Variant
from experiments.timing.links import BOUND_TURNS, EmulatedLinks
from experiments.timing.opened import Exchange, dense, due, ready
from experiments.timing.profiled import bits_ms, profile
from experiments.timing.shared_ddp import SharedDDP
from experiments.training import machine, rank_link
from experiments.training.clock import Stopwatch
from experiments.training.method import begin
from experiments.training.world import gathered, memory_left, world
from experiments.workloads.base import Shard
from launch.errors import UserError
from launch.spec import RunSpec
from launch.words import say

CHECK_TURNS = 3
"""Turns of the bound after the rounds, which have had one each; before them too, where each turn makes its method again."""
MEMORY = 0.8
"""Share of the memory available that the methods may take together."""


def train(spec: RunSpec) -> None:
    """Times the variants of `spec.config["variants"]`, interleaved; rank 0 writes a record for each.

    Raises UserError for what the user can mend. A method that fails on all ranks is recorded as failed and left out.
    """
    with world(spec) as shard:
        _World(spec, shard).run()


class _World:
    """What the methods share, on one rank."""

    def __init__(self, spec: RunSpec, shard: Shard) -> None:
        self.spec, self.shard, self.config = spec, shard, spec.config
        self.main = shard.rank == 0
        self.rounds, self.steps = int(spec.config["timing"]["rounds"]), int(spec.config["timing"]["steps"])
        self.workload, length, model = begin(spec, shard, shard.world_size)
        self.ddp = SharedDDP(
            model,
            device_ids=[shard.device] if shard.device.type == "cuda" else None,
            bucket_cap_mb=self.config["comm"]["bucket_cap_mb"],
            gradient_as_bucket_view=True,
            init_sync=False,  # the same seed has made the same model everywhere
        )
        self.ddp.train()
        # Dropout and the like differ between ranks from here on.
        torch.manual_seed(spec.seed * 1_000_003 + shard.rank + 1)
        shared = Shared(self.workload, self.ddp, shard, length, spec.seed)
        self.bound = Bound(self.config, shared)
        described = self.config["variants"]
        self.variants = [Variant(v, shared) for v in described if v["config"]["comm"]["enabled"]]
        self.bounds = [v for v in described if not v["config"]["comm"]["enabled"]]
        """What the comparison calls its runs without communication: the bound stands for them."""
        self.watch = Stopwatch(shard.device)
        self.links = EmulatedLinks(spec, self._agree, self._say)
        self.exchange = Exchange(self.ddp, [v["config"] for v in described])
        self.held = True

    # ---- the course of events ---------------------------------------------------------------------------------------

    def run(self) -> None:
        self.links.free()
        for _ in range(2):
            self.bound.turn(1, self.watch)
        if not self.config["variants"]:
            content = f'{{"step_ms": {1000 * self._measure_bound(BOUND_TURNS):.6g}}}\n'
            if self.main:
                record.write_file(self.spec.path / plan.BOUND_FILE, content.encode(), "measurement")
            return
        self._prepare()
        profiled = self._profile()
        before = self._measure_bound(BOUND_TURNS if self.held else CHECK_TURNS)
        dilation = self.links.settle(before)
        probed = rank_link.of_run(self.spec, self.shard.device)
        for repeated in (False, True):
            readings = gathered(machine.read())
            self._all_rounds()
            busy = machine.busy(readings, gathered(machine.read()))
            after = self._measure_bound(CHECK_TURNS)
            now = statistics.median([after, *self.bound.per_step()])
            began = statistics.median(pace for pace, _, _ in self.links.set_to) if self.links.set_to else before
            drift = now / began - 1
            if abs(drift) <= machine.DRIFT or repeated:
                break
            try:
                before, dilation = now, self.links.settle(now)
            except UserError as error:  # links that fit are more than this machine carries: the table says so
                self._say(f"Compute speed drifted by {drift:+.0%}, and the rounds are not repeated: {error}")
                break
            self._say(f"Compute speed drifted by {drift:+.0%}: the rounds are repeated")
            self.links.set_to.clear()
            self.exchange.forget()
            for entry in self._all():
                entry.forget()
        if self.links.set_to:
            dilation = statistics.median(dilation for _, dilation, _ in self.links.set_to)
            self.links.check(statistics.median(mbit for _, _, mbit in self.links.set_to), dilation)
        about = {
            "world": self.spec.id,
            "seed": self.spec.seed,
            "held": "all" if self.held else "one",
            "repeated": repeated,
            "bound_ms": {"before": round(1000 * before, 3), "after": round(1000 * after, 3)},
            "drift": round(drift, 4),
            "dilations": [dilation for _, dilation, _ in self.links.set_to],
            "busy": busy,
            **({"ready": found} if self.links.shapes and (found := ready(self.bound)) else {}),
            **({"profile": profiled} if profiled else {}),
        }
        entries = [*((self.bound, described) for described in self.bounds), *((v, v.described) for v in self.variants)]
        link, exchange = {**self.links.known, **(probed or {})}, self.exchange
        results.write(
            self.spec, self.shard, self.workload, entries, about=about, exchange=exchange, link=link, dilation=dilation
        )

    def _prepare(self) -> None:
        """Makes and warms up all methods, or, where memory does not hold them, sees that each can be made."""
        budget = self._memory()
        taken = 0
        for entry in self.variants:
            # Asked before it is made: what does not fit is killed by the system, and no message says so.
            if self.held and taken and (needed := taken + entry.most_memory()) > budget:
                self._hold_one(needed)
            if not self._make(entry):
                continue
            taken += max(gathered(entry.memory()))
            if not self.held:
                entry.free()
        self._at(self.bound)

    def _profile(self) -> dict[str, Any] | None:
        """What is known of machine and links besides the bound, where the ranks set the links' rate; they are open."""
        if not self.links.shapes or self.shard.device.type == "cuda" or self.spec.ranks_per_node > 1:
            return None
        return self._profiled()

    def _profiled(self) -> dict[str, Any]:
        unit_mb, model = float(self.config["comm"]["bucket_cap_mb"]), self.ddp.module
        decay = max((float(v.config["optimizer"].get("weight_decay", 0.0)) for v in self.variants), default=0.0)
        groups = self.workload.param_groups(model, decay)
        found = profile(self.bound.passed, self.ddp, groups, unit_mb)
        # As many turns as rounds: what is predicted from them is not to be less sure than what it is compared with.
        return {**found, "bits_ms": round(bits_ms(self.bound, groups, unit_mb, self.rounds), 3)}

    def _hold_one(self, needed: int) -> None:
        """From here on one method at a time is in memory."""
        self.held = False
        for entry in self.variants:
            entry.free()
        self.rounds = min(self.rounds, int(self.config["timing"]["rounds_when_rebuilding"]))
        self.links.remember(CHECK_TURNS)
        self._say(
            f"Memory does not hold all methods at once (up to {needed / 2**30:.1f} GiB a rank): each is rebuilt every round"
        )

    def _make(self, entry: Variant) -> bool:
        """Makes a method and warms it up on links that are free. Whether it works, on all ranks."""
        if entry.failed is None:
            self._at(entry)
            entry.make()
            self._same(entry)
        if entry.failed is None:
            entry.plan(self.rounds, self.steps, self.held)
        if entry.failed is None:
            entry.warm(self.watch)
            self._same(entry)
        if entry.failed is not None:
            entry.free()
            self._say(f"{entry.label} failed: {entry.failed}")
        return entry.failed is None

    def _all_rounds(self) -> None:
        began = time.monotonic()
        self._one_round(-1, timed=False)  # the first after the links have got their rate
        for number in range(self.rounds):
            extra = self.links.shapes and due(number, self.held)
            if extra and self.held:
                self.links.free()
                for entry in self._order(f"{number} open"):
                    self._open_turn(entry)
                self.links.set()
                self._at(self.bound)
            self.links.follow()
            if extra:
                self.exchange.turns(self.bound, self.watch, self.links.mbit)
            self._one_round(number, timed=True, extra=extra)
            left = (time.monotonic() - began) / (number + 2) * (self.rounds - number - 1)
            self._say(f"round {number + 1}/{self.rounds}, {left:.0f} s left")

    def _order(self, which: str) -> list[Entry]:
        """Those that take turns, shuffled."""
        order: list[Entry] = [e for e in self._all() if e.failed is None]
        random.Random(f"{self.spec.seed} {which}").shuffle(order)
        return order

    def _one_round(self, number: int, *, timed: bool, extra: bool = False) -> None:
        for entry in self._order(f"{number} turns"):
            if not self.held and isinstance(entry, Variant):
                if not timed:
                    continue
                self.links.free()
                if not self._make(entry):
                    continue
                if extra:
                    self._open_turn(entry)
                self.links.set()
            # A method that was made again has planned again.
            steps = entry.lengths(self.rounds, self.steps)[number] if timed else 1
            self._turn(entry, steps, timed)
            if not self.held:
                entry.free()

    def _turn(self, entry: Entry, steps: int, timed: bool) -> None:
        """One turn of one method."""
        self._at(entry)
        if entry is self.bound:
            self._warm_bound()
        seconds = self._seconds(entry, steps, timed)
        if timed:
            entry.seconds.append(seconds)
            entry.steps.append(steps)
            if entry is self.bound:
                self.links.pace.append(seconds / steps)

    def _seconds(self, entry: Entry, steps: int, timed: bool = False) -> float:
        """Of so many steps, on the slowest rank."""
        dist.barrier()
        entry.begin(timed)
        everyone = self._same(entry, entry.turn(steps, self.watch, timed))
        entry.end(timed)  # only now have all ranks what was sent to them
        return max(everyone)

    def _open_turn(self, entry: Entry) -> None:
        """A turn of a dense method on links that are open; others have none."""
        if isinstance(entry, Variant) and dense(entry.config):
            self._at(entry)
            entry.open.append(self._seconds(entry, self.steps) / self.steps)

    def _warm_bound(self) -> None:
        """A step that does not count, where the others have had theirs: the first after another method is 2 to 5 % slower."""
        if not self.held:
            self.bound.turn(1, self.watch)

    def _measure_bound(self, turns: int) -> float:
        """Seconds of a step without communication and update, on the slowest rank."""
        self._at(self.bound)
        self._warm_bound()
        steps = max(2, self.steps)
        taken = [self._seconds(self.bound, steps) / steps for _ in range(turns)]
        self.links.pace += taken
        return statistics.median(taken)

    # ---- together ---------------------------------------------------------------------------------------------------

    def _all(self) -> list[Entry]:
        return [self.bound, *self.variants]

    def _same(self, entry: Entry, seconds: float = 0.0) -> list[float]:
        """Every rank's seconds. A failure of any rank is one of the method, on all of them."""
        answers = gathered((seconds, entry.failed))
        entry.failed = next((failed for _, failed in answers if failed is not None), None)
        return [took for took, _ in answers]

    def _agree(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on rank 0, on every rank; what it raises is raised on every rank."""
        answers: list[Any] = [None]
        if self.main:
            try:
                answers = [("value", act())]
            except (UserError, RuntimeError, OSError) as error:
                answers = [("wrong" if isinstance(error, UserError) else "failed", str(error))]
        dist.broadcast_object_list(answers, src=0)
        kind, value = answers[0]
        if kind != "value":
            raise UserError(value) if kind == "wrong" else RuntimeError(value)
        return value

    def _memory(self) -> float:
        """Bytes that the methods of one rank may take, the same on all."""
        if self.shard.device.type == "cuda":
            return memory_left(MEMORY, float(torch.cuda.mem_get_info(self.shard.device)[0]))
        return memory_left(MEMORY)

    def _at(self, entry: Entry) -> None:
        """Leaves word whose turn it is, for whoever finds the world broken."""
        if self.main:
            (self.spec.path / plan.TURN_FILE).write_text(entry.id)

    def _say(self, line: str) -> None:
        if self.main:
            say(line)
