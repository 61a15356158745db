"""Which comparisons are timed in turns, what is started for them, and what becomes of them when a method breaks its world."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments import compare
from experiments.config import compose
from experiments.records import record
from experiments.timing import plan
from experiments.tracking.tracked import TrackedRun
from experiments.training import rank_link
from launch.errors import UserError
from launch.failure import RunFailed
from launch.local import LocalLauncher
from launch.process import Stopped
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow


def resolved(*overrides: str) -> list[dict[str, Any]]:
    return [compose.resolve(c) for c in compare.variants(compose.compose(list(overrides)), None)]


def test_what_is_only_timed_takes_turns() -> None:
    quick = resolved("+exp=resnet50", "scale=quick", "cluster=local")
    assert plan.reason_not_interleaved(quick, synthetic=True) is None
    assert plan.reason_not_interleaved(quick, synthetic=False) == "their accuracy counts"
    assert (
        plan.reason_not_interleaved(resolved("+exp=resnet50", "scale=paper", "cluster=local"), synthetic=True)
        is not None
    )
    digits = resolved("+exp=digits", "timing.mode=interleaved")
    assert plan.reason_not_interleaved(digits, synthetic=False) is None
    assert (
        plan.reason_not_interleaved(resolved("+exp=resnet50", "timing.mode=sequential", "cluster=local"), True)
        == "timing.mode=sequential"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkpoint.every=5", "no checkpoints"),
        ("cluster.max_restarts=1", "does not restart"),
        ("+profile=step", "a profile"),
    ],
)
def test_what_cannot_take_turns_is_run_apart(override: str, words: str) -> None:
    asked = ["+exp=resnet50", "scale=quick", "cluster=local", override]
    assert words in str(plan.reason_not_interleaved(resolved(*asked), synthetic=True))
    with pytest.raises(UserError, match=rf"timing\.mode=interleaved is not possible: .*{words}"):
        plan.reason_not_interleaved(resolved(*asked, "timing.mode=interleaved"), synthetic=True)


def test_replays_differ_in_their_model() -> None:
    assert (
        plan.reason_not_interleaved(resolved("+exp=replay_bert", "scale=quick", "cluster=local"), True)
        == "methods differ in workload"
    )


@pytest.mark.parametrize(
    "changed",
    [
        *("seed=1", "timeline=other", "data.path=/other", "comm.bucket_cap_mb=1", "cluster.nodes=8"),
        *(f"train.{key}" for key in ("batch_per_rank=1", "accumulate=3", "precision=bf16", "max_steps=7", "epochs=7")),
    ],
)
def test_methods_that_differ_in_what_a_step_is_take_no_turns(changed: str) -> None:
    """The bound is that of the first, and so is the number of samples."""
    key, _, value = changed.partition("=")
    first, second = (compose.resolve(compose.compose(["+exp=digits", "timing.mode=interleaved"])) for _ in range(2))
    assert plan.reason_not_interleaved([first, second], synthetic=False) is None
    section, _, leaf = key.rpartition(".")
    (second[section] if section else second)[leaf] = value
    with pytest.raises(UserError, match=f"methods differ in {section if section in plan.SHARED else key};"):
        plan.reason_not_interleaved([first, second], synthetic=False)


def test_one_run_for_all_variants(tmp_path: Path) -> None:
    made = compare.variants(compose.compose(["+exp=digits", f"output_dir={tmp_path}"]), None)
    spec = plan.make([*made, made[-1]], "stamp-digits-1234")
    ids = [v["id"] for v in spec.config["variants"]]
    assert ids == [
        f"stamp-digits-1234-{name}"
        for name in ("sgdm-none", "sgdm-fp32", "sgdm-bf16", "onebit_adam-1bit", "birder-1bit", "birder-1bit.2")
    ]
    assert (spec.id, spec.group, spec.path) == ("stamp-digits-1234",) * 2 + (tmp_path / "digits" / "stamp-digits-1234",)
    assert plan.make(made, "g", attempt=2).id == "g.2"
    named = plan.make(made, "g", run_name="mine")
    assert (named.id, named.path) == ("g", tmp_path / "digits" / "mine")
    assert plan.make(made, "g", attempt=2, run_name="mine").path.name == "g.2"
    named.save()
    with pytest.raises(UserError, match="digits/mine holds a run already: choose another run_name"):
        plan.make(made, "g", run_name="mine")
    part = plan.spec_of(spec, spec.config["variants"][4])
    assert part.config["optimizer"]["_target_"] == "birder.Birder"
    assert "variants" not in part.config
    assert part.group == "stamp-digits-1234"


def test_a_dilation_needs_a_timeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.emulated.launcher.why_not", lambda: None)
    made = [compose.compose(["+exp=digits", "cluster=emulated"])]
    with pytest.raises(UserError, match=r"timeline=NAME or cluster\.dilation=20"):
        plan.make(made, "g")


def test_when_a_method_breaks_its_world_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds: list[list[str]] = []

    def launch(self: LocalLauncher, spec: Any) -> None:
        variants = spec.config["variants"]
        worlds.append([v["name"] for v in variants])
        if len(worlds) == 1:
            spec.path.mkdir(parents=True)
            (spec.path / plan.TURN_FILE).write_text(variants[3]["id"])
            error = RunFailed("rank 1 on node 1 was killed, for example for lack of memory")
            self.on_failure(spec, str(error))
            raise error
        for v in variants:
            record.write(record.from_spec(plan.spec_of(spec, v)), tmp_path / "results")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    printed: list[str] = []
    tracked: list[int] = []
    monkeypatch.setattr(TrackedRun, "finish", lambda self, summary, exit_code: tracked.append(exit_code))
    overrides = [
        "+exp=digits",
        "timing.mode=interleaved",
        f"results_dir={tmp_path}/results",
        f"output_dir={tmp_path}/out",
    ]
    assert compare.compare(overrides, None, lambda results, group: printed.append(group) or []) == 1
    assert tracked == [1]
    assert [len(w) for w in worlds] == [5, 4]
    assert worlds[0][3] not in worlds[1]
    records = record.read_all(tmp_path / "results")
    assert sorted(r.status for r in records) == ["completed"] * 4 + ["failed"]
    assert {r.group for r in records} == set(printed)
    assert "1 of 5 runs failed" in capsys.readouterr().err


def test_a_method_that_fails_and_leaves_its_world_whole_is_in_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(self: LocalLauncher, spec: Any) -> None:
        first, *others = (plan.spec_of(spec, v) for v in spec.config["variants"])
        record.write(record.failed(first, "the loss is nan at step 3"), tmp_path / "results")
        for own in others:
            record.write(record.from_spec(own), tmp_path / "results")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    asked = ["+exp=digits", "timing.mode=interleaved", f"results_dir={tmp_path}/results", f"output_dir={tmp_path}/out"]
    assert compare.compare(asked, None, lambda *_: []) == 1
    shown = capsys.readouterr().err
    assert "the loss is nan at step 3" in shown
    assert "1 of 5 runs failed" in shown


def test_a_world_that_never_began_has_failed_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(self: LocalLauncher, spec: Any) -> None:
        self.on_failure(spec, "node 0: no")
        raise RunFailed("node 0: no")

    monkeypatch.setattr(LocalLauncher, "launch", launch)
    overrides = [
        "+exp=digits",
        "timing.mode=interleaved",
        f"results_dir={tmp_path}/results",
        f"output_dir={tmp_path}/out",
    ]
    assert compare.compare(overrides, None) == 1
    assert [r.status for r in record.read_all(tmp_path / "results")] == ["failed"] * 5


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), Stopped(signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"])
def test_a_world_that_somebody_ends_is_no_methods_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: BaseException
) -> None:
    def run(self: LocalLauncher, spec: Any) -> None:
        (spec.path / plan.TURN_FILE).write_text(spec.config["variants"][1]["id"])
        raise ended

    monkeypatch.setattr(LocalLauncher, "run", run)
    asked = ["timing.mode=interleaved", f"results_dir={tmp_path}/results", f"output_dir={tmp_path}/out", "tracker=none"]
    assert compare.main(["+exp=digits", *asked]) in (130, 143)
    assert [r.status for r in record.read_all(tmp_path / "results")] == ["failed"] * 5


@pytest.mark.parametrize("lost", [0, 1])
def test_under_torchrun_too_a_method_that_fails_is_in_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: int
) -> None:
    world = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in world.items():
        monkeypatch.setenv(name, str(value))

    def as_rank(spec: Any, *_: Any) -> None:
        for number, v in enumerate(spec.config["variants"]):
            own = plan.spec_of(spec, v)
            made = record.failed(own, "the loss is nan at step 3") if number < lost else record.from_spec(own)
            record.write(made, tmp_path / "results")

    monkeypatch.setattr(compare.start, "shared", contextlib.nullcontext)
    monkeypatch.setattr(compare.start, "as_rank", as_rank)
    monkeypatch.setattr(compare.tables, "write", lambda *_: None)
    monkeypatch.setattr(compare.tables, "print_group", lambda *_: [])
    asked = ["timing.mode=interleaved", f"results_dir={tmp_path}/results", f"output_dir={tmp_path}/out", "tracker=none"]
    assert compare.main(["+exp=digits", *asked]) == min(lost, 1)
    assert ("the loss is nan at step 3" in capsys.readouterr().err) is bool(lost)


def test_asking_for_a_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise() -> None:
        said: list[str] = []
        while len(said) < 2:
            time.sleep(0.01)
            asked = (tmp_path / "control").read_text().splitlines() if (tmp_path / "control").exists() else []
            for line in asked[len(said) :]:
                said.append(line + (": no such device" if line == "check 7" else ""))
                (tmp_path / "control.done").write_text("\n".join(said) + "\n")

    threading.Thread(target=supervise, daemon=True).start()
    rank_link.ask(tmp_path, "rate 40000")
    with pytest.raises(RuntimeError, match=r"could not be set \(check 7\): no such device"):
        rank_link.ask(tmp_path, "check 7")
    monkeypatch.setattr(rank_link, "ANSWER_S", 0.1)
    with pytest.raises(RuntimeError, match="nobody set"):
        rank_link.ask(tmp_path, "rate 3")


def _probe(rank: int, world: int, per_node: int) -> float | None:
    rank_link.PROBE_MB = 1
    return rank_link.probe(per_node, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "per_node"), [(2, 1), slow(3, 1), slow(4, 2)])
def test_the_rate_of_a_real_network_is_probed(ranks: int, per_node: int) -> None:
    found = run_ranks(_probe, ranks, per_node, ranks_per_node=per_node)
    assert len(set(found)) == 1
    assert found[0] > 0


def test_a_probed_rate_is_in_bits_and_the_slowest_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MiB in half a second; another node takes twice as long."""
    clock = itertools.count(0.0, 0.5)
    silent = {"barrier": lambda: None, "P2POp": lambda *a: a, "isend": 0, "irecv": 1, "batch_isend_irecv": lambda _: []}
    here = {"get_rank": lambda: 0, "get_world_size": lambda: 4, "group": SimpleNamespace(WORLD=object())}
    monkeypatch.setattr(rank_link, "dist", SimpleNamespace(**silent, **here))
    monkeypatch.setattr(rank_link, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(rank_link, "backend_for", lambda *_: "gloo")
    monkeypatch.setattr(rank_link, "gathered", lambda mine: [mine, 0.0, 2 * mine, 0.0])
    monkeypatch.setattr(rank_link, "PROBE_MB", 1)
    assert rank_link.probe(2, torch.device("cpu")) == pytest.approx(8 * 2**20 / 1e6 / 1.0, abs=0.05)


def test_a_single_node_has_no_link() -> None:
    assert run_ranks(_probe, 2, 2) == [None, None]
