"""What the nodes' links really carry: bytes through all of them at once, against the clock."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from statistics import fmean
from typing import Any

from launch.emulated import network

TOLERANCE = 0.1
"""A link whose goodput is further than this from what its set rate should give is marked."""
_WARM_UP_S = 0.3
_ATTEMPTS = 3
_CHUNK = 1 << 18


def check(nodes: int, mbit_per_s: float) -> dict[str, Any]:
    """Measures links set to `mbit_per_s`: {measured, mbit_per_s, off_by, note} of `<run_dir>/link.json`.

    A short load of the machine by others can only make links look slower. So links that seem off are measured again,
    up to three times, and the best counts. Raises NetworkError.
    """
    expected = network.GOODPUT * mbit_per_s
    best = 0.0
    for _ in range(_ATTEMPTS):
        # Slow links need longer than their queues, which hold some 50 ms and at least 250 KB.
        rate = fmean(goodput(nodes, seconds=min(5.0, max(1.0, 50 / mbit_per_s))))
        if abs(rate - expected) < abs(best - expected):
            best = rate
        if abs(best / expected - 1) <= TOLERANCE:
            break
    off_by = abs(best / expected - 1)
    note = None
    if off_by > TOLERANCE:
        note = (
            f"the link carries {best:.4g} Mbit/s per node, {off_by:.0%} {'less' if best < expected else 'more'} than "
            f"{expected:.4g}, which its set {mbit_per_s:.4g} should give: this machine is too busy or too slow for it"
        )
    return {"measured": True, "mbit_per_s": round(best, 2), "off_by": round(off_by, 4), "note": note}


def goodput(nodes: int, *, seconds: float = 1.0) -> list[float]:
    """TCP goodput that arrives at each node, in Mbit/s, while every node sends to the next one in a ring.

    All links are busy in both directions, as in a collective. What arrives in the first `_WARM_UP_S` is not counted:
    full token buckets and TCP's slow start. For processes of a sandbox. Raises NetworkError.
    """
    pairs = [_connect(node, (node + 1) % nodes) for node in range(nodes)]
    rates = [0.0] * nodes
    begin = time.monotonic() + _WARM_UP_S
    senders = [threading.Thread(target=_send, args=(sender,)) for sender, _ in pairs]
    receivers = [
        threading.Thread(target=_receive, args=(receiver, begin, begin + seconds, rates, (node + 1) % nodes))
        for node, (_, receiver) in enumerate(pairs)
    ]
    try:
        for thread in receivers + senders:
            thread.start()
        for thread in receivers:
            thread.join(_WARM_UP_S + seconds + 10)
    finally:
        for end in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in receivers + senders:
            thread.join()
        for end in (end for pair in pairs for end in pair):
            end.close()
    return rates


def _connect(source: int, target: int) -> tuple[socket.socket, socket.socket]:
    """A TCP connection from one node to another: its sending and its receiving end."""
    try:
        with network.inside(target):
            listener = socket.create_server((network.address(target), 0))
        with listener, network.inside(source):
            sender = socket.create_connection(listener.getsockname(), timeout=10)
            sender.settimeout(None)
            return sender, listener.accept()[0]
    except OSError as error:
        raise network.NetworkError(f"no connection from node {source} to node {target}: {error}") from error


def _send(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(_CHUNK))


def _receive(connection: socket.socket, begin: float, until: float, rates: list[float], index: int) -> None:
    """Sets rates[index] to the Mbit/s that arrive between two moments of the monotonic clock."""
    buffer, total, first, last = bytearray(_CHUNK), 0, 0.0, 0.0
    with contextlib.suppress(OSError):
        while last < until and (count := connection.recv_into(buffer)):
            last = time.monotonic()
            if first:
                total += count
            elif last >= begin:
                first = last
    rates[index] = total * 8e-6 / (last - first) if last > first > 0 else 0.0
