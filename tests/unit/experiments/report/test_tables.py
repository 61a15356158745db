"""The files of tables and plots: the same bytes every time, checked against the records, published numbers next to ours."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments import tables as cli
from experiments.records import labels, record
from experiments.records.record import ResultRecord
from experiments.report import figure, formats, published, tables
from launch.errors import UserError
from tests.helpers.commands import refused
from tests.helpers.records import full_group, run, save, score


def curve_records(results: Path) -> list[ResultRecord]:
    (results / "curves").mkdir(parents=True)
    found = []
    for method, seed in (("Birder", 0), ("Birder", 1), ("SGDM fp32", 0)):
        r = score(method, 90.0 + seed, seed, 0.1)
        text = "step,seconds,loss,metric\n1,0.1,2.0,\n10,1.0,1.0,80.0\n20,2.0,0.5,90.0\n"
        (results / "curves" / f"{r.id}.csv").write_text(text)
        found.append(dataclasses.replace(r, curve=f"curves/{r.id}.csv"))
    return found


@pytest.mark.slow
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


def test_a_picture_of_the_same_data_is_not_written_again(tmp_path: Path) -> None:
    """Another version of matplotlib draws other bytes; the checkout stays clean all the same. New words are new."""
    results = save(tmp_path / "r", *full_group())
    tables.write(results)
    (plot,) = (results / "plots").iterdir()
    drawn, other = plot.read_bytes(), plot.read_bytes() + b"other pixels"
    plot.write_bytes(other)
    tables.write(results)
    assert plot.read_bytes() == other
    plot.write_bytes(drawn.replace(b"data ", b"data 0", 1))  # of other data or with another title
    tables.write(results)
    assert plot.read_bytes() == drawn


def test_what_a_picture_says_is_a_part_of_what_it_shows() -> None:
    digests = set()
    for point, setting in (("a", "b"), ("a", "c"), ("d", "b")):
        made = figure.blank(2, 2)
        figure.head(made, point, setting)
        digests.add(figure.digest(figure.png(made, [1])))
    assert len(digests) == 3


def test_check_finds_changed_missing_and_left_over_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = save(tmp_path / "r", *full_group())
    assert cli.main(["--results", str(results), "--check"]) == 1
    assert cli.main(["--results", str(results)]) == 0
    assert cli.main(["--results", str(results), "--check"]) == 0
    capsys.readouterr()

    page = results / "tables" / "resnet50.md"
    page.write_text(page.read_text().replace("3.75x", "9.75x"))
    assert cli.main(["--results", str(results), "--check"]) == 1
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
        refused(cli.main, arguments, "error: no ", capsys)
    for more in (["--check"], ["--exp", "resnet50"]):
        refused(cli.main, ["--group", "g", *more], "leave out --check and --exp", capsys)


def test_a_missing_curve_is_not_passed_over(tmp_path: Path) -> None:
    records = curve_records(tmp_path / "r")
    results = save(tmp_path / "r", *records)
    (results / str(records[0].curve)).unlink()
    with pytest.raises(UserError, match=f"{records[0].id} names the curve"):
        tables.write(results)


@pytest.mark.parametrize("text", ["", "step,seconds\n1,2\n", "step,seconds,loss,metric\n1,2.0,\0torn,\n"])
def test_a_curve_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    records = curve_records(tmp_path / "r")
    results = save(tmp_path / "r", *records)
    (results / str(records[0].curve)).write_text(text)
    with pytest.raises(UserError, match=f"{records[0].curve} is not a readable curve"):
        tables.write(results)


def test_a_comparison_that_was_trained_ends_with_its_accuracies(tmp_path: Path) -> None:
    def trained(method: str, ms: float, top1: float) -> ResultRecord:
        metric = {"name": "top1", "value": top1, "target": None, "higher_is_better": True}
        return run(method, ms, id=method.replace(" ", "_"), metric=metric, data={"name": "digits", "synthetic": False})

    bound = trained("no communication", 5.0, 11.0)
    results = save(tmp_path / "r", trained("SGDM fp32", 10.0, 97.5), trained("Birder", 8.0, 96.25), bound)
    out = io.StringIO()
    (table,) = tables.print_group(results, "g", Console(file=out, width=80))
    headings, rows = table.printed()
    place = headings.index("top1")
    found = {row[0]: row[place] for row in rows}
    assert (found["SGDM fp32"], found["Birder"], found["no communication"]) == ("97.50", "96.25", "—")
    assert any("Birder" in line and "96.25" in line for line in out.getvalue().splitlines())
    assert "NIC tx" not in headings  # nobody read the interface


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
    # The verdict, the table, what is to be careful with, the paths; the rest when it is asked for.
    said = [text.index(words) for words in ("Faster than fp32 DDP", "│ Birder", "4 nodes as processes", "record: ")]
    assert said == sorted(said)
    out = io.StringIO()
    tables.print_group(results, "g", Console(file=out, width=118), verbose=True)
    assert "Published: " in out.getvalue()
    assert "Published: " not in text
    with pytest.raises(UserError, match="no record of group 'absent'"):
        tables.print_group(results, "absent")


def test_published_numbers_have_source_and_status(tmp_path: Path) -> None:
    entries = published.load()
    assert len(entries) > 60
    for e in entries:
        assert e["source"]
        assert (e["value"] is None) == (e["status"] == "not found"), e
    (said,) = published.quoted("bert_squad_quick", "speedup")
    assert "6.3x" in said
    assert "10 Gbit/s" in said
    assert published.quoted("digits", "speedup") == []
    assert "not found" in published.quoted("ptb", "accuracy")[0]
    assert any("nearly: 10x" in s and "verified" in s for s in published.quoted("cser_cifar100", "speedup"))
    assert any("87 %" in s for s in published.quoted("zero_one_bert_base", "speedup"))
    assert any("93.21" in s for s in published.quoted("slamb_cifar10", "accuracy"))
    assert "unverified" in published.quoted("cser_cifar100", "accuracy")[0]
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


def test_the_tables_of_one_experiment_leave_what_is_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's end drew the picture of all studies with its own alone, and left the verdicts that predictions quote."""

    def of(exp: str) -> ResultRecord:
        r = score("Birder", 90.0, 0, 0.1, exp=exp, id=exp)
        return dataclasses.replace(r, config={**r.config, "cluster": {"_target_": labels.VIRTUAL}})

    results, pictures = save(tmp_path, of("digits"), of("ptb")), "plots/accuracy.png"
    monkeypatch.setattr(tables.plots, "accuracies", lambda studies: b"of " + ",".join(sorted(studies)).encode())
    monkeypatch.setattr(tables.answered, "verdicts", lambda records: [[["x", r.exp]] for r in records])
    assert tables._made(results, None, None)[0][results / pictures] == b"of digits,ptb"
    verdicts = results / tables.answered.VERDICTS
    verdicts.parent.mkdir()
    verdicts.write_text("[]")
    made, _ = tables._made(results, "digits", None)
    assert results / pictures not in made
    assert json.loads(made[verdicts]) == [[["x", "digits"]], [["x", "ptb"]]]
    record.place(results, "ptb").unlink()
    assert tables._made(results, "digits", None)[0][results / pictures] == b"of digits"
