"""Tables: speedups recomputed by hand, nothing guessed, nothing hidden, the same bytes every time."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import accuracy, formats, published, record, speedup, tables
from experiments.errors import UserError
from experiments.record import ResultRecord

METHODS: dict[str, dict[str, Any]] = {
    "SGDM fp32": {"_target_": "birder.SGDM", "wire": "fp32", "lr": 0.1},
    "SGDM bf16": {"_target_": "birder.SGDM", "wire": "bf16", "lr": 0.1},
    "1-bit Adam": {"_target_": "birder.OneBitAdam", "wire": "fp32", "lr": 0.001},
    "Birder": {"_target_": "birder.Birder", "lr": 0.001},
    "no communication": {"_target_": "birder.SGDM", "wire": "fp32", "lr": 0.1},
}


def run(method: str, ms: float | None = None, **changes: Any) -> ResultRecord:
    """A record of `method` on 4 loopback nodes, group g; step time `ms` when given."""
    name = changes.pop("id", method.replace(" ", "_").lower())
    config: dict[str, Any] = {
        "train": {"batch_per_rank": 4, "accumulate": 1, "precision": "fp32", "epochs": 1, "max_steps": 12},
        "optimizer": dict(METHODS[method]),
        "comm": {"overlap": True},
        "seed": changes.get("seed", 0),
    }
    for key, value in changes.pop("config", {}).items():
        section, _, leaf = key.partition(".")
        config[section][leaf] = value
    timing = {} if ms is None else {"steps": 9, "median_ms": ms, "p10_ms": ms * 0.99, "p90_ms": ms * 1.01}
    payload = {"SGDM fp32": 153.6e6, "SGDM bf16": 76.8e6, "1-bit Adam": 4.8e6, "Birder": 4.8e6}.get(method)
    base: dict[str, Any] = {
        "id": name,
        "group": "g",
        "time": "2026-01-01T00:00:00Z",
        "status": "completed",
        "reason": None,
        "command": "run.py",
        "overrides": [],
        "config": config,
        "git": {"sha": None, "dirty": None},
        "exp": "resnet50",
        "workload": "resnet50",
        "optimizer": config["optimizer"]["_target_"].rpartition(".")[2],
        "method": method,
        "wire": {"SGDM fp32": "fp32", "SGDM bf16": "bf16", "no communication": "none"}.get(method, "1bit"),
        "cluster": "local",
        "scale": "quick",
        "nodes": 4,
        "ranks_per_node": 1,
        "seed": 0,
        "data": {"name": "synthetic 64x64 images", "synthetic": True},
        "hardware": {"device": "cpu", "cpu": "some CPU", "cores": 2, "memory_gb": 8, "gpus": []},
        "software": {},
        "link": dict(record.LINK),
        "timing": timing,
        "bytes_per_step": {**record.BYTES, "payload_intra": 0, "payload_inter": payload},
    }
    return ResultRecord(**{**base, **changes})


def score(method: str, value: float | None, seed: int, lr: float, **changes: Any) -> ResultRecord:
    """A record with a test accuracy on real data."""
    name = f"{method.replace(' ', '_').lower()}-{lr}-{seed}"
    metric = {"name": "top1", "value": value, "target": 92.0, "higher_is_better": True, "all": {"top1": value}}
    extra = {
        "exp": "digits",
        "group": None,
        "data": {"name": "digits", "synthetic": False},
        "metric": metric,
        "id": name,
    }
    return run(method, seed=seed, config={"optimizer.lr": lr}, **{**extra, **changes})


def save(results: Path, *records: ResultRecord) -> Path:
    results.mkdir(exist_ok=True)
    for r in records:
        record.write(r, results)
    return results


def full_group() -> list[ResultRecord]:
    times = {"SGDM fp32": 3000.0, "SGDM bf16": 1700.0, "1-bit Adam": 1000.0, "Birder": 800.0, "no communication": 600.0}
    return [run(method, ms) for method, ms in times.items()]


def cells(markdown: str, label: str) -> list[str]:
    """The cells of the first table row that begins with `label`."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_speedup_is_baseline_over_method() -> None:
    (table,) = speedup.build(full_group())
    rows = {row.label: row for row in table.rows}
    assert list(rows) == ["SGDM fp32", "SGDM bf16", "1-bit Adam", "Birder", "no communication"]
    assert table.speedup(rows["Birder"], "fp32") == pytest.approx(3.75)
    assert table.speedup(rows["Birder"], "bf16") == pytest.approx(2.125)
    assert table.speedup(rows["SGDM bf16"], "fp32") == pytest.approx(3000 / 1700)
    assert table.of_bound(rows["Birder"]) == pytest.approx(0.75)
    assert table.payload_ratio(rows["Birder"]) == pytest.approx(1 / 32)
    text = speedup.markdown(table)
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
    row = cells(speedup.markdown(table), "Birder")
    assert row[4:7] == ["—", "—", "—"]
    assert row[8:12] == ["—", "—", "—", "—"]
    assert speedup.conclusion(table) is None


def test_it_says_when_compression_does_not_pay() -> None:
    records = [
        run("SGDM fp32", 900.0),
        run("Birder", 1000.0),
        run("1-bit Adam", 1200.0),
        run("no communication", 850.0),
    ]
    (table,) = speedup.build(records)
    said = speedup.conclusion(table) or ""
    assert said.startswith("On this link, do not compress: the fastest compressed method, Birder, reaches 0.90x")
    assert "1.06x" in said


def test_a_speedup_within_the_spread_or_below_bf16_is_said_to_be() -> None:
    records = [run("SGDM fp32", 1000.0), run("SGDM bf16", 600.0), run("Birder", 990.0)]
    said = speedup.conclusion(speedup.build(records)[0]) or ""
    assert "Birder 1.01x (within the spread)" in said
    assert "does not beat bf16 DDP (0.61x)" in said


def test_failed_runs_are_rows_with_their_reason() -> None:
    # The launcher that writes this record may see another device than the workers did.
    broken = run("Birder", status="failed", reason="rank 2: out | of memory", data={"name": None, "synthetic": None})
    broken = dataclasses.replace(broken, hardware={**broken.hardware, "device": "cuda"})
    (table,) = speedup.build([run("SGDM fp32", 900.0), broken])
    assert [row.label for row in table.rows] == ["SGDM fp32", "Birder"]
    line = next(x for x in speedup.markdown(table).splitlines() if x.startswith("| Birder"))
    assert "failed: rank 2: out \\| of memory" in line
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
    text = speedup.markdown(table)
    assert "mean 1000 (590–3100)" in text
    assert "| rounds per step |" in text
    assert cells(text, row.label)[10:12] == ["—", "0.125"]
    assert cells(text, "SGDM fp32")[11] == "1.00"
    assert speedup.UNEVEN_NOTE in text
    assert "(within the spread)" not in str(speedup.conclusion(table))
    assert "rounds per step" not in speedup.markdown(speedup.build(records)[0])


def test_batches_are_never_compared_with_each_other() -> None:
    records = [run("SGDM fp32", 900.0), run("Birder", 100.0, config={"train.batch_per_rank": 1})]
    assert [speedup.conclusion(t) for t in speedup.build(records)] == [None, None]


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
        ({}, "4 nodes emulated on one machine; loopback network, not shaped"),
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
    assert words in speedup.markdown(table)


def test_shaped_links_of_one_group_make_one_table_and_odd_ones_are_marked() -> None:
    link = {**record.LINK, "kind": "emulated", "shaped": True, "measured": True, "dilation": 20.0, "link_gbps": 10}
    rates = {"SGDM fp32": (471.0, 0.01), "Birder": (402.0, 0.15)}
    records = [
        run(method, 100.0, link={**link, "set_mbit_per_s": 500.0, "mbit_per_s": rate, "off_by": off})
        for method, (rate, off) in rates.items()
    ]
    (table,) = speedup.build(records)
    text = speedup.markdown(table)
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
        assert word not in speedup.honesty([real])


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
    text = accuracy.markdown(table, plot=False)
    assert "| Birder | 0.001 | **91.00 ± 1.00** | 3 | 92 | best |" in text
    # One of two seeds is not finite: no candidate, and it shows.
    assert "| Birder | 0.01 | 95.00 | 1 of 2 | 92 |  |" in text
    assert "| Birder | 0.1 | failed: loss is nan | 0 of 1 | 92 |  |" in text
    assert "[2](../records/birder-0.001-2.json)" in text


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
    best = table.best("Birder")
    assert best is not None
    assert best.lr == 0.2
    text = accuracy.markdown(table, plot=False)
    assert "| Birder | 0.2 | **90.50 ± 0.71** | 77.50 ± 10.61 | 2 of 3 | — | best |" in text
    assert "chosen by held_out of its first seed" in text


def test_lower_is_better_for_perplexity() -> None:
    metric: dict[str, Any] = {"name": "perplexity", "target": None, "higher_is_better": False, "all": {}}
    records = [score("Birder", None, 0, lr, metric={**metric, "value": v}) for lr, v in ((0.1, 150.0), (0.2, 180.0))]
    (table,) = accuracy.build(records)
    best = table.best("Birder")
    assert best is not None
    assert best.lr == 0.1
    assert "lower is better" in accuracy.markdown(table, plot=False)


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


def test_the_same_seed_again_replaces_the_older_run() -> None:
    again = score("Birder", 95.0, 0, 0.1, id="again", time="2026-05-01T00:00:00Z")
    (table,) = accuracy.build([score("Birder", 90.0, 0, 0.1), again])
    assert [r.id for r in table.cells[0].records] == ["again"]


def curve_records(results: Path) -> list[ResultRecord]:
    (results / "curves").mkdir(parents=True)
    found = []
    for method, seed in (("Birder", 0), ("Birder", 1), ("SGDM fp32", 0)):
        r = score(method, 90.0 + seed, seed, 0.1)
        text = "step,seconds,loss,metric\n1,0.1,2.0,\n10,1.0,1.0,80.0\n20,2.0,0.5,90.0\n"
        (results / "curves" / f"{r.id}.csv").write_text(text)
        found.append(dataclasses.replace(r, curve=f"curves/{r.id}.csv"))
    return found


def test_tables_and_plots_are_the_same_bytes_every_time(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for results in (one, two):
        records = full_group() + curve_records(results)
        # Written in another order, at another time.
        save(results, *(records if results is one else records[::-1]))
        tables.write(results)
    names = sorted(p.relative_to(one).as_posix() for p in one.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(two).as_posix() for p in two.rglob("*") if p.is_file())
    assert [n for n in names if n.startswith(("tables", "plots"))] == [
        "plots/digits_quick_4x1_curve.png",
        "plots/resnet50_quick_local_4x1_step_time.png",
        "tables/digits.md",
        "tables/resnet50.md",
    ]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    for name in ("tables/digits.md", "tables/resnet50.md"):
        for line in (one / name).read_text().splitlines():
            if line.startswith("!["):
                assert (one / "tables" / line[line.index("(") + 1 : -1]).is_file()
    page = (one / "tables" / "resnet50.md").read_text()
    assert "2.5x (Birder, NeurIPS 2023, abstract; verified)" in page


def test_check_finds_changed_missing_and_left_over_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = save(tmp_path / "r", *full_group())
    assert tables.main(["--results", str(results), "--check"]) == 1
    assert tables.main(["--results", str(results)]) == 0
    assert tables.main(["--results", str(results), "--check"]) == 0
    capsys.readouterr()

    page = results / "tables" / "resnet50.md"
    page.write_text(page.read_text().replace("3.75x", "9.75x"))
    assert tables.main(["--results", str(results), "--check"]) == 1
    error = capsys.readouterr().err
    assert error == "out of date, run `make tables`: tables/resnet50.md\n"

    record.write(run("Birder", 500.0), results)
    assert tables.check(results) == ["plots/resnet50_quick_local_4x1_step_time.png", "tables/resnet50.md"]

    for path in (results / "records").iterdir():
        path.unlink()
    (results / "tables" / "own.md").write_text("by hand\n")
    assert len(tables.check(results)) == 2
    assert tables.write(results) == []
    assert [p.name for p in (results / "tables").iterdir()] == ["own.md"]
    assert list((results / "plots").iterdir()) == []


def test_one_experiment_alone(tmp_path: Path) -> None:
    results = save(tmp_path / "r", *full_group(), score("Birder", 90.0, 0, 0.1))
    assert [p.name for p in tables.write(results, "digits")] == ["digits.md"]
    assert not (results / "tables" / "resnet50.md").exists()


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = save(tmp_path / "r", *full_group())
    for arguments in (
        ["--results", str(tmp_path / "absent")],
        ["--results", str(results), "--exp", "nothing"],
        ["--results", str(results), "--group", "nothing"],
    ):
        assert tables.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: no ")
        assert error.count("\n") == 1


def test_a_missing_curve_is_not_passed_over(tmp_path: Path) -> None:
    records = curve_records(tmp_path / "r")
    results = save(tmp_path / "r", *records)
    (results / str(records[0].curve)).unlink()
    with pytest.raises(UserError, match=f"{records[0].id} names the curve"):
        tables.write(results)


def test_print_group_fits_a_terminal_and_says_where_things_lie(tmp_path: Path) -> None:
    broken = run("Birder", id="broken", status="failed", reason="rank 1 died", seed=4)
    results = save(tmp_path / "r", *full_group(), broken, run("Birder", 1.0, id="elsewhere", group="other", exp="ptb"))
    tables.write(results)
    out = io.StringIO()
    tables.print_group(results, "g", Console(file=out, width=118))
    text = out.getvalue()
    table = [line for line in text.splitlines() if line.startswith(("┃", "│"))]
    assert max(len(line) for line in table) <= 118
    assert any("Birder" in line and "3.75x" in line and "75 %" in line for line in table)
    assert "Birder failed: rank 1 died" in text
    assert f"record: {results}/records/birder.json" in text
    assert f"table:  {results}/tables/resnet50.md" in text
    assert f"plot:   {results}/plots/resnet50_quick_local_4x1_step_time.png" in text
    assert "elsewhere" not in text
    with pytest.raises(UserError, match="no record of group 'absent'"):
        tables.print_group(results, "absent")


def test_published_numbers_have_source_and_status(tmp_path: Path) -> None:
    entries = published.load()
    assert len(entries) > 60
    for e in entries:
        assert e["source"]
        assert (e["value"] is None) == (e["status"] == "not found"), e
    (said,) = published.beside("bert_squad_quick", "speedup")
    assert "6.3x" in said
    assert "10 Gbit/s" in said
    assert published.beside("digits", "speedup") == []
    assert "not found" in published.beside("ptb", "accuracy")[0]
    assert any("nearly: 10x" in s and "verified" in s for s in published.beside("cser_cifar100", "speedup"))
    assert any("87 %" in s for s in published.beside("zero_one_bert_base", "speedup"))
    assert any("93.21" in s for s in published.beside("slamb_cifar10", "accuracy"))
    assert "unverified" in published.beside("cser_cifar100", "accuracy")[0]
    (tmp_path / "x.json").write_text(
        json.dumps({"values": [{"quantity": "q", "value": 1, "unit": None, "source": "s"}]})
    )
    with pytest.raises(UserError, match="'q' needs status"):
        published.load(tmp_path)


def test_published_tables_are_shown_beside_ours(tmp_path: Path) -> None:
    (glue,) = published.tables_beside("zero_one_glue", "accuracy")
    assert "verified" in glue
    assert "| BERT-Base, 1-bit Adam | 69.0 | 84.8 | 55.6 | 91.6 | 90.8 | 90.9 | 83.6/83.9 |" in glue
    throughput = published.tables_beside("zero_one_bert_large", "speedup")
    assert any(
        "; chart)" in text and "| SQuAD, InfiniBand, Adam | 20 | 17 | 31 | 57 | 110 | — |" in text
        for text in throughput
    )
    assert published.tables_beside("digits", "speedup") == []
    scored = score("Birder", 90.0, 0, 0.1, exp="zero_one_glue")
    results = save(tmp_path / "r", scored)
    tables.write(results)
    assert glue in (results / "tables" / "zero_one_glue.md").read_text()
    broken = {"title": "t", "columns": ["a", "b"], "rows": [[1]], "source": "s", "status": "chart"}
    (tmp_path / "x.json").write_text(json.dumps({"values": [], "tables": [broken]}))
    with pytest.raises(UserError, match="'t' needs 2 cells in every row"):
        published.load_tables(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.number(0.12345), "0.123"),
        (formats.number(12.345), "12.3"),
        (formats.number(1234.5), "1234"),
        (formats.number(0), "0"),
        (formats.number(None), "—"),
        (formats.number(float("nan")), "—"),
        (formats.size(999), "999 B"),
        (formats.size(102.4e6), "102 MB"),
        (formats.size(999.7e3), "1.00 MB"),
        (formats.size(0), "0 B"),
        (formats.fraction(1.0), "1"),
        (formats.fraction(1 / 31.8), "1/31.8"),
        (formats.fraction(2.0), "2.00x"),
        (formats.percent(0.875), "88 %"),
        (formats.mean_sd(0.56789, 0.00123), "0.5679 ± 0.0012"),
        (formats.mean_sd(150.0, None), "150.00"),
    ],
)
def test_formats(text: str, expected: str) -> None:
    assert text == expected


def test_committed_tables_are_those_of_the_committed_records(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    listed = subprocess.run(["git", "-C", str(root), "ls-files", "results"], capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("not a git checkout: which records are committed is not known")
    for name in listed.stdout.splitlines():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target)
    assert tables.check(tmp_path / "results") == []
