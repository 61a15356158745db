"""The local launcher: what it starts, what it says when a rank fails, and that nothing is ever left running."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.records import record
from launch import environment, failure, local, lock, process
from launch.errors import UserError
from launch.local import LocalLauncher
from tests.helpers import ROOT
from tests.helpers.stub_run import make_spec, with_gpus
from tests.helpers.waiting import until

STUB = ROOT / "tests/helpers/stub_run.py"


def start(what: str, folder: Path, **options: Any) -> subprocess.Popen:
    env = {**os.environ, "MASTER_PORT": "1", "RANK": "7", "PET_NNODES": "9"}  # what an earlier torchrun might leave
    command = [sys.executable, str(STUB), "launch", what, str(folder)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen(command, env=env, **options)


def finish(what: str, folder: Path) -> tuple[int, str, str]:
    launcher = start(what, folder)
    out, err = launcher.communicate()
    return launcher.returncode, out, err


def wait_for_ranks(folder: Path) -> dict[int, int]:
    """Waits until both ranks train; rank -> process id."""
    until(lambda: all((folder / "run" / f"env{r}.json").exists() for r in (0, 1)), "the ranks train")
    files = (folder / "run" / "ranks").glob("*.json")
    return {f["rank"]: f["pid"] for f in (json.loads(p.read_text()) for p in files)}


def assert_all_gone(pids: list[int]) -> None:
    until(lambda: not any(map(process.alive, pids)), "no process is left")


@pytest.mark.slow
def test_two_nodes_on_a_terminal(tmp_path: Path) -> None:
    """The world is as asked for; rank 0 talks to the user's terminal, the others to their logs."""
    ours, theirs = pty.openpty()
    launcher = start("ok", tmp_path, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = ""
    with contextlib.suppress(OSError):  # nobody writes any more
        while True:
            shown += os.read(ours, 65536).decode()
    assert launcher.wait() == 0
    assert "rank 0 says hello, terminal: True" in shown
    assert "rank 1" not in shown
    assert "rank 1 says hello, terminal: False" in (tmp_path / "run/logs/rank1.log").read_text()
    for rank in (0, 1):
        env = json.loads((tmp_path / f"run/env{rank}.json").read_text())
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["GROUP_WORLD_SIZE"]) == (
            str(rank),
            "2",
            "0",
            "2",
        )
        assert env["MASTER_PORT"] != "1"
        assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in env
        assert json.loads((tmp_path / f"run/ranks/rank{rank}.json").read_text())["state"] == "done"
    assert not (tmp_path / "results").exists()  # the record of a completed run is training's to write


def test_failing_rank_is_named_and_shown_once(tmp_path: Path) -> None:
    code, _, err = finish("rank 1 fails", tmp_path)
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == "error: rank 1 on node 1: ValueError: a broken thing"
    (failed,) = record.read_all(tmp_path / "results")
    assert (failed.status, failed.reason) == ("failed", "rank 1 on node 1: ValueError: a broken thing")


@pytest.mark.slow
def test_bad_input_found_by_workers_is_one_line(tmp_path: Path) -> None:
    code, _, err = finish("bad input", tmp_path)
    assert (code, err) == (2, "error: the data folder is empty\n")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_killed_rank_ends_the_run(tmp_path: Path) -> None:
    launcher = start("sleep", tmp_path)
    ranks = wait_for_ranks(tmp_path)
    everything = process.descendants(launcher.pid)
    assert set(ranks.values()) <= set(everything)
    os.kill(ranks[1], signal.SIGKILL)
    _, err = launcher.communicate()
    assert launcher.returncode == 1
    assert err.splitlines()[-1].startswith("error: rank 1 on node 1 was killed")
    assert_all_gone(everything)


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    launcher = start("sleep", tmp_path)
    wait_for_ranks(tmp_path)
    everything = process.descendants(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert (launcher.returncode, err.count("\n")) == (130, 1)
    assert "interrupted" in err
    assert_all_gone(everything)
    assert record.read_all(tmp_path / "results")[0].reason == "interrupted by Ctrl-C"


@pytest.mark.slow
def test_an_interrupt_after_the_result_keeps_the_record(tmp_path: Path) -> None:
    launcher = start("recorded, then sleep", tmp_path)
    wait_for_ranks(tmp_path)
    until(lambda: list(tmp_path.glob("results/records/*.json")), "the record")
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate()
    assert (launcher.returncode, err.count("\n")) == (143, 1)
    (kept,) = record.read_all(tmp_path / "results")
    assert (kept.status, kept.reason) == ("completed", None)


@pytest.mark.slow
def test_killed_launcher_leaves_nothing_and_holds_nothing(tmp_path: Path) -> None:
    launcher = start("sleep", tmp_path)
    wait_for_ranks(tmp_path)
    everything = process.descendants(launcher.pid)
    assert len(everything) >= 4  # two agents, two ranks
    launcher.kill()
    assert_all_gone(everything)
    launcher.communicate()
    with lock.held(tmp_path / "run"):  # though run.owner is still there
        assert (tmp_path / "run/run.owner").exists()


def test_a_run_that_the_system_cannot_start_is_one_line(tmp_path: Path) -> None:
    """A full disk, no more processes; here a file stands where the logs go."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").write_text("")
    launcher = LocalLauncher(nodes=1, ranks_per_node=1)
    launcher.worker, launcher.on_failure = STUB, record.write_failed
    with pytest.raises(failure.RunFailed, match="logs"):
        launcher.launch(make_spec(tmp_path))
    assert record.read(record.place(tmp_path / "results", "stub-1")).status == "failed"


def test_an_interrupt_of_the_first_line_leaves_a_record_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launch.base.say", interrupted)
    launcher, said = LocalLauncher(nodes=2, ranks_per_node=1, backend="gloo"), list[str]()
    launcher.worker, launcher.on_failure = STUB, lambda spec, reason: said.append(reason)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(make_spec(tmp_path))
    assert said == ["interrupted by Ctrl-C"]


def test_command(tmp_path: Path) -> None:
    launcher = LocalLauncher(nodes=4, ranks_per_node=2, name="local", max_restarts=1)
    spec = make_spec(tmp_path)
    launcher.check(spec)
    commands = [launcher.command(spec, k) for k in range(4)]
    for node, command in enumerate(commands):
        pairs = dict(zip(command[3:-2:2], command[4:-2:2], strict=True))
        assert command[1:3] == ["-m", "torch.distributed.run"]
        assert pairs == {
            "--nnodes": "4",
            "--nproc-per-node": "2",
            "--rdzv-backend": "c10d",
            "--rdzv-id": "stub-1",
            "--rdzv-endpoint": f"127.0.0.1:{launcher.port}",
            "--rdzv-conf": f"is_host={int(node == 0)},join_timeout=120",
            "--local-addr": "127.0.0.1",
            "--log-dir": f"{spec.path}/logs/torchrun",
            "--max-restarts": "1",
        }
        assert command[-2].endswith("experiments/training/worker.py")
        assert command[-1] == str(spec.file)


def test_dry_run_starts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LocalLauncher(nodes=3, ranks_per_node=1, dry_run=True).launch(make_spec(tmp_path))
    assert capsys.readouterr().out.count("torch.distributed.run") == 3
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_divided_among_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, "0,2,4,6")
    launcher = LocalLauncher(nodes=2, ranks_per_node=2)
    assert [launcher.environment(k)["CUDA_VISIBLE_DEVICES"] for k in range(2)] == ["0,2", "4,6"]
    on_cpu = LocalLauncher(nodes=2, ranks_per_node=2, device="cpu")
    assert [on_cpu.environment(k)["CUDA_VISIBLE_DEVICES"] for k in range(2)] == ["", ""]


def test_cores_are_divided_among_all_ranks_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that take all cores each would time each other. What the user has set stays."""
    monkeypatch.setattr(environment, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launcher = LocalLauncher(nodes=2, ranks_per_node=2, device="cpu")
    assert [launcher.environment(k)["OMP_NUM_THREADS"] for k in range(2)] == ["2", "2"]
    assert LocalLauncher(nodes=16, ranks_per_node=1, device="cpu").environment(0)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launcher.environment(0)["OMP_NUM_THREADS"] == "3"


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_gpus(monkeypatch, "0")
    with pytest.raises(UserError, match="needs 2 GPUs"):
        LocalLauncher(nodes=2, ranks_per_node=1, backend="nccl").check(make_spec(tmp_path))
    # Left to itself the run goes to the CPU as a whole.
    assert LocalLauncher(nodes=2, ranks_per_node=1).environment(0)["CUDA_VISIBLE_DEVICES"] == ""


def test_ranks_may_share_a_gpu_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpus(monkeypatch, "3")
    launcher = LocalLauncher(nodes=2, ranks_per_node=2, backend="gloo", device="cuda")
    launcher.check(make_spec(tmp_path))
    assert "4 ranks share 1 GPU: times mean nothing" in capsys.readouterr().out
    assert launcher.environment(1)["CUDA_VISIBLE_DEVICES"] == "3"
    with pytest.raises(UserError, match=r"needs cluster\.backend=gloo"):
        LocalLauncher(nodes=2, ranks_per_node=2, device="cuda").check(make_spec(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="needs a GPU and finds none"):
        launcher.check(make_spec(tmp_path))


def test_a_port_is_none_that_the_system_gives_to_connections() -> None:
    """It would be taken before torchrun, which imports torch first, listens there."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(given.read_text().split()[0]) if given.exists() else 32_768
    if first < 32_000:
        pytest.skip("this machine gives away every port")
    assert all(local.free_port() < first for _ in range(50))


def test_no_free_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def bind(self: socket.socket, address: object) -> None:
        raise OSError(98, "Address already in use")

    class Exhausted(socket.socket):
        pass

    Exhausted.bind = bind  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(local.socket, "socket", Exhausted)
    with pytest.raises(UserError, match="no free port"):
        LocalLauncher(nodes=2, ranks_per_node=1).launch(make_spec(tmp_path))
    assert list(tmp_path.iterdir()) == []


def write(run_dir: Path, folder: str, rank: int, **content: Any) -> None:
    (run_dir / folder).mkdir(parents=True, exist_ok=True)
    content = {"rank": rank, "node": rank // 2, "pid_space": process.pid_space(), **content}
    (run_dir / folder / f"rank{rank}.json").write_text(json.dumps(content))


def error(time_s: float, message: str, kind: str = "RuntimeError", **more: Any) -> dict[str, Any]:
    shown = f"Traceback: {message}"
    return {"time": time_s, "type": kind, "message": message, "traceback": shown, "user_error": False, **more}


def test_lost_connections_are_never_the_cause(tmp_path: Path) -> None:
    write(tmp_path, "errors", 0, **error(1.0, "Connection reset by peer"))
    write(tmp_path, "errors", 1, **error(2.0, "no", kind="DistBackendError"))
    write(tmp_path, "errors", 3, **error(3.0, "a tensor of shape [2]\ntwo lines", kind="ValueError"))
    cause = failure.explain(tmp_path, killed=[], agent=0, code=1)
    assert cause.reason == "rank 3 on node 1: ValueError: a tensor of shape [2] two lines"
    assert cause.traceback.startswith("Traceback")


def test_killed_rank_explains_lost_connections(tmp_path: Path) -> None:
    write(tmp_path, "ranks", 1, pid=2**22 + 5, state="running")  # beyond the largest process id: nobody
    write(tmp_path, "ranks", 0, pid=os.getpid(), state="failed")
    write(tmp_path, "errors", 0, **error(1.0, "Connection closed by peer"))
    killed = failure.vanished(tmp_path)
    assert [k["rank"] for k in killed] == [1]
    assert failure.explain(tmp_path, killed, agent=0, code=1).reason.startswith("rank 1 on node 0 was killed")


def test_bad_input_is_told_apart_from_what_a_lost_peer_looks_like(tmp_path: Path) -> None:
    write(tmp_path, "errors", 0, **error(1.0, "not written: Connection reset by peer", "UserError", user_error=True))
    killed = [{"rank": 1, "node": 0, "pid": 1}]
    assert failure.explain(tmp_path, killed, agent=0, code=1).reason.startswith("rank 1 on node 0 was killed")
    write(tmp_path, "errors", 2, **error(2.0, "the disk is full", "UserError", user_error=True))
    cause = failure.explain(tmp_path, killed, agent=0, code=1)
    assert (cause.reason, cause.user_error) == ("the disk is full", True)


def test_process_ids_of_other_machines_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, "ranks", 0, pid=2**22 + 5, state="running", pid_space="elsewhere")
    write(tmp_path, "ranks", 1, pid=os.getpid(), state="running")
    assert failure.vanished(tmp_path) == []
    assert failure.pids(tmp_path) == [os.getpid()]
    # That machine's torchrun knows.
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/node0.log").write_text(f"traceback : Signal 9 (SIGKILL) received by PID {2**22 + 5}\n")
    write(tmp_path, "errors", 1, **error(1.0, "Connection closed by peer"))
    assert failure.explain(tmp_path, [], agent=0, code=1).reason.startswith("rank 0 on node 0 was killed")


def found(*states: str) -> list[dict[str, Any]]:
    """What a rank finds that looks around, two ranks a node."""
    return [{"rank": r, "node": r // 2, "state": s} for r, s in enumerate(states) if s != "me"]


def test_whom_the_others_miss(tmp_path: Path) -> None:
    lost = error(1.0, "rank 2 has not answered", kind="PeerLost")
    ok, cut = "answers", "unreachable"

    def explain(reports: dict[int, list[dict[str, Any]]]) -> str:
        failure.forget_earlier(tmp_path)
        for rank in range(6):
            write(tmp_path, "ranks", rank, pid=1, state="failed" if rank in reports else "running")
        for rank, peers in reports.items():
            write(tmp_path, "errors", rank, **lost, peers=peers)
        return failure.explain(tmp_path, [], agent=0, code=1).reason

    assert explain({1: found(ok, "me", "silent", ok, ok, ok)}).startswith("rank 2 on node 1 stopped answering")
    assert explain({1: found(ok, "me", ok, "gone", ok, ok)}).startswith("rank 3 on node 1 was killed")
    unreachable = "node 1 (ranks 2, 3) cannot be reached by the others"
    assert explain({1: found(ok, "me", cut, cut, ok, ok)}).startswith(unreachable)
    # Seen from the node that is cut off, all the others are.
    assert explain({3: found(cut, cut, ok, "me", cut, cut)}).startswith(unreachable)
    # A rank that left with an error of its own is gone too, and not the reason; nor is one that most find well.
    assert explain({0: found("me", "gone", ok, ok, "silent", ok), 1: found(ok, "me", ok, ok, "silent", ok)}).startswith(
        "rank 4 on node 2 stopped answering"
    )
    (tmp_path / "errors/rank1.json").unlink()
    two = {0: [{"rank": 1, "node": 1, "state": cut}]}
    assert explain(two).startswith("nodes 0 and 1 cannot reach each other")
    assert explain({0: found("me", ok, ok, ok, ok, ok)}) == "rank 0 on node 0: PeerLost: rank 2 has not answered"


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_a_node_that_ends_by_a_signal_has_failed_as_one_with_an_exit_code(code: int) -> None:
    """While others run, and when they have ended well."""
    polls = iter(range(3))  # without end else
    for other in (None, 0):
        nodes: Any = [SimpleNamespace(poll=lambda c=c: c) for c in (other, int(code))]
        assert process.wait_for_first_failure(nodes, each_poll=lambda: next(polls) and None) == 1


def test_torchrun_that_starts_no_rank(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/node1.log").write_text("rendezvous failed\n")
    cause = failure.explain(tmp_path, killed=[], agent=1, code=1)
    assert cause.reason.startswith("node 1: torchrun ended with status 1")
    assert "rendezvous failed" in cause.traceback
    assert failure.explain(tmp_path, killed=[], agent=1, code=-9).reason.endswith("was ended by SIGKILL")
