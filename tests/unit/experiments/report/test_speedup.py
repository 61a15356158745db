"""Speedup tables: recomputed by hand, nothing guessed, nothing hidden, and it says when compression does not pay."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from experiments.records import record
from experiments.report import captions, sentences, speedup, speedup_table
from tests.helpers.records import cells, full_group, run


def test_speedup_is_baseline_over_method() -> None:
    (table,) = speedup.build(full_group())
    rows = {row.label: row for row in table.rows}
    assert list(rows) == ["SGDM fp32", "SGDM bf16", "1-bit Adam", "Birder", "no communication"]
    assert table.speedup(rows["Birder"], "fp32") == pytest.approx(3.75)
    assert table.speedup(rows["Birder"], "bf16") == pytest.approx(2.125)
    assert table.speedup(rows["SGDM bf16"], "fp32") == pytest.approx(3000 / 1700)
    assert table.speedup(rows["Birder"], "none") == pytest.approx(0.75)
    assert table.payload_ratio(rows["Birder"]) == pytest.approx(1 / 32)
    text = speedup_table.as_table(table).markdown()
    assert cells(text, "Birder")[1:10] == [
        "1bit",
        "800 (792–808)",
        "—",
        "3.75x",
        "2.12x",
        "75 %",
        "4.80 MB",
        "1/32.0",
        "—",
    ]
    assert cells(text, "Birder")[-1] == "[birder](../records/birder.json)"
    assert "Faster than fp32 DDP: Birder 3.75x, 1-bit Adam 3.00x; the bound, without communication, is 5.00x." in text
    assert "Birder, beats bf16 DDP (2.12x)" in text


def test_a_number_that_no_record_holds_is_a_dash() -> None:
    (table,) = speedup.build([run("Birder", 800.0)])
    row = cells(speedup_table.as_table(table).markdown(), "Birder")
    assert row[4:7] == ["—", "—", "—"]
    assert row[8:12] == ["—", "—", "—", "—"]
    assert captions.compression(table) is None


def test_a_run_of_which_no_step_was_timed_has_no_step_time() -> None:
    """Virtual workers, or fewer steps than are left out: a dash, which hides a column that holds nothing else."""
    (table,) = speedup.build([run("Birder", timing={"steps": 0})])
    assert speedup_table.step_time(table.rows[0].record) == "—"


def test_a_run_without_a_step_time_does_not_stand_for_those_that_have_one() -> None:
    """As one of two seeds that was resumed so near its end that no step was timed."""
    seeds = [run("Birder", 800.0, id="a", seed=0), run("Birder", timing={"steps": 0}, id="b", seed=1)]
    (table,) = speedup.build([*seeds, run("SGDM fp32", 1600.0)])
    row = table.row("Birder")
    assert (row.ms, row.runs) == (800.0, 1)
    assert table.speedup(row, "fp32") == 2.0


@pytest.mark.parametrize("method", ["SGDM fp32", "no communication"])
def test_a_run_of_which_no_step_was_timed_is_not_held_against_arithmetic(method: str) -> None:
    """Of runs over shaped links: their table is written all the same."""
    link = {**record.LINK, "shaped": True, "mbit_per_s": 100.0}
    about: dict[str, Any] = {"nodes": 2, "link": link, "bytes_per_step": {**record.BYTES, "payload_inter": 1e6}}
    untimed = run(method, timing={"steps": 0}, **about)
    others = [run(m, 900.0, **about) for m in ("SGDM fp32", "no communication") if m != method]
    (table,) = speedup.build([untimed, *others])
    assert speedup_table.step_time(table.row(method).record) == "—"
    assert cells(speedup_table.as_table(table).markdown(), method)[2] == "—"


def test_of_several_dense_methods_the_fastest_is_the_baseline() -> None:
    """Against the slowest a method would seem to gain what another optimizer's update costs."""
    slower = dataclasses.replace(run("SGDM fp32", 4000.0, id="adamw"), method="AdamW fp32", optimizer="AdamW")
    (table,) = speedup.build([*full_group(), slower])
    assert {wire: row.label for wire in ("fp32", "bf16", "none") if (row := table.baseline(wire))} == {
        "fp32": "SGDM fp32",
        "bf16": "SGDM bf16",
        "none": "no communication",
    }
    assert table.speedup(table.row("Birder"), "fp32") == pytest.approx(3000 / 800)


def test_it_says_when_compression_does_not_pay() -> None:
    records = [
        run("SGDM fp32", 900.0),
        run("Birder", 1000.0),
        run("1-bit Adam", 1200.0),
        run("no communication", 850.0),
    ]
    (table,) = speedup.build(records)
    said = captions.compression(table) or ""
    assert said.startswith("On this link, do not compress: the fastest compressed method, Birder, reaches 0.90x")
    assert "1.06x" in said


def test_a_speedup_within_the_spread_is_not_decided_and_one_below_bf16_is_said_to_be() -> None:
    records = [run("SGDM fp32", 1000.0), run("SGDM bf16", 600.0), run("Birder", 990.0)]
    said = captions.compression(speedup.build(records)[0]) or ""
    assert said.startswith("Whether to compress on this link is not decided: Birder 1.01x")
    assert "does not beat bf16 DDP (0.61x)" in said


def test_failed_runs_are_rows_with_their_reason() -> None:
    # The launcher that writes this record may see another device than the workers did.
    broken = run("Birder", status="failed", reason="rank 2: out | of memory", data={"name": None, "synthetic": None})
    broken = dataclasses.replace(broken, hardware={**broken.hardware, "device": "cuda"})
    (table,) = speedup.build([run("SGDM fp32", 900.0), broken])
    assert [row.label for row in table.rows] == ["SGDM fp32", "Birder"]
    text = speedup_table.as_table(table).markdown()
    assert "- Birder failed: rank 2: out | of memory" in text.splitlines()
    line = next(x for x in text.splitlines() if x.startswith("| Birder"))
    assert "| failed |" in line
    assert line.count("—") == 9


def test_a_group_that_failed_altogether_does_not_hide_a_good_one() -> None:
    later = run("Birder", status="failed", reason="x", group="later", time="2026-02-01T00:00:00Z", id="late")
    (table,) = speedup.build([*full_group(), later])
    assert table.group == "g"
    (table,) = speedup.build([later])
    assert [row.record.status for row in table.rows] == ["failed"]


def test_the_latest_group_of_a_setting_is_shown_and_machines_stay_apart() -> None:
    old = full_group()
    new = [dataclasses.replace(r, id="n-" + r.id, group="h", time="2026-03-01T00:00:00Z") for r in old]
    other = [dataclasses.replace(r, id="o-" + r.id, hardware={**r.hardware, "cores": 64}) for r in old]
    wide = [dataclasses.replace(r, id="w-" + r.id, ranks_per_node=2) for r in old]
    found = speedup.build([*old, *new, *other, *wide])
    assert sorted((t.group, t.records[0].hardware["cores"], t.records[0].ranks_per_node) for t in found) == [
        ("g", 2, 2),
        ("g", 64, 1),
        ("h", 2, 1),
    ]
    assert len({t.slug for t in found}) == 3
    assert [t.group for t in speedup.build([*old, *new], "g")] == ["g"]


def test_methods_that_skip_steps_go_by_the_mean_and_show_their_rounds() -> None:
    records = [dataclasses.replace(r, rounds_per_step=1.0) for r in full_group()]
    timing = {"steps": 8, "median_ms": 600.0, "mean_ms": 1000.0, "p10_ms": 590.0, "p90_ms": 3100.0, "typical": "mean"}
    local = run("Birder", timing=timing, rounds_per_step=0.125, id="local", config={"optimizer.reset_every": 8})
    (table,) = speedup.build([*records, local])
    row = next(row for row in table.rows if row.record.id == "local")
    assert table.speedup(row, "fp32") == pytest.approx(3.0)  # 3000 / 1000, not 3000 / 600
    text = speedup_table.as_table(table).markdown()
    assert "mean 1000 (590–3100)" in text
    assert "| rounds per step |" in text
    assert cells(text, row.label)[10:12] == ["—", "0.125"]
    assert cells(text, "SGDM fp32")[11] == "1.00"
    assert sentences.say("uneven") in text
    assert f"not decided: {row.label} 3.00x" in str(captions.compression(table))  # its spread is that of kinds of steps
    assert "rounds per step" not in speedup_table.as_table(speedup.build(records)[0]).markdown()


def test_batches_are_never_compared_with_each_other() -> None:
    records = [run("SGDM fp32", 900.0), run("Birder", 100.0, config={"train.batch_per_rank": 1})]
    assert [captions.compression(t) for t in speedup.build(records)] == [None, None]


def test_seeds_share_a_row_and_variants_do_not() -> None:
    records = [run("SGDM fp32", 1000.0)]
    records += [run("Birder", ms, id=f"b{i}", seed=i) for i, ms in enumerate((500.0, 520.0, 480.0))]
    records += [run("Birder", 700.0, id="late", config={"comm.overlap": False})]
    (table,) = speedup.build(records)
    assert [(row.label, row.record.id, row.runs) for row in table.rows] == [
        ("SGDM fp32", "sgdm_fp32", 1),
        ("Birder (comm.overlap=false)", "late", 1),
        ("Birder (comm.overlap=true)", "b0", 3),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "4 nodes as processes on one machine; loopback network, not shaped"),
        ({"cluster": "emulated"}, "4 nodes emulated on one machine; loopback network, not shaped"),
        ({}, "synthetic data; quick scale"),
        ({"data": {"name": "ImageNet", "synthetic": False}, "scale": "paper"}, "no real link behaves like this"),
        (
            {"link": {**record.LINK, "shaped": True, "mbit_per_s": 500.0, "measured": True, "dilation": 4}},
            "time dilation 4.00",
        ),
        ({"link": {**record.LINK, "shaped": True, "mbit_per_s": 500.0, "measured": True}}, "shaped to 500 Mbit/s"),
        ({"link": {**record.LINK, "kind": "Ethernet", "mbit_per_s": 10000}}, "Ethernet, 10000 Mbit/s"),
        ({"nodes": 1, "ranks_per_node": 4}, "one node, nothing crosses a network"),
    ],
)
def test_titles_say_what_the_runs_are_not(changes: dict[str, Any], words: str) -> None:
    (table,) = speedup.build([run("SGDM fp32", 1.0, **changes)])
    assert words in speedup_table.as_table(table).markdown()


def test_shaped_links_of_one_group_make_one_table_and_odd_ones_are_marked() -> None:
    link = {**record.LINK, "kind": "emulated", "shaped": True, "measured": True, "dilation": 20.0, "link_gbps": 10}
    rates = {"SGDM fp32": (471.0, 0.01), "Birder": (402.0, 0.15)}
    records = [
        run(method, 100.0, link={**link, "set_mbit_per_s": 500.0, "mbit_per_s": rate, "off_by": off})
        for method, (rate, off) in rates.items()
    ]
    (table,) = speedup.build(records)
    text = speedup_table.as_table(table).markdown()
    assert "shaped to 500 Mbit/s per node and direction (measured: 402–471 Mbit/s of TCP)" in text
    assert "time dilation 20.0, so that the link stands for 10.0 Gbit/s; step times are wall-clock here" in text
    assert "| Birder ‡ |" in text
    assert "| SGDM fp32 |" in text
    assert "‡ The link was more than 10% off its set rate" in text
    other = run("Birder", 100.0, id="other", link={**link, "set_mbit_per_s": 900.0, "mbit_per_s": 850.0})
    assert len(speedup.build([*records, other])) == 2


def test_real_runs_on_a_real_network_carry_no_disclaimer() -> None:
    link = {**record.LINK, "kind": "Ethernet", "mbit_per_s": 10000}
    real = run("SGDM fp32", 1.0, scale="paper", data={"name": "ImageNet", "synthetic": False}, link=link)
    for word in ("synthetic", "emulated", "quick", "loopback"):
        assert word not in sentences.caveats([real])
