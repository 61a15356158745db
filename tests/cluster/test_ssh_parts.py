"""cluster=ssh in parts: lists of hosts, what a lost node explains, a host's own process, files that come back."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from experiments.config import compose
from experiments.records import record
from launch import failure, hosts, process
from launch.base import ROOT
from launch.errors import UserError
from launch.ssh import connection
from launch.ssh.launcher import SshLauncher
from tests.helpers.stub_run import make_spec
from tests.helpers.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ssh")]


def test_lists_of_hosts(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\na\nroot@b.example:2222  # the second\n\n")
    expected = [hosts.Host("a"), hosts.Host("b.example", "root", 2222)]
    assert hosts.parse(str(file)) == hosts.parse("a,root@b.example:2222") == hosts.parse(["a", "root@b.example:2222"])
    assert hosts.parse(str(file)) == expected
    assert hosts.parse("[fe80::1]:22") == [hosts.Host("fe80::1", None, 22)]
    for wrong in ("", "a,a", "a,root@A", "-oProxyCommand=x", "a b:x", str(tmp_path / "none")):
        with pytest.raises(UserError):
            hosts.parse(wrong)


def test_host_lists_that_are_no_file_and_files_that_are_no_text(tmp_path: Path) -> None:
    """A list longer than the name of a file can be; what editors elsewhere put before a text; another encoding."""
    many = [f"node{number:03}.example.org" for number in range(100)]
    assert [str(host) for host in hosts.parse(",".join(many))] == many
    file = tmp_path / "hosts"
    file.write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert hosts.parse(str(file)) == [hosts.Host("a"), hosts.Host("b")]
    file.write_bytes("# das Gerät\na\n".encode("latin-1"))
    for wrong in (str(file), "~nobody-of-this-name/hosts"):
        with pytest.raises(UserError):
            hosts.parse(wrong)


def test_nodes_are_as_many_as_hosts() -> None:
    def launcher(*overrides: str) -> SshLauncher:
        return compose.launcher(compose.resolve(compose.compose(["+exp=digits", "cluster=ssh", *overrides])))

    # The experiment's own number of nodes is for one machine.
    assert launcher("cluster.hosts=a,root@b:22,c").nodes == 3
    assert launcher("cluster.hosts=[a,b]", "cluster.nodes=2").nodes == 2
    with pytest.raises(UserError, match=r"cluster.nodes=4, but cluster.hosts names 3"):
        launcher("cluster.hosts=a,b,c", "cluster.nodes=4")
    with pytest.raises(UserError, match=r"cluster.hosts has no value"):
        launcher()


def test_lost_node_explains_lost_connections(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    error = {
        "rank": 0,
        "node": 0,
        "attempt": 0,
        "time": 1.0,
        "type": "RuntimeError",
        "traceback": "",
        "user_error": False,
    }
    file = tmp_path / "errors/rank0.json"
    file.write_text(json.dumps({**error, "message": "Connection closed by peer"}))
    assert failure.explain(tmp_path, [], 0, 1, lost="node 1: lost").reason == "node 1: lost"
    file.write_text(json.dumps({**error, "message": "a bug"}))
    assert "a bug" in failure.explain(tmp_path, [], 0, 1, lost="node 1: lost").reason


def agent(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """launch/ssh/remote.py with a shell script in torchrun's place."""
    command = [
        sys.executable,
        "-m",
        "launch.ssh.remote",
        "run",
        "0",
        str(folder),
        "sh",
        "-c",
        script,
        "--nproc-per-node",
        "1",
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = subprocess.Popen(command, cwd=ROOT, **pipes)
    assert started.stdin is not None
    request = {"files": {"spec.yaml": "a: 1\n"}, "environment": {}, "heartbeat_timeout_s": 30.0}
    started.stdin.write(json.dumps(request).encode() + b"\n")
    started.stdin.flush()
    return started


RANK = """
import signal, subprocess, sys, time
from pathlib import Path
from launch.failure import RankFiles
folder = Path(sys.argv[1])
writer = subprocess.Popen(["sleep", "600"], start_new_session=True)
def end(*_):
    time.sleep(0.5)
    (folder / "writer").write_text(f"{writer.pid} {writer.poll()}")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
RankFiles(folder / "run", 0, 0).begin()
while True:
    time.sleep(0.1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_what_a_rank_needs_to_end_well_is_ended_after_it(tmp_path: Path) -> None:
    """As W&B's writer, which was ended together with the ranks, so that the end of a run was not recorded."""
    (tmp_path / "rank.py").write_text(RANK)
    command = shlex.join([sys.executable, str(tmp_path / "rank.py"), str(tmp_path)])
    started = agent(tmp_path / "run", f"PYTHONPATH={shlex.quote(str(ROOT))} {command}")
    try:
        until(lambda: (tmp_path / "run/ranks/rank0.json").exists())
        assert started.stdin is not None
        started.stdin.close()
        started.wait()
    finally:
        started.kill()
        started.wait()
    writer, code = (tmp_path / "writer").read_text().split()
    assert code == "None"
    assert not process.alive(int(writer))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("how", ["input ends", "command ends"])
def test_host_ends_what_its_command_leaves(tmp_path: Path, how: str) -> None:
    """Orphans in sessions of their own that ignore SIGTERM are still found."""
    left = f"trap '' TERM; echo $$ > {tmp_path}/pid; while :; do sleep 0.2; done"
    script = f"(setsid sh -c {shlex.quote(left)} &) ; while [ ! -s {tmp_path}/pid ]; do sleep 0.05; done; "
    started = agent(tmp_path / "run", script + ("exit 3" if how == "command ends" else "sleep 600"))
    try:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip() != "")
        orphan = int((tmp_path / "pid").read_text())
        if how == "input ends":
            assert orphan in process.descendants(started.pid)
            assert started.stdin is not None
            started.stdin.close()
        code = started.wait()
    finally:
        started.kill()
        started.wait()
    assert code == (3 if how == "command ends" else 1)
    assert not process.alive(orphan)
    report = json.loads((tmp_path / "run/agents/node0.json").read_text())
    assert report == {"code": 3 if how == "command ends" else None, "vanished": []}
    assert (tmp_path / "run/spec.yaml").read_text() == "a: 1\n"


def test_the_record_of_a_resumed_run_takes_the_place_of_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run is shared, that of the results is not; here is the record of the start that failed."""
    spec = make_spec(tmp_path)
    (tmp_path / "run").mkdir()
    record.write_failed(spec, "rank 0: killed")
    written = record.write(record.from_spec(spec), tmp_path / "host")

    def fetch(commands: dict[int, str], outputs: list[Path]) -> dict[int, tuple[int, str]]:
        for node in commands:
            with tarfile.open(outputs[node], "w") as tar:
                if node == 0:
                    tar.add(written, f"results/records/{written.name}")
        return dict.fromkeys(commands, (0, ""))

    launcher = SshLauncher(hosts="a,b", ranks_per_node=1)
    launcher.shared = [True, True]
    monkeypatch.setattr(launcher, "command", lambda spec, node: ["true"])
    monkeypatch.setattr(launcher.connections, "run", fetch)
    launcher.run(spec)
    assert record.ended_well(spec) is not None


def test_checkpoints_that_the_hosts_do_not_see_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would begin again at the first step, under the same id."""
    spec = make_spec(tmp_path)
    spec = dataclasses.replace(spec, config={**spec.config, "resume": "auto", "checkpoint": {"every": 0}})
    launcher = SshLauncher(hosts="a", ranks_per_node=1)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(launcher, "_look", lambda spec: [{"shared": False, "gpus": 0, "address": "", "client": ""}])
    monkeypatch.setattr(launcher, "_misfit", lambda *_: "")
    monkeypatch.setattr(launcher, "_find_routes", lambda *_: [])
    launcher.check(spec)
    (tmp_path / "run/checkpoints/step-5").mkdir(parents=True)
    with pytest.raises(UserError, match=r"is not shared with a: .* another run_name"):
        launcher.check(spec)


def test_unpacking_writes_nowhere_else(tmp_path: Path) -> None:
    import io

    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("run/logs/rank0.log", "results/records/x.json", "../evil", "run/../../evil", "other/evil"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    connection.unpack(tmp_path / "t.tar", {"run": tmp_path / "a/run", "results": tmp_path / "a/results"})
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["a/results/records/x.json", "a/run/logs/rank0.log", "t.tar"]
