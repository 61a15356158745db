"""Evidence and runs apart: what is published, what is refused, and what stands next to a user's own figures."""

from __future__ import annotations

import dataclasses
import io
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from experiments import publish
from experiments import tables as cli
from experiments.records import record
from experiments.records.record import PUBLISHED, ROOT, ResultRecord
from experiments.report import published, tables
from tests.helpers.commands import refused
from tests.helpers.records import full_group, run, save, score

CLEAN = {"sha": "1" * 40, "dirty": False}


def clean_group() -> list[ResultRecord]:
    return [dataclasses.replace(r, git=dict(CLEAN)) for r in full_group()]


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(own: Path, published: Path, *more: str) -> int:
    return publish.main([*more, "--results", str(own), "--published", str(published)])


def test_a_group_is_moved_with_its_curves_and_both_folders_tables_follow(tmp_path: Path) -> None:
    first, *others = clean_group()
    first = dataclasses.replace(first, curve=f"curves/{first.id}.csv")
    stays = run("Birder", 1.0, id="stays", group="other", exp="ptb")
    own, published = save(tmp_path / "local", first, *others, stays), tmp_path / "published"
    (own / "curves").mkdir()
    (own / str(first.curve)).write_text("step,seconds,loss,metric\n1,1.0,2.0,\n")
    cli.write(own)
    table, plot = "tables/resnet50.md", "plots/resnet50_quick_local_4x1_step_time.png"
    before = files(own)
    assert command(own, published, "g") == 0
    after, there = files(own), files(published)
    assert sorted(after) == [n for n in before if "ptb" in n or "stays" in n]
    assert sorted(set(before) - set(after)) == sorted(there)
    for name in there:
        assert there[name] == before[name], name
    assert {table, plot, str(first.curve)} <= set(there)
    assert cli.check(published) == cli.check(own) == []


@pytest.mark.parametrize(
    ("git", "words"),
    [
        ({"sha": "1" * 40, "dirty": True}, "ran changed code; commit, run it again"),
        ({"sha": None, "dirty": None}, "ran code of an unknown commit; commit, run it again"),
    ],
)
def test_runs_of_other_code_than_a_commit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], git: dict[str, object], words: str
) -> None:
    *most, last = clean_group()
    own = save(tmp_path / "local", *most, dataclasses.replace(last, git=git))
    before = files(own)
    for arguments in (["g"], ["--exp", "resnet50"]):
        refused(lambda given: command(own, tmp_path / "published", *given), arguments, words, capsys)
    assert files(own) == before
    assert not (tmp_path / "published").exists()


def test_bad_input_is_one_line_and_moves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = clean_group()
    own = save(tmp_path / "local", dataclasses.replace(first, curve="curves/x.csv"), *others)
    for arguments, words in (
        (["absent"], "no record of group 'absent'"),
        (["absent"], "groups there: g"),
        (["--exp", "ptb"], "no record of experiment 'ptb'"),
        (["--exp", "ptb"], "experiments there: resnet50"),
        ([], "make publish GROUP=NAME"),
        (["g", "--exp", "resnet50"], "make publish GROUP=NAME"),
        (["g"], "names the curve"),
    ):
        refused(lambda given: command(own, tmp_path / "published", *given), arguments, words, capsys)
    assert not (tmp_path / "published").exists()


def test_nothing_is_moved_to_where_a_record_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, there = save(tmp_path / "local", *clean_group()), save(tmp_path / "published", run("Birder", 1.0, id="old"))
    (there / "records/broken.json").write_text("{")
    before = files(tmp_path)
    refused(lambda given: command(own, there, *given), ["g"], "broken.json is not a readable record", capsys)
    assert files(tmp_path) == before


def test_a_record_that_was_renamed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = clean_group()
    own = save(tmp_path / "local", first, *others)
    record.place(own, first.id).rename(own / "records/mine.json")
    refused(lambda given: command(own, tmp_path / "published", *given), ["g"], "has another name than", capsys)
    assert not (tmp_path / "published").exists()


def test_what_is_published_is_replaced_by_what_is_later_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of a suite, and runs that were resumed, keep their names."""
    old = dataclasses.replace(run("Birder", 1.0), git=CLEAN, time="2026-01-01T00:00:00Z")
    new = dataclasses.replace(run("Birder", 2.0), git=CLEAN, time="2026-01-02T00:00:00Z")
    own, there = save(tmp_path / "local", new), save(tmp_path / "published", old)
    assert command(own, there, "g") == 0
    assert record.read(record.place(there, old.id)) == new
    assert f"{old.id}: what was published" in capsys.readouterr().out
    for wrong in (old, dataclasses.replace(new, timing={})):
        save(own, wrong)
        before = files(tmp_path)
        refused(lambda given: command(own, there, *given), ["g"], "published already", capsys)
        assert files(tmp_path) == before
    save(own, new)  # the same once more, as after an interruption
    assert command(own, there, "g") == 0
    assert not record.place(own, new.id).exists()


def test_tables_that_cannot_be_made_are_not_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 would say that nothing was moved."""
    left = dataclasses.replace(score("Birder", 90.0, 0, 0.1), curve="curves/gone.csv")
    own, there = save(tmp_path / "local", *clean_group(), left), tmp_path / "published"
    assert command(own, there, "g") == 1
    assert "the runs are published, and the tables of" in capsys.readouterr().err
    assert len(record.read_all(there)) == len(clean_group())


def test_a_folder_is_not_published_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be emptied: what is copied onto itself is then removed."""
    own = save(tmp_path / "local", *clean_group())
    (tmp_path / "link").symlink_to(own)
    before = files(own)
    for folder in (own, tmp_path / "link"):
        refused(lambda given: command(own, Path(given[0]), "g"), [str(folder)], "the same folder", capsys)
    assert files(own) == before


def test_published_figures_stand_beside_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = save(tmp_path / "published", *full_group(), run("Birder", 7.0, id="w", group="w", nodes=2))
    mine = [
        dataclasses.replace(r, id=f"my-{r.id}", group="mine", time="2027-01-01T00:00:00Z", timing={**r.timing})
        for r in full_group()
    ]
    slow = {"steps": 9, "median_ms": 1600.0, "p10_ms": 1590.0, "p90_ms": 1610.0}
    mine = [dataclasses.replace(r, timing=slow) if r.method == "Birder" else r for r in mine]
    results = save(tmp_path / "mine", *mine)
    known = [r for r in record.read_all(theirs) if r.exp == "resnet50"]
    monkeypatch.setattr(published, "records", lambda results_dir, exp: known)
    out = io.StringIO()
    tables.print_group(results, "mine", Console(file=out, width=118), verbose=True)
    text = out.getvalue()
    row = next(line for line in text.splitlines() if line.startswith("│ Birder"))
    assert "1.88x" in row
    assert row.rstrip(" │").endswith("3.75x")
    assert "Published: 4 nodes as processes on one machine" in text
    assert str(PUBLISHED.relative_to(ROOT)) in text
    assert max(len(line) for line in text.splitlines() if line.startswith("│")) <= 118

    other = save(tmp_path / "other", *(dataclasses.replace(r, nodes=8) for r in mine))
    out = io.StringIO()
    tables.print_group(other, "mine", Console(file=out, width=118), verbose=True)
    assert "Published: nothing of this setting" in out.getvalue()


def test_the_published_folder_stands_beside_others_but_not_beside_itself(tmp_path: Path) -> None:
    folder = save(tmp_path / "published", *full_group())
    assert len(published.records(tmp_path / "mine", "resnet50", folder)) == len(full_group())
    assert published.records(tmp_path / "mine", "digits", folder) == []
    assert published.records(folder, "resnet50", folder) == []
    assert published.records(tmp_path, "resnet50", tmp_path / "absent") == []


def test_a_run_leaves_the_checkout_clean() -> None:
    """Runs write below results/local and outputs, and git ignores both."""
    from experiments.config import compose

    config = compose.compose(["+exp=digits"]).config
    assert config.results_dir == record.LOCAL
    names = [f"{config.results_dir}/records/x.json", f"{config.results_dir}/tables/x.md", f"{config.output_dir}/x"]
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", *names], capture_output=True, text=True)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout.splitlines() == names
