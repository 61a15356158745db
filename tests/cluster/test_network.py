"""Sandboxes: the nodes' network is what it promises, on every way into one, and nothing of it is ever left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from launch import process
from launch.emulated import measure, network, sandbox
from tests.helpers import ROOT, sandboxed
from tests.helpers.emulated_run import RATE, skip_reason
from tests.helpers.waiting import until

RUN = str(ROOT / "tests/helpers/emulated_run.py")
OVER = 1.2
"""Above a set rate only as far as pauses of a loaded machine take it: what has gathered meanwhile is read at once."""
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sandbox")]  # no two sandboxes at once
needs_sandbox = pytest.mark.skipif(skip_reason() is not None, reason=str(skip_reason()))


def interfaces() -> str:
    """The machine's own interfaces and how they are shaped."""
    shown = [["ip", "-json", "address"], ["tc", "-json", "qdisc"], ["ip", "netns"]]
    return "".join(subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in shown)


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def run(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python tests/helpers/sandboxed.py ARGUMENTS`, with other words before it."""
    command = [*before, *(sandboxed.script(*arguments)[bool(before) :])]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := skip_reason():
        pytest.skip(reason)
    file = tmp_path_factory.mktemp("network") / "shown.json"
    outside = interfaces(), mounts()
    done = run("--nodes", "3", "--mbit", str(RATE), "--", sys.executable, RUN, "network", str(file))
    assert done.returncode == 0, done.stderr
    assert (interfaces(), mounts()) == outside
    return json.loads(file.read_text())


def test_every_node_has_one_address_on_eth0(shown: dict[str, Any]) -> None:
    assert len(set(shown["namespaces"])) == 3
    for node, found in shown["interfaces"].items():
        assert found["eth0"] == ["UP", f"{network.address(int(node))}/{network.PREFIX}"]
        assert found["lo"][1] == "127.0.0.1/8"
        # Some kernels put idle tunnel devices into every namespace.
        assert [name for name, (state, *_) in found.items() if state == "UP"] == ["eth0"]


def test_addresses_sort_as_their_nodes_do() -> None:
    addresses = [network.address(node) for node in range(network.MAX_NODES)]
    assert addresses == sorted(set(addresses))


def test_goodput_is_that_of_the_set_rate(shown: dict[str, Any]) -> None:
    """Below it only as far as other load on the machine takes it."""
    for rate in shown["goodput"]:
        assert 0.7 * RATE < rate < 0.96 * OVER * RATE


def test_both_directions_are_shaped(shown: dict[str, Any]) -> None:
    """In the ring 0 -> 1 -> 2 -> 0 a slow node 0 is slow to hear from node 2 and to speak to node 1."""
    from_2, from_0, from_1 = shown["slow node 0"]
    assert 0.6 * RATE / 4 < from_2 < OVER * RATE / 4
    assert 0.6 * RATE / 4 < from_0 < OVER * RATE / 4
    assert from_1 > 0.6 * RATE


def test_a_cut_link_and_a_mended_one(shown: dict[str, Any]) -> None:
    assert shown["cut"] == [False, True]
    assert shown["mended"] == [True, True]


@needs_sandbox
def test_exit_status_and_output_are_the_commands() -> None:
    done = run("--nodes", "1", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert run("--nodes", "1", "--", "sh", "-c", "kill -9 $$").returncode == 137
    missing = run("--nodes", "1", "--", "no-such-command")
    assert (missing.returncode, missing.stderr.count("\n")) == (127, 1)


WITHOUT_RIGHTS = ("setpriv", "--bounding-set", "-sys_admin,-net_admin")
# env: setpriv itself may still start programs that nobody else may.
AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "env")
# Where parts of /proc are hidden the kernel refuses a private one, as in many containers.
HIDDEN_PROC = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/sys/fs && exec "$@"', "sh")

PROBE = """
import sys
from launch.emulated import sandbox
command, reason = sandbox.probe()
sys.exit(reason) if command is None else print(*command)
"""


@needs_sandbox
@pytest.mark.parametrize("before", [(), WITHOUT_RIGHTS, AS_NOBODY, HIDDEN_PROC + WITHOUT_RIGHTS])
def test_ways_into_a_sandbox(before: tuple[str, ...], tmp_path: Path) -> None:
    """As root, through a user namespace with and without being root outside, and without a private /proc."""
    if before and (os.geteuid() != 0 or shutil.which("setpriv") is None):
        pytest.skip("needs root, to give up rights with setpriv")
    python = sys.executable
    if before:
        for python in (sys.executable, "/usr/bin/python3"):  # the first may lie where only root looks
            tried = [*before, python, "-c", PROBE]
            done = subprocess.run(tried, capture_output=True, text=True, cwd=ROOT)
            if done.returncode == 0:
                break
        else:
            pytest.skip(f"not here: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        assert "--user" in done.stdout
        assert ("--mount-proc" in done.stdout) == (HIDDEN_PROC[0] != before[0])
        before = (*before, python)
    tmp_path.chmod(0o777)
    for folder in tmp_path.parents[:3]:  # a worker of several has a folder more
        if folder.stat().st_uid == os.geteuid() and folder != Path(tempfile.gettempdir()):
            folder.chmod(0o755)
    done = run("--nodes", "2", "--", python, RUN, "processes", str(tmp_path / "shown"), before=before)
    assert done.returncode == 0, done.stderr
    shown = json.loads((tmp_path / "shown").read_text())
    assert shown == {"alive": True, "dead": False, "zombies": 0, "reaches": True}


@needs_sandbox
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_killed_sandbox_leaves_nothing(sig: signal.Signals, tmp_path: Path) -> None:
    outside = interfaces()
    command = sandboxed.script("--nodes", "2", "--mbit", "100", "--", "sh", "-c", f"touch {tmp_path}/up; sleep 600")
    starter = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"])
    until((tmp_path / "up").exists, "the sandbox")
    (unshare,) = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
    inside = list(sandbox.processes(int(unshare)).values())
    assert len(inside) >= 3
    starter.send_signal(sig)  # the sandbox loses its parent
    starter.wait()
    until(lambda: not any(map(process.alive, [int(unshare), *inside])), "no process is left")
    assert interfaces() == outside


def test_no_sandbox_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sandbox, "probe", lambda: (None, "unshare: Operation not permitted"))
    assert sandboxed.main(["--nodes", "2", "--", "true"]) == 2
    assert capsys.readouterr().err == "error: no sandbox: unshare: Operation not permitted\n"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda tool: None if tool == "tc" else f"/bin/{tool}")
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    assert sandbox.probe.__wrapped__() == (None, "no tc: install iproute2")
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    assert sandbox.probe.__wrapped__() == (None, "network namespaces need Linux")


def test_links_that_seem_slow_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[40.0, 60.0], [90.0, 97.0], [1.0, 1.0]])
    monkeypatch.setattr(measure, "goodput", lambda nodes, **_: next(answers))
    link = measure.check(2, 100.0)
    assert (link["measured"], link["mbit_per_s"], link["note"]) == (True, 93.5, None)
    assert link["off_by"] == pytest.approx(abs(93.5 / (100 * network.GOODPUT) - 1), abs=1e-4)


def test_links_that_are_off_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([[40.0], [60.0], [50.0]])
    monkeypatch.setattr(measure, "goodput", lambda nodes, **_: next(answers))
    link = measure.check(1, 100.0)
    assert link["mbit_per_s"] == 60.0
    assert link["off_by"] == pytest.approx(0.365, abs=1e-3)
    assert "60 Mbit/s per node, 37% less than 94.5" in link["note"]
    assert "\n" not in link["note"]
