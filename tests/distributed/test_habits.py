"""Habits of ordinary training scripts, against every method: a cell is as its twin, or refused in the step where it matters.

What a cell came out as is kept in habits/outcomes.json, and must come out so again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.habits import outcomes
from tests.distributed.habits.catalogue import HABITS
from tests.distributed.habits.judge import Bench, possible
from tests.distributed.habits.methods import CONTROLS, OURS
from tests.distributed.habits.script import WAYS, find
from tests.distributed.habits.world import worlds

KEPT = outcomes.read()
ALL = tuple(HABITS)
FAST = [
    ("DDP", "Birder", ALL),
    ("one process", "AdamW", ALL),
    ("DDP, overlap=False", "Birder clipped", ("SkippedByOneRank", "SkippedStep")),
    ("DDP", "Birder coupled decay", ("Sam", "DecayByHand")),
    ("DDP", "OneBitAdam", ("ChannelsLast", "TwoOptimizers", "Unused", "SurgeryClipNorm", "JoinEven", "UnfreezeMidway")),
]
"""What protects a change: about a minute."""
SLOW = {("DDP", m) for m in ("AdamW", "OneBitAdam", "ZeroOneAdam", "CSER", "SLAMB")} | {
    (way, "Birder") for way in WAYS if way not in ("DDP", "hierarchical") and not way.endswith("overlap=False")
}
"""Of the whole table, what `make test-all` runs: every method's family under DDP, and every way."""
INSIDE = ("DDP, overlap=False", "FSDP2, overlap=False")
"""Ways that send inside `step`: `make test-all` runs what comes out otherwise there."""


def marks(way: str, method: str) -> list[pytest.MarkDecorator]:
    """Each row of the table gets its own ranks, so that one worker need not run them all."""
    kept_for = [pytest.mark.slow, pytest.mark.long] if (way, method) in SLOW else [pytest.mark.habits]
    return [*kept_for, pytest.mark.xdist_group(f"habits, {way}, {method}")]


TABLE = [
    pytest.param(way, method, marks=marks(way, method))
    for way in WAYS
    for method in (*CONTROLS, *OURS)
    if possible(method, way)
    if method in CONTROLS or any(outcomes.outcome(KEPT, h, way, method) for h in KEPT)
]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with worlds() as made:
        yield Bench(made)


def check(bench: Bench, way: str, method: str, habits: tuple[str, ...] = ALL) -> None:
    wrong = []
    for name in habits:
        verdict = bench.judge(name, method, way)
        wanted = "" if find(name).races else outcomes.outcome(KEPT, name, way, method)
        if not verdict.ok or (wanted and verdict.kind != wanted):
            wrong.append(f"{name}: {verdict.kind} {verdict.line[:300]}" + f", not {wanted}" * bool(wanted))
    assert wrong == []


@pytest.mark.long
@pytest.mark.xdist_group("habits")
@pytest.mark.parametrize(("way", "method", "habits"), FAST, ids=[f"{way}, {method}" for way, method, _ in FAST])
def test_habits(bench: Bench, way: str, method: str, habits: tuple[str, ...]) -> None:
    check(bench, way, method, habits)


def otherwise(way: str) -> tuple[str, ...]:
    """Habits that come out otherwise than with overlap."""
    ways = (way, way.removesuffix(", overlap=False"))
    return tuple(h for h in ALL if len({outcomes.outcome(KEPT, h, w, "Birder") for w in ways}) > 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("way", [pytest.param(w, marks=pytest.mark.xdist_group(f"habits, {w}")) for w in INSIDE])
def test_habits_that_come_out_otherwise_inside_the_step(bench: Bench, way: str) -> None:
    habits = otherwise(way)
    assert len(habits) > 20
    check(bench, way, "Birder", habits)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.xdist_group("habits, hierarchical")
def test_habits_that_nodes_as_workers_train_with(bench: Bench) -> None:
    """What is refused is refused as under DDP."""
    kept = {h: [outcomes.outcome(KEPT, h, way, "Birder") for way in ("DDP", "hierarchical")] for h in ALL}
    assert all(nodes == ranks for ranks, nodes in kept.values() if nodes)
    check(bench, "hierarchical", "Birder", tuple(h for h, (_, nodes) in kept.items() if nodes != "refused"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("way", "method"), TABLE)
def test_the_whole_table_of_habits(bench: Bench, way: str, method: str) -> None:
    check(bench, way, method)


def test_a_rank_that_dies_is_a_fault() -> None:
    class Dead:
        def call(self, *_: object) -> list[tuple[str, str]]:
            return [("ok", ""), ("error", "died without a word")]

    verdict = Bench({(2, 2): Dead()}).judge("Plain", "Birder", "DDP")  # type: ignore[dict-item]
    assert (verdict.kind, verdict.line) == ("fault", "hang: rank 1: error died without a word")


def test_the_page_has_the_table() -> None:
    page = outcomes.PAGE.read_text()
    assert outcomes.updated(page, KEPT) == page
