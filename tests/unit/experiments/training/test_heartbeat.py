"""Who is still there: what a probe tells of a process that answers, is stopped, has gone; and when the watch ends a run."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from experiments.training import heartbeat
from experiments.training.heartbeat import Heartbeat, Peer, PeerLost
from tests.helpers import ROOT
from tests.helpers.waiting import until

NOBODY = "9 127.0.0.1 1 word"
"""A rank that is not there: nothing listens on port 1."""


class Store(dict[str, bytes]):
    """What `Heartbeat` needs of torch's store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def main() -> None:
    """Rank 1 of 2, as a process of its own; prints what it tells the store."""
    store = Store({"birder/heartbeat/0": NOBODY.encode()})
    Heartbeat(store, 1, 2, heartbeat_timeout_s=1e9, join_s=1, on_lost=print)
    print(store["birder/heartbeat/1"].decode(), flush=True)
    time.sleep(600)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("BIRDER_NODE", "0")


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen, str]]:
    """Rank 1 on node 5, in a process of its own, and what it told the store."""
    env = {**os.environ, "BIRDER_NODE": "5", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.unit.experiments.training.test_heartbeat"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            yield running, running.stdout.readline().strip()
        finally:
            running.kill()


def peer(told: str) -> Peer:
    node, host, port, token = told.split()
    return Peer(1, int(node), host, int(port), token)


def test_what_a_probe_tells(other: tuple[subprocess.Popen, str]) -> None:
    process, told = other
    assert peer(told).node == 5
    until(lambda: heartbeat.probe(peer(told)) == "answers", "it answers")
    process.send_signal(signal.SIGSTOP)
    until(lambda: heartbeat.probe(peer(told), 0.5) == "silent", "it is stopped")
    process.send_signal(signal.SIGCONT)
    until(lambda: heartbeat.probe(peer(told)) == "answers", "it answers again")
    process.kill()
    process.wait()
    assert heartbeat.probe(peer(told)) == "gone"


def test_another_program_on_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0")

        threading.Thread(target=greet, daemon=True).start()
        assert heartbeat.probe(peer(f"0 127.0.0.1 {server.getsockname()[1]} word"), 600) == "gone"


def test_no_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TimeoutError(), OSError(113, "No route to host")):

        def connect(*arguments: Any, error: OSError = error, **options: Any) -> None:
            raise error

        monkeypatch.setattr(socket, "create_connection", connect)
        assert heartbeat.probe(peer("0 10.0.0.1 5 word")) == "unreachable"


@pytest.mark.slow
def test_silence_ends_the_watch(other: tuple[subprocess.Popen, str], monkeypatch: pytest.MonkeyPatch) -> None:
    process, told = other
    probe, states = heartbeat.probe, []
    monkeypatch.setattr(heartbeat, "probe", lambda asked: states.append(probe(asked)) or states[-1])
    lost: queue.SimpleQueue[tuple[PeerLost, list[dict[str, Any]]]] = queue.SimpleQueue()
    keys = {"birder/heartbeat/1": told.encode(), "birder/heartbeat/2": NOBODY.encode()}
    watch = Heartbeat(Store(keys), 0, 3, heartbeat_timeout_s=10.0, join_s=1, on_lost=lambda *found: lost.put(found))
    try:
        until(lambda: states.count("answers") >= 3, "rank 1 answers")
        assert lost.empty()  # it is not this rank's turn to watch rank 2
        process.send_signal(signal.SIGSTOP)
        error, peers = lost.get()
        said = re.fullmatch(r"rank 1 on node 5 has not answered for (\d+) s", str(error))
        assert said is not None
        assert int(said[1]) >= 10
        assert peers == [{"rank": 1, "node": 5, "state": "silent"}, {"rank": 2, "node": 9, "state": "gone"}]
    finally:
        watch.stop()


def test_a_stopped_watch_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where it is stopped while it asks."""
    lost: list[Any] = []
    asked, stopped = threading.Event(), threading.Event()
    monkeypatch.setattr(heartbeat, "probe", lambda _: asked.set() or (stopped.wait() and "gone"))
    store, others = Store({"birder/heartbeat/1": NOBODY.encode()}), set(threading.enumerate())
    watch = Heartbeat(store, 0, 2, heartbeat_timeout_s=1e-3, join_s=1, on_lost=lambda *found: lost.append(found))
    asked.wait()
    watch.stop()
    stopped.set()
    for thread in set(threading.enumerate()) - others:
        if thread.name == "heartbeat-_watch":
            thread.join()
    assert lost == []


def test_ranks_that_never_come() -> None:
    with pytest.raises(PeerLost, match="ranks 2, 3 did not appear within 1 s"):
        Heartbeat(Store({"birder/heartbeat/1": NOBODY.encode()}), 0, 4, heartbeat_timeout_s=9, join_s=1, on_lost=print)


def test_alone() -> None:
    heartbeat.start(Store(), 0, 1, heartbeat_timeout_s=9, join_s=1)
    assert heartbeat.poll_peers() == []
    heartbeat.stop()


if __name__ == "__main__":
    main()
