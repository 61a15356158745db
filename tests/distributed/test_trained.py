"""Real training in turns, predicted from its world's bound, links and machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from birder.comm import ByteCounter, Collectives, Topology
from birder.predict import METHODS, Cluster, Costs, Layout, Link, simulate
from birder.predict.costs import BYTES, EXCHANGES
from experiments.cells import trained
from experiments.config import compose
from experiments.records.record import PUBLISHED, ResultRecord, read_all, write
from experiments.report import prediction as report
from experiments.report import speedup, speedup_table
from experiments.report.prediction import quantiles
from experiments.timing import profiled
from experiments.timing.shared_ddp import SharedDDP
from launch.emulated.network import GOODPUT, burst_bytes
from launch.failure import RunFailed
from studies import validate
from tests.helpers.ranks import run_ranks
from tests.helpers.records import run
from tests.helpers.tiers import slow
from tests.unit.birder.predict.test_predict import MB, made

QUARTER = MB // 4
"""Elements of a MiB."""
SLOW = Link(0.1)
SHARED = Layout(1.0, 1.0, 1.0, gpu=False, shared=True)
BITS = QUARTER / 8 / 2
"""Bytes that one of two ranks sends of a MiB's bits in a phase."""


def ms_of(nbytes: float) -> float:
    return nbytes * 8 / (SLOW.gbps * 1e6)


# ---- one core for backward and everything else --------------------------------------------------------------------------


def test_what_sending_costs_the_core_makes_backward_later_and_goes_on_beside_the_wire() -> None:
    """Two buckets, 100 and 150 ms; 20 ms of sending each; the wire takes 84 ms for each."""
    t = made((QUARTER, 150.0), (QUARTER, 100.0))
    costs = Costs(sending_ns={"all_reduce_fp32": 20e6 / MB})
    wire = ms_of(MB)
    step = simulate(t, Cluster(2, 1, SLOW, ring=False), METHODS["fp32"], costs, SHARED)
    # The first is on the wire from 100 to 184; backward ends at 170, the second is on the wire from 184 on.
    assert step.ms == pytest.approx(100 + 2 * wire)
    assert step.exposed_ms == pytest.approx(100 + 2 * wire - 170)
    fast = simulate(t, Cluster(2, 1, Link(1e6), ring=False), METHODS["fp32"], costs, SHARED)
    assert fast.ms == pytest.approx(150 + 2 * 20, abs=1e-3)


def test_without_sharing_sending_costs_nothing_and_backward_ends_when_it_did() -> None:
    t = made((QUARTER, 150.0), (QUARTER, 100.0))
    costs = Costs(sending_ns=dict.fromkeys(EXCHANGES.values(), 1.0))
    for name in ("fp32", "birder", "powersgd1", "cser"):
        apart = Layout(1.0, 1.0, 1.0, gpu=False)
        c = Cluster(2, 1, SLOW, ring=False)
        assert simulate(t, c, METHODS[name], costs, apart).ms == simulate(t, c, METHODS[name], Costs(), apart).ms
        quick = Cluster(2, 1, Link(1e6), ring=False)  # a slow wire hides it
        assert (
            simulate(t, quick, METHODS[name], costs, SHARED).ms > simulate(t, quick, METHODS[name], Costs(), SHARED).ms
        )


def test_the_kernels_of_a_compressed_method_delay_backward_by_what_they_take() -> None:
    """All but the last unit's, which runs when backward has ended."""
    t = made((QUARTER, 300.0), (QUARTER, 100.0))
    costs = Costs({"encode": 0.5, "copy": 0.2, "": 0.0}, sending_ns={"pairwise": 10.0})
    encode, copy = QUARTER * BYTES["encode"](2) * 0.5 / 1e6, QUARTER * BYTES["copy"](2) * 0.2 / 1e6
    send = BITS * 10.0 / 1e6
    step = simulate(t, Cluster(2, 1, Link(1e6), ring=False), METHODS["birder"], costs, SHARED)
    assert step.ms == pytest.approx(300 + 2 * (encode + copy + 2 * send), abs=1e-3)
    assert step.exposed_ms == pytest.approx(encode + copy + 2 * send, abs=1e-3)


def test_a_shared_core_with_nothing_to_do_changes_nothing(subtests: pytest.Subtests) -> None:
    t = made((QUARTER, 30.0), (QUARTER, 20.0), (QUARTER, 12.0), end=40.0)
    for name, method in METHODS.items():
        with subtests.test(name):
            c = Cluster(3, 1, SLOW, ring=False)
            apart = simulate(t, c, method, Costs(), dataclasses.replace(SHARED, shared=False))
            assert simulate(t, c, method, Costs(), SHARED).ms == pytest.approx(apart.ms)


def test_costs_of_sending_grow_with_the_others() -> None:
    costs = Costs({"": 1.0}, sending_ns={"pairwise": 2.0}).times(3)
    assert (costs.sending_ms("pairwise", 1e6), costs.sending_ms("all_reduce_half", 1e6)) == (6.0, 0.0)


# ---- rows of a world ----------------------------------------------------------------------------------------------------

PROFILE = {
    "kernels": {
        **dict.fromkeys(("scale", "cast", "copy", "encode", "reduce_bits", "apply_bits"), 0.1),
        "": 0.1,
        "sgdm": 0.5,
    },
    "call_us": 0.0,
    "sending": {"all_reduce_fp32": 4.0, "all_reduce_half": 6.0, "pairwise": 2.0},
    "small_ms": 1.0,
    "buffer_bytes": 1e5,
    "bits_ms": 0.0,
}
READY = [[2e6, 100.0], [1e6, 200.0]]
LINK = {
    "kind": "emulated",
    "shaped": True,
    "measured": True,
    "mbit_per_s": 95.0,
    "set_mbit_per_s": 100.0,
    "dilation": 1.0,
}


def world(name: str = "w", **more: Any) -> list[ResultRecord]:
    rows = []
    for method, ms in (("no communication", 190.0), ("SGDM fp32", 1500.0), ("SGDM bf16", 800.0), ("Birder", 300.0)):
        r = run(method, ms, nodes=2, link={**LINK, "link_gbps": 10})
        turns = {"world": name, "ready": READY, "profile": PROFILE, "ms": [ms] * 3, "steps": [2] * 3, **more}
        rows.append(dataclasses.replace(r, turns=turns, timing={**r.timing, "update_ms": 20.0}))
    return rows


def test_rows_are_predicted_from_what_the_world_knew_before() -> None:
    """fp32 by hand: two buckets, kernels first, then the wire. What is measured is in nothing."""
    found = {t.record.wire: t for t in trained.of_world(world())}
    assert set(found) == {"fp32", "bf16", "1bit"}
    wire = 8 / (100.0 * GOODPUT * 1e3)
    first = 95.0 + 2e6 * 8 * 0.1 / 1e6  # the bound's own pace: 190 ms, not 200
    late = 2 * 1.0  # of two hops
    burst = burst_bytes(100.0) * wire
    expected = first + 12e6 * wire + 2 * late - burst + (1e5 * wire + 1.0) + 20.0  # buffers, the optimizer
    assert found["fp32"].predicted_ms == pytest.approx(expected, rel=1e-3)
    assert found["fp32"].error == pytest.approx(expected / 1500 - 1, rel=1e-2)
    slower = [dataclasses.replace(r, timing={**r.timing, "median_ms": 9e9}) for r in world() if r.wire != "none"]
    again = {t.record.wire: t for t in trained.of_world([world()[0], *slower])}
    assert {w: t.predicted_ms for w, t in again.items()} == {w: t.predicted_ms for w, t in found.items()}


def test_units_are_those_that_the_world_would_cut() -> None:
    """Compressed methods send units, dense ones buckets. A unit comes with the bucket that has the last of its gradients."""
    about = {**PROFILE, "units": [[1_500_000, 0], [500_000, 1], [1_000_000, 1]]}
    mine, whole = ({t.record.wire: t for t in trained.of_world(w)} for w in (world(profile=about), world()))
    assert mine["fp32"].predicted_ms == whole["fp32"].predicted_ms
    bound = world()[0]
    found = [(g.numel, g.ready_ms) for g in reversed(trained.timeline(bound, about["units"]).gradients)]
    assert found == [(1_500_000, 95.0), (500_000, 190.0), (1_000_000, 190.0)]
    # More of the model is encoded after backward, in two messages instead of one.
    assert mine["1bit"].predicted_ms > whole["1bit"].predicted_ms + 500_000 * BYTES["encode"](2) * 0.1 / 1e6


def test_what_bits_cost_beside_the_bound_is_added_to_compressed_methods() -> None:
    """Of 60 ms the simulation knows the gradient's copy and two messages, during which sending continues."""
    about = {**PROFILE, "units": [[3_000_000, 1]], "bits_ms": 60.0}
    nothing = {**about, "bits_ms": -5.0}  # a difference of two times: nothing may be left of it
    mine, theirs = (
        {t.record.wire: t.predicted_ms for t in trained.of_world(world(profile=p))} for p in (about, nothing)
    )
    assert mine["fp32"] == theirs["fp32"]
    assert mine["1bit"] - theirs["1bit"] == pytest.approx(60.0 - (3e6 * 8 * 0.1 / 1e6 + 2 * 1.0), abs=0.01)


def test_compressed_methods_are_predicted_where_bits_were_measured() -> None:
    without = {key: value for key, value in PROFILE.items() if key != "bits_ms"}
    mine, theirs = (
        {t.record.wire: t.predicted_ms for t in trained.of_world(world(profile=p))} for p in (PROFILE, without)
    )
    assert {**theirs, "1bit": mine["1bit"]} == mine
    assert set(theirs) == {"fp32", "bf16"}


def test_a_world_without_a_profile_is_not_predicted() -> None:
    assert trained.of_world(world(profile=None)) == []
    assert trained.of_world(world()[1:]) == []
    (table,) = speedup.build(world(profile=None))
    assert "Predicted from" not in speedup_table.as_table(table).markdown()


def test_tables_show_every_row_and_summaries_all_parts() -> None:
    rows = report.trained_rows([*world("a"), *world("b")])
    assert len(rows) == 6
    grid = validate.table(rows).grid()
    assert grid.count("SGDM fp32") == 2
    assert "| all" in report.trained_summary(rows).grid()
    (table,) = speedup.build(world())
    assert "Predicted from the bound" in speedup_table.as_table(table).markdown()


# ---- what is measured ---------------------------------------------------------------------------------------------------


def _profile(rank: int, size: int) -> Any:
    """In buckets of 0.001 MiB: a model of 2 x 400, 400, 400 x 3 and three times 3 numbers."""
    assert dist.group.WORLD is not None
    model = torch.nn.Sequential(torch.nn.Linear(2, 400), torch.nn.Linear(400, 3), torch.nn.BatchNorm1d(3))
    ddp = SharedDDP(model, init_sync=False, bucket_cap_mb=0.001)
    for _ in range(2):  # DDP rebuilds its buckets after the first pass
        buckets = ddp.send_nothing()
        ddp(torch.ones(4, 2)).sum().backward()
    decays = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decays}, {"params": [p for p in model.parameters() if p.dim() == 1]}]
    found = profiled.profile(buckets, ddp, groups, unit_mb=0.004)
    return [b.elements for b in buckets], found


def _exchanged(rank: int, size: int) -> tuple[int, int]:
    assert dist.group.WORLD is not None
    pairs = Collectives(dist.group.WORLD, Topology(size, 1), ByteCounter())
    profiled._of_bits([64, 640], pairs)()
    return pairs.counter.collectives, pairs.counter.total


def test_exchanges_of_bits_are_sent_where_they_are_timed() -> None:
    """Of each size an all-to-all and an all-gather: to the other rank half of it, twice."""
    assert run_ranks(_exchanged, 2) == [(4, 64 + 640)] * 2


def _sending(rank: int, size: int) -> dict[str, Any]:
    """As if everything took a second."""
    assert dist.group.WORLD is not None
    kernels = SimpleNamespace(ns_per_byte={"copy": 1.0}, call_us=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiled, "_median", lambda task: 1.0)
        patch.setattr(profiled, "measure_kernels", lambda *_, **__: kernels)
        return profiled.exchanges([800, 1600], dist.group.WORLD)


def test_what_sending_costs_is_of_the_bytes_that_a_rank_sends() -> None:
    """Of two ranks each sends 2 (n - 1) / n = 1 times its 2,400 numbers, or their bits."""
    found = run_ranks(_sending, 2)[0]
    sent = {EXCHANGES[4]: 9600, EXCHANGES[2]: 4800, EXCHANGES[0]: 300}
    assert found["sending"] == pytest.approx({name: 1e9 / nbytes for name, nbytes in sent.items()})
    assert found["small_ms"] == pytest.approx(1000 / (2 * profiled.MANY))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_all_ranks_have_the_same_profile(ranks: int) -> None:
    everyone = run_ranks(_profile, ranks)
    assert all(found == everyone[0] for found in everyone)
    ((buckets, found), *_) = everyone
    assert set(found["sending"]) == set(EXCHANGES.values())
    assert min(found["sending"].values()) > 0
    assert min(found["kernels"].values()) > 0
    assert set(found["kernels"]) >= {k for m in ("birder", "onebit_adam", "fp32") for k in METHODS[m].update}
    assert found["small_ms"] > 0
    assert found["buffer_bytes"] == 4 * (3 + 3) + 8
    # Those that decay, last first, each too large to share a unit; then the others in one, complete with the 400.
    assert sum(buckets) == 1200 + 800 + 3 + 3 + 3 + 400
    assert [elements for elements, _ in found["units"]] == [1200, 800, 3 + 3 + 3 + 400]
    assert [buckets[bucket] for _, bucket in found["units"]] == [1209, 800, 400]


# ---- the validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, slow(4), slow(8)])
def test_the_commands_of_the_validation_compose(nodes: int, tmp_path: Path) -> None:
    every = list(validate.worlds())
    assert len(every) == 3 * 3 * 3
    assert every == list(validate.worlds(list(validate.MODELS)))
    chosen = [one for one in every if one.nodes == nodes]
    assert len(chosen) == 3 * 3
    for one in chosen:
        composed = compose.compose(one.overrides(tmp_path))
        assert composed.config.cluster.nodes == one.nodes
        assert composed.config.cluster.link_gbps == one.gbps
        assert len(compose.compared(composed)) >= 5


def test_a_part_of_the_validation_and_what_is_recorded() -> None:
    part = list(validate.worlds(["resnet50", "nodes=4,2", "gbps=10,2.5", "results_dir=x"]))
    assert [(w.nodes, w.gbps) for w in part] == [(2, 2.5), (2, 10.0), (4, 2.5), (4, 10.0)]
    of = validate.ComparedWorld(world()[0].exp, 2, 10.0)
    assert of.made(world())
    assert not of.made([*world(), dataclasses.replace(world()[0], status="failed")])
    assert not dataclasses.replace(of, gbps=5.0).made(world())


def test_a_validation_makes_what_is_not_recorded_and_stops_where_a_comparison_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["resnet50", "nodes=2", "gbps=5,10", f"results_dir={tmp_path}"]
    for r in world():
        write(dataclasses.replace(r, exp="resnet50"), tmp_path)
    made: list[list[str]] = []
    with pytest.raises(
        RunFailed, match="2 nodes, 5 Gbit/s: ended with status 1; type the command again to continue here"
    ):
        validate.run(asked, lambda overrides, _: made.append(overrides) or 1)  # type: ignore[func-returns-value]
    assert [o for o in made[0] if "gbps" in o] == ["cluster.link_gbps=5"]
    validate.run([*asked[:2], "gbps=10", asked[3]], lambda *_: pytest.fail("it is recorded"))
    assert "| resnet50 | 2 | 10.0 | SGDM fp32 |" in capsys.readouterr().out


def test_the_published_worlds_keep_the_targets() -> None:
    """A median of 5 % and 15 % at worst."""
    found = report.trained_rows([*read_all(PUBLISHED), *read_all(PUBLISHED / report.VALIDATION)])
    median, _, worst = quantiles([t.error for t in found])
    assert median < 0.05
    assert worst < 0.15
