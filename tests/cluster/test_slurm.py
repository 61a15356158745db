"""The SLURM launcher, on a SLURM site of its own with four nodes: what a job says, ends, leaves behind and goes on from."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.records import record
from launch.errors import UserError
from launch.slurm.launcher import SlurmLauncher
from tests.helpers import ROOT, slurm_site
from tests.helpers.slurm_site import Site
from tests.helpers.stub_run import make_spec
from tests.helpers.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("slurm")]

STUB = ROOT / "tests/helpers/slurm_stub.py"


@pytest.fixture(scope="module")
def started() -> Iterator[Site]:
    if why := slurm_site.why_not():
        pytest.skip(why)
    with slurm_site.site() as made:
        yield made


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    """The site, without jobs before and after each test."""
    yield started
    started.call("scancel", "--user=root")
    until(lambda: not started.call("squeue", "--noheader") and not started.tasks(), started.logs)


@pytest.fixture
def start(site: Site) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts programs that find the site; none is left when the test ends."""
    programs: list[subprocess.Popen] = []

    def begin(*command: object, **env: str) -> subprocess.Popen:
        env = {**os.environ, **site.env, "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7", "PET_NNODES": "9", **env}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        programs.append(subprocess.Popen([sys.executable, *map(str, command)], env=env, cwd=ROOT, **pipes))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()
        program.communicate()


def running(site: Site) -> list[str]:
    return site.call("squeue", "--noheader", "--format=%i").split()


def until_there(site: Site, launcher: subprocess.Popen, run_dir: Path, *patterns: str) -> None:
    """Waits until the run has files of these patterns. Fails at once, and says why, where its launcher has ended first."""

    def missing() -> list[str]:
        return [pattern for pattern in patterns if not any(run_dir.glob(pattern))]

    def said() -> str:
        logs = [f"== {log.name}\n{log.read_text()}" for log in sorted(run_dir.glob("logs/*")) if log.is_file()]
        jobs = site.call("scontrol", "--oneliner", "show", "job")
        return "\n".join([f"{missing()} missing", jobs, *logs, site.logs()])

    until(lambda: launcher.poll() is not None or not missing(), said)
    if missing():
        pytest.fail("\n".join([*launcher.communicate(), said()]))


def test_four_nodes(site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    """The world is as asked for, each rank on a node of its own; the user sees what rank 0 prints. A name with a space."""
    folder = tmp_path / "a folder 100%n"
    of_the_site = {"SBATCH_ARRAY_INX": "0-1", "SBATCH_JOB_NAME": "another", "SBATCH_NO_REQUEUE": "1"}
    launcher = start(STUB, "launch", "ok", folder, 4, **of_the_site)
    out, err = launcher.communicate()
    assert (launcher.returncode, err) == (0, ""), site.logs()
    assert "rank 0 says hello" in out
    assert "rank 1" not in out
    assert "rank 1 says hello" in (folder / "run/logs/rank1.log").read_text()
    worlds = [json.loads((folder / f"run/env{rank}.json").read_text()) for rank in range(4)]
    assert {w["SLURMD_NODENAME"] for w in worlds} == {"node0", "node1", "node2", "node3"}
    assert all(w["BIRDER_NODE"] == w["SLURMD_NODENAME"].removeprefix("node") for w in worlds)
    assert {w["SLURM_JOB_ID"] for w in worlds}.isdisjoint({"7"})
    assert {w["SLURM_JOB_NAME"] for w in worlds} == {"stub-1"}
    assert not any("SLURM_ARRAY_TASK_ID" in w for w in worlds)
    for world in worlds:
        assert (world["WORLD_SIZE"], world["GLOO_SOCKET_IFNAME"], world["NCCL_SOCKET_IFNAME"]) == ("4", "lo", "lo")
        assert world["MASTER_ADDR"] == "127.0.0.1"  # not a node's name, which nobody can look up here
        assert not {"BIRDER_NIC", "BIRDER_TERMINAL", "PET_NNODES"} & set(world)
    for rank in range(4):
        assert json.loads((folder / f"run/ranks/rank{rank}.json").read_text())["state"] == "done"
    link = json.loads((folder / "run/link.json").read_text())
    assert (link["kind"], link["shaped"], link["measured"]) == ("network", False, False)
    assert not (folder / "results").exists()  # the record of a completed run is training's to write


def test_failing_rank_is_named_and_shown_once(
    site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    launcher = start(STUB, "launch", "rank 1 fails", tmp_path, 3)
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert err.count("Traceback") == 1
    (failed,) = record.read_all(tmp_path / "results")
    assert re.fullmatch(r"SLURM job \d+ FAILED: rank 1 on node \d: ValueError: a broken thing", failed.reason or "")
    assert err.splitlines()[-1] == f"error: {failed.reason}"


def test_bad_input_found_by_workers_is_one_line(
    site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    launcher = start(STUB, "launch", "bad input", tmp_path, 2)
    _, err = launcher.communicate()
    assert (launcher.returncode, err) == (2, "error: the data folder is empty\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_cancels_the_job(
    site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path, signum: int, status: int
) -> None:
    launcher = start(STUB, "launch", "sleep", tmp_path, 2)
    until_there(site, launcher, tmp_path / "run", "env0.json", "env1.json")
    assert any("slurm_stub.py" in task for task in site.tasks())
    launcher.send_signal(signum)
    _, err = launcher.communicate()
    assert (launcher.returncode, err.count("\n")) == (status, 1)
    # Nothing to wait for: the launcher has returned only when the job was over.
    assert running(site) == []
    assert site.tasks() == []
    assert len(record.read_all(tmp_path / "results")) == 1


def test_job_that_is_cancelled_elsewhere(site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    """The state of the job says why it ended, not the ranks that it took along."""
    launcher = start(STUB, "launch", "sleep", tmp_path, 2)
    until_there(site, launcher, tmp_path / "run", "env1.json")
    (job,) = running(site)
    site.call("scancel", job)
    _, err = launcher.communicate()
    assert (launcher.returncode, err) == (1, f"error: SLURM job {job} CANCELLED: it was cancelled\n")


def test_pending_job_says_why_and_is_not_started_twice(
    site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    launcher = start(STUB, "launch", "ok", tmp_path, 2, 'sbatch={"hold":null}')
    (job,) = until(lambda: running(site))
    assert launcher.stdout is not None
    assert any(line == f"SLURM job {job}: pending (JobHeldUser)\n" for line in launcher.stdout)
    second = start(STUB, "launch", "ok", tmp_path, 2)
    assert f"job {job} of this run has not ended" in second.communicate()[1]
    assert second.returncode == 2
    site.call("scontrol", "release", job)
    assert launcher.wait() == 0


def test_without_waiting(site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    launcher = start(STUB, "launch", "resumes", tmp_path, 2, "wait=false")
    out, err = launcher.communicate()
    assert (launcher.returncode, err) == (0, "")
    (job,) = running(site)
    assert f"scancel {job}" in out
    # The launcher has gone, the job goes on; and the script that it has left can be submitted by hand.
    until((tmp_path / "run/life0-rank1").exists, site.logs)
    site.call("scancel", job)
    again = site.call("sbatch", "--parsable", str(tmp_path / "run/job.sh"))
    until(lambda: site.call("squeue", "--noheader", "--format=%i %T") == f"{again} RUNNING", site.logs)


def test_requeued_job_goes_on(site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    launcher = start(STUB, "launch", "resumes", tmp_path, 2)
    until_there(site, launcher, tmp_path / "run", "life0-rank0", "life0-rank1")
    (job,) = running(site)
    (tmp_path / "run/errors").mkdir()
    (tmp_path / "run/errors/rank2.json").write_text("{}")  # of a life that is over
    site.requeue(job)
    out, err = launcher.communicate()
    assert (launcher.returncode, err) == (0, ""), site.logs()
    assert "running, restart 1" in out
    assert [(tmp_path / f"run/life1-rank{rank}").read_text() for rank in (0, 1)] == ["auto"] * 2
    assert not (tmp_path / "run/errors").exists()
    assert slurm_job_state(site, job) == "COMPLETED"


def slurm_job_state(site: Site, job: str) -> str:
    return re.findall(r"JobState=(\w+)", site.call("scontrol", "show", "job", job))[0]


def test_training_that_is_requeued_ends_with_a_record(
    site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    """A whole run on two nodes, through the command line, requeued in its middle."""
    steps, every = 1500, 500
    options = ["cluster=slurm", "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.poll_s=1", "run_name=one"]
    options += [f"train.max_steps={steps}", "train.epochs=100", f"checkpoint.every={every}", "wandb=disabled"]
    options += ["train.eval_every=1000000"]
    options += [f"output_dir={tmp_path / 'out'}", f"results_dir={tmp_path / 'results'}"]
    launcher = start("experiments/run.py", "+exp=digits", *options)
    run_dir = tmp_path / "out/digits/one"
    until_there(site, launcher, run_dir, "checkpoints/step-????????/manifest.json")
    assert launcher.poll() is None, launcher.communicate()
    (job,) = running(site)
    site.requeue(job)
    _, err = launcher.communicate()
    assert launcher.returncode == 0, (err, site.logs())
    assert slurm_job_state(site, job) == "COMPLETED"
    (done,) = record.read_all(tmp_path / "results")
    assert (done.status, done.cluster, done.nodes, done.link["kind"]) == ("completed", "slurm", 2, "network")
    assert done.timing["steps"] <= steps - every  # it has not begun again
    logged = [int(row["step"]) for row in csv.DictReader((run_dir / "curve.csv").open())]
    assert logged[-1] == steps
    assert logged == sorted(set(logged))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 5}, "5 nodes asked for, and partition main has 4"),
        ({"nodes": 2, "partition": "small"}, "2 nodes asked for, and partition small has 1"),
        ({"nodes": 1, "partition": "gpu"}, "no partition 'gpu'; there are: main, small"),
    ],
)
def test_what_the_site_cannot_do(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
    with pytest.raises(UserError, match=words):
        SlurmLauncher(ranks_per_node=1, **options).launch(make_spec(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_refused_job_is_one_line(site: Site, start: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    launcher = start(STUB, "launch", "ok", tmp_path, 2, 'constraint="warp"')
    _, err = launcher.communicate()
    assert launcher.returncode == 2
    assert err.startswith("error: sbatch refused the job: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
