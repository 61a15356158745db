"""The predictor's answers: the table, crossovers, sweeps, and bad questions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from birder.predict import Cluster, Costs, Timeline, TrainingPlan, answer, crossover, measure_kernels, predict, sweep
from birder.predict.layouts import STATE
from birder.predict.table import digits, size
from birder.predict.timeline import read
from tests.helpers import ROOT
from tests.unit.birder.predict.test_predict import link


def bert() -> Timeline:
    return read(ROOT / "results/timelines/bert_base_b12_tf32.json")


def test_a_slow_link_asks_for_compression_and_a_fast_one_does_not() -> None:
    slow = predict(bert(), Cluster(8, 8, link(1.0)))
    assert "x as fast as bf16" in slow.sentence
    assert slow.speedup("birder_hierarchical", "bf16")[0] > 2
    fast = predict(bert(), Cluster(8, 8, link(800.0)))
    assert fast.sentence.startswith("do not compress: bf16 is within 5 % of the bound")


def test_intervals_hold_the_value_and_grow_with_what_is_not_known() -> None:
    sure = predict(bert(), Cluster(8, 1, link(10.0)))
    unsure = predict(bert(), Cluster(8, 1, link(10.0, spread=0.3)))
    for a, b in zip(sure.rows, unsure.rows, strict=True):
        assert a.low <= a.ms <= a.high
        assert b.low <= a.low
        assert b.high >= a.high
    value, low, high = unsure.speedup("birder")
    assert low < value < high
    for nodes, part in ((1, "inside"), (2, "between")):  # whichever link ranks share
        cluster = Cluster(nodes, 4, link(5.0), inside=link(5.0), ring=False)
        unsure = replace(cluster, **{part: link(5.0, spread=0.4)})  # type: ignore[arg-type]
        known, wider = (predict(bert(), c, ["bf16"])["bf16"] for c in (cluster, unsure))
        assert wider.low < known.low < known.high < wider.high


def test_what_a_measured_step_took_above_its_prediction_is_in_every_method_that_communicates() -> None:
    there = Cluster(8, 8, link(10.0))
    plain, late, early = (predict(bert(), there, beyond_ms=ms) for ms in (0.0, 30.0, -1e6))
    bound = plain["none"].ms
    for a, b, c in zip(plain.rows, late.rows, early.rows, strict=True):
        more = 0.0 if a.name == "none" else 30.0
        assert (b.ms, b.low, b.high) == pytest.approx((a.ms + more, a.low, a.high + more))
        assert (c.ms, c.high) == (a.ms, a.high)
        assert c.low == min(a.low, bound)
    assert late.speedup("birder")[0] < plain.speedup("birder")[0]
    rates = [crossover(bert(), there, ["birder_hierarchical"], beyond_ms=ms) for ms in (0.0, 30.0, -30.0)]
    before, after, same = (r["birder_hierarchical"] or 0.0 for r in rates)
    assert after < before
    assert same <= before
    # What was not simulated is no reason to compress.
    assert predict(bert(), Cluster(8, 8, link(800.0)), beyond_ms=30.0).sentence.startswith("do not compress")


def test_long_steps_are_shown_without_exponents() -> None:
    slow = predict(bert(), Cluster(8, 8, link(0.1)))
    assert slow["fp32"].ms > 1e4
    assert "e+" not in str(slow)
    assert [digits(ms) for ms in (7e-15, 9e-5, 1.5e-4, 12345.6)] == ["0", "0", "0.00015", "12346"]
    assert [size(nbytes) for nbytes in (999.4, 999.6, 1.5e6, 2e12)] == ["999 B", "1 kB", "1.5 MB", "2000 GB"]


def test_the_table_names_every_row_and_ends_with_the_sentence() -> None:
    made_ = predict(bert(), Cluster(8, 8, link(10.0)))
    text = str(made_)
    assert all(r.method.label in text for r in made_.rows)
    assert text.endswith(made_.sentence)
    assert "embeddings" in text  # the tensor that waits
    assert made_["none"].state_bytes == STATE["adamw"] * made_.timeline.elements
    assert made_["powersgd1"].state_bytes == made_["none"].state_bytes + 4 * made_.timeline.elements
    assert made_["birder_hierarchical"].state_bytes == made_.timeline.elements


def test_a_link_that_nobody_stated_says_where_it_is_from() -> None:
    for nodes, between, inside in ((4, "assumed", "stated"), (1, "stated", "measured")):
        cluster = Cluster(nodes, 8, link(10.0, source=between), inside=link(10.0, source=inside))  # type: ignore[arg-type]
        text = str(predict(bert(), cluster))
        assert (f"({between if nodes > 1 else inside})" in text, "(stated)" in text) == (True, False)


def test_below_its_crossover_a_method_pays_and_above_it_does_not() -> None:
    t, c = bert(), Cluster(8, 8, link(10.0))
    found = crossover(t, c, ["birder_hierarchical", "fp32"])
    rate = found["birder_hierarchical"]
    assert rate is not None
    assert found["fp32"] is None
    for factor, pays in ((0.98, True), (1.02, False)):
        p = predict(t, c.at(rate * factor), ["bf16", "birder_hierarchical", "none"])
        assert (p.winner == "birder_hierarchical") is pays
    # 5 % of the point times alone is less than the main answer wants.
    plain = crossover(t, c, ["birder_hierarchical"], gain=0.05)["birder_hierarchical"]
    assert plain is not None
    assert plain > 1.02 * rate
    for factor, pays in ((0.98, True), (1.02, False)):
        p = predict(t, c.at(plain * factor), ["bf16", "birder_hierarchical"])
        assert (p["birder_hierarchical"].ms * 1.05 < p["bf16"].ms) is pays


@pytest.mark.parametrize("method", ["birder_hierarchical", "powersgd4"])
def test_a_crossover_is_where_the_main_answer_turns(method: str) -> None:
    """What is unsure of computing included."""
    there = Cluster(8, 8, link(10.0))
    rate = crossover(bert(), there, [method], unsure=0.3)[method]
    assert rate is not None
    assert rate < (crossover(bert(), there, [method])[method] or 0.0)
    below, above = (answer(bert(), there.at(rate * f), methods=[method], unsure=0.3) for f in (0.98, 1.02))
    assert below.pays
    assert not above.pays


def test_rates_of_sweeps_and_crossovers_are_those_of_one_nic() -> None:
    one, four = (replace(Cluster(8, 8, link(10.0 * n)), nics=n) for n in (1, 4))
    names = ["bf16", "birder_hierarchical"]
    (first,), (second,) = (sweep(bert(), c, "gbps", [25.0], names) for c in (replace(one, nics=4), four))
    assert first.cluster.nic_gbps == second.cluster.nic_gbps == 25.0
    alone = predict(bert(), Cluster(8, 8, link(100.0)), names)
    assert [r.ms for r in first.rows] == [r.ms for r in second.rows] == [r.ms for r in alone.rows]
    rates = [crossover(bert(), c, names)["birder_hierarchical"] or 0.0 for c in (one, four)]
    assert rates[1] == pytest.approx(rates[0] / 4, rel=2e-3)


def test_a_sweep_goes_to_a_thousand_nodes() -> None:
    found = sweep(bert(), Cluster(1, 8, link(10.0)), "nodes", [1, 8, 1024], ["fp32", "birder_hierarchical"])
    assert [p.cluster.nodes for p in found] == [1, 8, 1024]
    assert found[2]["fp32"].ms > found[1]["fp32"].ms > found[0]["fp32"].ms


@pytest.mark.parametrize("sharding", ["hsdp", "fsdp"])
def test_each_point_of_a_sweep_is_the_prediction_for_that_cluster(sharding: str) -> None:
    """FSDP's own collectives depend on the link's rate and on the number of nodes."""
    plan, there = TrainingPlan(sharding), Cluster(2, 8, link(10.0))  # type: ignore[arg-type]
    names = ["bf16", "none"] if sharding == "fsdp" else ["bf16", "birder_hierarchical", "none"]
    for over, values in (("gbps", [1.0, 10.0, 400.0]), ("nodes", [2, 4, 64])):
        for value, found in zip(values, sweep(bert(), there, over, values, names, plan=plan), strict=True):
            at = there.at(value) if over == "gbps" else replace(there, nodes=int(value))
            alone = answer(bert(), at, plan, names).prediction
            assert [found[n].ms for n in names] == [alone[n].ms for n in names]


def test_the_crossover_of_a_layout_is_that_of_its_replicas() -> None:
    plan, there = TrainingPlan("hsdp"), Cluster(8, 8, link(10.0))
    rate = crossover(bert(), there, ["birder_hierarchical"], plan=plan)["birder_hierarchical"]
    assert rate is not None
    for factor, pays in ((0.98, True), (1.02, False)):
        p = predict(bert(), there.at(rate * factor), ["bf16", "birder_hierarchical", "none"], plan=plan)
        assert (p.winner == "birder_hierarchical") is pays
    rarely, often = (crossover(bert(), there, ["local_sgd"], local_steps=n)["local_sgd"] for n in (100, 2))
    assert (rarely or 0.0) > (often or 0.0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: crossover(bert(), Cluster(2, 8, link(1.0)), plan=TrainingPlan("fsdp")),
            "no replicas to compress between",
        ),
        (
            lambda: sweep(bert(), Cluster(2, 8, link(1.0)), "gbps", [1.0], ["birder"], plan=TrainingPlan("hsdp")),
            "not with sharding",
        ),
        (lambda: link(0.0), "rate must be positive"),
        (lambda: link(1.0, latency_us=-1), "must not be negative"),
        (lambda: Cluster(0, 1, link(1.0)), "at least 1 node"),
        (lambda: Cluster(1.5, 8, link(1.0)), "whole numbers, got 1.5 x 8"),  # type: ignore[arg-type]
        (lambda: Cluster(2, 8, link(1.0), nics=0.0), "nics must be positive"),
        (lambda: sweep(bert(), Cluster(2, 8, link(1.0)), "nodes", [1.5]), "whole numbers"),
        (lambda: crossover(bert(), Cluster(2, 8, link(1.0)), lowest=10.0, highest=1.0), "lowest must be"),
        (lambda: measure_kernels(elements=512), "1024 elements"),
        (lambda: measure_kernels(rounds=0), "1 round"),
        (lambda: predict(bert(), Cluster(2, 1, link(1.0)), ["magic"]), "no method 'magic'"),
        (
            lambda: predict(bert(), Cluster(2, 1, link(1.0)), ["birder", "adamw"]),
            "adamw sends whole gradients: say",
        ),
        (lambda: Costs.of_gpu("abacus"), "no memory bandwidth known of 'abacus'"),
        (lambda: Costs.of_bandwidth(0.0), "must be positive"),
        (lambda: crossover(bert(), Cluster(1, 8, link(1.0))), "one node"),
        (lambda: sweep(bert(), Cluster(2, 8, link(1.0)), "moons", [1]), "gbps or nodes"),
        (lambda: sweep(bert(), Cluster(1, 8, link(1.0)), "gbps", [1.0, 2.0]), "with one node there is no link"),
        (lambda: bert().scaled(0.0), "positive factor"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]


def test_a_scaled_timeline_takes_as_many_times_as_long() -> None:
    t = bert().scaled(2.0, "half of an A100")
    assert t.step_ms == 2 * bert().step_ms
    assert t.gradients[0].ready_ms == 2 * bert().gradients[0].ready_ms
    assert t.note.endswith("half of an A100")


def test_predicting_needs_no_torch() -> None:
    code = (
        "import sys; from birder.predict import predict, Cluster, Link; from birder.predict.timeline import read;"
        "t = read('results/timelines/resnet50_b32_tf32.json'); str(predict(t, Cluster(8, 8, Link(10.0))));"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
