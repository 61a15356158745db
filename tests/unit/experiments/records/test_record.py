"""Records: written whole or not at all, read only when understood, and free of what belongs to the user's machine."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.records import labels, origin, privacy, record
from experiments.training import heartbeat, worker
from launch import link_file
from launch.errors import UserError
from launch.spec import RunSpec


def make_spec(**changes: Any) -> RunSpec:
    config: dict[str, Any] = {
        "seed": 3,
        "scale": {"name": "quick"},
        "cluster": {"name": "local", "nodes": 4, "ranks_per_node": 2},
        "workload": {"_target_": "experiments.workloads.resnet50.ResNet50"},
        "optimizer": {"_target_": "birder.Birder", "lr": 1e-3},
        "comm": {"enabled": True, "topology": "flat"},
        "data": {"path": None},
    }
    config.update(changes.pop("config", {}))
    base: dict[str, Any] = {
        "id": "run-1",
        "group": "g",
        "exp": "resnet50",
        "command": "experiments/run.py +exp=resnet50",
        "overrides": ["+exp=resnet50"],
        "config": config,
        "run_dir": "outputs/run-1",
    }
    return RunSpec(**{**base, **changes})


def test_roundtrip(tmp_path: Path) -> None:
    made = record.from_spec(
        make_spec(),
        data={"name": "digits", "synthetic": False},
        timing={"steps": 9, "median_ms": 1.5},
        metric={"name": "top1", "value": 97.5, "target": None, "higher_is_better": True, "all": {}},
    )
    path = record.write(made, tmp_path)
    assert path == tmp_path / "records" / "run-1.json"
    assert record.read(path) == made
    assert record.read_all(tmp_path) == [made]
    assert (made.method, made.wire, made.workload, made.cluster) == ("Birder", "1bit", "resnet50", "local")
    assert made.bytes_per_step == {"payload_intra": None, "payload_inter": None, "nic_tx": None, "nic_rx": None}
    assert [p.name for p in path.parent.iterdir()] == ["run-1.json"]
    assert path.read_text().startswith('{\n "schema": 1,\n "id": "run-1"')


@pytest.mark.parametrize(
    ("nodes", "comm", "optimizer", "scale"),
    [
        (4, {}, {"variance": "of_mean"}, None),
        (64, {}, {"variance": "of_mean"}, 1.0),
        (4, {"topology": "hierarchical"}, {"variance": "of_mean"}, None),
        (64, {}, {"variance": "shared"}, None),
        (64, {}, {"variance": "of_mean", "full_scale": None}, None),
        (64, {}, {"variance": "of_mean", "full_scale": 2.5}, 2.5),
    ],
)
def test_a_bit_of_sigma_delta_adam_once_stood_for_1_with_any_number_of_workers(
    tmp_path: Path, nodes: int, comm: dict[str, Any], optimizer: dict[str, Any], scale: float | None
) -> None:
    config = {
        "optimizer": {"_target_": "birder.SigmaDeltaAdam", **optimizer},
        "cluster": {"name": "virtual", "nodes": nodes, "ranks_per_node": 2 if comm else 1},
        "comm": {"enabled": True, "topology": "flat", **comm},
        "method": {"label": "Sigma-delta Adam"},
    }
    read = record.read(record.write(record.from_spec(make_spec(config=config), data={}), tmp_path))
    assert read.config["optimizer"]["full_scale"] == scale
    assert read.method.endswith(f"full scale {scale:g}") if scale else "full scale" not in read.method


def test_a_cluster_of_machines_is_no_loopback() -> None:
    def kind(**cluster: Any) -> str:
        config = {"cluster": {"nodes": 2, "ranks_per_node": 1, **cluster}}
        return str(record.from_spec(make_spec(config=config)).link["kind"])

    assert kind(name="local") == "loopback"
    assert kind(name="slurm") == "network"
    assert kind(name="ssh", link={"kind": "Ethernet"}) == "Ethernet"


def test_not_a_number_is_written_as_null(tmp_path: Path) -> None:
    made = record.from_spec(
        make_spec(), metric={"name": "perplexity", "value": float("inf"), "all": {"x": float("nan")}}
    )
    read = record.read(record.write(made, tmp_path))
    assert read.metric == {"name": "perplexity", "value": None, "all": {"x": None}}


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(UserError, match=r"could not write the record .*No space left.*free space or set results_dir"):
        record.write(record.from_spec(make_spec()), tmp_path)
    assert list((tmp_path / "records").iterdir()) == []


def test_full_disk_keeps_the_former_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = record.from_spec(make_spec())
    path = record.write(old, tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError):
        record.write(dataclasses.replace(old, seed=99), tmp_path)
    assert record.read_all(tmp_path) == [old]
    assert list(path.parent.iterdir()) == [path]


def test_really_full_disk() -> None:
    """/dev/full answers every write with ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match="could not write the record"):
        record.write(record.from_spec(make_spec()), "/dev/full")


def test_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        record.write(record.from_spec(make_spec()), tmp_path)
    assert list((tmp_path / "records").iterdir()) == []


def test_unknown_schema_is_refused(tmp_path: Path) -> None:
    path = record.write(record.from_spec(make_spec()), tmp_path)
    content = json.loads(path.read_text())

    path.write_text(json.dumps({**content, "schema": 99}))
    with pytest.raises(UserError, match=r"run-1\.json has record schema 99, this version reads 1") as caught:
        record.read_all(tmp_path)
    assert "\n" not in str(caught.value)

    path.write_text(json.dumps({**content, "extra": 1}))
    with pytest.raises(UserError, match=r"run-1\.json.*extra"):
        record.read(path)

    path.write_text(json.dumps({**content, "config": {**content["config"], "optimizer": None}}))
    with pytest.raises(UserError, match=r"run-1\.json.*config\.optimizer must be a mapping"):
        record.read(path)

    by_hand = {"status": "complete", "nodes": "4", "timing": None, "reason": 3, "metric": {"value": "98.2"}}
    for key, value in by_hand.items():  # tables would call it failed, or not finite, or end in a traceback
        path.write_text(json.dumps({**content, key: value}))
        with pytest.raises(UserError, match=rf"run-1\.json was changed by hand, or is broken: {key} cannot be"):
            record.read(path)

    path.write_text('{"schema": 1, "id"')
    with pytest.raises(UserError, match=r"run-1\.json is not a readable record"):
        record.read(path)

    with pytest.raises(UserError, match="no record at"):
        record.read(tmp_path / "absent.json")


def test_a_copy_of_a_record_is_refused(tmp_path: Path) -> None:
    """It would count as a second run, and what stands for several runs has no interval."""
    path = record.write(record.from_spec(make_spec()), tmp_path)
    path.with_name("copy.json").write_bytes(path.read_bytes())
    with pytest.raises(UserError, match=r"copy.json.* are records of one run, run-1: remove the copy"):
        record.read_all(tmp_path)


def test_unfinished_temporary_files_are_not_read(tmp_path: Path) -> None:
    path = record.write(record.from_spec(make_spec()), tmp_path)
    (path.parent / ".run-2.abc.tmp").write_text("{")
    assert [r.id for r in record.read_all(tmp_path)] == ["run-1"]


def test_failed_run_has_one_line_of_reason(tmp_path: Path) -> None:
    made = record.failed(make_spec(), "rank 2 died:\n  RuntimeError: boom\n")
    assert (made.status, made.reason) == ("failed", "rank 2 died: RuntimeError: boom")
    assert record.read(record.write(made, tmp_path)) == made


def test_a_failure_replaces_no_result(tmp_path: Path) -> None:
    spec = make_spec(config={"results_dir": str(tmp_path)}, run_dir=str(tmp_path / "run"))

    def status() -> str:
        return record.read(record.place(tmp_path, spec.id)).status

    spec.save()
    record.write_failed(spec, "no memory")
    assert status() == "failed"
    made = record.write(record.from_spec(spec), tmp_path)
    record.write_failed(spec, "interrupted while the ranks ended")
    assert status() == "completed"
    spec.save()  # started once more, as with resume=auto
    os.utime(spec.file, ns=(0, made.stat().st_mtime_ns + 1))
    record.write_failed(spec, "interrupted before it was known that nothing is left to do")
    assert status() == "completed"


def test_records_keep_private_things_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    host = socket.gethostname()
    config = {
        "data": {"path": "/mnt/alice/Image Net"},
        "results_dir": str(tmp_path / "results"),
        "output_dir": str(tmp_path),
        "wandb": {"mode": "auto", "project": "birder", "entity": "alice", "api_key": "0123secret"},
        "cluster": {"name": "ssh", "nodes": 2, "ranks_per_node": 1, "hosts": ["alice@n1", "n2"]},
        "checkpoint": "google/bert-base",
        "url": "https://example.org/a/b",
    }
    made = record.from_spec(
        make_spec(
            config=config,
            command="/home/alice/venv/bin/python run.py data.path='/mnt/alice/Image Net' WANDB_API_KEY=0123secret",
            overrides=["data.path=/mnt/alice/imagenet", "cluster.hosts=[alice@n1,n2]"],
        ),
        status="failed",
        reason=f'File "/home/alice/x.py": no {tmp_path}/data at {host}:29500 (2 images/s)',
    )
    text = json.dumps(dataclasses.asdict(made), ensure_ascii=False)
    for secret in ("alice", "0123secret", "n1", str(tmp_path)):
        assert secret not in text, secret
    assert made.config["data"]["path"] == "…/Image Net"
    assert made.config["results_dir"] == "results"
    assert made.config["output_dir"] == "."
    assert made.config["checkpoint"] == "google/bert-base"
    assert made.config["url"] == "https://example.org/a/b"
    assert made.command == "…/python run.py data.path='…/Image Net' WANDB_API_KEY=…"
    assert made.overrides == ["data.path=…/imagenet", "cluster.hosts=…"]
    assert made.reason is not None
    assert "no data at" in made.reason
    assert "2 images/s" in made.reason


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("'cluster.env={WANDB_API_KEY:SECRET,NCCL_DEBUG:INFO}'", "'cluster.env={WANDB_API_KEY:…,NCCL_DEBUG:INFO}'"),
        ('cluster.env={A: 1, "AWS_SECRET_ACCESS_KEY": "a b"}', 'cluster.env={A: 1, "AWS_SECRET_ACCESS_KEY": …}'),
        ("wandb={mode: online, entity: me}", "wandb={mode: online, entity: …}"),
        ("cluster.sbatch={mail-user: me@site.org, hold: null}", "cluster.sbatch={mail-user: …, hold: null}"),
        ("cluster.env={HTTPS_PROXY: http://me:pw@proxy:80}", "cluster.env={HTTPS_PROXY: http://…@proxy:80}"),
        ("cluster.ssh={port: 22, user: me} seed=1", "cluster.ssh=… seed=1"),
        ("error: key: one of a, host: b", "error: key: one of a, host: b"),
    ],
)
def test_a_mapping_keeps_its_private_entries_out(typed: str, kept: str) -> None:
    assert privacy.clean_text(typed, Path("/base")) == kept


def test_a_checkpoint_is_named_with_its_run() -> None:
    """Else a run from another run's checkpoint of the same step would count as recorded."""
    typed = [f"workload.weights=/scratch/{run}/checkpoints/step-1000" for run in ("adamw", "birder")]
    assert [privacy.clean_text(t, Path("/base")) for t in typed] == [t.replace("/scratch", "…") for t in typed]


def test_words_that_only_look_private_stay() -> None:
    kept = {"tokenizer": "bert", "max_tokens": 128, "lr": 0.1, "keep": 2, "scale": {"name": "a/b"}}
    assert privacy.clean(kept, Path("/base")) == kept


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert origin.git_state(tmp_path) == {"sha": None, "dirty": None}

    def git(*args: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args], check=True)

    git("init", "-q")
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/table.md"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    (tmp_path / "untracked.py").write_text("1")
    (tmp_path / "results/table.md").write_text("2")
    state = origin.git_state(tmp_path)
    assert len(state["sha"]) == 40
    assert state["dirty"] is False
    (tmp_path / "birder/optim").mkdir(parents=True)
    (tmp_path / "birder/optim/mine.py").write_text("1")
    assert origin.git_state(tmp_path)["dirty"] is True  # no commit holds this method
    (tmp_path / "birder/optim/mine.py").unlink()
    (tmp_path / "code.py").write_text("2")
    assert origin.git_state(tmp_path)["dirty"] is True
    (tmp_path / "below").mkdir()
    assert origin.git_state(tmp_path / "below") == {"sha": None, "dirty": None}
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook of that repository
    assert origin.git_state(tmp_path / "below") == {"sha": None, "dirty": None}


def test_a_record_names_the_commit_that_its_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not what was committed while it trained."""
    now = {"sha": "1" * 40, "dirty": False}
    monkeypatch.setattr(origin, "git_state", lambda: dict(now))
    monkeypatch.setattr(origin, "_BEGAN", {})
    monkeypatch.setattr(heartbeat, "on_lost", heartbeat.on_lost)
    monkeypatch.setenv("RANK", "0")
    spec = make_spec(run_dir=str(tmp_path))

    def train(spec: RunSpec) -> None:
        now["sha"] = "2" * 40
        record.write(record.from_spec(spec), tmp_path)

    worker.run_rank(spec, train)
    assert [r.git["sha"] for r in record.read_all(tmp_path)] == ["1" * 40]


def test_environment_names_no_machine() -> None:
    hardware = origin.hardware("cpu")
    assert set(hardware) == {"device", "cpu", "cores", "memory_gb", "gpus"}
    assert hardware["device"] == "cpu"
    assert hardware["cores"] >= 1
    assert {"python", "torch"} <= set(origin.software())
    host = socket.gethostname()
    assert len(host) < 4 or host not in json.dumps([hardware, origin.software()])


@pytest.mark.parametrize(
    ("optimizer", "comm", "method", "wire"),
    [
        ({"_target_": "birder.SGDM", "wire": "fp32"}, {}, "SGDM fp32", "fp32"),
        ({"_target_": "birder.SGDM"}, {}, "SGDM fp32", "fp32"),
        ({"_target_": "birder.SGDM", "wire": "bf16"}, {"topology": "hierarchical"}, "SGDM bf16", "bf16"),
        ({"_target_": "birder.BertAdam", "wire": "bf16"}, {}, "BertAdam bf16", "bf16"),
        ({"_target_": "birder.AdamW", "wire": "fp16"}, {}, "AdamW fp16", "fp16"),
        ({"_target_": "birder.OneBitAdam", "wire": "fp32"}, {}, "1-bit Adam", "1bit"),
        ({"_target_": "birder.Birder"}, {}, "Birder", "1bit"),
        ({"_target_": "birder.Birder"}, {"topology": "hierarchical"}, "Birder hierarchical", "1bit"),
        ({"_target_": "birder.Birder"}, {"enabled": False}, "no communication", "none"),
        ({"_target_": "birder.SGDM", "wire": "bf16"}, {"enabled": False}, "no communication", "none"),
        ({"_target_": "mine.NewMethod"}, {}, "NewMethod", "1bit"),
        ({"_target_": "mine.NewMethod", "wire": "int8"}, {}, "NewMethod", "int8"),
    ],
)
def test_labels(optimizer: dict[str, Any], comm: dict[str, Any], method: str, wire: str) -> None:
    config = {"optimizer": optimizer, "comm": comm}
    assert labels.method(config) == method
    assert labels.wire(config) == wire


def test_compressed_wires() -> None:
    assert [w for w in ("none", "fp32", "bf16", "fp16", "1bit", "int8") if labels.is_compressed(w)] == ["1bit", "int8"]


def test_cluster_label_falls_back_to_the_launcher() -> None:
    assert labels.cluster({"cluster": {"nodes": 2, "_target_": "launch.slurm.Slurm"}}) == "slurm"
    assert labels.cluster({"cluster": {"_target_": "launch.slurm.launcher.SlurmLauncher"}}) == "slurm"


def test_a_record_that_is_published_while_all_are_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended a sweep that had nothing to do with it."""
    paths = [record.write(record.from_spec(make_spec(id=name)), tmp_path) for name in ("a", "b", "c")]
    plain = record.read

    def read(path: Path) -> record.ResultRecord:
        paths[1].unlink(missing_ok=True)
        return plain(path)

    monkeypatch.setattr(record, "read", read)
    assert [r.id for r in record.read_all(tmp_path)] == ["a", "c"]
    paths[1].symlink_to(tmp_path / "absent")
    monkeypatch.setattr(record, "read", plain)
    with pytest.raises(UserError, match="no record at"):
        record.read_all(tmp_path)


def test_curve_is_copied(tmp_path: Path) -> None:
    assert record.save_curve(tmp_path / "absent.csv", tmp_path, "a") is None
    (tmp_path / "curve.csv").write_text("step,loss\n1,2\n")
    assert record.save_curve(tmp_path / "curve.csv", tmp_path / "results", "a") == "curves/a.csv"
    assert (tmp_path / "results/curves/a.csv").read_text() == "step,loss\n1,2\n"


def test_records_need_no_torch() -> None:
    """The launcher writes the record of a run whose workers died, and must start fast."""
    code = "import sys, experiments.records.record; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=record.ROOT).returncode == 0


def test_the_link_is_what_the_launcher_found_and_the_user_says(tmp_path: Path) -> None:
    spec = make_spec(run_dir=str(tmp_path))
    assert record.from_spec(spec).link == record.LINK
    found = {"kind": "emulated", "shaped": True, "measured": True, "mbit_per_s": 471.5, "dilation": 20.0}
    (tmp_path / link_file.FILE).write_text(json.dumps(found))
    assert record.from_spec(spec).link == found
    said = make_spec(
        run_dir=str(tmp_path), config={"cluster": {**spec.config["cluster"], "link": {"kind": "Ethernet"}}}
    )
    assert record.from_spec(said).link["kind"] == "Ethernet"
    (tmp_path / link_file.FILE).write_text("{")
    assert record.from_spec(spec).link == record.LINK
