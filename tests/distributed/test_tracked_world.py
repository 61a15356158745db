"""A comparison of two ranks leaves one W&B run whose table is the printed one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from experiments import compare
from experiments.records import record
from experiments.records.record import ROOT
from experiments.report import metrics
from tests.helpers import wandb_file
from tests.helpers.wandb_file import columns, shown_table

ROUNDS = 4


@pytest.mark.slow
@pytest.mark.long
def test_make_leaves_one_run_whose_table_is_the_printed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, three methods, offline: what `make digits NODES=2 ARGS="wandb=offline"` does, but in turns."""
    pytest.importorskip("wandb")
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    asked = ["+exp=digits", "cluster.nodes=2", f"results_dir={tmp_path}/results", f"output_dir={tmp_path}/outputs"]
    asked += [
        "timing.mode=interleaved",
        f"timing.rounds={ROUNDS}",
        "train.threads=1",
        "train.max_steps=30",
        "wandb=offline",
    ]
    assert compare.main([*asked, "--methods", "sgdm"]) == 0
    shown = capsys.readouterr()
    wandb = wandb_file.read(tmp_path / "outputs")  # there is one
    table = wandb.table("comparison")
    assert columns([table["columns"], *table["data"]]) == columns(shown_table(shown.out))
    assert len(table["data"]) == 3
    assert shown.out.count(f"wandb sync {wandb.folder}") == 2  # when it begins, and below the table
    assert (wandb.job, wandb.exit_code) == ("comparison", 0)
    assert wandb.group == wandb.name
    group = {r.group for r in record.read_all(tmp_path / "results")}
    assert group == {wandb.group}
    # The numbers behind it are those of the records.
    numbers = wandb.table("rows")
    rows = {row[-1]: dict(zip(numbers["columns"], row, strict=True)) for row in numbers["data"]}
    rounds = wandb.table("rounds")
    for r in record.read_all(tmp_path / "results"):
        assert rows[r.id]["step_ms"] == pytest.approx(r.timing["median_ms"])
        assert rows[r.id]["payload_inter_bytes"] == r.bytes_per_step["payload_inter"]
        assert [row[2] for row in rounds["data"] if row[-1] == r.id] == r.turns["ms"]
        (base,) = [b for b in record.read_all(tmp_path / "results") if b.wire == "fp32"]
        found = metrics.speedup(base, r)
        assert found is not None
        assert rows[r.id]["vs_fp32"] == pytest.approx(found.value, abs=1e-3)
    assert wandb.config["train"]["max_steps"] == 30
    assert [v["wire"] for v in wandb.config["variants"]] == ["none", "fp32", "bf16"]
    assert wandb.images()
    assert all(path.read_bytes()[1:4] == b"PNG" for path in wandb.images())
    assert wandb.system > 0  # of the time while it ran
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout
    assert after == before
