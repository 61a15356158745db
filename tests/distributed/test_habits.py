"""Habits of ordinary training scripts, against every method: a cell is as its twin, or refused in the step where it matters.

What a cell came out as is kept in habits/outcomes.json, and must come out so again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.distributed.habits import methods, outcomes
from tests.distributed.habits.catalogue import HABITS
from tests.distributed.habits.judge import Bench, possible
from tests.distributed.habits.methods import CONTROLS, OURS
from tests.distributed.habits.script import WAYS, find
from tests.distributed.habits.world import worlds

KEPT = outcomes.read()
ALL = tuple(HABITS)
OF_METHODS = ("base", "state", "frozen", "unused", "weights", "rates", "steps", "parameters")
"""Modules of habits that concern what a method keeps or computes; the others concern guards and hooks, which know none."""
OF_A_KIND = ("surgery", "real", "gan")
"""Modules of habits that differ in one expression and meet the same guard."""
FEW = (
    *("SurgeryReplaced", "SurgeryData", "SurgeryNumpy", "SurgeryClipNorm", "SurgeryClipNormNoEffect"),
    *("SurgeryOneElement", "SurgeryOnOneRank", "SurgeryInStepHook"),
    *("RealPlain", "RealAutocast", "RealReentrant", "Gan", "GanToggled"),
)


def of(*modules: str) -> tuple[str, ...]:
    return tuple(name for name, script in HABITS.items() if script.__module__.rpartition(".")[2] in modules)


def plainest() -> tuple[str, ...]:
    """Habits that are no variant of another one; FEW of those of a kind."""
    variants = {name for name, script in HABITS.items() if any(base.__name__ in HABITS for base in script.__mro__[1:])}
    return tuple(name for name in ALL if name in FEW or name not in {*variants, *of(*OF_A_KIND)})


def otherwise(way: str, method: str, than: str) -> tuple[str, ...]:
    """Habits that come out otherwise than with Birder in the way `than`."""
    cells = ((way, method), (than, "Birder"))
    return tuple(h for h in ALL if len({outcomes.outcome(KEPT, h, *cell) for cell in cells}) > 1)


FAST = [
    ("DDP", "Birder", plainest()),
    ("one process", "AdamW", of("base", "state", "frozen", "unused", "rates", "groups", "steps")),
    ("DDP, overlap=False", "Birder clipped", ("SkippedByOneRank", "SkippedStep")),
    ("DDP", "Birder coupled decay", ("Sam", "DecayByHand")),
    (
        "DDP",
        "OneBitAdam",
        ("ChannelsLast", "TwoOptimizers", "Unused", "SurgeryClipNorm", "JoinEven", "UnfreezeMidway", "Scaler"),
    ),
]
"""What protects a change: about a minute."""
TRIED = {(way, method): habits for way, method, habits in FAST}
"""What other tests of these rows need not run again."""
SLOW = [(way, "Birder") for way in ("DDP", "one process", "Trainer", "Lightning")] + [("one process", "AdamW")]
"""Rows of the table that `make test-all` runs whole."""
PARTS = {
    **{("DDP", m): of(*OF_METHODS) + otherwise("DDP", m, "DDP") for m in methods.FEW if m != "Birder"},
    ("hierarchical", "Birder"): of(*OF_METHODS, "accumulation"),
    ("Accelerate", "Birder"): of(
        "base", "accumulation", "scalers", "state", "rates", "holders", "steps", "real", "groups"
    ),
    # What comes out otherwise when it is sent inside `step`.
    ("DDP, overlap=False", "Birder"): otherwise("DDP, overlap=False", "Birder", "DDP"),
    ("FSDP2, overlap=False", "Birder"): otherwise("FSDP2, overlap=False", "Birder", "FSDP2"),
    ("FSDP2", "Birder"): ALL,  # FSDP2 has its own guards
}
"""Of other rows, the cells that `make test-all` runs, but for variants of a habit that come out as with Birder under DDP."""


def group(way: str, method: str) -> pytest.MarkDecorator:
    """Each row of the table gets its own ranks, so that one worker need not run them all."""
    return pytest.mark.xdist_group(f"habits, {way}, {method}")


def marks(way: str, method: str) -> list[pytest.MarkDecorator]:
    kept_for = [pytest.mark.slow, pytest.mark.long] if (way, method) in SLOW else [pytest.mark.habits]
    return [*kept_for, group(way, method)]


TABLE = [
    pytest.param(way, method, marks=marks(way, method))
    for way in WAYS
    for method in (*CONTROLS, *OURS)
    if possible(method, way)
    if method in CONTROLS or any(outcomes.outcome(KEPT, h, way, method) for h in KEPT)
]


def untried(way: str, method: str, habits: Iterable[str] = ALL) -> list[str]:
    """Of these habits those that `test_habits` leaves."""
    return [name for name in habits if name not in TRIED.get((way, method), ())]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with worlds() as made:
        yield Bench(made)


def check(bench: Bench, way: str, method: str, habits: Iterable[str]) -> None:
    wrong = []
    for name in habits:
        verdict = bench.judge(name, method, way)
        wanted = "" if find(name).races else outcomes.outcome(KEPT, name, way, method)
        if not verdict.ok or (wanted and verdict.kind != wanted):
            wrong.append(f"{name}: {verdict.kind} {verdict.line[:300]}" + f", not {wanted}" * bool(wanted))
    assert wrong == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "method", "habits"),
    [
        pytest.param(
            *row, id=", ".join(row[:2]), marks=group(*row[:2]) if row[:2] in SLOW else pytest.mark.xdist_group("habits")
        )
        for row in FAST
    ],
)
def test_habits(bench: Bench, way: str, method: str, habits: tuple[str, ...]) -> None:
    check(bench, way, method, habits)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("way", "method"), [pytest.param(*row, marks=group(*row)) for row in PARTS])
def test_parts_of_rows(bench: Bench, way: str, method: str) -> None:
    """What nodes as workers refuse is not tried: it is refused as under DDP."""
    worth = {*plainest(), *otherwise(way, method, "DDP")}
    habits = [h for h in ALL if h in PARTS[way, method] and h in worth]
    if way == "hierarchical":
        habits = [h for h in habits if outcomes.outcome(KEPT, h, way, method) != "refused"]
    assert len(habits) > 20
    check(bench, way, method, untried(way, method, habits))


def test_nodes_as_workers_come_out_as_ranks() -> None:
    kept = {h: [outcomes.outcome(KEPT, h, way, "Birder") for way in ("DDP", "hierarchical")] for h in ALL}
    assert all(nodes == ranks for ranks, nodes in kept.values() if nodes)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("way", "method"), TABLE)
def test_the_whole_table_of_habits(bench: Bench, way: str, method: str) -> None:
    check(bench, way, method, untried(way, method))


def test_a_rank_that_dies_is_a_fault() -> None:
    class Dead:
        def call(self, *_: object) -> list[tuple[str, str]]:
            return [("ok", ""), ("error", "died without a word")]

    verdict = Bench({(2, 2): Dead()}).judge("Plain", "Birder", "DDP")  # type: ignore[dict-item]
    assert (verdict.kind, verdict.line) == ("fault", "hang: rank 1: error died without a word")


def test_the_page_has_the_table() -> None:
    page = outcomes.PAGE.read_text()
    assert outcomes.updated(page, KEPT) == page
