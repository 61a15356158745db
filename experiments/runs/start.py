"""A run from its checked configuration to its end: started here, or joined as a rank of the world that torchrun has made."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.config.kinds import shown
from experiments.records import labels, record
from experiments.report import published, sentences
from experiments.runs.command import typed
from experiments.timing import calibrate
from launch.base import opened
from launch.errors import UserError, refused
from launch.failure import RunFailed
from launch.process import Stopped
from launch.spec import RunSpec
from launch.words import program, say

if TYPE_CHECKING:
    from experiments.workloads.base import Workload

_keep: list[object] = []  # the store of a world that rank 0 hosts must outlive `shared`


def launch(composed: Composed, *, group: str | None = None, alone: bool = False) -> RunSpec:
    """Checks, starts and waits for one run. Raises UserError or RunFailed.

    alone: no part of a comparison, so that its first line says what its numbers are, and its last one, where it ends too
           early, how it is resumed.
    """
    workload = compose.check(composed)
    if alone:
        check_results(compose.resolve(composed))
        say(headline(composed, workload))
    calibrate.settle([composed])
    spec = compose.make_spec(composed, group=group)
    before = saved_steps(spec)
    try:
        compose.launcher(spec.config).launch(spec)
    except (RunFailed, UserError, KeyboardInterrupt, Stopped) as error:
        # Bad input ends a run before its first step, a full disk ends it later.
        saved = saved_steps(spec) != before if isinstance(error, UserError) else (spec.path / "checkpoints").exists()
        if alone and (saved or (spec.path.exists() and isinstance(error, KeyboardInterrupt | Stopped))):
            say(how_to_resume(spec))
        raise
    return spec


def saved_steps(spec: RunSpec) -> list[int]:
    """The steps of which the run has a checkpoint."""
    return sorted(int(p.name[5:]) for p in spec.path.glob("checkpoints/step-*") if p.name[5:].isdigit())


def check_results(resolved: dict[str, Any]) -> None:
    """`check_folder` of a run that is to be started."""
    if not resolved["cluster"]["dry_run"]:
        check_folder(Path(resolved["results_dir"]))


def check_folder(folder: Path) -> None:
    """Raises UserError where records could not be written or read in the end: known before the first step."""
    with refused(f"cannot write to {folder}", OSError, way_on="set results_dir=FOLDER"):
        (folder / "records").mkdir(parents=True, exist_ok=True)
    if not os.access(folder / "records", os.W_OK):
        raise UserError(f"cannot write to {folder / 'records'}: set results_dir=FOLDER")
    record.read_all(folder)


def how_to_resume(spec: RunSpec) -> str:
    """How a run that ended too early is resumed: the command has a line to itself."""
    if not (steps := saved_steps(spec)):
        return "no checkpoint was saved: checkpoint.every=N saves one every N steps"
    kept = [o for o in spec.overrides if compose.key_of(o) not in ("run_name", "resume")]
    again = typed("run", [*kept, f"run_name={spec.path.name}", "resume=auto"], program("python"))
    return f"a checkpoint of step {steps[-1]} is saved; to resume:\n  {again}"


def headline(composed: Composed, workload: Workload) -> str:
    """What the numbers to come are and are not; on a second line, the command of the full setting."""
    resolved = compose.resolve(composed)
    exp, scale, virtual = resolved["exp"], resolved["scale"]["name"], labels.is_virtual(resolved)
    about = {"cluster": resolved["cluster"], "workload": workload, "virtual": virtual, "scale": scale}
    said = sentences.say("headline", **about, shaped=compose.launcher(resolved).shapes)
    if scale == "paper" or not (compose.CONF / "exp" / f"{exp}.yaml").is_file():
        return said
    whose = "The paper's setting" if any(published.quoted(exp, k) for k in ("speedup", "accuracy")) else "The full run"
    nodes_given = "cluster.nodes" in map(compose.key_of, composed.overrides)
    command = make_command(exp) + (f" NODES={resolved['cluster']['nodes']}" if nodes_given else "") + " SCALE=paper"
    if "data_path" in resolved["workload"]:
        path = resolved["data"]["path"]
        command += " DATA=" + ("/path/to/data" if path is None else shlex.quote(path))
    return f"{said}\n{whose}: {command}"


def make_command(exp: str) -> str:
    """How `make` runs an experiment: by a target of that name, or as `make exp EXP=NAME`."""
    makefile = (record.ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^EXPERIMENTS := (.*)$", makefile, re.MULTILINE)
    return f"make {exp}" if listed and exp in listed[1].split() else f"make exp EXP={exp}"


COPIES = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
"""What srun and mpirun set: how often they have started a command, and the number of each."""


def under_torchrun() -> bool:
    """Whether this process is a rank already. Raises UserError where the environment says so by halves, and where srun or
    mpirun has started it several times: each would train all of it, and all disturb each other."""
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        for size, number in COPIES:
            copies = os.environ.get(size, "")
            if number in os.environ and copies.isdecimal() and int(copies) > 1:
                raise UserError(
                    f"{size}={copies}: this command was started {copies} times, and starts its ranks itself. Start it once "
                    f"(cluster=slurm makes the job), or torchrun on each node; for {copies} separate runs unset {number}"
                )
        return False
    # Without the last, ranks on several machines would be recorded as those of one node.
    local = ["LOCAL_WORLD_SIZE"] if os.environ["WORLD_SIZE"] != "1" else []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *local):
        value = os.environ.get(name, "")
        if not value or (name != "MASTER_ADDR" and not value.isdecimal()):
            given = shown(value) if value else "not set"
            raise UserError(
                f"RANK and WORLD_SIZE say that this is a rank, and {name} is {given}: torchrun sets all of them; for a run "
                "without torchrun unset RANK"
            )
    return True


def join(composed: Composed) -> RunSpec:
    """Trains as one rank of the world that torchrun has made. Raises UserError or whatever training raises."""
    rank = int(os.environ["RANK"])
    adopt_torchrun_world(composed)
    workload = compose.check(composed, rank_zero=rank == 0)
    if rank == 0:
        check_results(compose.resolve(composed))
        say(headline(composed, workload))
    with shared(compose.make_spec(composed) if rank == 0 else None) as spec:
        as_rank(spec, rank)
        return spec


@contextlib.contextmanager
def shared(spec: RunSpec | None) -> Iterator[RunSpec]:
    """Rank 0's `spec`, on every rank: one id and one folder for the run, which rank 0 holds while it is open.

    Raises UserError where the folder cannot be had, and where nodes differ in their number of ranks.
    """
    import torch.distributed as dist

    with contextlib.ExitStack() as until_the_end:
        if spec is not None:
            until_the_end.enter_context(opened(spec))
        store, _, _ = next(iter(dist.rendezvous("env://")))
        _keep.append(store)
        key = f"birder/spec/{len(_keep)}"  # torchrun's restart count differs between nodes that came at different times
        if spec is not None:
            store.set(key, json.dumps(dataclasses.asdict(spec)))
        found = spec or RunSpec(**json.loads(store.get(key)))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", found.ranks_per_node))
        if here != found.ranks_per_node:
            first = found.ranks_per_node
            raise UserError(f"{here} ranks on this node, and {first} on the first one: start as many on every node")
        yield found


def as_rank(
    spec: RunSpec,
    rank: int,
    train: Callable[[RunSpec], None] | None = None,
    write_failed: Callable[[RunSpec, str], None] = record.write_failed,
) -> None:
    """Trains as this rank; rank 0 records what ends it too early. train: as in `worker.run_rank`."""
    from experiments.training import worker

    def on_failure(error: BaseException) -> None:
        if rank == 0 and isinstance(error, Exception) and not isinstance(error, UserError):
            write_failed(spec, f"rank 0: {type(error).__name__}: {error}")

    worker.run_rank(spec, train, on_failure)


def adopt_torchrun_world(composed: Composed) -> None:
    """Makes the cluster of a configuration the world that torchrun has made. Raises UserError.

    So it does where something else was typed: a dry run, workers that no ranks are, another number of ranks.
    """
    world = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    asked = composed.config.cluster
    if asked.dry_run:
        raise UserError("--dry-run starts nothing, and torchrun has started ranks: call it without torchrun")
    if asked.name in ("emulated", "virtual", "ssh"):
        raise UserError(f"cluster={asked.name} makes its own world: call it without torchrun")
    if world % per_node:
        raise UserError(f"{world} ranks cannot be divided into nodes of {per_node}: start as many on every node")
    one_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")  # for all starts
    if world > 1 and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and one_store == "True":
        raise UserError(
            "torchrun --max-restarts keeps one key-value store, in which ranks that are started again find the addresses "
            "of those before them: use --rdzv-backend c10d, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on "
            "every node"
        )
    typed_in = set(map(compose.key_of, composed.overrides))
    for key, here in (("nodes", world // per_node), ("ranks_per_node", per_node)):
        if f"cluster.{key}" in typed_in and asked[key] != here:
            raise UserError(
                f"cluster.{key}={asked[key]}, and torchrun has made a world of {key}={here}: leave the key out"
            )
    asked.nodes, asked.ranks_per_node, asked.name = world // per_node, per_node, "torchrun"
