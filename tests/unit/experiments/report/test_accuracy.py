"""Accuracy tables: seeds are averaged, settings are not, and the grid is all there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from experiments.records import labels
from experiments.records.record import PUBLISHED, ResultRecord, read_all
from experiments.report import (
    accuracy,
    accuracy_page,
    answered,
    curves,
    facts,
    formats,
    gaps,
    methods_table,
    plots,
    time_to_loss,
)
from tests.helpers.records import score


def test_accuracy_is_mean_and_sample_sd_and_lists_the_whole_grid() -> None:
    records = [score("Birder", v, s, 0.001) for s, v in enumerate((90.0, 91.0, 92.0))]
    records += [score("Birder", v, s, 0.01) for s, v in enumerate((95.0, None))]
    records += [score("Birder", 80.0, 0, 0.0001), score("SGDM fp32", 93.0, 0, 0.1)]
    records += [score("Birder", None, 0, 0.1, status="failed", reason="loss is nan", metric={}, data={"name": None})]
    (table,) = accuracy.build(records)
    assert [(c.label, c.lr) for c in table.cells] == [
        ("SGDM fp32", 0.1),
        ("Birder", 0.0001),
        ("Birder", 0.001),
        ("Birder", 0.01),
        ("Birder", 0.1),
    ]
    assert table.cells[2].summary(None) == (91.0, 1.0)
    text = accuracy.as_table(table).markdown()
    assert "| Birder | 0.001 | **91.00 ± 1.00** | 3 | 92 | best |" in text
    # One of two seeds is not finite: no candidate, and it shows.
    assert "| Birder | 0.01 | 95.00 | 1 of 2 | 92 |  |" in text
    assert "| Birder | 0.1 | failed: loss is nan | 0 of 1 | 92 |  |" in text
    assert "[2](../records/birder-0.001-2.json)" in text


def test_data_sets_of_one_name_are_not_one_setting() -> None:
    """Where their files differ. A record that does not know its files goes with the others where those agree."""

    def on(files: str | None, seed: int, weights: str | None = None) -> ResultRecord:
        made = score("Birder", 90.0 + seed, seed, 0.1)
        data = {"path": "…/train", "files": files, "weights": weights}
        return dataclasses.replace(made, config={**made.config, "data": data})

    assert [len(c.records) for t in accuracy.build([on(None, 0), on("ab", 1)]) for c in t.cells] == [2]
    apart = accuracy.build([on(None, 0), on("ab", 1), on("cd", 2)])
    assert [t.setting.data for t in apart] == ["digits", "digits (files ab)", "digits (files cd)"]
    assert [len(c.records) for t in apart for c in t.cells] == [1, 1, 1]
    fine_tuned = accuracy.build([on("ab", 0, "cd"), on("ab", 1, "ef")])
    assert [t.setting.data for t in fine_tuned] == ["digits (weights cd)", "digits (weights ef)"]


def test_a_held_out_part_chooses_the_learning_rate() -> None:
    """Not the test metric, and not with hindsight: seed 0 decides, even when another seed fails later."""

    def scored(lr: float, seed: int, top1: float, held_out: float, **changes: Any) -> ResultRecord:
        metric = {"name": "top1", "value": top1, "target": None, "higher_is_better": True}
        return score(
            "Birder", top1, seed, lr, metric={**metric, "all": {"top1": top1, "held_out": held_out}}, **changes
        )

    records = [scored(0.1, 0, 99.0, 80.0), scored(0.2, 0, 90.0, 85.0), scored(0.2, 1, 91.0, 70.0)]
    records += [score("Birder", None, 2, 0.2, status="failed", reason="the loss is nan", metric={})]
    (table,) = accuracy.build(records)
    best = table.bests["Birder"]
    assert best is not None
    assert best.lr == 0.2
    text = accuracy.as_table(table).markdown()
    assert "| Birder | 0.2 | **90.50 ± 0.71** | 77.50 ± 10.61 | 2 of 3 | — | best |" in text
    assert "chosen by held_out of its first seed" in text


def test_the_baseline_is_its_best_variant_with_most_seeds() -> None:
    """And not the one whose label comes first."""

    def variant(eps: float, top1: float, seeds: int) -> list[ResultRecord]:
        made = [score("SGDM fp32", top1 + s, s, 0.1, id=f"{eps}-{s}") for s in range(seeds)]
        stated = {"parity": {"baseline": "SGDM", "margin": 1.0, "relative": False}}
        return [
            dataclasses.replace(r, config={**r.config, **stated, "optimizer": {**r.config["optimizer"], "eps": eps}})
            for r in made
        ]

    for better, seeds, expected in ((92.0, 2, 2.0), (92.0, 1, 1.0), (88.0, 2, 1.0)):
        (table,) = accuracy.build([*variant(1.0, 90.0, 2), *variant(2.0, better, seeds)])
        assert table.baseline is not None
        assert table.baseline.label == f"SGDM fp32 (optimizer.eps={expected})"
        assert [c.label for c in table.one_of_each] == [table.baseline.label]
        assert len(table.chosen) == 2


def test_variants_are_chosen_by_as_many_seeds_as_learning_rates() -> None:
    """Two seeds that choose: the first alone would take the other variant."""

    def variant(eps: float, *held_out: float, margin: float | None = 1.0) -> list[ResultRecord]:
        stated = {"parity": {"baseline": "SGDM", "margin": margin, "relative": False, "choose_seeds": 2}}
        made = [(score("SGDM fp32", 90.0, s, 0.1, id=f"{eps}-{s}"), value) for s, value in enumerate(held_out)]
        return [
            dataclasses.replace(
                r,
                config={**r.config, **stated, "optimizer": {**r.config["optimizer"], "eps": eps}},
                metric={**r.metric, "all": {"top1": 90.0, "held_out": value}},
            )
            for r, value in made
        ]

    (table,) = accuracy.build([*variant(1.0, 85.0, 80.0, 80.0), *variant(2.0, 84.0, 84.0, 10.0)])
    assert table.baseline is not None
    assert table.baseline.label == "SGDM fp32 (optimizer.eps=2.0)"
    assert [c.label for c in table.one_of_each] == [table.baseline.label]
    # Also where no margin is stated, so that there is no verdict.
    more = [*variant(1.0, 85.0, 80.0, margin=None), *variant(2.0, 84.0, 84.0, margin=None)]
    (table,) = accuracy.build(more)
    assert table.parity is None
    assert [c.label for c in table.one_of_each] == ["SGDM fp32 (optimizer.eps=2.0)"]


def test_a_name_is_the_variant_that_stands_for_the_method_and_ideas_of_studies_stand_for_none(tmp_path: Path) -> None:
    def run(top1: float, seed: int, eps: float, target: str = "birder.Birder", label: str = "Birder") -> ResultRecord:
        r = score("Birder", top1, seed, 0.1, id=f"{label}-{eps}-{seed}")
        optimizer = {**r.config["optimizer"], "_target_": target, "eps": eps}
        return dataclasses.replace(r, method=label, config={**r.config, "optimizer": optimizer})

    records = [run(90.0, 0, 1.0), run(91.0, 1, 1.0), run(95.0, 0, 2.0)]
    records += [run(99.0, seed, 1.0, "studies.one.Idea", "an idea") for seed in range(3)]
    (table,) = accuracy.build(records)
    assert [c.label for c in table.one_of_each] == ["Birder (optimizer.eps=1.0)"]
    study = facts.StudyFacts(table, tmp_path)
    assert study.cell("Birder") is table.one_of_each[0]
    assert study.cell("Birder (optimizer.eps=2.0)").by_seed == {0: 95.0}
    assert study.cell("an idea").by_seed.keys() == {0, 1, 2}
    with pytest.raises(LookupError):
        study.cell("Bird")


def test_lower_is_better_for_perplexity() -> None:
    metric: dict[str, Any] = {"name": "perplexity", "target": None, "higher_is_better": False, "all": {}}
    records = [score("Birder", None, 0, lr, metric={**metric, "value": v}) for lr, v in ((0.1, 150.0), (0.2, 180.0))]
    (table,) = accuracy.build(records)
    best = table.bests["Birder"]
    assert best is not None
    assert best.lr == 0.1
    assert "lower is better" in accuracy.as_table(table).markdown()


def test_accuracy_knows_neither_synthetic_data_nor_runs_without_communication() -> None:
    synthetic = score("Birder", 99.0, 0, 0.1, data={"name": "synthetic", "synthetic": True})
    assert accuracy.build([synthetic, score("no communication", 50.0, 0, 0.1)]) == []


def test_settings_and_variants_are_never_averaged_together() -> None:
    a = score("Birder", 90.0, 0, 0.1)
    other_steps = json.loads(json.dumps(a.config))
    other_steps["train"]["max_steps"] = 900
    other_beta = json.loads(json.dumps(a.config))
    other_beta["optimizer"]["beta"] = 0.9
    b = dataclasses.replace(a, id="b", config=other_steps, seed=1)
    c = dataclasses.replace(a, id="c", config=other_beta, seed=1)
    found = accuracy.build([a, b, c])
    assert [[cell.label for cell in t.cells] for t in found] == [["Birder", "Birder (optimizer.beta=0.9)"], ["Birder"]]
    warm = json.loads(json.dumps(a.config))
    warm["train"]["lr_schedule"] = {"name": "cosine", "warmup": 0.2, "final": 0.1, "gamma": None}
    found = accuracy.build([a, dataclasses.replace(a, id="d", config=warm, seed=1)])
    assert [", cosine schedule (warmup 0.2, final 0.1), " in t.title for t in found] in ([True, False], [False, True])


def test_what_was_computed_in_another_precision_has_a_table_of_its_own() -> None:
    a = score("Birder", 90.0, 0, 0.1)
    half = json.loads(json.dumps(a.config))
    half["train"]["precision"] = "bf16"
    found = accuracy.build([a, dataclasses.replace(a, id="b", config=half, seed=1)])
    assert [[cell.label for cell in t.cells] for t in found] == [["Birder"], ["Birder"]]
    assert sorted(", precision bf16, scale" in t.title for t in found) == [False, True]


def test_runs_that_differ_in_the_order_of_sums_alone_are_of_one_method() -> None:
    """The oldest records know no `train.bf16_matmul`."""
    runs = [score("Birder", 90.0, 0, 0.1)]
    for seed, how in enumerate(("native", "fp32"), start=1):
        config = json.loads(json.dumps(runs[0].config))
        config["train"]["bf16_matmul"] = how
        runs.append(dataclasses.replace(runs[0], id=how, config=config, seed=seed))
    (table,) = accuracy.build(runs)
    assert [(cell.label, cell.count()) for cell in table.cells] == [("Birder", "3")]


def test_the_same_seed_again_replaces_the_older_run() -> None:
    again = score("Birder", 95.0, 0, 0.1, id="again", time="2026-05-01T00:00:00Z")
    (table,) = accuracy.build([score("Birder", 90.0, 0, 0.1), again])
    assert [r.id for r in table.cells[0].records] == ["again"]


def on_virtual_workers(nodes: int, method: str, value: float, seed: int, lr: float) -> ResultRecord:
    r = score(method, value, seed, lr, nodes=nodes, id=f"{nodes}-{method}-{lr}-{seed}")
    parity = {"baseline": "sgdm", "margin": 1.0}
    return dataclasses.replace(r, config={**r.config, "cluster": {"_target_": labels.VIRTUAL}, "parity": parity})


def test_numbers_of_workers_stand_side_by_side() -> None:
    made = [on_virtual_workers(n, "SGDM fp32", 90.0 + s + n, s, 0.1) for n in (16, 8) for s in range(3)]
    made += [on_virtual_workers(8, "Birder", v + s, s, lr) for lr, v in ((0.1, 97.0), (0.2, 98.1)) for s in range(3)]
    made += [on_virtual_workers(16, "Birder", 103.0 + s, s, 0.1) for s in range(3)]
    made += [on_virtual_workers(8, "Birder", 99.0, 0, 0.3)]
    elsewhere = [score("Birder", 1.0, 0, 0.1, nodes=8)]
    (tables,) = accuracy_page.together(accuracy_page.studies(made + elsewhere)["digits"])
    shown = accuracy_page.section(tables).markdown()
    assert "| method | 8 workers | 16 workers |" in shown
    assert (
        "| SGDM fp32 | 99.00 ± 1.00<br>baseline<br>lr 0.1, n = 3 | 107.00 ± 1.00<br>baseline<br>lr 0.1, n = 3 |"
        in shown
    )
    # The best of three rates is in the middle; one alone has no edge.
    assert "| Birder | 99.10 ± 1.00<br>+0.10 [0.10, 0.10]<br>parity<br>lr 0.2, n = 3 | " in shown
    assert "104.00 ± 1.00<br>-3.00 [-3.00, -3.00]<br>worse<br>lr 0.1, n = 3 |" in shown
    one = accuracy_page.studies([r for r in made if r.nodes == 8 and r.config["optimizer"]["lr"] != 0.3])["digits"]
    shown = accuracy_page.section(one).markdown()
    assert "| method | lr | top1 | vs SGDM fp32 | verdict | seeds |" in shown
    assert "| Birder | 0.2 § | 99.10 ± 1.00 | +0.10 [0.10, 0.10] | parity | 3 |" in shown


def test_a_study_with_another_baseline_leaves_the_first_as_it_was() -> None:
    def against(baseline: str | None, r: ResultRecord) -> ResultRecord:
        parity = None if baseline is None else {"baseline": baseline, "margin": 1.0}
        later = "2026-05-01T00:00:00Z" if baseline == "OneBitAdam" else r.time
        return dataclasses.replace(r, id=f"{baseline}-{r.id}", time=later, config={**r.config, "parity": parity})

    def runs(*found: tuple[str, float]) -> list[ResultRecord]:
        return [on_virtual_workers(8, method, value + s, s, 0.1) for method, value in found for s in range(3)]

    first = runs(("SGDM fp32", 90.0), ("Birder", 90.5)) + [against(None, r) for r in runs(("1-bit Adam", 80.0))]
    second = [against("OneBitAdam", r) for r in runs(("1-bit Adam", 95.0), ("Birder", 91.0))]
    (before,) = accuracy_page.studies(first)["digits"]
    old, new = accuracy_page.studies(second + first)["digits"]
    assert accuracy_page.section([old]).markdown() == accuracy_page.section([before]).markdown()
    assert (old.slug, new.slug) == (before.slug, f"{before.slug}-2")
    assert {c.label: new.verdict(c) for c in new.chosen} == {"1-bit Adam": "", "Birder": "worse"}
    assert new.title.endswith("against OneBitAdam")


def test_pytorchs_hooks_on_real_ranks_stand_beside_virtual_workers_in_the_same_setting() -> None:
    made = [on_virtual_workers(8, "SGDM fp32", 90.0 + s, s, 0.1) for s in range(3)]
    hooked = [
        dataclasses.replace(
            r, method="PowerSGD rank 4", wire="lowrank", id=f"hook-{r.seed}",
            config={**r.config, "cluster": {"name": "local"}, "comm": {"hook": "powersgd", "powersgd_rank": 4}},
        )
        for r in (on_virtual_workers(8, "SGDM fp32", 91.0 + s, s, 0.1) for s in range(3))
    ]  # fmt: skip
    (table,) = accuracy_page.studies([*made, *hooked])["digits"]
    shown = accuracy_page.section([table]).markdown()
    assert "| PowerSGD rank 4 | 0.1 | 92.00 ± 1.00 | +1.00 [1.00, 1.00] |" in shown
    assert not accuracy_page.studies(hooked)  # no setting of virtual workers


def test_the_same_batch_in_all_stands_side_by_side_too() -> None:
    def trained(workers: int, batch: int, top1: float) -> ResultRecord:
        made = on_virtual_workers(workers, "SGDM fp32", top1, 0, 0.1)
        train = {**made.config["train"], "batch_per_rank": batch}
        return dataclasses.replace(made, id=f"{workers}-{batch}", config={**made.config, "train": train})

    runs = [(8, 4, 90.0), (16, 4, 91.0), (8, 8, 92.0), (32, 2, 93.0), (8, 2, 94.0), (8, 3, 95.0)]
    found = accuracy_page.together(accuracy_page.studies([trained(*run) for run in runs])["digits"])
    shown = [accuracy_page.section(tables).markdown() for tables in found]
    assert [len(tables) for tables in found] == [2, 2, 3, 1]
    assert [text.partition("**;")[0].rpartition(", ")[2] for text in shown[:3]] == [
        "batch 2 each",
        "batch 4 each",
        "batch 64 in all",
    ]
    assert "| SGDM fp32 | 92.00<br>baseline<br>lr 0.1, n = 1 | 91.00<br>" in shown[2]
    assert "batch 3 each" in shown[3]


def test_another_precision_never_stands_side_by_side() -> None:
    made = [on_virtual_workers(n, "SGDM fp32", 90.0, 0, 0.1) for n in (8, 16)]
    half = [{**r.config, "train": {**r.config["train"], "precision": "bf16"}} for r in made]
    made += [dataclasses.replace(r, id=f"half-{r.id}", config=c) for r, c in zip(made, half, strict=True)]
    found = accuracy_page.together(accuracy_page.studies(made)["digits"])
    assert [len(tables) for tables in found] == [2, 2]
    shown = [accuracy_page.section(tables).markdown() for tables in found]
    assert ["batch 4 each, precision bf16**" in text for text in sorted(shown)] == [False, True]


def test_the_best_method_in_fp32_is_shown_beside_the_baseline() -> None:
    made = [on_virtual_workers(n, "SGDM fp32", 90.0 + s, s, 0.1) for n in (8, 16) for s in range(3)]
    made += [on_virtual_workers(n, "Birder", 95.0 + s, s, 0.1) for n in (8, 16) for s in range(3)]
    adam = [on_virtual_workers(8, "SGDM fp32", 97.5 + s, s, 0.1) for s in range(3)]
    made += [
        dataclasses.replace(
            r, method="AdamW fp32", optimizer="AdamW", id=f"adam-{r.seed}",
            config={**r.config, "optimizer": {"_target_": "birder.AdamW", "lr": 0.1}},
        )
        for r in adam
    ]  # fmt: skip
    (tables,) = accuracy_page.together(accuracy_page.studies(made)["digits"])
    shown = accuracy_page.section(tables).markdown()
    assert "+5.00 [5.00, 5.00]<br>better<br>-2.50 [-2.50, -2.50] to AdamW fp32<br>lr 0.1, n = 3 |" in shown
    assert "+5.00 [5.00, 5.00]<br>better<br>lr 0.1, n = 3 |\n" in shown  # with 16 workers the baseline is the only one
    assert "| AdamW fp32 | 98.50 ± 1.00<br>+7.50 [7.50, 7.50]<br>better<br>lr 0.1, n = 3 | — |" in shown


def test_only_a_plain_all_reduce_in_fp32_counts_as_full_precision() -> None:
    made = [on_virtual_workers(8, "SGDM fp32", 90.0 + s, s, 0.1) for s in range(3)]
    others = (("PowerSGD rank 4", "lowrank", "birder.SGDM"), ("Birder without bits", "fp32", "birder.Birder"))
    for place, (method, wire, target) in enumerate(others):
        made += [
            dataclasses.replace(
                r, method=method, wire=wire, optimizer=target, id=f"{place}-{r.seed}",
                config={**r.config, "optimizer": {"_target_": target, "lr": 0.1}},
            )
            for r in (on_virtual_workers(8, "SGDM fp32", 99.0 + s, s, 0.1) for s in range(3))
        ]  # fmt: skip
    (table,) = accuracy.build(made)
    assert [c.label for c in table.chosen] == ["Birder without bits", "SGDM fp32", "PowerSGD rank 4"]
    assert table.strongest is not None
    assert table.strongest.label == "SGDM fp32"


def test_studies_of_one_seed_have_no_interval_and_no_table() -> None:
    made = [on_virtual_workers(8, "SGDM fp32", 90.0, s, 0.1) for s in range(2)]
    assert accuracy_page.tables(accuracy_page.studies(made)["digits"]).startswith("**digits: digits")
    assert accuracy_page.tables(accuracy_page.studies(made[:1])["digits"]) == ""


def test_a_method_that_diverges_where_the_baseline_does_not_is_worse() -> None:
    made = [on_virtual_workers(8, m, 90.0 + s, s, 0.1) for m in ("SGDM fp32", "Birder") for s in range(3)]
    table = accuracy.build(made)[0]
    assert [table.verdict(c) for c in table.chosen if c.label == "Birder"] == ["parity"]
    nan = "rank 0: RuntimeError: the loss is nan at step 7: lower optimizer.lr"
    lost = dataclasses.replace(
        on_virtual_workers(8, "Birder", 90.0, 3, 0.1), status="failed", reason=nan, metric={}, data={"name": None}
    )
    more = on_virtual_workers(8, "SGDM fp32", 90.0, 3, 0.1)
    held = [dataclasses.replace(r, metric={**r.metric, "all": {"held_out": 1.0}}) for r in (*made, more)]
    (table,) = accuracy.build([*held, lost])  # tuned: a rate that lost a seed stays the choice
    assert [(c.count(), table.verdict(c)) for c in table.chosen if c.label == "Birder"] == [("3 of 4", "worse")]
    # Also where a single seed is left, which has no interval: pictures and answers count it as lost.
    kept = [r for r in (*held, lost) if r.method != "Birder" or r.seed in (0, 3)]
    assert answered.verdicts(kept) == [[["Birder", "worse"]]]
    (panel,) = gaps.panels(accuracy_page.studies(kept))
    assert panel.rows[0].gap.low is None
    assert plots.accuracies(accuracy_page.studies(kept)) is not None
    # The baseline loses as many: nothing is decided by it.
    both = [r for r in held if r.id != more.id] + [
        lost,
        dataclasses.replace(lost, id="too", method="SGDM fp32", wire="fp32", optimizer="SGDM", config=more.config),
    ]
    (table,) = accuracy.build(both)
    assert [(c.count(), table.verdict(c)) for c in table.chosen if c.label == "Birder"] == [("3 of 4", "parity")]
    (table,) = accuracy.build([*held, dataclasses.replace(lost, reason="interrupted by Ctrl-C")])  # not its own doing
    assert [(c.count(), table.verdict(c)) for c in table.chosen if c.label == "Birder"] == [("3 of 4", "parity")]


def test_a_method_that_diverged_at_every_learning_rate_counts_as_worse() -> None:
    """It has no rate that could be held against the baseline, and was in no study."""
    made = [on_virtual_workers(8, m, 90.0 + s, s, 0.1) for m in ("SGDM fp32", "1-bit Adam") for s in range(3)]
    nan = "rank 0: RuntimeError: the loss is nan at step 7: lower optimizer.lr"
    tried = [
        dataclasses.replace(on_virtual_workers(8, "Birder", 0.0, s, lr), status="failed", reason=nan, metric={})
        for s, lr in ((0, 0.1), (0, 0.2))
    ]
    both = [["1-bit Adam", "parity"], ["Birder", "worse"]]
    assert answered.verdicts([*made, *tried]) == [both]
    assert answered.verdicts([*made[:3], *tried]) == [both[1:]]
    # What was only broken off says nothing, nor does one rate where another one did well.
    broken = [dataclasses.replace(r, reason="interrupted by Ctrl-C") for r in tried]
    assert answered.verdicts([*made, *broken]) == [both[:1]]
    well = [on_virtual_workers(8, "Birder", 90.0 + s, s, 0.05) for s in range(3)]
    assert answered.verdicts([*made, *tried, *well]) == [[both[0], ["Birder", "parity"]]]


def test_a_picture_shows_the_study_with_most_seeds_with_its_verdicts() -> None:
    made = [
        on_virtual_workers(n, "SGDM fp32", 90.0 + s, s, 0.1) for n, seeds in ((8, 3), (16, 2)) for s in range(seeds)
    ]
    made += [on_virtual_workers(8, "Birder", 95.0 + s, s, 0.1) for s in range(3)]
    made += [on_virtual_workers(8, "1-bit Adam", 90.1 + 1.1 * s, s, 0.1) for s in range(3)]
    found = gaps.panels(accuracy_page.studies(made))
    (panel,) = found
    assert panel.title == "digits, 12 steps, 8 workers"
    assert panel.baseline == "SGDM fp32"
    assert panel.axis == "top-1 accuracy, points"
    assert {row.label: row.verdict for row in panel.rows} == {"Birder": "better", "1-bit Adam": "parity"}
    assert [round(row.gap.value, 2) for row in panel.rows] == [0.2, 5.0]
    assert gaps.point(found) == "Birder against the dense baseline, 95 % intervals: better on digits"
    others = tuple(row for row in panel.rows if row.label != "Birder")  # a picture without it does not speak of it
    assert gaps.point([dataclasses.replace(panel, rows=others)]) == "Methods against the dense baseline, 95 % intervals"
    # Of two variants of a method one is drawn, by its name alone.
    other = [on_virtual_workers(8, "Birder", 99.0 + s, s, 0.1) for s in range(3)]
    other = [
        dataclasses.replace(r, id=f"o{r.seed}", config={**r.config, "optimizer": {**r.config["optimizer"], "eps": 1.0}})
        for r in other
    ]
    (panel,) = gaps.panels(accuracy_page.studies([*made, *other]))
    assert [(row.label, round(row.gap.value, 2)) for row in panel.rows] == [("1-bit Adam", 0.2), ("Birder", 9.0)]
    # Another study is shown besides where it has a method that the first lacks, or another number of workers.
    same = [on_virtual_workers(4, m, 90.0 + s, s, 0.1) for m in ("SGDM fp32", "Birder") for s in range(2)]
    more = [dataclasses.replace(r, method=r.method.replace("Birder", "CSER")) for r in same]
    titles = [panel.title for panel in gaps.panels(accuracy_page.studies([*made, *more]))]
    assert titles == ["digits, 12 steps, 8 workers", "digits, 12 steps, 4 workers"]
    assert [panel.title for panel in gaps.panels(accuracy_page.studies([*made, *same]))] == titles
    # Once each, also where a table of the page stands next to others of its batch and to others of its batch in all.
    studies = accuracy_page.studies([*made, *same])
    assert [panel.title for panel in gaps.panels({exp: [*every, *every] for exp, every in studies.items()})] == titles
    few = [dataclasses.replace(r, method=r.method.replace("Birder", "Birder local")) for r in same]
    wide = [dataclasses.replace(r, id=f"{m}{r.id}", method=m) for m in ("A", "B") for r in made if r.method == "Birder"]
    assert [p.title for p in gaps.panels(accuracy_page.studies([*made, *wide, *same]))] == titles[:1]
    assert len(gaps.panels(accuracy_page.studies([*made, *wide, *few]))) == 2  # a method that the first lacks
    nodes = [
        dataclasses.replace(r, id=f"n{r.id}", nodes=2, ranks_per_node=4, method=r.method.replace("Birder", "CSER"))
        for r in made if r.method != "1-bit Adam"
    ]  # fmt: skip
    assert len(gaps.panels(accuracy_page.studies([*made, *wide, *nodes]))) == 1  # as many workers, in another shape
    shorter = [dataclasses.replace(r, config=r.config | {"train": r.config["train"] | {"max_steps": 6}}) for r in same]
    assert len(gaps.panels(accuracy_page.studies([*made, *shorter]))) == 1
    # Each task of an experiment that has several, however few its methods.
    task = [dataclasses.replace(r, id=f"t{r.id}", data=r.data | {"name": "GLUE CoLA"}) for r in same]
    titles = [panel.title for panel in gaps.panels(accuracy_page.studies([*made, *wide, *task]))]
    assert sorted(titles) == ["GLUE CoLA, 12 steps, 4 workers", "digits, 12 steps, 8 workers"]
    alone = [on_virtual_workers(8, "SGDM fp32", 90.0, 0, 0.1), on_virtual_workers(8, "Birder", 95.0, 0, 0.1)]
    assert plots.accuracies(accuracy_page.studies(alone)) is None  # one seed has no interval


def test_a_picture_of_shares_has_its_ends_and_its_margin_in_per_cent() -> None:
    from scipy import stats

    base, mine = [100.0, 110.0, 120.0], [109.0, 121.5, 133.0]
    made = [on_virtual_workers(8, "SGDM fp32", v, s, 0.1) for s, v in enumerate(base)]
    made += [on_virtual_workers(8, "Birder", v, s, 0.1) for s, v in enumerate(mine)]
    parity = {"baseline": "SGDM", "margin": 0.03, "relative": True}
    (panel,) = gaps.panels(
        accuracy_page.studies([dataclasses.replace(r, config={**r.config, "parity": parity}) for r in made])
    )
    shares = [100 * (m / b - 1) for m, b in zip(mine, base, strict=True)]
    low, high = stats.t.interval(0.95, 2, loc=sum(shares) / 3, scale=stats.sem(shares))
    (row,) = panel.rows
    assert (row.gap.value, row.gap.low, row.gap.high) == pytest.approx((sum(shares) / 3, low, high))
    assert panel.margin == pytest.approx(3.0)
    assert panel.limit == pytest.approx(gaps.FAR * row.gap.value)


def of_methods(method: str, sent: float, lower: bool, *values: float) -> list[ResultRecord]:
    made = [score(method, v, s, 0.1, exp="methods") for s, v in enumerate(values)]
    about = {"name": "perplexity", "higher_is_better": False} if lower else {}
    return [
        dataclasses.replace(r, bytes_per_step={**r.bytes_per_step, "payload_inter": sent}, metric={**r.metric, **about})
        for r in made
    ]


def test_a_picture_of_one_task_names_the_best_and_pairs_no_seeds_that_only_one_has() -> None:
    few = {"1-bit Adam": (100.0, 102.0), "Birder": (97.5, 99.5, 107.5)}  # means of 101, as the baseline's, and 101.5
    for lower, best in ((False, "Birder"), (True, "1-bit Adam")):
        made = of_methods("SGDM fp32", 3200.0, lower, 100.0, 102.0)
        made += [r for m, values in few.items() for r in of_methods(m, 100.0, lower, *values)]
        found = gaps.against_bytes(methods_table.build(made)[0])
        assert found is not None
        assert found.point().startswith(f"{best} sends 1/32.0 of the bytes of fp32")
        gap = {p.label: p.gap for p in found.points}
        assert gap["Birder"] is not None
        assert (gap["Birder"].value, gap["Birder"].low) == (pytest.approx(0.5), None)
        assert gap["1-bit Adam"] is not None
        assert gap["1-bit Adam"].low is not None  # of the same seeds


def test_a_picture_without_an_fp32_run_states_no_share_of_its_bytes() -> None:
    made = [score(method, 90.0 + k, 0, 0.1, exp="methods") for k, method in enumerate(("SGDM bf16", "Birder"))]
    found = gaps.against_bytes(methods_table.build(made)[0])
    assert found is not None
    assert {p.share for p in found.points} == {None}
    assert formats.DASH not in found.point()


def test_accuracy_against_bytes_has_what_a_rank_sends_for_each_parameter() -> None:
    sent = {"SGDM fp32": 7000, "Birder": 400, "1-bit Adam": 500}
    made = [on_virtual_workers(8, m, 90.0 + s + n, s, 0.1) for n, m in enumerate(sent) for s in range(3)]
    made = [
        dataclasses.replace(r, bytes_per_step={**r.bytes_per_step, "payload_inter": sent[r.method], "payload_intra": 0})
        for r in made
    ]
    (panel,) = gaps.with_bytes(accuracy_page.studies(made))
    ranks = made[0].ranks_per_node * made[0].nodes
    assert [(row.label, round(row.each, 6)) for row in panel.rows] == [
        (m, round(8 * (ranks - 1) / ranks * sent[m] / 7000, 6)) for m in ("Birder", "1-bit Adam")
    ]
    assert panel.baseline == "SGDM fp32"
    assert gaps.point_of_bytes([panel]).endswith("accuracy kept 2 times, lost 0 times, not decided 0 times")
    assert (plots.accuracies_by_bytes(accuracy_page.studies(made)) or b"").startswith(b"\x89PNG")
    assert gaps.with_bytes(accuracy_page.studies([r for r in made if r.method != "SGDM fp32"])) == []


def test_a_share_is_said_where_the_stated_baseline_was_not_run(tmp_path: Path) -> None:
    """A perplexity of 110 against 100 is +10 %, not +1,000 %."""
    stated = {"parity": {"baseline": "BertAdam", "margin": 0.03, "relative": True}}
    made = []
    for method, value in (("SGDM fp32", 100.0), ("Birder", 110.0)):
        r = score(method, value, 0, 0.1, curve=f"{method}.csv")
        (tmp_path / f"{method}.csv").write_text("step,seconds,loss,metric\n1,0,2.0,\n2,0,1.0,\n")
        metric = {**r.metric, "name": "perplexity", "higher_is_better": False}
        made.append(dataclasses.replace(r, config={**r.config, **stated}, metric=metric))
    (table,) = accuracy.build(made)
    assert plots.outcome(curves.read(table, tmp_path)).endswith("110.00, +10.0 % from SGDM fp32")


def synced_every(records: list[ResultRecord], h: int) -> ResultRecord:
    """A run of DiLoCo that averages every `h` steps."""
    r = next(r for r in records if r.method == "DiLoCo")
    return dataclasses.replace(r, config={**r.config, "optimizer": {**r.config["optimizer"], "sync_every": h}})


def test_time_to_a_loss_is_measured_steps_times_predicted_ones() -> None:
    records = [r for r in read_all(PUBLISHED) if r.exp == "zero_one_gpt2"]
    race = time_to_loss.build(accuracy_page.studies(records), PUBLISHED)
    assert race is not None
    both = [r for r in read_all(PUBLISHED) if r.exp in time_to_loss.EXPS]
    assert time_to_loss.build(accuracy_page.studies(both), PUBLISHED) == race  # a study of fewer methods does not count
    found = {m.label: m for m in race.methods}
    dense, onebit = found["AdamW fp32"], found["1-bit Adam"]
    assert dense.steps is not None
    assert dense.steps <= race.total
    slow, fast = ("a100", 10.0), ("a100", 100.0)
    assert dense.seconds(slow) == pytest.approx(dense.steps * dense.ms[slow] / 1000)
    assert dense.ms[slow] > 2 * onebit.ms[slow] > 2 * 0.2 * dense.ms[slow]  # a fifth of its steps is dense
    assert dense.ms[slow] > dense.ms[fast] > found["Birder"].ms[fast]
    # Its loss of half a run is there in half a run, to the next point of its curve.
    assert 0.4 * race.total < dense.steps <= (time_to_loss.SHARE + 1 / curves.POINTS) * race.total
    often, rare = (time_to_loss.step_ms(synced_every(records, h), race.total) for h in (5, 500))
    assert often[slow] > 1.05 * rare[slow]  # the run's own H
    reached = [m.steps is not None for m in race.methods]
    assert reached == sorted(reached, reverse=True)
    assert time_to_loss.build({}, PUBLISHED) is None
    # A study whose baseline is none that the predictor knows has no picture.
    other = [dataclasses.replace(r, method="LAMB fp32", optimizer="LAMB") for r in records if r.method == "AdamW fp32"]
    assert time_to_loss.build(accuracy_page.studies(other), PUBLISHED) is None
