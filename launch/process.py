"""Processes that never outlive what started them. Imports neither torch nor hydra: workers load it first of all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Those that ask a launcher to end."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Stopped(BaseException):
    """The launcher was asked to end by a signal other than Ctrl-C. `code` is the exit status: 128 + signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.code = 128 + signum


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent, process `parent`, ends for whatever cause (Linux only).

    Ends at once if the parent has ended already: between fork and this call there is no protection.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def start(command: Sequence[str], env: dict[str, str], log: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen:
    """Starts `command` in a new session, output appended to `log`; it dies when this process does.

    The session keeps the terminal's Ctrl-C away from it: the launcher alone decides when and how it ends.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return attached(command, env=env, stdin=stdin, stdout=output, stderr=subprocess.STDOUT)


def attached(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """Starts `command` out of reach of the terminal's Ctrl-C; it dies when this process does. options: of Popen."""
    parent, started = os.getpid(), list[subprocess.Popen]()
    try:
        with deferred():
            started.append(
                subprocess.Popen(
                    list(command), start_new_session=True, preexec_fn=lambda: die_with_parent(parent), **options
                )
            )
    except BaseException:
        for process in started:  # nobody else knows of it yet
            process.kill()
            process.wait()
        raise
    return started[0]


def wait_for_first_failure(
    processes: Sequence[subprocess.Popen], each_poll: Callable[[], None] = lambda: None
) -> int | None:
    """Waits until all have ended well (None) or one has not: its index. Says nothing about the others then."""
    while True:
        each_poll()
        codes = [p.poll() for p in processes]
        for index, code in enumerate(codes):
            if code not in (None, 0):
                return index
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def end(processes: Sequence[subprocess.Popen], others: Callable[[], list[int]], grace_s: float = 5.0) -> None:
    """Ends all `processes` and the processes whose ids `others()` returns: SIGTERM, and SIGKILL after `grace_s`."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                _signal_group(process.pid, sig)
        for pid in others():
            if alive(pid):
                _signal_group(pid, sig)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline:
            if all(p.poll() is not None for p in processes) and not any(alive(pid) for pid in others()):
                return
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process of this id runs. A zombie, which only waits to be collected, does not."""
    if has_own_proc():
        return (found := _stat(pid)) is not None and found[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def descendants(*pids: int) -> list[int]:
    """Process ids of all descendants of processes `pids`, parents first. Looks through all processes of the machine once."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, todo = [], list(pids)
    while todo:
        below = children.get(todo.pop(0), [])
        found += below
        todo += below
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (found := _stat(int(entry.name))) is not None:
            yield int(entry.name), int(found[1])


def has_own_proc() -> bool:
    """Whether ids in /proc are those of this process: not in a PID namespace with the /proc of another one."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped. One that a debugger holds is not."""
    return (found := _stat(pid)) is not None and found[0] == "T"


def _stat(pid: int) -> list[str] | None:
    """State, parent and the rest of what /proc says of a process; None where there is none."""
    # The command name in parentheses may itself hold spaces and parentheses.
    return of_proc(pid, "stat").decode(errors="replace").rpartition(")")[2].split() or None


def of_proc(pid: int, name: str) -> bytes:
    """A file of /proc about a process (`cmdline`, `environ`, `stat`); empty when the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def boot_id() -> str:
    """Names this machine and its boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return platform.node()


def pid_space() -> str:
    """Names the space in which this process's ids mean something: the machine, its boot, its PID namespace."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _not_ignored(signals: set[signal.Signals]) -> list[signal.Signals]:
    return [s for s in signals if signal.getsignal(s) is not signal.SIG_IGN]


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into `Stopped` while it is open, so that `finally` blocks run. Main thread only.

    One that is ignored stays so: `nohup` has a program outlive the terminal that it was started from.
    """

    def handler(signum: int, frame: object) -> None:
        raise Stopped(signum)

    before = {s: signal.signal(s, handler) for s in _not_ignored({signal.SIGTERM, signal.SIGHUP})}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Has Ctrl-C, SIGTERM and SIGHUP take effect when it closes. Python drops what a signal raises while it forks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {s: signal.signal(s, lambda signum, _: came.append(signum)) for s in _not_ignored(SIGNALS)}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Holds back Ctrl-C, SIGTERM and SIGHUP while it is open: cleaning up is short and must not be cut shorter."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        # What came meanwhile is dropped: the caller is on its way out already.
        while signal.sigpending() & SIGNALS:
            signal.sigwait(SIGNALS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_group(pid: int, sig: signal.Signals) -> None:
    """Signals the process group that `pid` leads, or the process alone when it leads none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, sig)
        else:
            os.kill(pid, sig)
