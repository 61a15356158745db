"""Suites whose methods take turns: order, memory, intervals on the page, older records; the check against arithmetic."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.cells import setups, suite, timelines
from experiments.cells.engine import Node, carried
from experiments.cells.setups import Setups
from experiments.cells.suite import Measurement
from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import arithmetic, replay_page, replay_words, replayed, speedup
from experiments.report.table import Note
from tests.distributed import test_bench
from tests.helpers.ranks import run_ranks
from tests.helpers.records import run
from tests.unit.experiments.cells import test_paper_table
from tests.unit.experiments.cells.test_paper_table import AT, MS, PAPER, chosen

IDLE = {"others": 0.01, "steal": 0.0, "load": 3.0, "cores": 2}
PACE = (1.0, 1.1, 0.9, 1.3)
"""How fast the machine is in each round."""


def timed(r: ResultRecord, wobble: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0), **about: Any) -> ResultRecord:
    """`r` as one of a comparison; its own times wobble around the machine's pace."""
    wall = r.timing["median_ms"]
    ms = [wall * pace * own for pace, own in zip(PACE, wobble, strict=True)]
    timing = {
        **r.timing,
        "steps": 4,
        "median_ms": sorted(ms)[1] / 2 + sorted(ms)[2] / 2,
        "min_ms": min(ms),
        "max_ms": max(ms),
    }
    turns = {"world": "w", "seed": 0, "held": "all", "ms": ms, "steps": [1] * 4, "busy": IDLE, **about}
    return dataclasses.replace(r, timing=timing, turns=turns)


def grid(times: dict[str, float] = MS, **about: Any) -> list[ResultRecord]:
    """The methods of one place, none of them as steady as the machine."""
    wobbles = [(1.0, 1.01, 0.99, 1.0), (0.99, 1.0, 1.02, 1.0), (1.02, 0.98, 1.0, 1.01)]
    cells = chosen("resnet50_b32", ["tf32"], ("9.4",), (8,), tuple(times))
    return [timed(test_paper_table.entry(c, times[c.method]), wobbles[i % 3], **about) for i, c in enumerate(cells)]


def test_a_link_carries_what_its_bucket_lets_through_unless_the_machine_cannot() -> None:
    for looked in (31.5, 34.3):  # for a moment
        assert carried({"mbit_per_s": looked}, 36.0) == pytest.approx(0.945 * 36)
    assert carried({"mbit_per_s": 2000.0}, 5000.0) == 2000.0
    assert carried({}, 36.0) == carried({"mbit_per_s": None}, 36.0) == pytest.approx(0.945 * 36)


def test_every_round_has_an_order_of_its_own_the_same_on_every_node_and_methods_stay_together() -> None:
    cells = PAPER.cells(PAPER.places(["resnet50_b32"], ["tf32"], nodes=[4]), PAPER.rows)
    scaled = [suite.scale(PAPER, c, 34.0) for c in cells]
    (compared,) = suite.comparisons(scaled)
    assert compared == scaled

    class Spec:
        seed = 3

    nodes = [Node.__new__(Node) for _ in range(2)]
    orders = []
    for node in nodes:
        node.spec = Spec()  # type: ignore[assignment]
        orders.append([node._order(compared, number) for number in range(6)])
    assert orders[0] == orders[1]
    first = [[same[0].cell.method for same in order] for order in orders[0]]
    assert len({tuple(order) for order in first}) > 3
    for order in orders[0]:
        assert sorted(PAPER.id(s.cell) for same in order for s in same) == sorted(PAPER.id(c) for c in cells)
        assert all(len({s.key for s in same}) == 1 for same in order)
    assert {same[0].cell.link for order in orders[0] for same in order if len(same) == 2} == {"9.4", "7.2"}


def _setups(rank: int, world: int, timeline: str, room: int) -> dict[str, Any]:
    model = test_bench.BENCH.models["resnet50"].model_copy(update={"timeline": timeline})
    made = test_bench.BENCH.model_copy(update={"models": {"resnet50": model}})
    cells = made.cells(made.places(links=["loopback"], nodes=[2]), ["fp32", "birder", "none"])
    scaled = [suite.scale(made, c, 34.0) for c in cells]
    setups.memory_left = lambda share: room  # type: ignore[assignment]
    found: dict[str, Any] = {}
    with Setups(made, scaled) as held:
        for _ in range(2):
            for s in scaled:
                with held.use(s) as setup:
                    setup.follow(dataclasses.replace(s, dilation=0.0))
                    taken = setup.turn()
                    shared = setup.model._values[0].data_ptr()
                found.setdefault(s.cell.method, []).append((taken["sent"], id(setup), shared))
        found["held"] = [s.cell.method for s in scaled if held.holds(s)]
        found["peaks"] = list(held.peaks.values())
    return found


@pytest.mark.slow
def test_setups_are_kept_as_far_as_memory_holds_them_and_send_the_same_either_way(tmp_path: Path) -> None:
    timeline = test_bench.tiny(tmp_path)
    elements = timelines.load(timeline).elements
    all_held = run_ranks(_setups, 2, timeline, 2**40, ranks_per_node=1)
    none_held = run_ranks(_setups, 2, timeline, setups.NEED * elements, ranks_per_node=1)
    for many, few in zip(all_held, none_held, strict=True):
        assert many["held"] == ["fp32", "birder", "none"]
        assert few["held"] == []
        for name in ("fp32", "birder", "none"):
            (first, kept, memory), (second, again, _) = many[name]
            assert kept == again
            assert first == second == few[name][0][0] == few[name][1][0]
            assert memory == many["fp32"][0][2]  # one memory for the gradients of all
        assert few["birder"][0][0] > 0 == few["none"][0][0]
        assert all(peak is None or peak >= 0 for peak in (*many["peaks"], *few["peaks"]))


def test_speedups_have_intervals_that_the_machines_pace_does_not_widen() -> None:
    results = replayed.collect(PAPER, grid())
    found = results.compared(AT, "birder_hierarchical")
    assert found is not None
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(math.sqrt(found.low * found.high), rel=1e-6)  # the rounds give the same value
    assert 2.4 < found.low < found.high < 2.65  # four rounds that wobble by 2 %; the pace alone differs by 40 %
    page = replay_page.markdown(results)
    row = next(line for line in page.splitlines() if line.startswith("| Birder, hierarchical | —"))
    assert f"| {found.value:.2f}x [{found.low:.2f}, {found.high:.2f}] |" in row
    own = next(line for line in page.splitlines() if line.startswith("| fp32 DDP | —"))
    assert "| 1.00x |" in own
    assert "Timing was interleaved, 4 rounds of one step in shuffled order." in page
    assert "one after the other" not in page
    assert "busy" not in page
    (said,) = replay_words.reproduced(results)
    assert f"against fp32 ({found.value:.2f}x [{found.low:.2f}, {found.high:.2f}])" in said
    # A picture of rounds is another one than of the same times without.
    assert replay_page.plot(results, "x") != replay_page.plot(
        replayed.collect(PAPER, test_paper_table.grid(nodes=(8,))), "x"
    )


def test_ties_are_marked_and_verdicts_go_by_intervals() -> None:
    close = {**MS, "birder_hierarchical": 40.0, "birder": 40.1}
    results = replayed.collect(PAPER, grid(close))
    found = results.compared(AT, "birder_hierarchical", "birder")
    assert found is not None
    assert found.tie
    assert results.versus(AT, "birder_hierarchical", "birder").endswith("] =")
    (said,) = replay_words.fastest(results)
    assert "is not decided against Birder, flat, 42.3 ms" in said
    # 2 % apart differ where rounds say so; without rounds they are not.
    (said,) = replay_words.fastest(replayed.collect(PAPER, grid({**MS, "birder": 38.0})))
    assert "is not the fastest compressed method" in said


def test_a_page_says_which_records_have_no_rounds_and_when_the_machine_was_busy() -> None:
    old = test_paper_table.grid(nodes=(8,))
    assert replay_words.rounds(replayed.collect(PAPER, old)) == [
        Note("The cells on more than one node were measured one after the other, 2 steps each: no interval is known.")
    ]
    busy = grid(busy={"others": 0.2, "steal": 0.01, "load": 5.0, "cores": 2})
    mixed = replayed.collect(PAPER, [*(r for r in old if "fp32" in r.id), *(r for r in busy if "fp32" not in r.id)])
    assert mixed.compared(AT, "birder").low is None
    assert mixed.versus(AT, "birder") == mixed.versus(AT, "birder").partition(" ")[0]
    notes = replay_words.rounds(mixed)
    assert "1 of the 6 cells on more than one node were measured one after the other" in notes[1].text
    assert notes[2].kind == "caution"
    assert "In 1 of 1 comparisons other programs were at work; at worst: The machine was busy" in notes[2].text
    assert f"**{notes[2].text}**" in replay_page.markdown(mixed)
    # Of different comparisons there are no pairs.
    apart = [*grid({"fp32": 100.0}, world="a"), *grid({"birder": 50.0}, world="b")]
    assert replayed.collect(PAPER, apart).compared(AT, "birder").low is None


@pytest.mark.parametrize("name", suite.names())
def test_every_published_cell_that_misses_arithmetic_is_named_on_its_page(name: str) -> None:
    made = suite.load(name)
    results = replayed.load(made, PUBLISHED)
    checks = replay_words.checks(results)
    wires = [m for m in made.methods.values() if m.wire in arithmetic.WIRES]
    assert len(checks) >= 2 * len([n for n in made.nodes if n > 1]) * len(results.models)
    assert {c.name.split(", ")[-2] for c in checks} == {m.wire for m in wires} == {"fp32", "bf16"}
    page = (PUBLISHED / "tables" / f"{name}.md").read_text()
    for c in checks:
        assert f"| {c.name} |" in page
        assert (str(c) in page) is not c.holds
        assert abs(c.difference) < 0.25, c  # what misses by more is no replay of arithmetic at all


def test_published_runs_that_miss_arithmetic_are_named_beside_their_table() -> None:
    known = [r for r in read_all(PUBLISHED) if r.exp == "resnet50"]
    page = (PUBLISHED / "tables" / "resnet50.md").read_text()
    shaped = [t for t in speedup.build(known) if t.records[0].link["shaped"] and t.records[0].nodes > 1]
    assert shaped
    for table in shaped:
        checks = arithmetic.of_runs([row.record for row in table.rows])
        assert [c.name for c in checks] == ["SGDM fp32", "SGDM bf16"]
        assert arithmetic.listed(checks) in page


def test_the_arithmetic_of_a_run_by_hand() -> None:
    """A model of one bucket: nothing is hidden. 1 M parameters, 2 nodes: 4 MB in fp32, 320 ms at 100 Mbit/s."""
    link = {"kind": "emulated", "shaped": True, "measured": True, "mbit_per_s": 100.0, "dilation": 1.0}

    def made(method: str, ms: float, payload: float) -> ResultRecord:
        r = run(method, ms, nodes=2, link=link)
        sent = {**r.bytes_per_step, "payload_inter": payload}
        return dataclasses.replace(r, bytes_per_step=sent, timing={**r.timing, "update_ms": 10.0 * (payload > 0)})

    runs = [made("no communication", 200.0, 0), made("SGDM fp32", 540.0, 4e6), made("SGDM bf16", 400.0, 2e6)]
    fp32, bf16 = arithmetic.of_runs(runs)
    assert (fp32.name, fp32.expected) == ("SGDM fp32", pytest.approx(200 + 320 + 10))
    assert fp32.holds
    assert bf16.expected == pytest.approx(200 + 160 + 10)
    assert arithmetic.listed([fp32, bf16]).endswith(
        "SGDM fp32 (+1.9%), SGDM bf16 (+8.1%). Not within 5%: SGDM bf16 (+8.1%)."
    )
    # Nothing tells when the gradients of a larger model are ready, nor what a table without the bound computes.
    assert arithmetic.of_runs([runs[0], made("SGDM fp32", 4000.0, 4e8)]) == []
    assert arithmetic.of_runs(runs[1:]) == []


def test_a_timeline_is_taken_for_the_model_whose_elements_were_sent_and_steps_of_one_pass() -> None:
    """A rank of 4 sends 2 (n - 1) / n of 4 bytes for each element."""
    t = timelines.load("resnet50_b32_tf32")
    link = {"kind": "emulated", "shaped": True, "measured": True, "mbit_per_s": 1000.0, "dilation": 1.0}

    def rows(elements: float, accumulate: int = 1) -> list[arithmetic.Check]:
        made = [run("no communication", 2 * t.step_ms, link=link), run("SGDM fp32", 9000.0, link=link)]
        sent = {**made[1].bytes_per_step, "payload_inter": 2 * 3 / 4 * 4 * elements}
        config = {**made[1].config, "timeline": t.name}
        config["train"] = {**config["train"], "accumulate": accumulate}
        return arithmetic.of_runs([made[0], dataclasses.replace(made[1], bytes_per_step=sent, config=config)])

    (found,) = rows(t.elements)
    wire = 2 * 3 / 4 * 4 * t.elements * 8 / 1e6
    assert found.expected == pytest.approx(arithmetic.last(t, wire, scale=2.0))
    assert rows(0.9 * t.elements) == []  # of another model
    assert rows(t.elements, accumulate=2) == []  # buckets of the first pass are not sent


def test_with_a_timeline_what_hides_behind_backward_is_not_counted() -> None:
    t = timelines.load("resnet50_b32_tf32")
    wire = 1000.0
    assert arithmetic.last(t, wire, scale=2.0) < 2 * t.step_ms + wire
    assert arithmetic.last(t, wire, scale=2.0) > 2 * t.forward_ms + wire
    assert arithmetic.last(t, wire, bucket_mb=1e4) == pytest.approx(t.step_ms + wire)
    assert arithmetic.last(t, 1e-3) == pytest.approx(t.step_ms, rel=0.01)


def test_on_one_node_there_are_fewer_rounds_and_models_may_have_shares_of_their_own() -> None:
    assert (PAPER.rounds_on(1), PAPER.rounds_on(2)) == (suite.ALONE, PAPER.rounds)
    assert PAPER.fraction(Measurement("resnet50_b128", "tf32", 4, "9.4", "birder_hierarchical")) == 1 / 16
    assert PAPER.fraction(Measurement("resnet50_b128", "tf32", 4, "9.4", "fp32")) == 1 / 48
    assert PAPER.fraction(Measurement("bert_base_b12", "tf32", 4, "9.4", "fp32")) == 1 / 96
