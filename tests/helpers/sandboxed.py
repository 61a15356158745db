"""Runs a command next to emulated nodes: `python tests/helpers/sandboxed.py --nodes 4 --mbit 500 -- COMMAND ...`.

`launch.emulated.network.enter(k)` starts a program on one of them. Everything ends with COMMAND, or with the process that
started the sandbox.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import process
from launch.emulated import network, sandbox
from launch.process import Stopped


def script(*arguments: str) -> list[str]:
    """This file's command line."""
    return [sys.executable, str(Path(__file__).resolve()), *arguments]


def wait(watched: subprocess.Popen, poll_s: float = 0.05) -> int:
    """Waits for `watched` as the first process of a PID namespace does: orphans are collected too."""
    while (code := watched.poll()) is None:
        sandbox.collect_orphans([watched.pid])
        time.sleep(poll_s)
    return code


def run_command(nodes: int, mbit: float | None, command: Sequence[str]) -> int:
    """Inside: builds the network, runs `command`, and returns its exit status."""
    running: list[subprocess.Popen] = []
    try:
        with process.stop_signals():
            network.build(nodes, mbit)
            running.append(subprocess.Popen(list(command)))
            code = wait(running[0])
    finally:
        with process.undisturbed():
            process.end(running, others=list)
    return code if code >= 0 else 128 - code


def enter(arguments: list[str]) -> NoReturn:
    """Outside: becomes the sandbox that runs this file with `arguments`."""
    prefix, reason = sandbox.probe()
    if prefix is None:
        raise network.NetworkError(reason)
    command = [*prefix, *script(*arguments)]
    process.die_with_parent(os.getppid())
    os.execvp(command[0], command)


def guarded(run: Callable[[], int]) -> int:
    """`run()`, what it raises turned into one line and an exit status."""
    try:
        return run()
    except network.NetworkError as error:
        print(f"error: no sandbox: {error}", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 127
    except KeyboardInterrupt:
        return 130
    except Stopped as error:
        return error.code


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mbit", type=float, help="rate of every node's link per direction, Mbit/s; default: no limit")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+", help="after --: what to run")
    options = parser.parse_args(arguments)
    if options.inside:
        return guarded(lambda: run_command(options.nodes, options.mbit, options.command))
    return guarded(lambda: enter(["--inside", *arguments]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
