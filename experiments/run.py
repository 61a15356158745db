"""Runs one experiment: `python experiments/run.py +exp=bert_squad [key=value ...]`, with Hydra's whole syntax.

Composes once, starts its own workers (`cluster=...` says where) and waits for them. Under torchrun it starts nothing
and trains in that world. `-m` runs one job after the other. Exit status: 0; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from launch import interrupt

    interrupt.ends_silently()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.config.kinds import one_line
from experiments.records import record
from experiments.report.headline import headline
from experiments.timing import calibrate
from launch import lock
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped
from launch.spec import RunSpec

if TYPE_CHECKING:
    from experiments.workloads.base import Workload

LONGEST = 290
"""Characters of a message about bad input."""
_keep: list[object] = []  # the store of a world that rank 0 hosts must outlive `share`


def launch(composed: Composed, *, command: str, group: str | None = None, alone: bool = False) -> RunSpec:
    """Checks, starts and waits for one run. Raises UserError or RunFailed.

    alone: no part of a comparison, so that its first line says what its numbers are.
    """
    workload = compose.check(composed)
    if alone:
        introduce(composed, workload)
    calibrate.settle([composed])
    spec = compose.make_spec(composed, command=command, group=group)
    compose.launcher(spec.config).launch(spec)
    return spec


def introduce(composed: Composed, workload: Workload) -> None:
    """Prints what the numbers of a run are and are not."""
    resolved = compose.resolve(composed)
    nodes_given = any(o.startswith("cluster.nodes=") for o in composed.overrides)
    print(headline(resolved, workload, nodes_given=nodes_given, shaped=calibrate.shapes(resolved)), flush=True)


def under_torchrun() -> bool:
    """Whether this process is a rank already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def join(composed: Composed, *, command: str) -> RunSpec:
    """Trains as one rank of the world that torchrun has made. Raises UserError or whatever training raises."""
    rank = int(os.environ["RANK"])
    take_place(composed)
    workload = compose.check(composed, rank_zero=rank == 0)
    if rank == 0:
        introduce(composed, workload)
    command = under(composed.config.cluster, command)
    spec = compose.make_spec(composed, command=command) if rank == 0 else None
    with contextlib.ExitStack() as until_the_end:
        if spec is not None:
            spec.path.mkdir(parents=True, exist_ok=True)
            until_the_end.enter_context(lock.held(spec.path))
            spec.save()
        return _train(share(spec), rank)


def _train(spec: RunSpec, rank: int) -> RunSpec:
    from experiments.training import worker

    def on_failure(error: BaseException) -> None:
        if rank == 0 and isinstance(error, Exception) and not isinstance(error, UserError):
            record.write_failed(spec, f"rank 0: {type(error).__name__}: {error}")

    worker.run_rank(spec, on_failure=on_failure)
    return spec


def take_place(composed: Composed) -> None:
    """Makes the cluster of a configuration the world that torchrun has made. Raises UserError."""
    world = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        raise UserError(f"{world} ranks are no multiple of the {per_node} on this node: start as many on every node")
    if world > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and _one_store_for_all_starts():
        raise UserError(
            "torchrun --max-restarts keeps one key-value store, in which ranks that are started again find the addresses "
            "of those before them: use --rdzv-backend c10d, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on "
            "every node"
        )
    cluster = composed.config.cluster
    cluster.nodes, cluster.ranks_per_node, cluster.name = world // per_node, per_node, "torchrun"


def _one_store_for_all_starts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def under(cluster: DictConfig, command: str) -> str:
    """`command` as torchrun starts it on the nodes of `cluster`."""
    shape = f"--nnodes {cluster.nodes} --nproc-per-node {cluster.ranks_per_node}"
    return f"torchrun {shape} {command.removeprefix('python ')}"


def share(spec: RunSpec | None) -> RunSpec:
    """Rank 0's `spec`, on every rank: one id and one directory for the run."""
    import dataclasses
    import json

    import torch.distributed as dist

    store, rank, _ = next(iter(dist.rendezvous("env://")))
    _keep.append(store)
    key = f"birder/spec/{len(_keep)}"  # torchrun's count of restarts differs between nodes that came at different times
    if rank == 0:
        assert spec is not None
        store.set(key, json.dumps(dataclasses.asdict(spec)))
        return spec
    return RunSpec(**json.loads(store.get(key)))


def typed(script: str, arguments: list[str]) -> str:
    """The command line as the user would type it again."""
    return shlex.join(["python", f"experiments/{script}.py", *arguments])


def report(error: BaseException) -> int:
    """Tells the user in one line what ended a run, and returns the exit status."""
    if isinstance(error, UserError):
        print("error:", one_line(" ".join(str(error).split()), LONGEST), file=sys.stderr, flush=True)
        return 2
    if isinstance(error, RunFailed):
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    if isinstance(error, KeyboardInterrupt):
        print("interrupted: every process of the run has ended", file=sys.stderr, flush=True)
        return 130
    if isinstance(error, Stopped):
        print(f"{error}: every process of the run has ended", file=sys.stderr, flush=True)
        return error.code
    raise error


def main() -> int:
    """The Hydra application."""
    # Hydra wants its flags before the overrides; users write them anywhere.
    typed_in = ["cluster.dry_run=true" if a == "--dry-run" else a for a in sys.argv[1:]]
    arguments = compose.quote_hosts(sorted(typed_in, key=_is_override))
    sys.argv[1:] = arguments
    jobs = 0
    failed: list[tuple[str, int]] = []
    bugs: list[Exception] = []

    def job(config: DictConfig) -> None:
        nonlocal jobs
        jobs += 1
        hydra_config = HydraConfig.get()
        composed = Composed(config, dict(hydra_config.runtime.choices), list(hydra_config.overrides.task))
        try:
            if under_torchrun():
                join(composed, command=typed("run", composed.overrides))
            else:
                launch(composed, command=typed("run", composed.overrides), alone=True)
        except (UserError, RunFailed) as error:
            # The other jobs of a sweep go on.
            failed.append((" ".join(composed.overrides), report(error)))
        except Exception as error:
            bugs.append(error)
            raise

    # Hydra's own reports of errors are many lines long: have it raise, and say it in one.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")(job)()
    except compose.CONFIG_ERRORS as error:
        if bugs:
            raise
        return report(compose.explain(error, [a for a in arguments if _is_override(a)]))
    except (KeyboardInterrupt, Stopped, UserError) as error:
        return report(error)
    if jobs > 1 and failed:
        print(f"{len(failed)} of {jobs} jobs failed:", file=sys.stderr)
        for overrides, _ in failed:
            print(f"  {overrides}", file=sys.stderr)
        return 1
    return failed[0][1] if failed else 0


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith(("+", "~")))


if __name__ == "__main__":
    from launch import interrupt

    interrupt.is_heard()
    sys.exit(main())
