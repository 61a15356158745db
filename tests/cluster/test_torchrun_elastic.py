"""torchrun --nnodes=1:2 on loopback: a node is lost, the other goes on alone from the last checkpoint; a node comes, both go
on. What is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from birder import checkpoint
from birder.checkpoint.files import read_manifest
from experiments import run
from experiments.config import compose
from experiments.runs import start
from launch import process
from launch.errors import UserError
from launch.local import free_port
from tests.helpers import ROOT
from tests.helpers.waiting import until

RENDEZVOUS = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=120"
"""Seconds instead of torchrun's half minute: the tests wait for them. The last call holds both agents' imports."""


class Nodes:
    """Torchrun agents of one rank each, at most two; node 0 holds the rendezvous."""

    def __init__(self, folder: Path, script: str, *arguments: str, begin_with: int = 2) -> None:
        self.folder, self.port = folder, free_port()
        self.script = [str(ROOT / script), *arguments]
        self.agents: list[subprocess.Popen] = []
        for _ in range(begin_with):
            self.join()

    def join(self) -> None:
        """The next node comes."""
        node = len(self.agents)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        command += ["--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=elastic", "--local-addr=127.0.0.1"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf=is_host={int(node == 0)},{RENDEZVOUS}"]
        command += [f"--log-dir={self.folder}/logs", *self.script]
        with open(self.folder / f"node{node}.txt", "w") as said:
            self.agents.append(subprocess.Popen(command, env=env, cwd=self.folder, stdout=said, stderr=said))

    def said(self, node: int) -> str:
        return (self.folder / f"node{node}.txt").read_text()

    def wait_for_checkpoint(self, root: Path) -> None:
        """Of all that have come: on a busy machine one node may have begun without the other."""

        def logs() -> str:
            return "".join(map(self.said, range(len(self.agents))))

        def saved() -> bool:
            assert all(a.poll() is None for a in self.agents), logs()
            return (last := checkpoint.latest(root)) and read_manifest(last[1]).world_size == len(self.agents)

        until(saved, logs, every_s=0.02)

    def lose(self, node: int) -> None:
        """The whole node at once: its agent and its ranks."""
        for pid in (self.agents[node].pid, *process.descendants(self.agents[node].pid)):
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for node, agent in enumerate(self.agents):
            if agent.poll() is None:
                self.lose(node)
            agent.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Any]:
    started: list[Nodes] = []

    def start(script: str, *arguments: str, begin_with: int = 2) -> Nodes:
        started.append(Nodes(tmp_path, script, *arguments, begin_with=begin_with))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.cluster
def test_the_example_goes_on_alone(nodes: Any, tmp_path: Path) -> None:
    there = nodes("examples/elastic.py", str(tmp_path / "kept"), "4000")
    there.wait_for_checkpoint(tmp_path / "kept")
    there.lose(1)
    assert there.agents[0].wait() == 0, there.said(0)
    (went_on,) = re.findall(r"step (\d+) of 2 ranks, now 1", there.said(0))
    assert 0 < int(went_on) < 4000
    assert float(re.findall(r"step 4000: loss ([\d.]+)", there.said(0))[0]) < 0.3  # of 0.69 at the start
    last = checkpoint.latest(tmp_path / "kept")
    assert last is not None
    assert (last[0], read_manifest(last[1]).world_size) == (4000, 1)


@pytest.mark.cluster
def test_a_node_that_comes_is_given_the_state(nodes: Any, tmp_path: Path) -> None:
    """torchrun ends the ranks that are there, and starts those of both nodes as a world of two."""
    there = nodes("examples/elastic.py", str(tmp_path / "kept"), "1000000", begin_with=1)
    there.wait_for_checkpoint(tmp_path / "kept")
    there.join()
    there.wait_for_checkpoint(tmp_path / "kept")
    (went_on,) = re.findall(r"step (\d+) of 1 ranks, now 2", there.said(0))
    last = checkpoint.latest(tmp_path / "kept")
    assert last is not None
    assert last[0] > int(went_on) > 0
    assert [a.poll() for a in there.agents] == [None, None]


@pytest.mark.cluster
def test_a_run_of_the_harness_goes_on_alone(nodes: Any, tmp_path: Path) -> None:
    asked = [*ASKED, "resume_resize=average", f"output_dir={tmp_path}/outputs", f"results_dir={tmp_path}/results"]
    there = nodes("experiments/run.py", *asked)
    there.wait_for_checkpoint(tmp_path / "outputs/digits/elastic/checkpoints")
    there.lose(1)
    assert there.agents[0].wait() == 0, there.said(0)
    (path,) = (tmp_path / "results/records").glob("*.json")
    kept = json.loads(path.read_text())
    assert (kept["status"], kept["nodes"], kept["ranks_per_node"]) == ("completed", 1, 1)
    assert kept["config"]["resume_changed"][-1] == ["cluster.nodes", 2, 1]
    steps = [int(row.split(",")[0]) for row in (tmp_path / "results" / kept["curve"]).read_text().split()[1:]]
    assert steps == list(range(1, 601))  # those after the checkpoint came again, none is missing


ASKED = ["+exp=digits", "scale=quick", "optimizer=birder", "train.batch_per_rank=8", "train.max_steps=600", "seed=1"]
ASKED += ["train.eval_every=1000000", "train.threads=1", "checkpoint.every=40", "wandb=disabled"]
ASKED += ["run_name=elastic", "resume=auto"]


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is the only rank of a world that had two, as far as its environment and the run directory say."""
    monkeypatch.chdir(tmp_path)
    composed = compose.compose([*ASKED, "cluster.nodes=2", "cluster.ranks_per_node=1"])
    spec = compose.make_spec(composed)
    spec.path.mkdir(parents=True)
    spec.save()
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    return spec.path


def test_without_resume_rule_the_smaller_world_ends_in_one_line(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *ASKED])
    before = (alone / "spec.yaml").read_text()
    assert run.main() == 2
    assert capsys.readouterr().err == (
        "error: cannot resume outputs/digits/elastic: it ran with world size 2, this is 1; resume_resize=average resumes "
        "with another number of ranks\n"
    )
    assert (alone / "spec.yaml").read_text() == before
    assert sorted(p.name for p in alone.iterdir()) == ["spec.yaml"]


@pytest.mark.parametrize(("restarts", "world", "shared"), [("1", "2", "True"), ("0", "2", "True"), ("1", "2", "False")])
def test_restarts_in_one_store_are_refused(
    monkeypatch: pytest.MonkeyPatch, restarts: str, world: str, shared: str
) -> None:
    """Ranks of a second start would find the first one's addresses in it."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    composed = compose.compose(ASKED)
    if (restarts, shared) == ("1", "True"):
        with pytest.raises(UserError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every node"):
            start.adopt_torchrun_world(composed)
    else:
        start.adopt_torchrun_world(composed)
        assert composed.config.cluster.nodes == 2
