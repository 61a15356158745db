"""Prediction: sums by hand, orders of lanes, tables, crossovers. Exact to rounding unless a test says otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from birder.predict import (
    METHODS,
    Cluster,
    Costs,
    Gradient,
    IntraNode,
    Layout,
    Link,
    Timeline,
    simulate,
)
from birder.predict.costs import BYTES
from birder.predict.methods import SYNCS_OF_ZERO_ONE_ADAM, low_rank_numbers, over, rare
from birder.predict.simulation import Item, buckets, run, units

MB = 2**20
FREE = Costs()
ROUNDED = 1e-9


def made(*sizes_and_times: tuple[int, float], forward: float = 1.0, end: float | None = None) -> Timeline:
    """A timeline of vectors, in the model's order: (elements, ready_ms)."""
    gradients = tuple(Gradient(f"p{i}", (n,), at) for i, (n, at) in enumerate(sizes_and_times))
    last = max(g.ready_ms for g in gradients) if end is None else end
    about = IntraNode(0.0, 0.0, 0.0, "none")
    return Timeline("made", "made", "cpu", "fp32", 1, 1, forward, last, gradients, about, source="a test")


def link(gbps: float, **more: float) -> Link:
    return Link(gbps, **more)


def one_bucket(t: Timeline) -> Layout:
    mb = 8.0 * t.elements / MB + 1
    return Layout(mb, mb, mb)


# ---- collectives --------------------------------------------------------------------------------------------------------


def test_bytes_through_a_nic_are_those_of_docs_replay() -> None:
    nodes, gpus, d = 4, 8, 8_000_000
    n = nodes * gpus
    c = Cluster(nodes, gpus, link(10))
    assert c.all_reduce(4 * d).nbytes == pytest.approx(2 * (n - 1) / n * 4 * d, rel=ROUNDED)
    assert replace(c, ring=False).all_reduce(4 * d).nbytes == pytest.approx(2 * 3 / 4 * 4 * d, rel=ROUNDED)
    assert c.all_to_all(d / 8).nbytes == pytest.approx(gpus * 3 / 4 * d / 8, rel=ROUNDED)
    assert c.all_gather(d / 8).nbytes == pytest.approx((n - 1) / n * d / 8, rel=ROUNDED)
    assert replace(c, ring=False).all_gather(d / 8).nbytes == pytest.approx(gpus * 3 / 4 * d / 8, rel=ROUNDED)
    assert c.by_nodes(d / 8).nbytes == pytest.approx(3 / 4 * d / 8, rel=ROUNDED)


def test_one_node_has_the_link_inside_and_one_rank_has_none() -> None:
    c = Cluster(1, 2, link(1), inside=link(100))
    assert c.all_reduce(1e6).ms == pytest.approx(1e6 * 8 / 100e6, rel=ROUNDED)
    assert c.by_nodes(1e6).nbytes == 0
    alone = Cluster(1, 1, link(1))
    assert (alone.all_reduce(1e6).ms, alone.all_to_all(1e6).ms, alone.all_gather(1e6).ms) == (0, 0, 0)


def test_latency_counts_hops_in_a_ring_and_messages_in_an_exchange() -> None:
    c = Cluster(4, 1, link(1e9, latency_us=1000, message_us=10), ring=False)
    assert c.all_reduce(8.0).ms == pytest.approx(6.0, rel=1e-6)
    assert c.all_to_all(8.0).late_ms == pytest.approx(1.03, rel=1e-6)  # one latency, three messages
    assert c.all_to_all(8.0).ms == pytest.approx(0.0, abs=1e-6)  # the NIC is free meanwhile


def test_the_last_flow_is_behind_by_the_root_of_the_exchange_and_not_at_all_where_it_is_alone() -> None:
    u = 12.0
    calm, unfair = link(1.0), link(1.0, unfair_ms=u)
    wire = calm.exchange(1e6, 0, 1).ms
    late = [unfair.exchange(1e6, 0, peers).late_ms for peers in (1, 3, 7)]
    assert late == pytest.approx([0.0, math.sqrt(2 * math.log(3) * u * wire), math.sqrt(2 * math.log(7) * u * wire)])
    assert unfair.exchange(4e6, 0, 3).late_ms == pytest.approx(2 * late[1], rel=ROUNDED)
    assert calm.exchange(1e6, 0, 7).late_ms == 0.0


# ---- buckets and units --------------------------------------------------------------------------------------------------


def test_buckets_follow_readiness_and_close_when_they_are_full() -> None:
    t = made((MB // 4, 4.0), (MB // 4, 3.0), (MB // 4, 2.0), (10, 2.0))
    cut = buckets(t, Layout(bucket_mb=2.0, first_mb=1.0))
    assert [[g.name for g in b.gradients] for b in cut] == [["p3", "p2"], ["p1", "p0"]]
    assert [b.ready for b in cut] == [2.0, 4.0]


def test_a_bucket_that_is_ready_waits_for_those_before_it() -> None:
    t = made((MB // 4, 3.0), (MB // 4, 5.0))
    late = replace(t, gradients=(replace(t.gradients[0], ready_ms=5.0), replace(t.gradients[1], ready_ms=3.0)))
    assert [b.ready for b in buckets(late, Layout(1.0, 1.0))] == [3.0, 5.0]


def test_units_are_cut_from_the_last_parameter_and_wait_for_their_buckets() -> None:
    t = made((MB // 4, 4.0), (MB // 8, 3.0), (MB // 8, 2.0))
    cut = units(t, Layout(bucket_mb=0.75, first_mb=0.75, unit_mb=1.0))
    assert [[g.name for g in u.gradients] for u in cut] == [["p2", "p1"], ["p0"]]
    assert cut[0].ready == 3.0  # p2 was ready at 2, but its bucket at 3


# ---- lanes --------------------------------------------------------------------------------------------------------------


def test_lanes_keep_their_order_and_the_thread_that_waits_its_unit() -> None:
    first = Item(0.0, [], [("encode", 2.0), ("nic", 5.0), ("comm", 1.0), ("nic", 3.0), ("comm", 1.0)])
    second = Item(1.0, [], [("encode", 2.0), ("nic", 1.0), ("comm", 1.0), ("nic", 3.0), ("comm", 1.0)])
    busy = run([first, second])
    # encode 0-2, 2-4; nic 2-7, 7-8; comm keeps to the first: 7-8, nic 8-11, 11-12; then the second: 12-13, nic 13-16, 16-17
    assert (first.end, second.end) == (12.0, 17.0)
    assert busy == {"encode": 4.0, "nic": 12.0, "comm": 4.0}


def test_a_delay_keeps_no_lane_busy() -> None:
    items = [Item(0.0, [], [("nic", 1.0), ("", 10.0)]), Item(0.0, [], [("nic", 1.0)])]
    run(items)
    assert [i.end for i in items] == [11.0, 2.0]


def test_a_token_bucket_fills_in_pauses() -> None:
    items = [Item(0.0, [], [("nic", 5.0)]), Item(6.0, [], [("nic", 5.0)])]
    run(items, burst_ms=2.0)
    assert [i.end for i in items] == [3.0, 9.0]  # 2 at the start; 3 to 6 is a pause that gives 2 again


# ---- a step -------------------------------------------------------------------------------------------------------------


def test_without_overlap_a_dense_step_is_compute_plus_wire_plus_update() -> None:
    t = made((1_000_000, 10.0))
    costs = Costs({"": 0.1})
    c = Cluster(2, 1, link(1.0))
    step = simulate(t, c, METHODS["fp32"], costs, one_bucket(t))
    wire = 4e6 * 8 / 1e6
    update = 1e6 * BYTES["sgdm"](2) * 0.1 / 1e6
    scale = 1e6 * BYTES["scale"](2) * 0.1 / 1e6
    assert step.ms == pytest.approx(10 + scale + wire + update, rel=ROUNDED)
    assert step.exposed_ms == pytest.approx(scale + wire, rel=ROUNDED)
    assert step.waits_for == "p0"


def test_the_bound_sends_nothing_and_waits_for_nothing() -> None:
    t = made((1_000_000, 10.0))
    step = simulate(t, Cluster(8, 8, link(0.1)), METHODS["none"], FREE)
    assert (step.ms, step.nic_bytes, step.exposed_ms, step.waits_for) == (10.0, 0.0, 0.0, None)


def test_overlap_hides_all_but_the_last_bucket() -> None:
    quarter = MB // 4
    t = made((quarter, 40.0), (quarter, 20.0))
    step = simulate(t, Cluster(2, 1, link(1.0)), METHODS["fp32"], FREE, Layout(1.0, 1.0))
    assert step.ms == pytest.approx(40 + MB * 8 / 1e6, rel=ROUNDED)


def test_a_bf16_wire_takes_half_of_an_fp32_one_and_bits_a_thirtysecond() -> None:
    t = made((3_200_000, 10.0))
    c = Cluster(4, 1, link(1.0), ring=False)
    wires = {m: simulate(t, c, METHODS[m], FREE, one_bucket(t)).wire_ms for m in ("fp32", "bf16", "birder")}
    assert wires["bf16"] == pytest.approx(wires["fp32"] / 2, rel=ROUNDED)
    assert wires["birder"] == pytest.approx(wires["fp32"] / 32, rel=ROUNDED)


def test_one_phase_sends_half_of_two_phases_where_exchanges_are_pairwise() -> None:
    t = made((3_200_000, 10.0))
    c = Cluster(4, 8, link(1.0), ring=False)
    two, one = (simulate(t, c, METHODS[m], FREE).nic_bytes for m in ("birder", "birder_one_phase"))
    assert one == pytest.approx(two / 2, rel=ROUNDED)


@pytest.mark.parametrize("ring", [True, False])
def test_codes_go_to_servers_and_back_for_no_ring_adds_them_up(ring: bool) -> None:
    t, c = made((3_200_000, 10.0)), Cluster(4, 8, link(1.0), ring=ring)
    for name, every in (("fp8", 1), ("int4", 1), ("diloco_int4", 500)):
        size = METHODS[name].rounds[-1].nbytes * t.elements
        expected = 8 * 3 / 4 * size + (31 / 32 if ring else 8 * 3 / 4) * size
        step = simulate(t, c, METHODS[name], FREE)
        assert step.nic_bytes == pytest.approx(expected / every, rel=ROUNDED)


def test_while_a_unit_is_on_the_wire_the_next_one_is_encoded() -> None:
    t = made((MB // 4, 1.0), (MB // 4, 1.0))
    costs = Costs({"encode": 0.2})
    c = Cluster(2, 1, link(0.1))
    birder = METHODS["birder"]
    serial = replace(birder, rounds=(replace(birder.rounds[0], split=False),))
    ms = {s: simulate(t, c, m, costs, Layout(1.0, 1.0, 1.0)).ms for s, m in ((True, serial), (False, birder))}
    encode = MB / 4 * BYTES["encode"](2) * 0.2 / 1e6
    assert ms[True] - ms[False] == pytest.approx(encode, rel=1e-6)


@pytest.mark.parametrize("name", ["onebit_lamb", "zero_one_adam", "cser", "ef_sgd", "slamb"])
def test_so_it_is_with_every_method_that_works_unit_by_unit(name: str) -> None:
    t, c, costs = made((MB // 4, 1.0), (MB // 4, 1.0)), Cluster(2, 1, link(0.1)), Costs({"": 0.2})
    method = METHODS[name]
    serial = replace(method, rounds=tuple(replace(r, split=False) for r in method.rounds))
    ms = [simulate(t, c, m, costs, Layout(1.0, 1.0, 1.0)).ms for m in (method, serial)]
    assert ms[0] < 0.99 * ms[1]


def test_hierarchical_bytes_do_not_grow_with_the_ranks_of_a_node() -> None:
    t = made((3_200_000, 10.0))
    sent = [simulate(t, Cluster(4, g, link(1.0)), METHODS["birder_hierarchical"], FREE).nic_bytes for g in (2, 8)]
    assert sent == pytest.approx([2 * 3 / 4 * 400_000] * 2, rel=ROUNDED)


def test_scales_cost_a_collective_only_where_they_travel_alone() -> None:
    """Behind the bits they cost nothing. Apart, as the re-created DeepSpeed sends them, every phase has one message more."""
    t = made((3_200_000, 10.0))
    c = Cluster(4, 1, link(1e3, latency_us=1000.0), ring=False)
    onebit = METHODS["onebit_adam"]
    apart = replace(onebit, rounds=(replace(onebit.rounds[0], small=2),))
    ms = [simulate(t, c, m, FREE, one_bucket(t)).ms for m in (METHODS["birder"], onebit, apart)]
    assert ms[0] == ms[1]
    assert ms[2] - ms[1] == pytest.approx(2.0, rel=1e-3)
    assert METHODS["deepspeed"].rounds[0].small == 2


def test_every_method_has_a_step_and_rounds_that_make_up_one(subtests: pytest.Subtests) -> None:
    t = made((300_000, 10.0), (64, 9.0))
    for name, method in METHODS.items():
        with subtests.test(name):
            assert sum(r.share for r in method.rounds) == pytest.approx(1.0, rel=ROUNDED)
            step = simulate(t, Cluster(3, 5, link(1.0)), method, Costs({"": 0.1}, 1.0))
            assert step.ms >= 10.0
            assert step.nic_bytes >= 0


@pytest.mark.parametrize("name", ["fp32", "birder", "birder_hierarchical", "onebit_adam", "powersgd4", "local_sgd"])
def test_a_faster_link_never_makes_a_step_longer(name: str) -> None:
    t = made(*[(MB // 8, 10.0 - i) for i in range(8)])
    c = Cluster(4, 2, link(1.0))
    times = [simulate(t, c.at(g), METHODS[name], Costs({"": 0.1}), Layout(1.0, 1.0, 1.0)).ms for g in (0.1, 1, 10, 100)]
    assert times == sorted(times, reverse=True)


def test_low_rank_numbers_are_those_of_torchs_hook() -> None:
    assert low_rank_numbers((100,), 4) == (100, 0, 0)
    assert low_rank_numbers((64, 32, 3, 3), 4) == (0, 256, 4 * 288)
    assert low_rank_numbers((8, 8), 4) == (64, 0, 0)


@pytest.mark.parametrize("steps", [1, 10, 300, 2_000, 100_000])
def test_moments_are_sent_as_often_as_the_schedule_says(steps: int) -> None:
    from birder.optim.sigma_delta import last_shared

    count = rare(1.1, steps)
    assert count == sum(last_shared(step, 1.1) == step for step in range(1, steps + 1))
    for name in ("sigma_delta", "sigma_delta_one_phase_hierarchical"):
        bits, moments = over(METHODS[name], steps).rounds
        assert (bits.share, moments.share) == (pytest.approx(1 - count / steps), pytest.approx(count / steps))
        assert over(over(METHODS[name], 10), steps) == over(METHODS[name], steps)
    assert METHODS["sigma_delta"] == over(METHODS["sigma_delta"], 100_000)
    assert over(METHODS["zero_one_adam"], steps) == METHODS["zero_one_adam"]


def test_the_share_of_syncs_of_zero_one_adam_is_that_of_its_schedule() -> None:
    from birder.optim import zero_one_schedule as schedule

    steps, warmup = 118_000, 12_500
    syncs = sum(schedule.sync(s, warmup, 32_678, 16, False) for s in range(1, steps + 1))
    assert syncs / steps == pytest.approx(SYNCS_OF_ZERO_ONE_ADAM, abs=5e-3)
