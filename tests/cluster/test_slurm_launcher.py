"""The SLURM launcher without SLURM: the job's script, each node's program, what a log explains, an interrupted submission."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.config import compose
from launch.errors import UserError
from launch.slurm import job as slurm_job
from launch.slurm import node as slurm_node
from launch.slurm.launcher import SlurmLauncher
from tests.cluster.test_slurm import ROOT, until
from tests.helpers.stub_run import make_spec

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm")]


def launcher(**options: Any) -> SlurmLauncher:
    return SlurmLauncher(**{"nodes": 2, "ranks_per_node": 4, "name": "slurm", **options})


def directives(script: str) -> dict[str, str]:
    lines = [
        shlex.split(line.removeprefix("#SBATCH "))[0] for line in script.splitlines() if line.startswith("#SBATCH")
    ]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def test_script(tmp_path: Path) -> None:
    options = {"partition": "gpu", "account": "us", "time": "1:00:00", "constraint": "a|b", "gpus_per_node": "a100:4"}
    script = launcher(**options, sbatch={"mem": 0, "exclusive": None, "comment": 'it\'s "x"'}, max_restarts=1).script(
        make_spec(tmp_path)
    )
    wanted = {
        "--nodes": "2",
        "--ntasks-per-node": "1",
        "--cpus-per-task": "4",
        "--requeue": "",
        "--open-mode": "append",
        "--job-name": "stub-1",
        "--output": f"{tmp_path}/run/logs/output.log",
        "--partition": "gpu",
        "--account": "us",
        "--time": "1:00:00",
        "--constraint": "a|b",
        "--gpus-per-node": "a100:4",
        "--mem": "0",
        "--exclusive": "",
        "--comment": 'it\'s "x"',
    }
    assert directives(script).items() >= wanted.items()
    assert "srun --kill-on-bad-exit=1" in script
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in script
    torchrun = shlex.split(script[script.index("srun --kill") : script.index("\nstatus=")].replace("\\\n", ""))
    assert torchrun[torchrun.index("--nnodes") + 1] == "2"
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == "4"
    assert "is_host={is_host}" in torchrun[torchrun.index("--rdzv-conf") + 1]
    assert torchrun[-2:] == [str(ROOT / "experiments/training/worker.py"), f"{tmp_path}/run/spec.yaml"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_dry_run_needs_no_slurm_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    launcher(dry_run=True).launch(make_spec(tmp_path))
    shown = capsys.readouterr().out
    assert shown.startswith("#!/bin/bash\n")
    command = shlex.split(shown.splitlines()[-1])
    assert (command[:2], command[-1]) == (["sbatch", "--parsable"], f"{tmp_path}/run/job.sh")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="needs sbatch, which is not here"):
        launcher().launch(make_spec(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus_per_node": 2}, "gpus_per_node=2 is fewer than the 4 ranks"),
        ({"gpus_per_node": "a100:2"}, "gpus_per_node=a100:2 is fewer"),
        ({"gpus_per_node": "a100"}, "gpus_per_node=a100 is a kind of GPU without their number: a100:N"),
        ({"gpus_per_node": 0, "backend": "nccl"}, "gpus_per_node=0 is fewer"),
        ({"sbatch": {"nodes": 3}}, "sbatch.nodes is set by other keys"),
        ({"sbatch": {"partition": "x"}}, "sbatch.partition is set by other keys"),
        ({"sbatch": {"--mem": 1}}, "without the leading dashes"),
        ({"sbatch": {"comment": "a\n#SBATCH --nodes=9"}}, "must be one line"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        launcher(**options)


def test_nccl_asks_for_a_gpu_per_rank() -> None:
    assert launcher(backend="nccl").options["gpus-per-node"] == 4
    assert "gpus-per-node" not in launcher().options


def test_configuration_keys_reach_the_launcher() -> None:
    overrides = ["+exp=digits", "cluster=slurm", "cluster.nodes=2", "cluster.time=1:00:00", "cluster.sbatch={mem: 0}"]
    made = compose.launcher(compose.resolve(compose.compose(overrides)))
    assert (made.options["nodes"], made.options["time"], made.options["mem"]) == (2, "1:00:00", 0)


def test_each_node_looks_at_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node's own name may mean loopback on that node: its interface is the one to the second."""
    asked, became = [], {}

    def route(peers: list[str], interface: str | None) -> dict[str, Any]:
        asked.append(peers[0])
        return {"interface": "ib0", "address": "10.0.0.1", "port": 1}

    monkeypatch.setattr(slurm_node.probe, "route", route)
    monkeypatch.setattr(slurm_node.socket, "gethostbyname", lambda name: name)
    monkeypatch.setattr(slurm_node.os, "execvpe", lambda file, command, env: became.update(command=command, env=env))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for node in ("0", "1"):
        monkeypatch.setenv("SLURM_NODEID", node)
        given = ["--first", "a", "--second", "b", "--port", "9", "--ranks", "10000", "--"]
        slurm_node.main([*given, "run", "--at", "{endpoint}", "is_host={is_host},x=1", "{address}"])
        assert became["command"] == ["run", "--at", "a:9", f"is_host={int(node == '0')},x=1", "10.0.0.1"]
        env = became["env"]
        assert (env["BIRDER_NODE"], env["BIRDER_NIC"], env["GLOO_SOCKET_IFNAME"]) == (node, "ib0", "ib0")
        assert env["OMP_NUM_THREADS"] == "1"
    assert asked == ["b", "a"]


def test_an_earlier_life_of_the_job_explains_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for node in (1, 3):
        (tmp_path / f"logs/node{node}.log").write_text(f"node {node} says why\n")
    log = (
        "slurmstepd-node0: error: *** JOB 5 ON node0 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n"
        "srun: error: node1: task 1: Exited with exit code 7\n"
    )
    explained = slurm_job.explain(tmp_path, "5", "FAILED", log.replace("task 1", "task 3") + log)
    assert explained.reason.startswith("SLURM job 5 FAILED: node 1: torchrun ended with status 7")
    assert explained.traceback == "node 1 says why"
    killed = slurm_job.explain(tmp_path, "5", "OUT_OF_MEMORY", "srun: error: node3: tasks 3,5: Killed\n")
    assert "more memory than it had asked for" in killed.reason
    assert "node 3" in killed.reason
    early = slurm_job.explain(tmp_path, "5", "FAILED", "job.sh: line 3: srun: not found\n")
    assert early.reason.startswith("SLURM job 5 FAILED before its ranks could start")
    assert early.traceback == "job.sh: line 3: srun: not found"


@pytest.mark.parametrize("out", ["123\n", "123;cluster\n", "sbatch: a site's word\n123\n"])
def test_id_of_a_job(out: str) -> None:
    assert slurm_job._id(out) == "123"


def test_interrupt_during_the_submission(tmp_path: Path) -> None:
    """The job may have been made already when Ctrl-C comes, and nobody knows its id yet."""
    programs = {
        "sbatch": f"touch {tmp_path}/asked; until [ -e {tmp_path}/sent ]; do sleep 0.05; done; echo 123",
        "scancel": f"echo $@ > {tmp_path}/cancelled",
        "scontrol": "echo JobId=123 JobState=CANCELLED Reason=None",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    code = "from launch.slurm import job; job.submit(['sbatch'])"
    begun = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    until((tmp_path / "asked").exists, "it is asked")
    begun.send_signal(signal.SIGINT)
    (tmp_path / "sent").touch()
    assert "KeyboardInterrupt" in begun.communicate()[1]
    assert (tmp_path / "cancelled").read_text() == "123\n"
