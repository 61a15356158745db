"""Heartbeats between ranks: a collective that fails, or waits, does not say on whose account.

Every rank answers on a socket, from a thread, so also while it computes, prepares data or waits. Each rank asks
the next one every few seconds; one that has been quiet for `cluster.heartbeat_timeout_s` ends the run. A rank that fails for
want of others asks all of them once. What it finds goes into its error file, where the launcher reads whom most ranks miss.
Imports no torch.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil

PING_S = 2.0
"""Between two questions to the next rank, at most."""
PROBE_S = 2.0
"""How long an answer may take before it counts as missing this time."""


class PeerLost(RuntimeError):
    """A rank cannot be reached, or does not answer."""


@dataclass(frozen=True)
class Peer:
    """Where a rank answers, and with which token: a port may have passed on to another program."""

    rank: int
    node: int
    host: str
    port: int
    token: str


def own_node() -> int:
    """This rank's node: the launcher's number where there is one, for torchrun may count in another order."""
    return int(os.environ.get("BIRDER_NODE") or os.environ.get("GROUP_RANK", "0"))


def probe(peer: Peer, timeout_s: float = PROBE_S) -> str:
    """What has become of a rank.

    answers | silent (connected, but no token: stopped or hung) | gone (its host says that nobody listens) | unreachable.
    """
    deadline = time.monotonic() + timeout_s
    try:
        connection = socket.create_connection((peer.host, peer.port), timeout=timeout_s)
    except (ConnectionRefusedError, ConnectionResetError):
        return "gone"
    except OSError:
        return "unreachable"
    with connection:
        try:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            return "answers" if connection.recv(64) == peer.token.encode() else "gone"
        except ConnectionError:
            return "gone"
        except OSError:
            return "silent"


class Heartbeat:
    """This rank's socket, and its watch over the next rank.

    store:     torch's key-value store that all ranks share (set, get, wait, check).
    on_lost:   called once, from a thread, when the next rank has been quiet for `heartbeat_timeout_s`: (error, what
               `poll_peers` found).
    join_s:    how long the other ranks may take to appear. Raises PeerLost after that.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        *,
        heartbeat_timeout_s: float,
        join_s: float,
        on_lost: Callable[[PeerLost, list[dict[str, Any]]], None],
    ) -> None:
        self.rank = rank
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.on_lost = on_lost
        self.token = secrets.token_hex(8)
        self._stopped = threading.Event()
        address = _own_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=256)
        # A data loader's process must not keep the port of a dead rank open.
        os.register_at_fork(after_in_child=self._server.close)
        self._thread(self._answer)
        port = self._server.getsockname()[1]
        store.set(_key(rank), f"{own_node()} {address} {port} {self.token}")
        self.peers = _meet(store, world, join_s)
        self._thread(self._watch)

    def poll_peers(self) -> list[dict[str, Any]]:
        """{rank, node, state} of every other rank; `state` as in `probe`. Takes PROBE_S and little more."""
        others = [p for p in self.peers if p.rank != self.rank]
        with ThreadPoolExecutor(max_workers=64) as pool:
            states = list(pool.map(probe, others))
        return [{"rank": p.rank, "node": p.node, "state": s} for p, s in zip(others, states, strict=True)]

    def stop(self) -> None:
        """Ends the watch; this rank still answers. To be called when all ranks are known to be at the end."""
        self._stopped.set()

    def _thread(self, target: Callable[[], None]) -> None:
        threading.Thread(target=target, daemon=True, name=f"heartbeat-{target.__name__}").start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
                with connection:
                    connection.sendall(self.token.encode())
            except OSError:
                time.sleep(0.1)  # out of files, say: later again

    def _watch(self) -> None:
        following = self.peers[(self.rank + 1) % len(self.peers)]
        ping_s = min(PING_S, self.heartbeat_timeout_s / 4)
        quiet, before = 0.0, time.monotonic()
        while not self._stopped.wait(ping_s):
            state = probe(following)
            # A machine that slept, or this process itself having been stopped, is not the other's silence.
            passed, before = min(time.monotonic() - before, 2 * (ping_s + PROBE_S)), time.monotonic()
            quiet = 0.0 if state == "answers" else quiet + passed
            if quiet >= self.heartbeat_timeout_s and not self._stopped.is_set():
                error = PeerLost(f"rank {following.rank} on node {following.node} has not answered for {quiet:.0f} s")
                self.on_lost(error, self.poll_peers())
                return


_current: Heartbeat | None = None


def _end(error: PeerLost, peers: list[dict[str, Any]]) -> None:
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


on_lost: Callable[[PeerLost, list[dict[str, Any]]], None] = _end
"""How a rank ends when it finds another one lost; experiments/training/worker.py sets what writes the error file first."""


def start(store: Any, rank: int, world: int, *, heartbeat_timeout_s: float, join_s: float) -> None:
    """Begins to answer and to watch, as this process's one `Heartbeat`. Raises PeerLost when ranks do not appear."""
    global _current
    if world > 1:
        _current = Heartbeat(
            store, rank, world, heartbeat_timeout_s=heartbeat_timeout_s, join_s=join_s, on_lost=lambda *a: on_lost(*a)
        )


def poll_peers() -> list[dict[str, Any]]:
    """See `Heartbeat.poll_peers`; empty where none has started."""
    return _current.poll_peers() if _current is not None else []


def stop() -> None:
    """See `Heartbeat.stop`."""
    if _current is not None:
        _current.stop()


def _key(rank: int) -> str:
    return f"birder/heartbeat/{rank}"


def _meet(store: Any, world: int, join_s: float) -> list[Peer]:
    keys = [_key(r) for r in range(world)]
    try:
        store.wait(keys, timedelta(seconds=join_s))
    except RuntimeError as error:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:8]))}{', …' * (len(missing) > 8)}"
        raise PeerLost(f"{ranks} did not appear within {join_s:.0f} s") from error
    peers = []
    for rank, key in enumerate(keys):
        node, host, port, token = store.get(key).decode().split()
        peers.append(Peer(rank, int(node), host, int(port), token))
    return peers


def _own_address() -> str:
    """The address of this rank's own traffic: that of gloo's interface, or the one on the way to rank 0."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    for found in psutil.net_if_addrs().get(interface, ()):
        if found.family == socket.AF_INET:
            return found.address
    family, kind, protocol, _, address = socket.getaddrinfo(os.environ["MASTER_ADDR"], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as s:
        s.connect(address)  # sends nothing: only the way is looked up
        return str(s.getsockname()[0])
