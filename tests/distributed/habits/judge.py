"""Verdicts: a cell is as its twin, or refused in the step in which it would go wrong; anything else is a fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.distributed.habits.methods import METHODS, Method
from tests.distributed.habits.script import DEVICE, ONE_LINE, WAYS, Ran, find
from tests.distributed.habits.world import World

Worlds = dict[tuple[int, int], World]
ENOUGH = 16
"""After so many cells that ended in an error the ranks are new ones."""


@dataclass
class Verdict:
    """kind: "same", "refused", "none" (does not apply), or "fault"."""

    kind: str
    line: str = ""

    @property
    def ok(self) -> bool:
        return self.kind != "fault"


class Bench:
    """Runs cells, keeping what twins gave."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self._ran: dict[tuple[str, str, str], list[Ran] | str] = {}
        self._left = 0
        """Cells that ended in an error: their groups stay, with threads that wake up a hundred times a second."""

    def play(self, habit: str, method: str, way: str) -> list[Ran] | str:
        """Of every rank; or what hung or broke."""
        key = (habit, method, way)
        if key not in self._ran:
            w = WAYS[way]
            answers = self.worlds[w.ranks, w.local].call("tests.distributed.habits.script", "play", *key)
            bad = [f"rank {r}: {kind} {value[-900:]}" for r, (kind, value) in enumerate(answers) if kind != "ok"]
            self._ran[key] = "; ".join(bad) or [value for _, value in answers]
            if not bad and self._leaves_something([value for _, value in answers]):
                self.worlds[w.ranks, w.local].close()
        return self._ran[key]

    def _leaves_something(self, ran: list[Ran]) -> bool:
        """Whether ranks that ended so may have messages under way, or too many groups by now."""
        if len({(r.step, r.error) for r in ran}) > 1 or any(r.dies or (r.error and not r.ours) for r in ran):
            return True
        self._left += bool(ran[0].error)
        return bool(ran[0].error) and self._left % ENOUGH == 0

    def judge(self, habit: str, method: str, way: str) -> Verdict:
        """One cell of the table."""
        script = find(habit)
        if not covers(script, way) or (script.torch_fails and METHODS[method].torch):
            return Verdict("none")
        runs = self.play(habit, method, way)
        if isinstance(runs, str):
            return Verdict("fault", "hang: " + runs)
        if runs[0].skipped:
            return Verdict("none")
        if any(r.fault for r in runs):
            return Verdict("fault", next(r.fault for r in runs if r.fault))
        refused = [r for r in runs if r.error]
        if refused:
            verdict = self._refusal(script, METHODS[method], runs)
            if verdict.kind != "refused" or METHODS[method].torch:
                return Verdict("fault", verdict.line)
        elif script.refuses and not METHODS[method].torch:
            return Verdict("fault", "not a word")
        said = self._compare(script, method, way, runs)
        if said:
            return Verdict("fault", said)
        return verdict if refused else Verdict("same")

    @staticmethod
    def _refusal(script: Any, m: Method, runs: list[Ran]) -> Verdict:
        first = next(r for r in runs if r.error)
        if script.by_one:
            first = next((r for r in runs if r.ours), first)
        elif len({(r.step, r.error) for r in runs}) > 1:
            said = "; ".join(f"rank {i} step {r.step}: {r.error[:110] or 'no error'}" for i, r in enumerate(runs))
            return Verdict("fault", f"ranks end differently: {said}")
        if not first.ours or not ONE_LINE.match(first.error):
            return Verdict("fault", f"step {first.step}: {first.error[:300]} [{first.where[-500:]}]")
        if script.says is None:
            return Verdict("fault", f"refused in step {first.step}: {first.error}")
        if not re.search(script.says, first.error):
            return Verdict("fault", f"the line does not fit, step {first.step}: {first.error}")
        since = max(script.since, 1)
        since += -since % (m.meets or 1)  # nothing is sent before ranks meet
        since += DEVICE != "cpu"  # what a GPU has counted, the host reads a step later
        if first.step > since and not script.races:
            return Verdict("fault", f"late, in step {first.step} of {script.since}: {first.error}")
        return Verdict("refused", first.error)

    def _compare(self, script: Any, method: str, way: str, runs: list[Ran]) -> str:
        """What is wrong with the values, up to the step that was refused."""
        m, w = METHODS[method], WAYS[way]
        twin = script.twin(m, w) if callable(script.twin) and not isinstance(script.twin, type) else script.twin
        if twin is not None:
            wanted = self.play(twin.__name__, method, script.twin_way or way)
            if isinstance(wanted, str) or any(r.error or r.fault for r in wanted):
                why = wanted if isinstance(wanted, str) else wanted[0].error + wanted[0].fault
                return f"the twin {twin.__name__} fails: {why}"
            still = [n for n in script.names if n in wanted[0].trace[0] and _still([x[n] for x in wanted[0].trace])]
            if still:
                return f"the twin {twin.__name__} does not train {', '.join(still)}"
        dense = w.ranks > 2 and m.averages  # DDP's ring and FSDP add up in orders of their own
        near = max(script.tolerance, script.norm_tolerance if m.norms else 0.0, 2e-6 if dense else 0.0)
        for r, ran in enumerate(runs):
            for t, values in enumerate(ran.trace):
                for name in ran.stays[t - 1] if t and not m.brings_together(t) else ():
                    if not np.array_equal(values[name], ran.trace[t - 1][name]):
                        by = np.abs(values[name] - ran.trace[t - 1][name]).max()
                        return f"step {t}: {name} moves by {by:.3g} on rank {r}, without a gradient"
                if twin is None:
                    continue
                goal = wanted[r].trace[t]  # type: ignore[union-attr]
                for name in script.names:
                    if name in goal and name in values and not _near(values[name], goal[name], near):
                        by = np.abs(values[name] - goal[name]).max()
                        moved = np.abs(goal[name] - wanted[r].trace[max(t - 1, 0)][name]).max()  # type: ignore[union-attr]
                        return f"step {t}: {name} differs by {by:.3g} on rank {r} (it moves by {moved:.3g})"
        if not m.local and script.apart != "all" and (m.compressed or not script.apart):
            for t in range(min(len(r.trace) for r in runs)):
                for name in runs[0].trace[t]:
                    if any(not np.array_equal(r.trace[t][name], runs[0].trace[t][name]) for r in runs):
                        return f"step {t}: {name} differs between ranks"
        return ""


def possible(method: str, way: str) -> bool:
    """Whether the method works in this way at all. One that clips never sends during backward: overlap or not is the same."""
    m = METHODS[method]
    if m.clips and f"{way}, overlap=False" in WAYS:
        return False
    if way.startswith("FSDP2"):
        return m.on_shards
    return not way.startswith("hierarchical") or m.torch or m.compressed


def covers(script: Any, way: str) -> bool:
    """Whether the habit is one of this way. Accelerate's loop is DDP's."""
    if way.startswith("Accelerate"):
        return way.replace("Accelerate", "DDP") in script.ways and script.accelerate
    return way in script.ways


def _still(values: list[np.ndarray]) -> bool:
    return all(np.array_equal(v, values[0]) for v in values)


def _near(a: np.ndarray, b: np.ndarray, by: float) -> bool:
    if a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b) if by == 0.0 else np.allclose(a, b, rtol=by, atol=by))
