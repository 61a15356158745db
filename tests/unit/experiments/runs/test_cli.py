"""run.py and compare.py on the command line: exit status, one line for a mistake, nothing stray written.

All scripts: test_scripts.py. `make`: test_make.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed

from experiments import compare, run
from experiments.config import compose
from experiments.records import record
from experiments.runs import start
from launch.errors import UserError
from launch.failure import Diverged, RunFailed
from launch.local import LocalLauncher
from launch.spec import RunSpec
from tests.helpers import ROOT
from tests.helpers.records import full_group, save
from tests.helpers.stub_run import make_spec

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command runs in an empty folder, outside of any torchrun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # run.main sets it for the process
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def typed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """`python experiments/run.py ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    return run.main()


@pytest.mark.parametrize(
    "arguments",
    [
        ["+exp=nothing"],
        ["optimizer=nothing"],
        ["+exp=digits", "cluster.nodes=four"],
        ["+exp=digits", "cluster.nodes=0"],
        ["+exp=digits", "cluster.nodes=-1"],
        ["+exp=digits", "optimizer.lr=-1"],
        ["+exp=digits", "nonsense=1"],
        ["+exp=digits", "a[b"],
        ["+exp=digits", "+train.max_step=5"],
        ["+exp=digits", "~optimizer.lr"],
        ["+exp=digits", "train=5"],
        ["+exp=digits", "optimizer._target_=birder.Nosuch"],
        ["+exp=digits", "cluster.nodes=99999999999999999999999", "--dry-run"],
        ["+exp=digits", "run_name=2024"],
        ["exp=0"],
        ["wandb=null"],
        ["+exp=resnet50", "data.path=/no/such/folder"],
        ["+exp=resnet50", "workload.image_size=3"],
        ["--cfg", "job", "--resolve", "+exp=nothing"],
        ["-m", "+exp=digits", "optimizer=sgdm,nothing"],
        ["+exp=digits", "seed=${nosuch}"],
        ["+exp=digits", "hydra.run.dir=elsewhere"],
        ["-m", "+exp=digits", "hydra.sweep.dir=elsewhere"],
        ["-m", "+exp=digits", "hydra/launcher=joblib", "seed=1,2"],
        ["-m", "+exp=digits", "seed=1,x"],  # before the first job runs
        ["-m", "+exp=digits,resnet50", "data.path=/no/such/folder"],
        ["-m", "+exp=digits", "seed=1,2", "run_name=mine"],
        ["-m", "+exp=digits", "optimizer=glob(zz*)"],
        ["-m", "+exp=digits", "seed=1,2", f"output_dir={ROOT / 'README.md'}"],
    ],
)
def test_one_line_for_bad_input(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert [p for p in Path.cwd().rglob("*") if p.name != "multirun.yaml" and p.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dry-run"], "--dry-run starts nothing, and torchrun has started ranks"),
        (["cluster=virtual", "cluster.nodes=64"], "cluster=virtual makes its own world: call it without torchrun"),
        (["cluster=emulated"], "cluster=emulated makes its own world"),
        (["cluster=ssh", "cluster.hosts=a,b,c"], "cluster=ssh makes its own world"),
        (["cluster.nodes=4"], "cluster.nodes=4, and torchrun has made a world of nodes=1: leave the key out"),
        (["cluster.ranks_per_node=1"], "a world of ranks_per_node=2"),
    ],
)
def test_under_torchrun_another_world_is_refused(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    as_rank_zero(monkeypatch, of=2)
    assert typed(monkeypatch, "+exp=digits", *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(Path.cwd().iterdir()) == []


def as_rank_zero(monkeypatch: pytest.MonkeyPatch, of: int) -> None:
    """As torchrun would have started it on this machine."""
    world = {"RANK": "0", "WORLD_SIZE": f"{of}", "LOCAL_WORLD_SIZE": f"{of}"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("script", [run, compare])
@pytest.mark.parametrize("taken", ["outputs/digits", "results/local/records"])
def test_under_torchrun_folders_are_looked_at_before_the_first_step(
    script: Any, taken: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A file stands where a folder must be: as without torchrun, one line."""
    as_rank_zero(monkeypatch, of=1)
    monkeypatch.setattr(start, "as_rank", lambda *_: pytest.fail("it trains"))
    Path(taken).parent.mkdir(parents=True)
    Path(taken).touch()
    monkeypatch.setattr(sys, "argv", ["script.py", "+exp=digits", "timing.mode=interleaved", "tracker=none"])
    assert script.main() == 2
    shown = capsys.readouterr().err
    assert "cannot write to" in shown
    assert shown.count("\n") == 1


def test_under_torchrun_bad_input_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Or the mended command would be refused: its run_name would be taken."""
    as_rank_zero(monkeypatch, of=1)
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_: iter([(torch.distributed.HashStore(), 0, 1)]))
    monkeypatch.setattr(start, "as_rank", Mock(side_effect=UserError("the data folder is empty")))
    assert typed(monkeypatch, "+exp=digits", "run_name=mine") == 2
    assert "the data folder is empty" in capsys.readouterr().err
    assert not Path("outputs/digits").exists()


def test_under_torchrun_nodes_of_other_sizes_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    """4 ranks on the first node, 2 on two others: each divides the 8, and rank 0 would record two nodes."""
    world = {"RANK": "4", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "_keep", [])
    monkeypatch.setattr(start, "as_rank", lambda *_: pytest.fail("it trains"))
    spec = make_spec(tmp_path)
    spec = dataclasses.replace(spec, config={**spec.config, "cluster": {"nodes": 2, "ranks_per_node": 4}})
    store = torch.distributed.HashStore()
    store.set("birder/spec/1", json.dumps(dataclasses.asdict(spec)))
    monkeypatch.setattr(torch.distributed, "rendezvous", lambda *_: iter([(store, 4, 8)]))
    assert typed(monkeypatch, "+exp=digits") == 2
    assert "2 ranks on this node, and 4 on the first one" in capsys.readouterr().err


def test_under_torchrun_a_lost_loss_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    as_rank_zero(monkeypatch, of=1)
    monkeypatch.setattr(start, "join", Mock(side_effect=Diverged("the loss is nan at step 7: lower optimizer.lr")))
    assert typed(monkeypatch, "+exp=digits") == 1
    assert capsys.readouterr().err == "error: the loss is nan at step 7: lower optimizer.lr\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_ADDR", ""), ("MASTER_PORT", "x"), ("RANK", "one"), ("WORLD_SIZE", ""), ("LOCAL_WORLD_SIZE", "")],
)
def test_half_of_a_world_is_one_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    as_rank_zero(monkeypatch, of=2)
    monkeypatch.setenv(name, value)
    assert typed(monkeypatch, "+exp=digits") == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert (name in shown.err, shown.err.count("\n"), shown.out) == (True, 1, "")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "world",
    [
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "4", "PMI_RANK": "3"},
    ],
)
def test_a_command_that_srun_starts_several_times_is_refused(
    world: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each would train all of it. One task of srun is a run as any, and so is what torchrun starts in each."""
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert typed(monkeypatch, "+exp=digits") == 2
    shown = capsys.readouterr()
    assert ("started 4 times" in shown.err, shown.err.count("\n"), shown.out) == (True, 1, "")
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.setenv(next(iter(world)), "1")
    assert not start.under_torchrun()
    monkeypatch.setenv(next(iter(world)), "4")
    as_rank_zero(monkeypatch, of=2)
    assert start.under_torchrun()


def test_first_lines_say_what_a_run_is(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """One run and a comparison begin alike: where, with what data, at what scale; then the full setting's command."""
    monkeypatch.setattr(LocalLauncher, "launch", lambda self, spec: None)
    assert typed(monkeypatch, "+exp=bert_squad", "scale=quick") == 0
    first, command = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith(
        "Local: 2 nodes of 2 ranks as processes on this machine, joined by loopback; synthetic data ("
    )
    assert "quick scale: shows step time and bytes, not accuracy." in first
    assert command.endswith("make bert_squad SCALE=paper DATA=/path/to/data")
    monkeypatch.setattr(compare.tables, "write", lambda *a: None)
    monkeypatch.setattr(compare.tables, "print_group", lambda *a: [])
    assert compare.compare(["+exp=bert_squad", "scale=quick"], ["birder"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [first, command]


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_what_run_is_for(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, flag) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--dry-run", "-m", "+exp=digits", "resume=auto"))


def test_an_interrupted_run_says_how_it_is_resumed(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """And the command that it names goes on with the same run."""

    def interrupted(self: LocalLauncher, spec: RunSpec) -> None:
        specs.append(spec)
        spec.save()
        for step in (100, 3250)[: int(spec.config["checkpoint"]["every"])]:
            (spec.path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        raise KeyboardInterrupt

    def fails(self: LocalLauncher, spec: RunSpec) -> None:
        spec.save()
        raise RunFailed("rank 0 on node 0: RuntimeError: the loss is nan at step 3")

    specs: list[RunSpec] = []
    monkeypatch.setattr(LocalLauncher, "launch", interrupted)
    assert typed(monkeypatch, "+exp=digits") == 130
    assert "checkpoint.every=N" in capsys.readouterr().out
    assert typed(monkeypatch, "+exp=digits", "checkpoint.every=2") == 130
    said = capsys.readouterr().out.partition("step 3250")[2]
    again = shlex.split(said.partition("python experiments/run.py ")[2])
    assert typed(monkeypatch, *again) == 130
    assert specs[2].id == specs[1].id != specs[0].id
    monkeypatch.setattr(LocalLauncher, "launch", fails)
    capsys.readouterr()
    assert typed(monkeypatch, "+exp=digits") == 1
    assert "checkpoint" not in capsys.readouterr().out  # nobody asked how to go on


@pytest.mark.parametrize("step", [7, None])
def test_a_disk_that_fills_ends_a_run_that_says_how_it_is_resumed(
    step: int | None, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Bad input, which a resumed run has from the start, does not: the same command would end so again."""

    def ends(self: LocalLauncher, spec: RunSpec) -> None:
        spec.save()
        if step:
            (spec.path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        raise UserError("No space left on device; free space")

    Path("outputs/digits/mine/checkpoints/step-00000003").mkdir(parents=True)
    monkeypatch.setattr(LocalLauncher, "launch", ends)
    assert typed(monkeypatch, "+exp=digits", "run_name=mine", "resume=auto") == 2
    shown = capsys.readouterr()
    assert shown.err == "error: No space left on device; free space\n"
    assert ("a checkpoint of step 7 is saved; to resume:" in shown.out) is bool(step)
    assert ("run_name=mine resume=auto" in shown.out) is bool(step)


ENDS = """
import atexit, os, signal
from experiments.runs import command
from launch import interrupt
interrupt.ends_silently()
atexit.register(os.kill, os.getpid(), signal.SIGINT)
command.start(command.report_errors(lambda: os.kill(os.getpid(), signal.SIGINT)))
"""


def test_a_second_ctrl_c_while_the_interpreter_ends_shows_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-2, "interrupted: every process of the run has ended\n")


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_that_leaves_is_no_failure_to_tell_of(unbuffered: bool) -> None:
    """As `| head` does. With buffers nothing is written before the end."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, *["-u"] * unbuffered, str(ROOT / "experiments/predict.py"), "timeline=resnet50_b32_tf32"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_without_dashes_has_a_table(tmp_path: Path) -> None:
    """Where the locale's encoding is latin-1, or ASCII."""
    command = [
        sys.executable,
        str(ROOT / "experiments/tables.py"),
        f"--results={save(tmp_path, *full_group())}",
        "--group=g",
    ]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"800 (792?808)" in done.stdout


def test_cfg_job(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, "+exp=digits", "--cfg", "job", "--resolve", "optimizer.lr=0.25") == 0
    shown = capsys.readouterr().out
    assert "lr: 0.25" in shown
    assert "hydra:" not in shown
    assert list(Path.cwd().iterdir()) == []


def test_cfg_job_shows_the_hyper_parameters_of_the_pair(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, "+exp=cifar100", "--cfg", "job", "--package", "optimizer", "optimizer=birder") == 0
    assert "lr: 0.0005\n" in (shown := capsys.readouterr().out)
    assert "beta: 0.95\n" in shown
    assert typed(monkeypatch, "+exp=cifar100", "--cfg", "job", "--package", "optimizer", "optimizer.lr=0.5") == 0
    assert "lr: 0.5\n" in capsys.readouterr().out


def test_sweep_takes_the_hyper_parameters_of_each_pair(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def note(self: LocalLauncher, spec: object) -> None:
        o = spec.config["optimizer"]  # type: ignore[attr-defined]
        launched.append((o["_target_"], o["lr"], o["weight_decay"]))

    launched: list[tuple[str, float, float]] = []
    monkeypatch.setattr(LocalLauncher, "launch", note)
    assert typed(monkeypatch, "-m", "+exp=digits", "optimizer=sgdm,birder", "optimizer.weight_decay=0,0.5") == 0
    assert launched == [
        ("birder.SGDM", 0.05, 0),
        ("birder.SGDM", 0.05, 0.5),
        ("birder.Birder", 2e-3, 0),
        ("birder.Birder", 2e-3, 0.5),
    ]


@pytest.mark.parametrize("typed_as", ["--config-dir=own files", "hydra.searchpath=['own files']"])
def test_a_run_of_the_users_own_file_says_where_it_is(typed_as: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the recorded command could not be typed again."""
    Path("own files/exp").mkdir(parents=True)
    Path("own files/exp/mine.yaml").write_text("# @package _global_\nexp: mine\nseed: 7\n")
    specs: list[RunSpec] = []
    monkeypatch.setattr(LocalLauncher, "launch", lambda _, spec: specs.append(spec))
    assert typed(monkeypatch, typed_as, "+exp=mine") == 0
    (spec,) = specs
    again = compose.resolve(compose.compose(spec.overrides))
    assert (again["exp"], again["seed"], again["optimizer"]) == ("mine", 7, spec.config["optimizer"])
    _, _, *arguments = shlex.split(spec.command)
    assert arguments == spec.overrides


@pytest.mark.parametrize("flag", ["cluster.dry_run=true", "--dry-run"])
def test_dry_run(flag: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, "+exp=digits", "cluster.nodes=3", flag) == 0
    assert capsys.readouterr().out.count("torch.distributed.run --nnodes 3") == 3
    assert list(Path.cwd().iterdir()) == []


def test_jobs_that_share_a_folder_are_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert typed(monkeypatch, "-m", "+exp=digits", "run_name=a,b,b", "--dry-run") == 2
    assert "run_name=b is of one run" in capsys.readouterr().err
    assert typed(monkeypatch, "-m", "+exp=digits", "run_name=a", "output_dir=x,y", "--dry-run") == 0
    assert list(Path.cwd().iterdir()) == []  # a dry run leaves nothing


def test_a_flag_that_may_have_a_value_takes_no_override_for_it() -> None:
    command = [sys.executable, str(ROOT / "experiments/run.py"), "+exp=digits", "seed=3", "--info"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy())
    assert (done.returncode, done.stderr) == (0, "")
    assert "seed: 3" in done.stdout


def test_a_typed_reference_is_one_to_the_configuration(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """And stays one in what is recorded of the command."""
    specs: list[RunSpec] = []
    monkeypatch.setattr(LocalLauncher, "launch", lambda self, spec: specs.append(spec))
    assert typed(monkeypatch, "+exp=digits", "seed=${train.epochs}", "train.epochs=7") == 0
    assert (specs[0].seed, specs[0].overrides[1]) == (7, "seed=${train.epochs}")


def test_a_sweep_over_names_by_pattern(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(LocalLauncher, "launch", lambda self, spec: None)
    assert typed(monkeypatch, "-m", "+exp=digits", "optimizer=glob(sg*)") == 0
    jobs = re.findall(r"^job \d of 2: \+exp=digits (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert jobs == ["optimizer=sgdm", "optimizer=sgdm_nesterov"]


def test_sweep_goes_on_after_a_failed_job(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def fail_once(self: LocalLauncher, spec: object) -> None:
        if "seed=1" in spec.overrides:  # type: ignore[attr-defined]
            raise RunFailed("rank 0 on node 0: ValueError: no")
        launched.append(spec.overrides)  # type: ignore[attr-defined]

    launched: list[list[str]] = []
    monkeypatch.setattr(LocalLauncher, "launch", fail_once)
    assert typed(monkeypatch, "+exp=digits", "seed=1,2", "-m") == 1  # the flag may stand anywhere
    assert launched == [["+exp=digits", "seed=2"]]
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 0 on node 0: ValueError: no",
        "1 of 2 jobs failed:",
        "  +exp=digits seed=1",
    ]


def test_a_sweep_counts_its_jobs_and_ends_with_a_table(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def recorded(self: LocalLauncher, spec: RunSpec) -> None:
        if "optimizer=sgdm" in spec.overrides and spec.seed == 2:
            raise RunFailed("rank 1 on node 0 was killed")
        metric = {"name": "top1", "value": 90.0 + spec.seed, "target": None, "higher_is_better": True}
        timing = {"steps": 9, "median_ms": 12.5}
        record.write(record.from_spec(spec, metric=metric, timing=timing), spec.config["results_dir"])

    monkeypatch.setattr(LocalLauncher, "launch", recorded)
    assert typed(monkeypatch, "-m", "+exp=digits", "optimizer=sgdm,birder", "seed=1,2") == 1
    shown = capsys.readouterr()
    assert re.findall(r"^job (\d) of 4: ", shown.out, re.MULTILINE) == ["1", "2", "3", "4"]
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in shown.out.splitlines() if line.startswith("│")]
    assert rows == [
        ["1", "optimizer=sgdm seed=1", "12.5", "top1 91.00"],
        ["2", "optimizer=sgdm seed=2", "—", "failed: rank 1 on node 0 was killed"],
        ["3", "optimizer=birder seed=1", "12.5", "top1 91.00"],
        ["4", "optimizer=birder seed=2", "12.5", "top1 92.00"],
    ]


def test_comparison_goes_on_after_a_failed_run(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def fail_once(self: LocalLauncher, spec: object) -> None:
        groups.append(spec.group)  # type: ignore[attr-defined]
        if len(groups) == 1:
            raise RunFailed("rank 1 on node 1 was killed")

    groups: list[str] = []
    printed: list[str] = []
    monkeypatch.setattr(LocalLauncher, "launch", fail_once)
    monkeypatch.setattr(compare.tables, "write", lambda *a: None)
    monkeypatch.setattr(compare.tables, "print_group", lambda results, group: printed.append(group) or [])
    assert compare.compare(["+exp=digits"], None) == 1
    assert len(groups) == len(compose.compose(["+exp=digits"]).config.compare)
    assert printed == [groups[0]]
    assert len(set(groups)) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("Local: ")
    assert shown.err.startswith("error: rank 1 on node 1 was killed\n")


@pytest.mark.slow
def test_under_torchrun() -> None:
    """Started by torchrun it trains in that world: one run directory, one record, no process of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["+exp=digits", "train.max_steps=4", "wandb=disabled", "optimizer=sgdm"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(ROOT / "experiments/run.py"), *arguments], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    (record,) = Path("results/local/records").glob("*.json")
    content = json.loads(record.read_text())
    assert (content["nodes"], content["ranks_per_node"], content["cluster"]) == (1, 2, "torchrun")
    (run_dir,) = Path("outputs/digits").iterdir()
    assert run_dir.name == content["id"]
    assert content["command"].startswith("torchrun --nnodes 1 --nproc-per-node 2 experiments/run.py +exp=digits")
