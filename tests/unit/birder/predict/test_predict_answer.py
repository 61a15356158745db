"""Answers: what is advised, layouts over ranks, links of all kinds, memory. Timelines are made up; no torch but for state."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import birder
from birder.predict import METHODS, Cluster, Costs, Gradient, IntraNode, Link, Timeline, predict
from birder.predict.answers import Answer, answer
from birder.predict.costs import BYTES
from birder.predict.gpus import GPUS, find
from birder.predict.layouts import CONTEXT_GB, HELD, STATE, TrainingPlan
from birder.predict.methods import every

MILLION = 1_000_000


def timeline(step_ms: float = 90.0, elements: int = 100 * MILLION, layers: int = 10) -> Timeline:
    forward, each = step_ms / 3, elements // layers
    gradients = tuple(
        Gradient(f"layer {i}", (each,), forward + (step_ms - forward) * (layers - i) / layers) for i in range(layers)
    )
    inside = IntraNode.of(elements, 8)
    return Timeline("made", "made", "a100", "bf16", 8, 8, forward, step_ms, gradients, inside, "a test", update_ms=2.0)


def ask(
    gbps: float, plan: TrainingPlan | None = None, nodes: int = 4, latency_us: float = 20.0, **options: Any
) -> Answer:
    cluster = Cluster.of_gpus(nodes, 8, Link(gbps, latency_us))
    return answer(timeline(**options.pop("model", {})), cluster, plan or TrainingPlan(), **options)


def test_a_slow_link_is_a_reason_to_compress_and_the_sentence_says_how() -> None:
    found = ask(10)
    assert found.pays
    assert found.best is not None
    first, second = found.sentences("accuracy is not told")[:2]
    assert first.startswith("Compress: ")
    assert first.endswith("; accuracy is not told.")
    assert "birder.attach(ddp, optimizer" in second
    assert ("hierarchical=True" in second) == found.best.method.hierarchical
    value, low, high = found.saving(found.best.name)
    assert low <= value <= high
    assert value == pytest.approx(1 - found.best.ms / found.prediction["bf16"].ms)


def test_a_fast_link_is_none_by_the_same_five_percent() -> None:
    found = ask(800)
    assert not found.pays
    assert found.sentences()[0].startswith("Do not compress: bf16 is within 5 % of the bound")


def test_what_is_unsure_of_computing_is_in_the_interval() -> None:
    sure, unsure = ask(20), ask(20, unsure=0.3)
    assert sure.best is not None
    narrow, wide = sure.saving("birder"), unsure.saving("birder")
    assert wide[0] == pytest.approx(narrow[0])
    assert wide[1] < narrow[1] <= narrow[2] < wide[2]


def test_six_rows_fit_eighty_columns() -> None:
    lines = ask(10, gpu=find("a100"), saved_bytes=1e9).table()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 80
    assert any("no communication" in line for line in lines)


def test_two_near_methods_are_the_simpler_one() -> None:
    """One phase wins by less than 2 %: what is advised is the paper's method."""
    found = ask(40, methods=["birder", "birder_one_phase"])
    p = found.prediction
    assert p["birder_one_phase"].ms < p["birder"].ms < 1.02 * p["birder_one_phase"].ms
    assert found.best is not None
    assert found.best.name == "birder"


def test_a_method_that_does_not_pay_is_preferred_to_none_that_does() -> None:
    """Birder costs accuracy and pays; what keeps accuracy is as fast within 2 %, and gains too little to pay."""
    prediction = ask(40, methods=["birder", "sigma_delta"]).prediction
    bf16 = prediction["bf16"]

    def row(name: str, gain: float) -> Any:
        ms = bf16.ms / gain
        return replace(prediction[name], step=replace(prediction[name].step, ms=ms), low=ms, high=ms)

    sure = replace(bf16, low=bf16.ms, high=bf16.ms)
    rows = (sure, row("birder", 1.055), row("sigma_delta", 1.045), prediction["none"])
    made = replace(prediction, rows=rows)
    for order in (made, replace(made, rows=(rows[2], rows[1], rows[0], rows[3]))):
        found = Answer(order, (), TrainingPlan(), None, {}, {"birder": 1.0, "sigma_delta": 0.0})
        assert found.pays
        assert found.best is not None
        assert found.best.name == order.winner == "birder"
    # Where nothing pays, it is said of the fastest, whatever keeps accuracy.
    none = replace(made, rows=(sure, row("birder", 1.045), row("sigma_delta", 1.035), prediction["none"]))
    said = Answer(none, (), TrainingPlan(), None, {}, {"birder": 1.0, "sigma_delta": 0.0})
    assert not said.pays
    assert said.sentences()[0].startswith("Do not compress: Birder, the fastest whose ranks share one model, saves 4 %")
    assert none.winner == "bf16"


@pytest.mark.parametrize("gbps", [5, 25, 50, 100, 150, 200, 300, 400, 800])
def test_the_answer_and_the_table_decide_by_one_rule(gbps: float) -> None:
    found = ask(gbps)
    best = found.best.name if found.best else None
    begins = {"Compress": best, "Do not compress": "bf16", "Not decided": None}
    assert begins[found.sentences()[0].partition(":")[0]] == found.prediction.winner == found.plain()["winner"]


def test_what_is_needed_can_be_imported() -> None:
    found = ask(10)
    for method in (m for m in METHODS.values() if not (m.dense or m.local or m.name.startswith("powersgd"))):
        (name,) = re.findall(r"`birder\.(\w+)", found.needs(method))[:1]
        assert hasattr(birder, name)


# ---- layouts -------------------------------------------------------------------------------------------------------------


def test_in_a_short_run_moments_cost_more() -> None:
    first = {
        n: ask(5, methods=["birder", "sigma_delta"], plan=TrainingPlan(run_steps=n)).prediction for n in (300, 100_000)
    }
    assert first[300]["birder"].ms == first[100_000]["birder"].ms
    assert first[300]["sigma_delta"].ms > 1.2 * first[100_000]["sigma_delta"].ms > 1.2 * first[300]["birder"].ms
    with pytest.raises(ValueError, match="run_steps must be at least 1, got 0"):
        TrainingPlan(run_steps=0)


def test_a_dense_warm_up_counts_where_methods_are_near() -> None:
    """1-bit Adam is as fast as Birder in its compression stage; a run has its warm-up too."""
    found = ask(5, methods=["birder", "onebit_adam"], lost={"birder": 1.0, "onebit_adam": -1.0})
    p = found.prediction
    assert p["onebit_adam"].ms < 1.05 * p["birder"].ms
    assert found.best is not None
    assert found.best.name == "birder"
    alone = ask(5, methods=["onebit_adam"]).best
    assert alone is not None
    assert alone.name == "onebit_adam"


def test_of_methods_alike_the_one_that_keeps_accuracy_is_advised() -> None:
    """A method of which no study is known counts as one that lost all; a faster one is advised whatever it costs."""
    near = ask(40, methods=["birder", "sigma_delta", "birder_one_phase"])
    assert near.best is not None
    assert near.best.name == "birder"
    assert replace(near, lost={"sigma_delta": 0.5}).best.name == "sigma_delta"  # type: ignore[union-attr]
    assert replace(near, lost={"sigma_delta": 1.0, "birder": 0.5}).best.name == "birder"  # type: ignore[union-attr]
    far = ask(1, methods=["birder", "birder_one_phase"], lost={"birder": 0.0, "birder_one_phase": 1.0})
    assert far.best is not None
    assert far.best.name == "birder_one_phase"


def test_accumulation_computes_more_for_the_same_messages() -> None:
    one, four = ask(10), ask(10, TrainingPlan(accumulation=4))
    assert four.prediction["none"].step.ms == pytest.approx(4 * one.prediction["none"].step.ms, rel=0.05)
    assert four.prediction["fp32"].step.nic_bytes == one.prediction["fp32"].step.nic_bytes
    assert four.saving("birder")[0] < one.saving("birder")[0]


def test_hsdp_sends_shards_between_nodes_and_takes_what_it_can_run() -> None:
    found = ask(10, TrainingPlan("hsdp"))
    names = {r.name for r in found.prediction.rows}
    assert {"fp32", "bf16", "birder_hierarchical", "none"} <= names
    assert names.isdisjoint({"birder", "cser", "powersgd4", "local_sgd"})
    elements = found.prediction.timeline.elements
    assert found.prediction["birder_hierarchical"].step.nic_bytes == pytest.approx(2 * 3 / 4 * elements / 8)
    assert found.prediction["bf16"].step.nic_bytes == pytest.approx(2 * 3 / 4 * 2 * elements)
    assert "attach(model, optimizer, mesh=mesh)" in found.sentences()[1]


def test_where_fsdp_shards_a_rank_updates_its_shard_and_keeps_that_ones_state() -> None:
    costs, names = Costs({"": 0.1}), ["bf16", "birder_hierarchical"]
    recorded = replace(timeline(), update_ms=None)
    cluster = Cluster.of_gpus(4, 8, Link(10.0), Link(1e9))
    for sharding, shards in (("ddp", 1), ("hsdp", 8), ("fsdp", 32)):
        plan = TrainingPlan(sharding)  # type: ignore[arg-type]
        asked = names if sharding != "fsdp" else names[:1]
        p = predict(recorded, cluster, asked, costs, plan=plan)
        for name in asked:
            (kernel,) = METHODS[name].update
            whole = BYTES[kernel](4) * 0.1 * recorded.elements / 1e6
            assert p[name].step.update_ms == pytest.approx(whole / shards)
            state = plan.state(METHODS[name], cluster)
            assert p[name].state_bytes == pytest.approx(state * recorded.elements)
    flat, sharded = (predict(recorded, cluster, names, costs, plan=TrainingPlan(s)) for s in ("ddp", "hsdp"))  # type: ignore[arg-type]
    hooks = {"bf16": ("cast", "widen"), "birder_hierarchical": ("copy",)}
    for name, kernels in hooks.items():
        whole = sum(BYTES[k](4) for k in kernels) * 0.1 * recorded.elements / 1e6
        assert flat[name].step.encode_ms - sharded[name].step.encode_ms == pytest.approx(whole * 7 / 8)


@pytest.mark.parametrize("sharding", ["ddp", "hsdp", "fsdp"])
def test_what_is_said_to_be_computed_is_no_waiting(sharding: Any) -> None:
    """Under HSDP over slow links in a node it was what FSDP waits for too; under FSDP one micro-batch of several."""
    found = answer(timeline(), Cluster.of_gpus(4, 8, Link(10.0), Link(20.0)), TrainingPlan(sharding, accumulation=3))
    assert found.plain()["model"]["compute_ms"] == pytest.approx(3 * 90.0)


def test_hsdp_scatters_inside_a_node_what_its_method_sends_between_them() -> None:
    """As FSDP over all ranks does: bf16 seemed to scatter fp32 over PCIe, for which compressing then seemed to pay."""
    cluster, names = Cluster.of_gpus(4, 8, Link(1e6), Link(20.0)), ["fp32", "bf16", "birder_hierarchical", "none"]
    p = predict(timeline(), cluster, names, Costs(), plan=TrainingPlan("hsdp"))
    assert p["fp32"].ms - p["bf16"].ms == pytest.approx(cluster.inside_ms(2.0 * p.timeline.elements), rel=0.02)
    assert p["birder_hierarchical"].ms == pytest.approx(p["fp32"].ms, rel=0.02)
    assert p["none"].ms <= p["bf16"].ms < p["birder_hierarchical"].ms
    assert p.winner == "bf16"


def test_hsdp_is_fsdp_on_one_node_and_ddp_with_one_rank_a_node() -> None:
    for sharding, cluster in (
        ("fsdp", Cluster.of_gpus(1, 8, Link(10.0), Link(10.0))),
        ("ddp", Cluster.of_gpus(4, 1, Link(10.0))),
    ):
        own, same = (answer(timeline(), cluster, TrainingPlan(s)) for s in ("hsdp", sharding))  # type: ignore[arg-type]
        assert own.sentences() == same.sentences()
        assert own.prediction.rows == same.prediction.rows
        assert own.plan == same.plan
        assert "sharding=hsdp" not in " ".join(own.sentences())
    with pytest.raises(ValueError, match="birder_hierarchical needs replicas: not with sharding=hsdp on one node"):
        answer(timeline(), Cluster(1, 8, Link(10.0)), TrainingPlan("hsdp"), ["birder_hierarchical"])


def test_fsdp_gathers_and_scatters_in_every_micro_batch() -> None:
    one, four = (ask(10, TrainingPlan("fsdp", accumulation=n)).prediction["bf16"].step for n in (1, 4))
    assert four.nic_bytes == 4 * one.nic_bytes


def test_hsdp_gathers_in_every_micro_batch_and_scatters_in_the_last() -> None:
    """It scattered in all of them, and kept its gradients in shards: what is sent during backward is sent once, and until
    then FSDP keeps them whole (`set_requires_gradient_sync(False)`)."""
    cluster, names = Cluster.of_gpus(4, 8, Link(1e6), Link(20.0)), ["fp32", "none"]
    one, four = (predict(timeline(), cluster, names, Costs(), plan=TrainingPlan("hsdp", n)) for n in (1, 4))
    gather = cluster.inside_ms(2.0 * one.timeline.elements)  # longer than computing
    assert four["fp32"].ms - one["fp32"].ms == pytest.approx(3 * 2 * gather)
    assert four["fp32"].step.nic_bytes == one["fp32"].step.nic_bytes
    shards, whole = (TrainingPlan("hsdp", n).memory_gb(timeline(), cluster, METHODS["bf16"], 1e9) for n in (1, 4))
    assert whole - shards == pytest.approx(4 * 0.1 * 7 / 8)


def test_fsdp_over_all_ranks_has_nothing_to_compress() -> None:
    slow, fast = ask(10, TrainingPlan("fsdp")), ask(800, TrainingPlan("fsdp"))
    for found in (slow, fast):
        assert found.sentences()[0].startswith("Do not compress: FSDP over all ranks")
        assert found.plain()["winner"] == "bf16"
        assert {r.name for r in found.prediction.rows} == {"fp32", "bf16", "fp16", "none"}
    assert "sharding=hsdp" in slow.sentences()[0]
    # Two gathers of 2 bytes, a scatter of 4, over 31/32 of the parameters.
    assert slow.prediction["fp32"].step.nic_bytes == pytest.approx(31 / 32 * 8 * 100 * MILLION)
    assert slow.prediction["bf16"].ms < slow.prediction["fp32"].ms
    value, low, high = slow.saving("fp32")
    assert low < value < high  # a gather is no better known than an all-reduce


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_on_one_node_nothing_passes_a_nic(sharding: Any) -> None:
    """The column had what passes a GPU's link inside the node."""
    p = answer(timeline(), Cluster.of_gpus(1, 8, Link(10.0), Link(20.0)), TrainingPlan(sharding)).prediction
    assert {r.step.nic_bytes for r in p.rows} == {0.0}
    assert p["fp32"].ms > p["bf16"].ms > p["none"].ms


def test_a_method_that_a_layout_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"birder needs the whole model, or nodes as workers: not with sharding=hsdp"):
        ask(10, TrainingPlan("hsdp"), methods=["birder"])
    with pytest.raises(ValueError, match=r"birder_hierarchical needs replicas: not with sharding=fsdp"):
        ask(10, TrainingPlan("fsdp"), methods=["birder_hierarchical"])
    with pytest.raises(ValueError, match="accumulation must be at least 1"):
        TrainingPlan(accumulation=0)
    with pytest.raises(ValueError, match="fp8 needs the whole model"):  # its hook is DDP's
        ask(10, TrainingPlan("hsdp"), methods=["fp8"])


# ---- links ---------------------------------------------------------------------------------------------------------------


def test_a_ring_waits_for_the_borders_of_nodes_and_a_tree_for_less() -> None:
    def latency(nodes: int, ranks: int) -> float:
        inside = Link(1e9, 5.0)
        return Cluster.of_gpus(nodes, ranks, Link(1e9, 1000.0), inside).all_reduce(8.0).ms

    def share(nodes: int, ranks: int) -> float:  # of an all-gather, which is a ring
        return Cluster.of_gpus(nodes, ranks, Link(1e9, 1000.0), Link(1e9, 5.0)).sharded(8.0).ms

    assert share(2, 8) == pytest.approx(1.0 + 14 * 0.005, rel=1e-3)
    assert latency(3, 8) == pytest.approx(2 * (2 * 1.0 + 7 * 0.005), rel=1e-3)
    assert latency(2, 1) == pytest.approx(2.0, rel=1e-3)
    # A tree over 64 nodes with a chain inside each, not 126 hops between them and 896 inside.
    assert latency(64, 1) == pytest.approx(2 * 6 * 1.0, rel=1e-3)
    assert latency(64, 8) == pytest.approx(2 * (6 * 1.0 + 7 * 0.005), rel=1e-3)


def test_between_two_sites_only_seldom_meetings_pay() -> None:
    found = ask(0.2, nodes=2, latency_us=50_000.0, local_steps=500)
    assert found.far is not None
    assert found.far.method.local
    assert "with a model of its own on every rank" in " ".join(found.sentences())
    assert found.prediction["diloco"].ms < 0.2 * found.prediction["birder_hierarchical"].ms


def test_local_steps_set_how_often_ranks_meet() -> None:
    often, seldom = (every(METHODS["diloco"], n) for n in (10, 1000))
    assert [r.share for r in often.rounds] == [0.9, 0.1]
    assert "H = 1000" in seldom.about
    assert every(METHODS["birder"], 10) is METHODS["birder"]
    with pytest.raises(ValueError, match="local_steps must be at least 1"):
        every(METHODS["diloco"], 0)


# ---- memory --------------------------------------------------------------------------------------------------------------


def test_memory_is_parameters_gradients_state_and_activations() -> None:
    t, cluster = timeline(), Cluster(4, 8, Link(10))
    whole = TrainingPlan().memory_gb(t, cluster, METHODS["bf16"], 3e9)
    assert whole == pytest.approx(CONTEXT_GB + 3 + 0.1 * (8 + STATE["adamw"] + 2))
    own = TrainingPlan("hsdp").state(METHODS["onebit_adam_hierarchical"], cluster)
    assert own == METHODS["onebit_adam"].state(4, 1) / 8  # the moments are sharded too
    shared = TrainingPlan("hsdp").memory_gb(t, cluster, METHODS["bf16"], 3e9)
    assert shared == pytest.approx(CONTEXT_GB + 3 + 0.1 * (8 + STATE["adamw"]) / 8 + 2 * 2 * 0.01)


@pytest.mark.parametrize(("each", "copied"), [(4, 2), (2, 0)])
def test_frozen_parameters_are_sharded_and_gathered_with_the_others(each: int, copied: int) -> None:
    """Under FSDP they stood whole on every rank, and were not in what is gathered. each: bytes as they are kept."""
    many = 10 * (50 * MILLION,)
    own, t = timeline(), replace(timeline(), frozen=many, frozen_bytes=each * sum(many))
    cluster, bf16 = Cluster.of_gpus(4, 8, Link(10.0), Link(1e2)), METHODS["bf16"]

    def gb(sharding: Any, of: Timeline) -> float:
        return TrainingPlan(sharding).memory_gb(of, cluster, bf16, 3e9)

    assert gb("ddp", t) - gb("ddp", own) == pytest.approx((each + copied) * 0.5)
    layers = 2 * 2 * (50 - 10) / 1e3  # two, in 16 bits, that are larger
    for sharding, shards in (("hsdp", 8), ("fsdp", 32)):
        assert gb(sharding, t) - gb(sharding, own) == pytest.approx(each * 0.5 / shards + layers)
    wide, narrow = (predict(of, cluster, ["bf16"], plan=TrainingPlan("fsdp"))["bf16"] for of in (t, own))
    assert wide.step.nic_bytes - narrow.step.nic_bytes == pytest.approx(31 / 32 * 2 * 2 * sum(many))
    assert wide.ms - narrow.ms == pytest.approx(2 * cluster.sharded(2.0 * sum(many)).ms, rel=0.1)
    inside, flat = (predict(of, cluster, ["bf16"], plan=TrainingPlan("hsdp"))["bf16"] for of in (t, own))
    assert inside.step.nic_bytes == flat.step.nic_bytes  # between nodes go gradients
    assert inside.ms > flat.ms


def test_powersgd_keeps_the_users_optimizer_and_an_error_in_fp32() -> None:
    for optimizer in ("adamw", "sgd"):
        plan = TrainingPlan(optimizer=optimizer)  # type: ignore[arg-type]
        found = ask(10, plan, gpu=find("a100"), saved_bytes=3e9, methods=["powersgd1"])
        p = found.prediction
        assert found.memory["powersgd1"] - found.memory["bf16"] == pytest.approx(4 * p.timeline.elements / 1e9)
        assert p["powersgd1"].state_bytes == (STATE[optimizer] + 4) * p.timeline.elements
        assert p["powersgd1"].step.update_ms == p["bf16"].step.update_ms == p.timeline.update_ms


def test_what_does_not_fit_is_said_first() -> None:
    small, big = find("l4"), replace(find("l4"), gb=1000.0)
    found = ask(10, gpu=small, saved_bytes=40e9)
    assert found.sentences()[0].startswith("It does not fit: ")
    assert found.best is None
    assert "!" in "".join(found.table())
    assert not ask(10, gpu=big, saved_bytes=40e9).sentences()[0].startswith("It does not fit")


@pytest.mark.parametrize(
    ("sharding", "nodes", "ranks", "advice"),
    [
        ("ddp", 4, 8, "sharding=hsdp"),
        ("ddp", 4, 1, "sharding=fsdp"),
        ("hsdp", 4, 8, "sharding=fsdp"),
        ("hsdp", 4, 1, "sharding=fsdp"),
        ("hsdp", 1, 8, ". Take a smaller batch"),
        ("fsdp", 4, 8, ". Take a smaller batch"),
        ("ddp", 1, 1, ". Take a smaller batch"),
    ],
)
def test_what_does_not_fit_is_advised_more_shards_than_it_has(
    sharding: Any, nodes: int, ranks: int, advice: str
) -> None:
    cluster = Cluster.of_gpus(nodes, ranks, Link(10.0))
    t, plan = timeline(elements=2000 * MILLION, layers=100), TrainingPlan(sharding)
    least = min(answer(t, cluster, plan, gpu=find("l4"), saved_bytes=8e9).memory.values())
    small = replace(find("l4"), gb=least - 0.1)
    first = answer(t, cluster, plan, gpu=small, saved_bytes=8e9).sentences()[0]
    assert first.startswith("It does not fit: ")
    assert advice in first


@pytest.mark.parametrize(
    ("millions", "saved", "advice"),
    [
        (700, 12e9, "Shard it (sharding=hsdp), or take a smaller batch or checkpointing=true."),
        (700, 40e9, ". Take a smaller batch or checkpointing=true."),
        (2000, 1e9, "Shard it (sharding=hsdp)."),
        (20_000, 1e9, "Shard it (sharding=fsdp)."),
        (41_000, 1e9, "Shard it (sharding=fsdp) and take a smaller batch or checkpointing=true."),
        (60_000, 1e9, "It needs more GPUs to shard it over (sharding=fsdp), or GPUs with more memory."),
    ],
)
def test_a_sharding_is_advised_that_fits(millions: int, saved: float, advice: str) -> None:
    """Shards of a node were advised to whoever had no room for them, and then more; and back again by the answer to FSDP.
    Fewer activations were advised where without any there is no room; and shards, where fewer activations do."""
    t, cluster = timeline(elements=millions * MILLION, layers=100), Cluster.of_gpus(4, 8, Link(10.0))
    ddp, fsdp = (
        answer(t, cluster, TrainingPlan(s), gpu=find("l4"), saved_bytes=saved).sentences()  # type: ignore[arg-type]
        for s in ("ddp", "fsdp")
    )
    assert advice in ddp[0]
    assert ("sharding=hsdp" in " ".join(fsdp)) == ("hsdp" in advice)


@pytest.mark.parametrize(
    ("batch", "recompute", "saved", "advice"),
    [
        (8, True, 30e9, "Take a smaller batch or checkpointing=true."),
        (8, True, 300e9, "Take a smaller batch and checkpointing=true."),
        (8, False, 30e9, "Take a smaller batch."),
        (8, False, 300e9, "It needs GPUs with more memory."),
        (1, True, 30e9, "Take checkpointing=true."),
        (1, False, 30e9, "It needs GPUs with more memory."),
    ],
)
def test_fewer_activations_are_advised_where_there_can_be_fewer(
    batch: int, recompute: bool, saved: float, advice: str
) -> None:
    """A smaller batch than one sample was advised, and checkpointing where it was on, or is refused."""
    t, cluster = replace(timeline(), batch_per_gpu=batch), Cluster.of_gpus(1, 1, Link(10.0))
    first = answer(t, cluster, gpu=find("l4"), saved_bytes=saved, recompute=recompute).sentences()[0]
    assert first.endswith(f" GB on one L4. {advice}")


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("SGDM", {}),
    "birder": ("Birder", {}),
    "sigma_delta": ("SigmaDeltaAdam", {}),
    "lion": ("Lion", {}),
    "efficient_adam": ("EfficientAdam", {}),
    "onebit_adam": ("OneBitAdam", {"warmup_steps": 1}),
    "onebit_lamb": ("OneBitLAMB", {"warmup_steps": 1}),
    "zero_one_adam": ("ZeroOneAdam", {"warmup_steps": 1, "local_doubling": 1}),
    "cser": ("CSER", {"block": 32, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 2}),
    "ef21_sgdm": ("EF21SGDM", {"block": 32, "ratio": 2}),
    "ef_sgd": ("EFSGD", {"block": 32, "ratio": 2}),
    "qsparse": ("QSparseLocalSGD", {"block": 32, "ratio": 2, "sync_every": 2}),
    "slamb": ("SLAMB", {"sync_every": 2}),
    "diloco": ("SparseLoCo", {"sync_every": 2, "message": "dense", "outer_momentum": 0.9}),
    "diloco_int4": (
        "SparseLoCo",
        {"sync_every": 2, "message": "int4", "chunk": 256, "outer_momentum": 0.9, "top_k": 1},
    ),
}
NOT_PREDICTED = {"DeepSpeedZeroOneAdam", "SLAMBv1", "SLAMBv2"}
"""Released code of methods of which the paper's form is predicted. (Of SparseLoCo's messages those of DiLoCo are: top-k's
grow with the number of workers, which a `Round` does not know.)"""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_what_the_method_keeps(name: str) -> None:
    """The method itself is asked, on one rank that is its own server."""
    kind, options = OPTIMIZERS[name]
    net = nn.Linear(256, 256, bias=False)
    optimizer = getattr(birder, kind)(net.parameters(), lr=0.1, **options)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(4, 256)).square().mean().backward()
        optimizer.step()
    state = TrainingPlan(optimizer="sgd").state(METHODS[name], Cluster(1, 1, Link(1.0)))
    assert optimizer.state_bytes() == pytest.approx(state * 256 * 256, rel=0.001)
    assert METHODS[name].local is optimizer.local_models
    if not METHODS[name].hooked:  # nor is what is sent in the optimizer's state
        held = sum(t.nbytes for u in optimizer.units for t in (u.grad, *u.buffers.values()))
        assert held == pytest.approx(HELD * 256 * 256, rel=0.1)


def test_memory_holds_the_gradients_that_are_sent() -> None:
    """Birder, which keeps 8 bytes a parameter as Adam does, seemed to fit wherever Adam does."""
    t, cluster = timeline(), Cluster(4, 8, Link(10))
    for sharding, name, shards in (("ddp", "birder", 1), ("hsdp", "birder_hierarchical", 8)):
        plan = TrainingPlan(sharding)  # type: ignore[arg-type]
        own, adam = (plan.memory_gb(t, cluster, METHODS[m], 3e9) for m in (name, "bf16"))
        assert own - adam == pytest.approx(0.1 * HELD / shards)


def test_every_method_has_an_entry() -> None:
    """One that is new needs an entry in methods.py, or a reason. That table is data, so that predicting loads no torch."""
    there = {n: v for n in birder.__all__ if isinstance(v := getattr(birder, n), type)}
    compressed = {n for n, v in there.items() if issubclass(v, birder.BucketOptimizer) and v.compressed}
    assert compressed == {kind for kind, _ in OPTIMIZERS.values()} - {"SGDM"} | NOT_PREDICTED


def test_json_holds_every_row() -> None:
    found = ask(10, gpu=GPUS["a100-sxm-80gb"], saved_bytes=1e9, costs=Costs.of_gpu("a100"))
    plain = found.plain()
    assert {r["method"] for r in plain["rows"]} == {r.name for r in found.prediction.rows}
    assert plain["pays"] is found.pays
    assert all(r["low_ms"] <= r["ms"] <= r["high_ms"] for r in plain["rows"])
    two = answer(timeline(), replace(found.prediction.cluster, between=Link(50.0), nics=2.0)).plain()
    assert (two["gbps"], two["nics"]) == (25.0, 2.0)  # of one NIC, as cluster.gbps
