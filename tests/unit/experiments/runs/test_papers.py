"""`make cser`, `make zero_one_adam`, `make slamb`: what they run, and the comparison that they print."""

from __future__ import annotations

import dataclasses
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import compare
from experiments.config import compose, papers
from experiments.config.papers import Paper, Part
from experiments.records import labels, record
from experiments.records.record import ROOT, ResultRecord
from experiments.report import speedup_table, tables
from experiments.timing import plan
from launch.errors import UserError
from launch.slurm import job as slurm_job
from tests.helpers.records import run
from tests.helpers.tiers import slow_unless

LINKS = ("cluster=emulated", "cluster.link_gbps=0.1", "cluster.dilation=1")
AS_PAPERS = {"view": speedup_table.as_papers, "kinds": ("speedup", "accuracy")}


def digits(paper: Paper) -> Part:
    (part,) = [p for p in paper.parts if p.accuracy]
    return part


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "cser", papers.names()))
def test_every_part_holds_its_methods_and_composes(name: str) -> None:
    for part in papers.load(name).parts:
        kept = part.kept([], None)
        assert part.methods is None or sorted(kept) == sorted(part.methods)
        assert part.accuracy or part.overrides == LINKS
        for variant in compare.variants(compose.compose(part.given(["scale=quick"])), kept):
            compose.resolve(variant)
    assert digits(papers.load(name)).exp == "methods_digits"


@pytest.mark.parametrize("name", slow_unless(lambda name: name == "zero_one_adam", papers.names()))
def test_each_paper_has_a_dense_method_1_bit_adam_and_its_own(name: str) -> None:
    part = digits(papers.load(name))
    variants = compare.variants(compose.compose(part.given([])), part.kept([], None))
    made = {labels.method(compose.resolve(v)) for v in variants}
    assert made & {"SGDM fp32", "SGDM Nesterov fp32", "AdamW fp32"}
    assert {"1-bit Adam", {"cser": "CSER", "zero_one_adam": "0/1 Adam", "slamb": "SLAMB"}[name]} <= made


def test_the_users_overrides_replace_a_parts_own() -> None:
    part = Part(exp="cser_cifar100", overrides=LINKS)
    assert part.given(["cluster.link_gbps=2"])[2:] == ["cluster.dilation=1", "cluster.link_gbps=2"]
    given = part.given(["cluster=local", "cluster.nodes=2"])
    assert given == ["+exp=cser_cifar100", "cluster=local", "cluster.nodes=2"]
    assert [p.exp for p in papers.load("cser").asked(["data.path=x"])] == ["cser_cifar100"]
    assert [p.exp for p in papers.load("cser").asked(["scale=paper"])] == ["cser_cifar100"]
    assert [p.exp for p in papers.load("slamb").asked(["scale=quick"])][-1] == "methods_digits"


def test_parts_run_one_after_the_other_with_the_methods_that_they_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ran: list[tuple[str, list[str]]] = []

    def instead(overrides: list[str], methods: list[str], show: Any) -> int:
        ran.append((overrides[0], methods))
        return int(len(ran) == 1)

    monkeypatch.setattr(compare, "compare", instead)
    where = f"results_dir={tmp_path}/results"
    # One that failed is in the status, also where it is not the last.
    assert compare.main(["--paper", "zero_one_adam", where, "--methods", "birder,onebit_adam"]) == 1
    assert ran == [("+exp=zero_one_bert_base", ["onebit_adam"]), ("+exp=methods_digits", ["onebit_adam", "birder"])]
    for wrong in (["slamb", "--methods", "lion"], ["cser", "+exp=digits"]):
        assert compare.main(["--paper", *wrong]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_make_shows_the_volume_of_the_paper_that_has_one() -> None:
    for name in papers.names():
        made = subprocess.run(["make", "-n", name, "VENV=none"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("studies/volume.py" in made.stdout) is (name == "zero_one_adam")


@pytest.mark.slow
def test_a_part_that_is_recorded_is_shown_and_not_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ["--paper", "zero_one_adam", f"results_dir={tmp_path}", "--methods", "zero_one_adam"]
    made: list[str] = []

    def instead(overrides: list[str], methods: list[str], show: Any) -> int:
        made.append(overrides[0])
        for number, variant in enumerate(compare.variants(compose.compose(overrides), methods)):
            about = {"id": f"r{len(made)}-{number}", "group": f"g{len(made)}", "overrides": variant.overrides}
            record.write(run("Birder", 10.0, exp=str(variant.config.exp), **about), tmp_path)
        return 0

    monkeypatch.setattr(compare, "compare", instead)
    assert compare.main(given) == 0
    parts = list(made)
    assert parts
    assert compare.main(given) == 0
    assert made == parts
    assert "recorded as g1" in capsys.readouterr().out
    (tmp_path / "records" / "r1-0.json").unlink()
    assert compare.main(given) == 0
    assert made == [*parts, parts[0]]


@pytest.mark.parametrize("mode", ["interleaved", "sequential"])
def test_a_part_whose_jobs_have_not_ended_is_not_submitted_again(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With cluster.wait=false the command has returned before anything is recorded."""
    given = ["+exp=methods_digits", "cluster=slurm", "cluster.wait=false", f"timing.mode={mode}"]
    given += [f"output_dir={tmp_path}", f"results_dir={tmp_path}/results"]
    made = [compose.compose(given)]
    queued: list[str] = []
    submitted: list[str] = []

    def instead(overrides: list[str], methods: list[str], show: Any) -> int:
        spec = plan.make(made, "g") if mode == "interleaved" else compose.make_spec(made[0])
        spec.save()
        (spec.path / "job.sh").touch()
        submitted.append(spec.id)
        queued.append(spec.id)
        return 0

    def ask(command: list[str]) -> str:
        return "".join(f"{17 + number}\n" for number, name in enumerate(queued) if name in command[-1])

    monkeypatch.setattr(compare, "variants", lambda *_: made)
    monkeypatch.setattr(compare, "compare", instead)
    monkeypatch.setattr(slurm_job, "ask", ask)
    for _ in range(2):
        assert compare._part(given, ["birder"], lambda *_: []) == 0
    assert len(submitted) == 1
    assert "SLURM's jobs have not ended: 17\n" in capsys.readouterr().out
    queued.clear()  # the job has failed, and its record says so or is not there
    assert compare._part(given, ["birder"], lambda *_: []) == 0
    assert len(submitted) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_recorded_part_with_a_method_that_failed_does_not_end_well(tmp_path: Path, lost: bool) -> None:
    overrides = ["+exp=digits", f"results_dir={tmp_path}"]
    for number, variant in enumerate(compare.variants(compose.compose(overrides), ["onebit_adam", "birder"])):
        how = {"status": "failed", "reason": "the loss is nan at step 3"} if lost and number else {}
        about = {"id": f"r{number}", "group": "g", "overrides": variant.overrides, "exp": "digits"}
        record.write(run("Birder", 10.0, **about, **how), tmp_path)
    shown: list[str] = []
    status = compare._part(overrides, ["onebit_adam", "birder"], lambda _, group: shown.append(group) or [])
    assert (status, shown) == (int(lost), ["g"])


def group() -> list[ResultRecord]:
    """SGDM, CSER-like local steps, and a failed run, on real data."""

    def scored(method: str, name: str, ms: float | None, top1: float | None, **changes: Any) -> ResultRecord:
        metric = {} if top1 is None else {"name": "top1", "value": top1, "target": None, "higher_is_better": True}
        real = {"data": {"name": "digits", "synthetic": False}, "metric": metric, "exp": "methods_digits"}
        r = run(method, ms, id=name, **{**real, **changes})
        return dataclasses.replace(r, state_bytes_per_rank=400_000, collectives_per_step=1.5)

    uneven = {"steps": 8, "median_ms": 10.0, "mean_ms": 25.0, "p10_ms": 9.0, "p90_ms": 90.0, "typical": "mean"}
    return [
        scored("SGDM fp32", "sgdm", 100.0, 97.5, rounds_per_step=1.0),
        scored("Birder", "local", None, 96.25, timing=uneven, rounds_per_step=0.125),
        scored("1-bit Adam", "bad", None, None, status="failed", reason="the loss is nan"),
    ]


def test_the_comparison_of_a_group(tmp_path: Path) -> None:
    for r in group():
        record.write(r, tmp_path)
    out = io.StringIO()
    tables.print_group(tmp_path, "g", Console(file=out, width=118), **AS_PAPERS)
    text = out.getvalue()
    lines = {
        line.split("│")[1].strip(): [c.strip() for c in line.split("│")[2:-1]]
        for line in text.splitlines()
        if "│" in line
    }
    assert lines["SGDM fp32"] == ["154 MB", "1", "1.00", "1.50", "400 kB", "100", "1.00x", "97.50"]
    assert lines["Birder"] == ["4.80 MB", "1/32.0", "0.125", "1.50", "400 kB", "mean 25.0", "4.00x", "96.25"]
    assert lines["1-bit Adam"] == ["failed", *["—"] * 7]
    assert "1-bit Adam failed: the loss is nan" in text
    assert max(len(line) for line in text.splitlines() if "│" in line) <= 118
    with pytest.raises(UserError, match="no record of group 'absent'"):
        tables.print_group(tmp_path, "absent", **AS_PAPERS)


def test_the_comparison_stands_beside_the_papers_numbers(tmp_path: Path) -> None:
    record.write(run("SGDM fp32", 10.0, exp="cser_cifar100"), tmp_path)
    out = io.StringIO()
    tables.print_group(
        tmp_path,
        "g",
        Console(file=out, width=118),
        verbose=True,
        view=speedup_table.as_papers,
        kinds=("speedup", "accuracy"),
    )
    assert "acceleration, CIFAR-100, nearly: 10x (CSER, NeurIPS 2020, abstract; verified)" in out.getvalue()
    line = next(line for line in out.getvalue().splitlines() if line.startswith("│ SGDM"))
    assert line.rstrip("│ ").endswith("—")  # synthetic data: no accuracy


def test_a_paper_that_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text, words in (
        ("parts: [{exp: digits}]\nspeed: 1", "speed: extra inputs are not permitted"),
        ("parts: [{methods: [sgdm]}]", "parts.0.exp: field required"),
        ("parts: [", "is not a readable paper"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"^{path}") as error:
            papers.load(path)
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(
        UserError, match="no paper 'lion'; there are: cser, slamb, zero_one_adam, or the path of a YAML"
    ):
        papers.load("lion")
