"""From a world's measurements to a record for each method."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.records import labels, record
from experiments.timing.entries import Entry, Variant
from experiments.timing.opened import Exchange
from experiments.timing.plan import spec_of
from experiments.training import clock, traffic
from experiments.workloads.base import Shard, Workload, all_sum
from launch.spec import RunSpec
from launch.words import say


@dataclass(frozen=True)
class Timed:
    """What a world has timed, on one rank.

    bound, bounds:  the bound, and what the comparison calls its runs without communication: the bound stands for them.
    exchange, link: the work of the dense exchange; what is known of emulated links.
    """

    spec: RunSpec
    shard: Shard
    workload: Workload
    bound: Entry
    bounds: list[dict[str, Any]]
    variants: list[Variant]
    exchange: Exchange
    link: dict[str, Any]


def write(world: Timed, about: dict[str, Any], dilation: float | None, probed: dict[str, Any] | None) -> None:
    """Writes the record of every method, on rank 0. Called on every rank. Raises UserError.

    about: what the records' `turns` say of the world. dilation: of the links, where they have one. probed: the link of a
    real network.
    """
    made: list[tuple[Entry, dict[str, Any], dict[str, Any]]] = []
    for described in world.bounds:
        made.append((world.bound, described, _measured(world, world.bound)))
    for variant in world.variants:
        made.append((variant, variant.described, {} if variant.failed else _measured(world, variant)))
    if world.shard.rank != 0:
        return
    for entry, described, fields in made:
        described = copy.deepcopy(described)
        if dilation is not None and "dilation" in described["config"]["cluster"]:
            described["config"]["cluster"]["dilation"] = dilation
        spec = spec_of(world.spec, described)
        said = described["config"]["cluster"].get("link") or {}
        link = {**world.link, **said, **(probed or {})}
        known: dict[str, Any] = {"device": world.shard.device.type, "link": link, "data": world.workload.data}
        if entry.failed is not None:
            made_record = record.failed(spec, entry.failed, **known)
        else:
            turns = {**about, "ms": [round(1000 * s, 4) for s in entry.per_step()], "steps": entry.steps}
            if entry.open:
                turns["open_ms"] = [round(1000 * s, 4) for s in entry.open]
                turns |= world.exchange.told(labels.wire(described["config"]))
            made_record = record.from_spec(spec, turns=turns, **fields, **known)
        record.write(made_record, described["config"]["results_dir"])
        timing = fields.get("timing")
        told = f"{timing[timing['typical'] + '_ms']:.0f} ms a step" if timing else f"failed: {entry.failed}"
        say(f"{labels.method(described['config'])}: {told}")


def _measured(world: Timed, entry: Entry) -> dict[str, Any]:
    """Fields of a record. Called on every rank."""
    shard, settings = world.shard, world.spec.config["train"]
    variant = entry if isinstance(entry, Variant) else None
    told = variant.told if variant else None
    sent = variant.sent if variant else [0, 0, 0]
    state = all_sum([float(variant.state_bytes if variant else 0)], shard)[0] / shard.world_size
    steps = sum(entry.steps)
    samples = world.workload.samples(int(settings["batch_per_rank"])) * int(settings["accumulate"]) * shard.world_size
    uneven = told is not None and told.uneven
    timing = clock.summary(
        1000 * np.array(entry.per_step()), samples, uneven, variant.clock.split() if variant else {}, steps
    )
    mean = 1000 * sum(entry.seconds) / steps
    timing["mean_ms"] = round(mean, 3)
    if uneven:
        timing["samples_per_s"] = round(1000 * samples / mean, 3)
    updates = variant.updates if variant else [0.0]
    timing["update_ms"] = round(1000 * float(np.mean(updates)), 3) if updates else None
    return {
        "timing": timing,
        "bytes_per_step": traffic.per_step(sent, entry.nic, world.spec.nodes, steps, shard),
        "collectives_per_step": round(sent[2] / steps, 2),
        "rounds_per_step": round((told.per_step if told else None) or 0.0, 4),
        "state_bytes_per_rank": round(state),
    }
