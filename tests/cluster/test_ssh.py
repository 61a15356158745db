"""cluster=ssh against real sshds, one in each of four hosts made of namespaces."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from experiments.records import record
from launch.base import ROOT
from tests.helpers import ssh_site
from tests.helpers.ssh_site import HOSTS, Site
from tests.helpers.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ssh")]

GIT = ["git", "-c", "user.name=test", "-c", "user.email=test@example.org"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := ssh_site.missing():
        pytest.skip(reason)
    made = Site(tmp_path_factory.mktemp("site"))
    yield made
    made.stop()


def assert_nothing_left(site: Site, only: range = range(HOSTS)) -> None:
    def left() -> dict[int, Any]:
        return {k: found for k in only if (found := site.running(k))}

    until(lambda: not left(), left, every_s=0.5)


def wait_for_ranks(folder: Path, number: int) -> dict[int, dict[str, Any]]:
    """Waits until stub ranks train in a shared folder: their rank files by node."""
    until(lambda: all((folder / f"run/env{r}.json").exists() for r in range(number)), "the ranks train")
    files = [json.loads((folder / f"run/ranks/rank{r}.json").read_text()) for r in range(number)]
    return {f["node"]: f for f in files}


def test_hosts_with_folders_of_their_own(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 talks to the user; what the ranks leave on their hosts is here afterwards."""
    monkeypatch.setenv("SOME_TOKEN", "hidden-value")
    with site.private(tmp_path):
        request = site.request(tmp_path, "ok", env={"NCCL_DEBUG": "INFO", "SOME_TOKEN": None})
        code, out, err = site.finish(request)
        assert (code, err) == (0, "")
        assert re.findall(r"rank \d says hello", out) == ["rank 0 says hello"]
        assert_nothing_left(site)
        nodes = set()
        for rank in range(HOSTS):
            facts = json.loads((tmp_path / f"run/ranks/rank{rank}.json").read_text())
            nodes.add(facts["node"])
            assert facts["state"] == "done"
            assert rank == 0 or f"rank {rank} says hello" in (tmp_path / f"run/logs/rank{rank}.log").read_text()
            assert (tmp_path / f"run/logs/node{rank}.log").exists()
            env = json.loads(site.on(facts["node"], f"cat {tmp_path}/run/env{rank}.json"))
            assert env["GLOO_SOCKET_IFNAME"] == env["NCCL_SOCKET_IFNAME"] == env["BIRDER_NIC"] == "eth0"
            assert (env["BIRDER_NODE"], env["WORLD_SIZE"]) == (str(facts["node"]), "4")
            assert (env["NCCL_DEBUG"], env["SOME_TOKEN"]) == ("INFO", "hidden-value")
            assert int(env["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))
            assert env["MASTER_ADDR"] in site.addresses
        assert nodes == set(range(HOSTS))
        link = json.loads(site.on(2, f"cat {tmp_path}/run/link.json"))
        assert (link["kind"], link["shaped"], link["measured"]) == ("network", False, False)
    assert not list(tmp_path.glob("**/.birder-*"))


def test_rank_that_fails_on_one_host(site: Site, tmp_path: Path) -> None:
    """One traceback; host and node for the user, the node alone in the record, which may be published."""
    with site.private(tmp_path):
        code, _, err = site.finish(site.request(tmp_path, "node 3 fails"))
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[0] == f"node 3 is {site.addresses[3]}"
    assert re.fullmatch(r"error: rank \d on node 3: ValueError: a broken thing", err.splitlines()[-1])
    (failed,) = record.read_all(tmp_path / "results")
    assert (failed.status, f"error: {failed.reason}") == ("failed", err.splitlines()[-1])
    assert_nothing_left(site)


def test_misfits_are_named_one_line_each(site: Site, tmp_path: Path) -> None:
    """Wrong commit, wrong torch, no answer: each host in one line, and nothing starts."""
    if not (ROOT / ".git").is_dir():
        pytest.skip("not a git checkout of its own")
    clone = tmp_path / "clone"
    subprocess.run([*GIT, "clone", "-q", "--shared", "--no-checkout", ROOT, clone], check=True)
    made = subprocess.run(
        [*GIT, "-C", clone, "commit-tree", "HEAD^{tree}", "-m", "other"], capture_output=True, text=True, check=True
    )
    other = made.stdout.strip()
    subprocess.run([*GIT, "-C", clone, "update-ref", "--no-deref", "HEAD", other], check=True)
    torch = next(f for f in metadata.files("torch") or [] if f.name == "METADATA").locate()
    version = metadata.version("torch")
    changed = tmp_path / "METADATA"
    changed.write_text(Path(str(torch)).read_text().replace(f"\nVersion: {version}", "\nVersion: 1.0.0", 1))
    mounts = {1: f"--bind {clone}/.git {ROOT}/.git", 2: f"--bind {changed} {torch}"}
    folder = tmp_path / "here"
    with site.mounted(mounts):
        addresses = [*site.addresses[:3], "10.77.0.99"]
        code, out, err = site.finish(site.request(folder, "ok", addresses))
    lines = err.splitlines()
    assert (code, out, len(lines)) == (2, "", 4), err
    assert lines[0].startswith(f"{site.addresses[1]}: commit {other[:10]} in {ROOT}, here ")
    assert lines[1] == f"{site.addresses[2]}: torch 1.0.0, here {version}"
    assert lines[2].startswith("10.77.0.99: cannot be reached: ssh: connect to host 10.77.0.99")
    assert lines[3] == "error: 3 of 4 hosts cannot take part: nothing was started"
    assert not folder.exists()
    assert_nothing_left(site)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"python": "/no/such/python"}, "no Python at /no/such/python: set cluster.python"),
        (
            {"directory": "/no/such/folder"},
            "no folder /no/such/folder: put the repository there, or set cluster.directory",
        ),
        ({"interface": "eth9"}, 'Device "eth9" does not exist.'),
        ({"ssh_options": ["-F", "none", "-o", "UserKnownHostsFile=/dev/null"]}, "Host key verification failed."),
    ],
)
def test_settings_that_do_not_fit_the_hosts(site: Site, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    code, _, err = site.finish(site.request(tmp_path / "here", "ok", site.addresses[:2], **options))
    assert (code, err.count("\n")) == (2, 3), err
    assert [words in line for line in err.splitlines()] == [True, True, False]
    assert not (tmp_path / "here").exists()


def test_checkpoints_need_a_shared_folder(site: Site, tmp_path: Path) -> None:
    with site.mounted({1: f"-t tmpfs tmpfs {tmp_path}"}):
        code, _, err = site.finish(site.request(tmp_path, "ok", site.addresses[:2], checkpoint_every=10))
    assert (code, err.count("\n")) == (2, 1)
    assert f"is not shared with {site.addresses[1]}: set output_dir" in err
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_what_ssh_would_run(site: Site, tmp_path: Path) -> None:
    code, out, _ = site.finish(
        site.request(tmp_path, "ok", site.addresses[:2], dry_run=True, port=29400, max_restarts=1)
    )
    assert code == 0
    commands = [shlex.split(line) for line in out.splitlines()]
    assert [c[-2] for c in commands] == site.addresses[:2]
    for node, command in enumerate(commands):
        assert command[0] == "ssh"
        run = shlex.split(command[-1])
        assert run[:5] == ["cd", str(ROOT), "&&", "exec", "env"]
        assert {f"BIRDER_NODE={node}", "GLOO_SOCKET_IFNAME=eth0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(run)
        assert run[run.index("--rdzv-endpoint") + 1] == f"{site.addresses[0]}:29400"
        assert run[run.index("--local-addr") + 1] == site.addresses[node]
        assert run[run.index("--rdzv-conf") + 1].split(",")[0] == f"is_host={int(node == 0)}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ended_launcher_leaves_nothing_on_hosts(site: Site, tmp_path: Path, sent: signal.Signals, status: int) -> None:
    launcher = site.start(site.request(tmp_path, "sleep", site.addresses[:2]))
    wait_for_ranks(tmp_path, 2)
    assert all(site.running(k) for k in (0, 1))
    launcher.send_signal(sent)
    _, err = launcher.communicate()
    assert launcher.returncode == status
    assert_nothing_left(site, only=range(2))
    if sent == signal.SIGINT:
        assert err == "interrupted: every process of the run has ended\n"
        assert record.read_all(tmp_path / "results")[0].reason == "interrupted by Ctrl-C"


def test_killed_rank_is_found_on_its_host(site: Site, tmp_path: Path) -> None:
    """Process ids are those of the host: here they mean other processes, or none."""
    launcher = site.start(site.request(tmp_path, "sleep", site.addresses[:2]))
    facts = wait_for_ranks(tmp_path, 2)[1]
    site.on(1, f"kill -9 {facts['pid']}")
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert err.splitlines()[-1].startswith(f"error: rank {facts['rank']} on node 1 was killed")
    assert_nothing_left(site, only=range(2))


def test_host_that_is_lost(site: Site, tmp_path: Path) -> None:
    """The end of everything that belongs to a connection, as when a host is switched off."""
    launcher = site.start(site.request(tmp_path, "sleep", site.addresses[:2]))
    wait_for_ranks(tmp_path, 2)
    (agent,) = [
        pid for pid, line in site.running(1).items() if " -m launch.ssh.remote run 1 " in line and "bash" not in line
    ]
    site.on(1, f"kill -9 {agent}")
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert "error: node 1: the connection to it was lost" in err
    assert ssh_site.BANNER.strip() not in err
    assert_nothing_left(site, only=range(2))


def test_training_on_four_hosts(site: Site, tmp_path: Path) -> None:
    """A real run without a shared folder, from the command line to its table."""
    folders = [f"output_dir={tmp_path}/outputs", f"results_dir={tmp_path}/results"]
    options = "[" + ",".join(json.dumps(o) for o in site.options) + "]"
    cluster = ["cluster=ssh", "cluster.hosts=" + ",".join(site.addresses), f"cluster.ssh_options={options}"]
    small = ["scale=quick", "train.max_steps=4", "train.timing_warmup=1", "workload.train_images=256", "wandb=disabled"]
    command = [*site.enter(), sys.executable, "experiments/compare.py", "+exp=digits", "--methods", "birder"]
    env = {"cluster.env={OMP_NUM_THREADS: 1}"}
    with site.private(tmp_path):
        done = subprocess.run([*command, *cluster, *folders, *small, *env], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = record.read_all(tmp_path / "results")
    assert (found.status, found.cluster, found.nodes, found.link["kind"]) == ("completed", "ssh", 4, "network")
    assert found.bytes_per_step["payload_inter"] > 0
    assert "10.77" not in json.dumps(record.dataclasses.asdict(found))
    assert (tmp_path / "results" / str(found.curve)).exists()
    assert "Birder" in (tmp_path / "results/tables/digits.md").read_text()
    assert_nothing_left(site)
