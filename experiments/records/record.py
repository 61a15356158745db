"""`ResultRecord`: what one run was and what it measured, as one JSON file. Every number in a table comes from one."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import types
import typing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.records import labels, old_keys, privacy
from experiments.records.origin import ROOT, code, hardware, software
from launch import link_file as launch_link
from launch.errors import UserError, refused
from launch.files import write_whole
from launch.spec import RunSpec
from launch.words import say

SCHEMA = 1
DIVERGED = "the loss is "
"""How the reason begins of a run whose loss was NaN or inf (experiments/training/loop.py)."""
LATER = {"rounds_per_step", "steps", "turns"}
"""Fields that records of this schema may lack: they were added when there were records already."""
FINGERPRINTS = ("files", "weights")
"""What the section `data` of a record tells places of one name apart by (`data` of experiments/config/construct.py)."""
LOCAL = "results/local"
"""Where runs write, below the working directory; git ignores it."""
PUBLISHED = ROOT / "results" / "published"
"""The project's evidence: tracked, written by `make publish` and `make tables` alone."""
LINK: dict[str, Any] = {"kind": "loopback", "mbit_per_s": None, "dilation": None, "measured": False, "shaped": False}
BYTES: dict[str, Any] = {"payload_intra": None, "payload_inter": None, "nic_tx": None, "nic_rx": None}


@dataclass(frozen=True)
class ResultRecord:
    """One run. `None` means "not measured", everywhere; tables print it as an em dash.

    time:                 UTC, ISO 8601, whole seconds: when the record was made.
    status, reason:       "completed" or "failed", and for a failed run one line that says why.
    command, overrides, config: how to run it again, without the user's absolute paths, hosts and keys.
    method, wire:         labels of tables (`experiments.records.labels`).
    data:                 {name, synthetic}.
    link:                 the network between nodes: {kind, shaped, measured, mbit_per_s} as the ranks have it, {link_gbps,
                          dilation} what it stands for, {set_mbit_per_s, off_by, note} how it was made.
    timing:               {steps, median_ms, mean_ms, p10_ms, p90_ms, typical, samples_per_s, split: {..._ms}}; samples
                          over all ranks. typical: "mean" where steps differ in what they send, else "median": which of the
                          two samples_per_s and the tables go by. Older records have neither it nor mean_ms: the median.
                          Of turns also update_ms, the parameters' update.
    bytes_per_step:       {payload_intra, payload_inter, nic_tx, nic_rx}: bytes sent (rx: received) per node and step.
    collectives_per_step: number of collectives that one rank starts per step.
    rounds_per_step:      share of the steps in which anything is sent; None in records older than the field.
    steps:                optimizer steps of the whole run; None in records older than the field.
    turns:                of a method that took turns with others in one world, else empty: {world: the id that these share;
                          ms, steps: per round, a step's milliseconds on the slowest rank and the number of steps; seed;
                          held: "all", or "one" where memory held one method at a time; repeated; bound_ms: {before, after};
                          drift: by what share the bound differs from that behind the dilation; dilations: of each round,
                          where links follow the bound; busy: {others, steal, load, cores} of the machine}.
                          Of emulated links also ready: [elements, ms] of each of DDP's buckets, when it is ready in the
                          bound's steps; and of dense methods, for some rounds: open_ms, a step's on unthrottled links;
                          exchange_ms, of its all-reduces alone, the links set to exchange_mbit_per_s. With one rank a
                          node also profile: what predictions are made from (experiments/timing/profiled.py).
                          Of a suite's cell: world, ms, steps, seed, held, busy, on the clock of the cell (link.dilation).
    state_bytes_per_rank: bytes of optimizer state on one rank.
    metric:               {name, value, target, higher_is_better, all: {...}}; empty when nothing was evaluated.
    curve:                path of the curve (columns step, seconds, loss, metric) relative to the results folder.
    """

    id: str
    group: str | None
    time: str
    status: str
    reason: str | None
    command: str
    overrides: list[str]
    config: dict[str, Any]
    git: dict[str, Any]
    exp: str
    workload: str
    optimizer: str
    method: str
    wire: str
    cluster: str
    scale: str
    nodes: int
    ranks_per_node: int
    seed: int
    data: dict[str, Any]
    hardware: dict[str, Any]
    software: dict[str, Any]
    link: dict[str, Any]
    timing: dict[str, Any] = field(default_factory=dict)
    bytes_per_step: dict[str, Any] = field(default_factory=lambda: dict(BYTES))
    collectives_per_step: float | None = None
    state_bytes_per_rank: int | None = None
    metric: dict[str, Any] = field(default_factory=dict)
    curve: str | None = None
    rounds_per_step: float | None = None
    steps: int | None = None
    turns: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def diverged(self) -> bool:
        """Whether it ended without a number by the method's own doing: its loss or its metric was NaN or inf."""
        if self.status == "completed":
            return "value" in self.metric and not is_finite(self.metric["value"])
        return loss_diverged(self.reason)


def loss_diverged(reason: str | None) -> bool:
    """Whether a failure is the method's own doing: its loss was NaN or inf."""
    return DIVERGED in (reason or "")


def is_finite(value: Any) -> bool:
    """Whether it is a number, neither NaN nor inf, which are null in a record's file."""
    return isinstance(value, int | float) and math.isfinite(value)


def from_spec(
    spec: RunSpec,
    *,
    status: str = "completed",
    reason: str | None = None,
    link: dict[str, Any] | None = None,
    device: str | None = None,
    wire: str | None = None,
    bytes_per_step: dict[str, Any] | None = None,
    **measured: Any,
) -> ResultRecord:
    """The record of a run of `spec`. measured: what else it is to hold, by field; None: not measured.

    device: "cpu" or "cuda", what the run used; default: cuda where there is a GPU.
    wire:   what was sent, when the caller knows better than the configuration tells.
    link:   default: the launcher's file in the run directory, else what the kind of cluster tells, without a rate. What
            the user says of the link (`cluster.link`) counts more.
    """
    config = spec.config
    base = Path.cwd()
    asked = config["cluster"].get("link") or {}
    known = {"data": {"name": None, "synthetic": None}, **{k: v for k, v in measured.items() if v is not None}}
    return ResultRecord(
        id=spec.id,
        group=spec.group,
        time=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        status=status,
        reason=reason if reason is None else privacy.clean_text(" ".join(reason.split()), base),
        command=privacy.clean_text(spec.command, base),
        overrides=[privacy.clean_text(o, base) for o in spec.overrides],
        config=privacy.clean(config, base),
        git=code(),
        exp=spec.exp,
        workload=labels.workload(config),
        optimizer=labels.class_name(config["optimizer"]),
        method=labels.method(config),
        wire=wire or labels.wire(config),
        cluster=labels.cluster(config),
        scale=config["scale"]["name"],
        nodes=spec.nodes,
        ranks_per_node=spec.ranks_per_node,
        seed=spec.seed,
        hardware=hardware(device),
        software=software(),
        link={**LINK, "kind": _link_kind(config), **(link or launch_link.read(spec.path)), **asked},
        bytes_per_step={**BYTES, **(bytes_per_step or {})},
        **known,
    )


def failed(spec: RunSpec, reason: str, **known: Any) -> ResultRecord:
    """The record of a run that did not end well. `reason` becomes one line; `known` as in `from_spec`."""
    return from_spec(spec, status="failed", reason=reason, **known)


def write(record: ResultRecord, results_dir: str | Path) -> Path:
    """Writes `<results_dir>/records/<id>.json` whole or not at all, and returns its path. Raises UserError."""
    content = json.dumps({"schema": record.schema, **dataclasses.asdict(record)})
    finite = json.loads(content, parse_constant=lambda _: None)  # NaN is not JSON, hence null
    # One key per line, so that a difference between two records reads well.
    text = json.dumps(finite, indent=1, ensure_ascii=False, allow_nan=False)
    path = place(results_dir, record.id)
    write_file(path, (text + "\n").encode(), "record")
    return path


def place(results_dir: str | Path, run_id: str) -> Path:
    """Where the record of a run is."""
    return Path(results_dir) / "records" / f"{run_id}.json"


def write_failed(spec: RunSpec, reason: str) -> None:
    """Records that `spec` failed, unless some start of it has recorded a result: that is whole, and stays.

    A record that cannot be written is reported in one line and hides no other error.
    """
    try:
        if ended_well(spec) is None:
            write(failed(spec, reason), spec.config["results_dir"])
    except UserError as error:
        say(f"error: {error}", sys.stderr)


def ended_well(spec: RunSpec) -> ResultRecord | None:
    """The record of a run that some start of it has ended well; None where there is none."""
    try:
        found = read(place(spec.config["results_dir"], spec.id))
    except UserError:
        return None
    return found if found.status == "completed" else None


def save_curve(source: str | Path, results_dir: str | Path, run_id: str) -> str | None:
    """Copies a run's curve.csv to `<results_dir>/curves/<id>.csv`, whole or not at all. Raises UserError.

    Returns the path for `ResultRecord.curve`, or None when the run has written no curve.
    """
    if not Path(source).is_file():
        return None
    relative = f"curves/{run_id}.csv"
    write_file(Path(results_dir) / relative, Path(source).read_bytes(), "curve")
    return relative


def write_file(path: Path, content: bytes, what: str) -> None:
    """Writes a file whole or not at all. `what` names it in the UserError that a full disk raises."""
    with refused(f"could not write the {what} {path}", OSError, way_on="free space or set results_dir=..."):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


def read(path: str | Path) -> ResultRecord:
    """The record in a file that `write` made. Raises UserError for anything else."""
    with refused(f"{path} is not a readable record", OSError, ValueError, way_on="bring it back, or remove it"):
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"no record at {path}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path} has record schema {schema!r}, this version reads {SCHEMA}")
    known = {f.name for f in dataclasses.fields(ResultRecord)}
    if set(content) | LATER != known:
        raise UserError(f"{path} is not a record of schema {SCHEMA}: check {', '.join(sorted(set(content) ^ known))}")
    for section in ("cluster", "optimizer", "train", "workload"):
        if not isinstance(content["config"], dict) or not isinstance(content["config"].get(section, {}), dict):
            raise UserError(f"{path} is not a whole record: config.{section} must be a mapping")
    wrong = [name for name, kind in _kinds().items() if name in content and not isinstance(content[name], kind)]
    wrong += ["status"] * (content["status"] not in ("completed", "failed"))
    if not wrong and not isinstance(content["metric"].get("value"), int | float | None):
        wrong = ["metric"]
    if wrong:
        found = " ".join(json.dumps(content[wrong[0]]).split())[:60]
        raise UserError(f"{path} was changed by hand, or is broken: {wrong[0]} cannot be {found}")
    content["config"] = old_keys.config(content["config"])
    content["overrides"] = [old_keys.override(o) for o in content["overrides"]]
    if content["optimizer"] == "SigmaDeltaAdam":
        _as_it_was(content)
    return ResultRecord(**content)


@functools.cache
def _kinds() -> dict[str, Any]:
    """Of each field the types that its value in a file may have."""
    found = {}
    for name, hint in typing.get_type_hints(ResultRecord).items():
        kind = hint if isinstance(hint, types.UnionType) else typing.get_origin(hint) or hint
        found[name] = kind | int if float in typing.get_args(hint) else kind  # 1.0 may be written as 1
    return found


def _as_it_was(content: dict[str, Any]) -> None:
    """Of Sigma-delta Adam: its default form was another one once, and with any number of workers a bit stood for 1."""
    config = content["config"]
    optimizer = config["optimizer"]
    nodes_are_workers = config.get("comm", {}).get("topology") == "hierarchical"
    workers = content["nodes"] * (1 if nodes_are_workers else content["ranks_per_node"])
    if "full_scale" not in optimizer:  # None is 1 where there are few workers
        optimizer["full_scale"] = 1.0 if optimizer.get("variance") == "of_mean" and workers > 4 else None
    if "method" in config:
        content["method"] = labels.method(config)


def read_all(results_dir: str | Path) -> list[ResultRecord]:
    """All records below `<results_dir>/records`, ordered by time and then id. Empty when there are none. Raises UserError."""
    records, files = [], dict[str, Path]()
    for path in sorted((Path(results_dir) / "records").glob("[!.]*.json")):
        try:
            records.append(r := read(path))
        except UserError:
            if os.path.lexists(path):
                raise
            continue  # another command has just published it, or removed it
        if (other := files.setdefault(r.id, path)) is not path:  # a copy would count as a second run
            raise UserError(f"{other} and {path.name} are records of one run, {r.id}: remove the copy")
    return sorted(records, key=lambda r: (r.time, r.id))


def _link_kind(config: dict[str, Any]) -> str:
    if labels.is_virtual(config):
        return "none"
    return "loopback" if labels.cluster(config) in ("local", "emulated") else "network"
