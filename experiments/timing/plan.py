"""The launcher's half of an interleaved comparison: which comparisons share one world, and how it is started."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cells import timelines
from experiments.config import compose
from experiments.config.compose import Composed
from experiments.config.validate import value_at
from experiments.records import labels, record
from launch.base import Launcher
from launch.errors import UserError
from launch.files import read_log
from launch.spec import RunSpec

WORKER = Path(__file__).resolve().parent / "worker.py"
TURN_FILE = "turn"
"""In a run directory: the id of the method whose turn it is."""
BOUND_FILE = "bound.json"
"""In a run directory: {step_ms} of the bound, where there was no method to time (experiments/timing/calibrate.py)."""
ENDED = ("interrupted by Ctrl-C", "ended by SIG")
"""How a reason begins where somebody has ended the world, as launch/base.py gives it."""
SHARED = (
    *("workload", "cluster", "data", "seed", "scale", "timeline", "timing", "results_dir", "output_dir", "profile"),
    *(f"train.{key}" for key in ("batch_per_rank", "accumulate", "precision", "threads", "epochs", "max_steps")),
    "comm.bucket_cap_mb",
)
"""Keys of the configuration that methods of one world must have in common."""


def reason_not_interleaved(resolved: Sequence[dict[str, Any]], synthetic: bool) -> str | None:
    """Why these variants are run one after the other, each in another world; None where they take turns.

    With timing.mode=auto those take turns that are only timed: synthetic data at quick scale. Raises UserError where
    timing.mode=interleaved asks for what cannot be.
    """
    first = resolved[0]
    mode = first["timing"]["mode"]
    if mode == "sequential":
        return "timing.mode=sequential"
    if mode == "auto" and not (synthetic and first["scale"]["name"] == "quick"):
        return "their accuracy counts"
    reason = _not_together(resolved)
    if mode == "interleaved" and reason is not None:
        raise UserError(f"timing.mode=interleaved is not possible: {reason}; set timing.mode=sequential")
    return reason


def _not_together(resolved: Sequence[dict[str, Any]]) -> str | None:
    first = resolved[0]
    if any(config["comm"]["topology"] == "hsdp" for config in resolved):
        return "comm.topology=hsdp shards its model"
    if labels.is_virtual(first):
        return "virtual workers have no times"
    for other in resolved[1:]:
        for key in SHARED:
            if value_at(other, key) != value_at(first, key):
                return f"methods differ in {key}"
    if first["checkpoint"]["every"] or first["resume"] == "auto":
        return "interleaved timing saves no checkpoints"
    if first["cluster"].get("max_restarts"):
        return "interleaved timing does not restart"
    if first.get("profile"):
        return "a profile is of a run"
    return None


def make(chosen: Sequence[Composed], group: str, attempt: int = 1, run_name: str | None = None) -> RunSpec:
    """One run for all variants. Its id begins the ids of their records. Raises UserError.

    attempt: from 1; later ones are of methods that are left when another one has broken the world.
    run_name: as the configuration has it: the first attempt's folder; None: the run's id, as for later attempts.
    """
    run_id = group if attempt == 1 else f"{group}.{attempt}"
    resolved = [compose.resolve(c) for c in chosen]
    first = resolved[0]
    check_timeline(first)
    data = compose.data(first)
    variants: list[dict[str, Any]] = []
    for composed, config in zip(chosen, resolved, strict=True):
        name = f"{composed.choices.get('optimizer') or 'method'}-{labels.wire(config)}"
        same = sum(v["name"] == name for v in variants)
        mine = f"{run_id}-{name}" + (f".{same + 1}" if same else "")
        about = {"command": composed.command, "overrides": list(composed.overrides), "config": {**config, "data": data}}
        variants.append({"id": mine, "name": name, **about})
    made = world(first, variants, group, run_id)
    if run_name is None or attempt > 1:
        return made
    if (folder := made.path.with_name(run_name)).joinpath("spec.yaml").exists():
        raise UserError(f"{folder} holds a run already: choose another run_name")
    return dataclasses.replace(made, run_dir=str(folder))


def world(config: dict[str, Any], variants: list[dict[str, Any]], group: str | None, run_id: str) -> RunSpec:
    """The run of a world in which `variants` take turns."""
    config = {**config, "variants": variants, "resume": "never"}
    folder = Path(config["output_dir"]) / str(config["exp"]) / run_id
    command = variants[0]["command"] if variants else ""
    return RunSpec(run_id, group, str(config["exp"]), command, [], config, str(folder))


def spec_of(spec: RunSpec, described: dict[str, Any]) -> RunSpec:
    """The description of one method's part in a world. described: one of `variants`."""
    return dataclasses.replace(
        spec,
        id=described["id"],
        command=described["command"],
        overrides=described["overrides"],
        config=described["config"],
    )


def launcher(config: dict[str, Any]) -> Launcher:
    """What starts a world. Emulated links wait for the ranks to ask for their rate. Raises UserError."""
    made: Launcher = compose.launcher(config)
    made.worker, made.on_failure, made.late = WORKER, write_failed, True
    return made


def check_timeline(config: dict[str, Any]) -> None:
    """Raises UserError where a dilation is to be measured against nothing."""
    if config["cluster"].get("dilation") == "auto" and compose.launcher(config).shapes:
        if config["timeline"] is None:
            raise UserError(
                "cluster.dilation=auto needs the target's step time: set timeline=NAME or cluster.dilation=20"
            )
        timelines.load(config["timeline"])


def write_failed(spec: RunSpec, reason: str) -> None:
    """Records a world's failure as that of the method whose turn it was, of all where it was nobody's. Does not raise.

    Of all, too, where somebody has ended the world: no other world follows.
    """
    blamed = None if reason.startswith(ENDED) else whose_turn(spec)
    for described in spec.config["variants"]:
        if blamed in (None, described["id"]):
            record.write_failed(spec_of(spec, described), reason)


def whose_turn(spec: RunSpec) -> str | None:
    """The id of the method in whose turn a world broke; None where none had begun, or it is not known."""
    found = read_log(spec.path / TURN_FILE).strip()
    return found if found in {v["id"] for v in spec.config["variants"]} else None


def failures(spec: RunSpec) -> list[str]:
    """Of a world that ended well: which methods have failed, and why, a line for each."""
    found = []
    for described in spec.config["variants"]:
        path = record.place(described["config"]["results_dir"], described["id"])
        if path.exists() and (made := record.read(path)).status != "completed":
            found.append(f"{made.method}: {made.reason}")
    return found
