"""What must not decide a comparison: runs that were broken off, of other data, another length, another model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from experiments.records import labels
from experiments.records.record import ResultRecord
from experiments.report import accuracy, captions, methods_table, published, speedup
from experiments.report.accuracy import AccuracyTable
from tests.helpers.records import full_group, run, score

NAN = "the loss is nan at step 3: lower optimizer.lr"


def runs(method: str, lr: float, *values: float | None, first: int = 0, **config: Any) -> list[ResultRecord]:
    """One of each seed, at a margin of one point to SGDM. None: it diverged."""
    made = []
    for seed, value in enumerate(values, first):
        r = score(method, value, seed, lr)
        if value is None:
            r = replace(r, status="failed", reason=NAN, metric={}, data={"name": None, "synthetic": None})
        parity = {"baseline": "SGDM", "margin": 1.0, "relative": False, "choose_seeds": 1}
        made.append(replace(r, config={**r.config, "parity": parity, **config}))
    return made


def broken_off(r: ResultRecord, **changes: Any) -> ResultRecord:
    lost = {
        "status": "failed",
        "reason": "interrupted by Ctrl-C",
        "metric": {},
        "data": {"name": None, "synthetic": None},
    }
    return replace(r, id=f"{r.id}-again", time="2026-01-03T00:00:00Z", **lost, **changes)


def only(records: list[ResultRecord]) -> AccuracyTable:
    (table,) = accuracy.build(records)
    return table


def verdicts(table: AccuracyTable) -> dict[str, tuple[float | None, str]]:
    return {c.label: (c.lr, table.verdict(c)) for c in table.chosen}


BASE = runs("SGDM fp32", 0.1, 90.0, 90.1, 90.2)


def test_a_run_that_was_broken_off_changes_nothing() -> None:
    good = runs("Birder", 0.003, 90.3, 90.4, 90.5)
    records = [*BASE, *good, *runs("Birder", 0.001, 85.0, 85.1, 85.2)]
    wanted = verdicts(only(records))
    assert wanted["Birder"] == (0.003, "parity")
    assert verdicts(only([*records, broken_off(good[0])])) == wanted  # the same seed again
    fourth = replace(good[0], seed=3, config={**good[0].config, "seed": 3})
    assert verdicts(only([*records, broken_off(fourth)])) == wanted
    diverged = runs("Birder", 0.003, None, first=3)
    assert verdicts(only([*records, *diverged]))["Birder"] == (0.001, "worse")


def test_a_run_that_diverged_on_other_data_stands_with_those() -> None:
    mine = [*BASE, *runs("Birder", 0.003, 90.1, 90.2, 90.1)]
    a = [replace(r, config={**r.config, "data": {"path": "…/a"}}) for r in mine]
    b = [
        replace(r, id=f"{r.id}-b", config={**r.config, "data": {"path": "…/b"}})
        for r in [*BASE, *runs("Birder", 0.003, None)]
    ]
    b = [replace(r, data={**r.data, "name": r.data["name"] and "others"}) for r in b]
    ours, theirs = accuracy.build([*a, *b])
    assert verdicts(ours) == verdicts(only(a))
    assert [c.count() for c in ours.cells] == ["3", "3"]
    assert [c.count() for c in theirs.cells] == ["3", "0 of 1"]


def test_epochs_that_end_before_max_steps_are_another_length() -> None:
    def of(epochs: int, steps: int, *records: ResultRecord) -> list[ResultRecord]:
        train = records[0].config["train"] | {"epochs": epochs, "max_steps": 1000}
        return [replace(r, steps=steps, config={**r.config, "train": train}) for r in records]

    long, short = (
        of(20, 1000, *BASE, *runs("Birder", 0.003, 90.0, 90.1)),
        of(1, 60, *runs("Birder", 0.003, 70.0, None, first=2)),
    )
    short[1] = replace(short[1], steps=None)  # the launcher does not know
    tables = {t.setting.length: [c.count() for c in t.cells] for t in accuracy.build([*long, *short])}
    assert tables == {"1000 steps": ["3", "2"], "1 epoch": ["1 of 2"]}


def test_a_run_that_was_resumed_with_other_options_has_a_row_of_its_own() -> None:
    changed = runs("Birder", 0.003, 70.0, resume_changed=[["optimizer.lr", 0.1, 0.003]])
    changed = [replace(r, id="changed", time="2026-01-03T00:00:00Z") for r in changed]
    table = only([*BASE, *runs("Birder", 0.003, 90.0, 90.1, 90.2), *changed])
    assert table.verdict(table.cells[-2]) == "parity" or table.verdict(table.cells[-1]) == "parity"
    assert sorted(c.count() for c in table.cells) == ["1", "3", "3"]


def test_another_model_is_another_task() -> None:
    small = [*BASE, *runs("Birder", 0.003, 90.1, 90.0, 90.2)]
    large = [*runs("SGDM fp32", 0.1, 95.0, 95.1, 95.2), *runs("Birder", 0.003, 95.1, 95.0, 95.2)]
    sized = [
        replace(r, id=f"{r.id}-{n}", config={**r.config, "workload": {"layers": n}})
        for n, rs in ((2, small), (4, large))
        for r in rs
    ]
    tables = accuracy.build(sized)
    assert [t.setting.workload for t in tables] == ["layers=2", "layers=4"]
    assert [verdicts(t)["Birder"][1] for t in tables] == ["parity", "parity"]
    timed = [
        replace(
            run(method, ms * times), id=f"{method}{model}", config={**run(method).config, "workload": {"model": model}}
        )
        for model, times in (("resnet18", 1.0), ("resnet50", 3.0))
        for method, ms in (("SGDM fp32", 1000.0), ("Birder", 500.0), ("no communication", 400.0))
    ]
    for table in speedup.build(timed):
        assert captions.versus(table, table.row("Birder"), "fp32") == "2.00x"


def test_a_rate_that_lacks_a_seed_that_chooses_is_not_chosen_yet() -> None:
    """Two seeds choose: the mean over one of them alone is another one's."""

    def kept(lr: float, *held_out: float) -> list[ResultRecord]:
        made = zip(runs("Birder", lr, *(90.0 for _ in held_out)), held_out, strict=True)
        return [replace(r, metric={**r.metric, "all": {"top1": 90.0, "held_out": value}}) for r, value in made]

    records = [*kept(0.003, 80.0, 70.0), *kept(0.03, 79.0)]
    parity = {"baseline": "SGDM", "margin": 1.0, "relative": False, "choose_seeds": 2}
    table = only([replace(r, config={**r.config, "parity": parity}) for r in records])
    assert [c.lr for c in table.chosen] == [0.003]
    assert table.cells[1].summary("held_out", [0, 1]) == (None, None)
    assert table.cells[1].summary("held_out", [0]) == (79.0, None)


@pytest.mark.parametrize(("first", "other"), [(0, 1), (1, 0)])
def test_a_rate_is_chosen_by_the_seed_that_all_were_tried_with_also_if_its_other_seed_diverges(
    first: int, other: int
) -> None:
    def kept(lr: float, held_out: float) -> ResultRecord:
        (r,) = runs("Birder", lr, 90.0, first=first)
        return replace(r, metric={**r.metric, "all": {"top1": 90.0, "held_out": held_out}})

    low, high = kept(0.1, 70.0), kept(0.2, 80.0)
    table = only([low, high, *runs("Birder", 0.2, None, first=other)])
    assert table.bests["Birder"] is not None
    assert table.bests["Birder"].lr == 0.2
    assert accuracy.choosers(table.by_label["Birder"]) == [first, other]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_seed_that_ends_without_a_finite_metric_is_lost_as_one_that_diverged(value: float | None) -> None:
    """Its rate was chosen on held-out data, by the first seed, which is there."""

    def kept(r: ResultRecord) -> ResultRecord:
        return replace(r, metric={**r.metric, "all": {**r.metric["all"], "held_out": 80.0}})

    base, mine = map(kept, BASE), runs("Birder", 0.003, 90.1, 90.2, 90.1, 90.2)
    *others, last = map(kept, mine)
    table = [*base, *others]
    ended = replace(last, metric={**last.metric, "value": value})
    assert ended.status == "completed"
    assert verdicts(only([*table, ended]))["Birder"] == (0.003, "worse")
    assert verdicts(only([*table, last]))["Birder"] == (0.003, "parity")
    assert verdicts(only([*table, broken_off(last)]))["Birder"] == (0.003, "parity")


def test_another_batch_is_another_table_also_where_it_is_accumulated() -> None:
    mine = [*BASE, *runs("Birder", 0.003, 90.1, 90.2, 90.1)]
    twice = [
        replace(r, id=f"{r.id}-2", config={**r.config, "train": {**r.config["train"], "accumulate": 2}}) for r in mine
    ]
    tables = accuracy.build([*mine, *twice])
    assert [(t.setting.batch, [c.count() for c in t.cells]) for t in tables] == [(4, ["3", "3"]), (8, ["3", "3"])]
    assert "batch 8 each" in tables[1].title


def test_rates_are_compared_on_the_seeds_that_they_share() -> None:
    tuned = [*runs("SGDM fp32", 0.1, 91.0, 90.2, 90.3, 90.1, 90.2), *runs("SGDM fp32", 0.3, 90.6)]
    table = only([*tuned, *runs("Birder", 0.003, 88.1, 88.2, 88.3, 88.1, 88.2)])
    assert table.held_against is not None
    assert table.held_against.lr == 0.1
    assert verdicts(table)["Birder"][1] == "worse"


def test_a_rate_of_the_baseline_that_diverges_is_not_held_against_others() -> None:
    def held_out(r: ResultRecord, value: float) -> ResultRecord:
        return replace(r, metric={**r.metric, "all": {**r.metric["all"], "held_out": value}}) if r.metric else r

    sound = [held_out(r, 91.0) for r in runs("SGDM fp32", 0.1, 90.7, 90.0, 90.1, 90.2, 89.9)]
    wild = [held_out(r, 90.9) for r in runs("SGDM fp32", 0.3, 91.6, 91.7, None, None, None)]
    mine = [held_out(r, 90.0) for r in runs("Birder", 0.003, 90.5, 90.6, 90.2, None, None)]
    table = only([*sound, *wild, *mine])
    assert table.held_against is not None
    assert table.held_against.lr == 0.1
    assert verdicts(table)["Birder"][1] == "worse"


@pytest.mark.parametrize("wires", [("fp32", "bf16")])
def test_another_message_of_a_users_own_optimizer_is_another_method(wires: tuple[str, str]) -> None:
    made = []
    for wire, value in zip(wires, (90.0, 80.0), strict=True):
        for r in runs("SGDM fp32", 0.1, value, value + 0.1, value + 0.2):
            config = {**r.config, "optimizer": {"_target_": "mine.Own", "wire": wire, "lr": 0.1}}
            named = {"optimizer": "Own", "method": labels.method(config), "wire": labels.wire(config)}
            made.append(replace(r, id=f"{r.id}-{wire}", config=config, **named))
    table = only([*BASE, *made])
    assert sorted(verdict for _, verdict in verdicts(table).values()) == ["", "parity", "worse"]


def emulated(group: str, dilation: float, **link: Any) -> list[ResultRecord]:
    at = {
        "link_gbps": 10,
        "dilation": dilation,
        "set_mbit_per_s": 10000 / dilation,
        "kind": "netns",
        "mbit_per_s": 1.0,
        **link,
    }
    return [
        replace(
            r, id=r.id + group, group=group, time=f"2026-01-01T00:00:0{group[1]}Z", cluster="emulated", link=r.link | at
        )
        for r in full_group()
        for r in [replace(r, config={**r.config, "cluster": {"dilation": "auto"}})]
    ]


def test_of_an_emulated_comparison_the_latest_is_shown_however_much_time_was_dilated() -> None:
    records = [r for group, dilation in (("g1", 12.6), ("g3", 12.7), ("g2", 12.5)) for r in emulated(group, dilation)]
    assert [t.group for t in speedup.build(records)] == ["g3"]


def test_published_figures_stand_beside_those_of_the_same_link_and_model_alone() -> None:
    known = emulated("g1", 12.6)
    (same,), (slower,) = (speedup.build(emulated("g2", 12.0, link_gbps=gbps)) for gbps in (10, 1))
    assert published.matching(same, known) is not None
    assert published.matching(slower, known) is None
    small, large = (
        [replace(r, config={**r.config, "workload": {"image_size": size}}) for r in some]
        for size, some in ((64, known), (224, same.records))
    )
    (larger,) = speedup.build(large)
    assert published.matching(larger, small) is None
    # What was published of another model later does not hide it, nor do a user's own comparisons hide each other.
    later = [replace(r, id=f"{r.id}-3", group="g3", time="2026-01-02T00:00:00Z") for r in small]
    assert published.matching(larger, [*large, *later]) is not None
    assert [(t.group, t.workload) for t in speedup.build([*large, *later])] == [
        ("g2", "image_size=224"),
        ("g3", "image_size=64"),
    ]


def test_of_published_figures_for_several_machines_the_latest_stand_beside() -> None:
    known = emulated("g1", 12.6)
    other = [replace(r, hardware={**r.hardware, "cores": 64}) for r in emulated("g3", 12.6)]
    (mine,) = speedup.build(emulated("g2", 12.0))
    both = [published.matching(mine, every) for every in ([*known, *other], [*other, *known])]
    assert [found and found.group for found in both] == ["g3", "g3"]


def clocked(method: str, ms: float, name: str, at: int) -> ResultRecord:
    """A run of the table of all methods that measured its step time alone."""
    r = run(
        method, ms, id=name, exp="methods", time=f"2026-01-01T00:00:0{at}Z", data={"name": "digits", "synthetic": False}
    )
    return replace(r, config={**r.config, "evaluate": False})


def test_in_the_table_of_all_methods_the_fastest_dense_one_is_the_baseline_and_the_latest_time_counts() -> None:
    trained = [score(method, 90.0, 0, 0.1, exp="methods") for method in ("SGDM fp32", "Birder")]
    adamw = {"method": "AdamW fp32", "optimizer": "AdamW"}
    trained.append(replace(trained[0], id="adamw", **adamw))
    clocks = [
        clocked("SGDM fp32", 1000.0, "a", 1),
        replace(clocked("SGDM fp32", 800.0, "b", 2), **adamw),
        clocked("Birder", 300.0, "c", 3),
        clocked("Birder", 500.0, "d", 4),
    ]
    (table,) = methods_table.build([*trained, *clocks[::-1]])
    shown = {line.label: table.versus(line) for line in table.lines}
    assert shown == {"SGDM fp32": "0.80x", "AdamW fp32": "1.00x", "Birder": "1.60x"}


def test_in_the_table_of_all_methods_birder_without_bits_is_no_all_reduce_in_fp32() -> None:
    """It sends its update in fp32; bytes and step times are held against DDP's gradients."""

    def floats(r: ResultRecord) -> ResultRecord:
        return replace(r, id=f"floats-{r.id}", method="Birder without bits (this project's)", wire="fp32")

    trained = [score(method, 90.0, 0, 0.1, exp="methods") for method in ("SGDM fp32", "Birder")]
    clocks = [
        replace(run(method, ms, exp="methods", data=trained[0].data), config={**r.config, "evaluate": False})
        for (method, ms), r in zip((("SGDM fp32", 1000.0), ("Birder", 500.0)), trained, strict=True)
    ]
    (table,) = methods_table.build([*trained, floats(trained[1]), *clocks, floats(clocks[1])])
    shown = {line.label: (table.versus(line), table.payload_ratio(line)) for line in table.lines}
    assert shown["SGDM fp32"] == ("1.00x", 1.0)
    assert shown["Birder"] == shown["Birder without bits (this project's)"] == ("2.00x", 1 / 32)
