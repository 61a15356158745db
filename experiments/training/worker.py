"""One rank. torchrun starts `python experiments/training/worker.py SPEC` on every rank of every node.

Says what becomes of it in files of the run directory (format: launch/failure.py), which the launcher reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.records import origin
from experiments.tracking import tracked
from experiments.training import heartbeat
from launch import failure, process
from launch.errors import UserError
from launch.spec import RunSpec

Train = Callable[[RunSpec], None]


def run_rank(
    spec: RunSpec, train: Train | None = None, on_failure: Callable[[BaseException], None] | None = None
) -> None:
    """Trains as the rank that the environment names. `train` defaults to `experiments.training.loop.train`.

    on_failure: called with what ends this rank too early, before it ends.

    Whatever it raises is also left in `<run_dir>/errors/rank<r>.json`. A rank that finds another one lost does not wait
    for its collectives to notice: it ends at once, with status 1.
    """
    me = _Rank(spec, on_failure)
    me.begin()
    heartbeat.on_lost = me.end_alone
    if me.rank == 0:  # which writes the record
        origin.begin()
    try:
        if train is None:
            from experiments.training.loop import train as full_train

            train = full_train
        train(spec)
    except BaseException as error:
        me.save_exception(error)
        if failure.is_consequence(type(error).__name__, str(error)):
            me.save_exception(error, heartbeat.poll_peers())
        me.end(error)
        raise
    me.save("done")


def main(spec_path: str, train: Train | None = None) -> None:
    """The whole life of a rank's process; never returns. Exit status: 0, 1, or 2 for bad input."""
    process.die_with_parent(os.getppid())  # before the slow imports: a dead agent leaves no rank behind
    spec = RunSpec.load(spec_path)
    me = _Rank(spec)
    # Restarted by torchrun, or by a scheduler that may start the same job again: go on, don't begin again. torchrun's
    # count of restarts differs between nodes, so all ranks look for a checkpoint whenever there may have been one.
    if spec.config["cluster"].get("max_restarts", 0) or os.environ.get("BIRDER_RESUME") == "auto":
        spec = dataclasses.replace(spec, config={**spec.config, "resume": "auto"})
    _redirect_output(me)
    _end_on_sigterm(me)
    try:
        run_rank(spec, train)
    except BaseException as error:
        _flush()
        # Threads of a broken process group could keep an ordinary exit waiting for ever.
        os._exit(2 if isinstance(error, UserError) else 1)
    sys.exit(0)


class _Rank(failure.RankFiles):
    """This process's place in the world, and its files in the run directory."""

    def __init__(self, spec: RunSpec, on_failure: Callable[[BaseException], None] | None = None) -> None:
        super().__init__(spec.path, int(os.environ["RANK"]), heartbeat.own_node())
        self.on_failure = on_failure

    def save_exception(self, error: BaseException, peers: Sequence[dict[str, Any]] = ()) -> None:
        self.save_error(
            kind=type(error).__name__,
            message=str(error),
            traceback="" if isinstance(error, failure.Diverged) else "".join(traceback.format_exception(error)),
            user_error=isinstance(error, UserError),
            peers=peers,
        )

    def end(self, error: BaseException) -> None:
        self.save("failed")
        if self.on_failure is not None:
            self.on_failure(error)

    def end_alone(self, error: BaseException, peers: list[dict[str, Any]]) -> None:
        """Ends this process from a thread, whatever the main thread waits for."""
        self.save_exception(error, peers)
        self.end(error)
        print(f"error: {error}", file=sys.stderr)
        tracked.end_all(1)
        _flush()
        os._exit(1)


def _redirect_output(me: _Rank) -> None:
    """Sends this rank's output to its log, except rank 0's standard output, which goes to the user's terminal."""
    terminal_on_stdin = os.environ.get("BIRDER_TERMINAL") == "stdin"
    log = me.dir / "logs" / f"rank{me.rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _flush()
    os.dup2(out, 2)
    if me.rank != 0:
        os.dup2(out, 1)
    elif terminal_on_stdin:
        os.dup2(0, 1)
    os.close(out)
    if terminal_on_stdin:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


def _end_on_sigterm(me: _Rank) -> None:
    """Ends this process within moments of SIGTERM, also while its main thread waits inside a collective.

    A Python handler would run only when that wait is over. The wake-up pipe is written by the C handler at once.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while True:
            if signal.SIGTERM in os.read(read, 64):
                me.save("terminated")
                tracked.end_all(128 + signal.SIGTERM)
                _flush()
                os._exit(128 + signal.SIGTERM)

    def in_child() -> None:
        # Children (data loaders) share neither the thread nor, therefore, this way to end.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=in_child)
    threading.Thread(target=watch, daemon=True, name="sigterm").start()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print(
            "error: no spec.yaml: a run writes it when it starts, --dry-run does not: experiments/run.py",
            file=sys.stderr,
        )
        sys.exit(2)
    main(sys.argv[1])
