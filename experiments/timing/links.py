"""The links of a world in which methods take turns: emulated ones are set to what this machine's pace asks for."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

from experiments.cells import timelines
from experiments.timing.calibrate import Calibration
from experiments.training import rank_link
from launch import link_file
from launch.errors import UserError
from launch.spec import RunSpec

BOUND_TURNS = 9
"""The bound's last turns, from whose median the dilation of the next round is taken. What it errs by, every ratio of that
round errs by: single turns vary by 3 to 5 %, the median of three differed by up to 7 % between worlds on the same machine."""


class EmulatedLinks:
    """What every rank knows of them, and how rank 0 has them set.

    agree:  makes what a function returns on rank 0 known to every rank. say: prints a line on rank 0.
    known:  what records say of the link.
    shapes: whether the ranks set the rate.
    pace:   seconds a step of the bound in its last turns, on the slowest rank.
    set_to: for each round: the pace that the links are set by, the dilation that follows, the links' rate.
    """

    def __init__(self, spec: RunSpec, agree: Callable[[Callable[[], Any]], Any], say: Callable[[str], None]) -> None:
        self.folder, self.config, self.agree, self.say = spec.path, spec.config, agree, say
        self.known = agree(lambda: link_file.read(spec.path))
        self.shapes = bool(self.known.get("shaped")) and self.known.get("set_mbit_per_s") is None
        self.mbit: float | None = None
        self.dilation = 1.0
        self.set_by = 0.0
        self.pace: deque[float] = deque(maxlen=BOUND_TURNS)
        self.set_to: list[tuple[float, float, float]] = []

    def remember(self, turns: int) -> None:
        """Takes the dilation from so many of the bound's last turns at most: where rounds are few, all are soon theirs."""
        self.pace = deque(self.pace, maxlen=min(turns, BOUND_TURNS))

    def _calibration(self, bound_s: float) -> Calibration:
        """The dilation that a step of the bound asks for."""
        accumulate = int(self.config["train"]["accumulate"])
        return Calibration(1000 * bound_s, timelines.load(self.config["timeline"]), accumulate)

    def settle(self, bound_s: float) -> float | None:
        """Sets emulated links to what the bound asks for. Returns the dilation; None where there is none."""
        asked = self.config["cluster"].get("dilation")
        if not self.shapes:
            return self.known.get("dilation")
        if asked == "auto":
            calibration = self._calibration(bound_s)
            dilation = calibration.dilation
            self.say(str(calibration))
        else:
            dilation = float(asked)

        self.mbit = self.agree(lambda: rank_link.capacity(self.config, dilation))
        self.dilation, self.set_by = dilation, bound_s
        self.check(self.mbit, dilation)
        if self.known.get("note"):
            self.say(self.known["note"])
        return dilation

    def check(self, mbit: float, dilation: float) -> None:
        """Sets emulated links to a rate and measures what they carry then."""

        def check() -> dict[str, Any]:
            rank_link.ask(self.folder, f"check {mbit:.6g}")
            return link_file.read(self.folder)

        self.known = {**self.agree(check), "dilation": dilation}

    def follow(self) -> None:
        """Sets emulated links again from the bound's last turns: this machine's pace changes, the cluster's does not."""
        if not self.shapes or self.config["cluster"].get("dilation") != "auto":
            return
        pace = statistics.median(self.pace)
        dilation = self._calibration(pace).dilation
        with contextlib.suppress(UserError):  # more than this machine can carry: unchanged
            self.mbit, self.dilation, self.set_by = rank_link.capacity(self.config, dilation), dilation, pace
        assert self.mbit is not None
        self.set_to.append((self.set_by, self.dilation, self.mbit))
        self.set()

    def free(self) -> None:
        self._ask(rank_link.FREE_MBIT)

    def set(self) -> None:
        self._ask(self.mbit)

    def _ask(self, mbit: float | None) -> None:
        if self.shapes and mbit is not None:
            self.agree(lambda: rank_link.ask(self.folder, f"rate {mbit:.6g}"))
