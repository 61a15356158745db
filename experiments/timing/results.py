"""From a world's measurements to a record for each method."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.records import labels, record
from experiments.timing.entries import Entry
from experiments.timing.opened import Exchange
from experiments.timing.plan import spec_of
from experiments.training import clock, traffic
from experiments.workloads.base import Shard, Workload, all_sum
from launch.spec import RunSpec
from launch.words import say


def write(
    spec: RunSpec,
    shard: Shard,
    workload: Workload,
    entries: Sequence[tuple[Entry, dict[str, Any]]],
    *,
    about: dict[str, Any],
    exchange: Exchange,
    link: dict[str, Any],
    dilation: float | None,
) -> None:
    """Writes the record of every method, on rank 0. Called on every rank. Raises UserError.

    entries:  who took turns, with what the comparison calls it: the bound stands for its runs without communication.
    about:    what the records' `turns` say of the world. exchange: the work of the dense exchange.
    link:     what is known of it. dilation: of emulated links, where they have one.
    """
    made = [(e, described, {} if e.failed else _measured(spec, shard, workload, e)) for e, described in entries]
    if shard.rank != 0:
        return
    for entry, described, fields in made:
        described = copy.deepcopy(described)
        if dilation is not None and "dilation" in described["config"]["cluster"]:
            described["config"]["cluster"]["dilation"] = dilation
        own = spec_of(spec, described)
        known: dict[str, Any] = {"device": shard.device.type, "link": link, "data": workload.data}
        if entry.failed is not None:
            made_record = record.failed(own, entry.failed, **known)
        else:
            turns = {**about, "ms": [round(1000 * s, 4) for s in entry.per_step()], "steps": entry.steps}
            if entry.open:
                turns["open_ms"] = [round(1000 * s, 4) for s in entry.open]
                turns |= exchange.of_wire(labels.wire(described["config"]))
            made_record = record.from_spec(own, turns=turns, **fields, **known)
        record.write(made_record, described["config"]["results_dir"])
        timing = fields.get("timing")
        outcome = f"{timing[timing['typical'] + '_ms']:.0f} ms a step" if timing else f"failed: {entry.failed}"
        say(f"{labels.method(described['config'])}: {outcome}")


def _measured(spec: RunSpec, shard: Shard, workload: Workload, entry: Entry) -> dict[str, Any]:
    """Fields of a record. Called on every rank."""
    settings, sent, rounds = spec.config["train"], entry.sent, entry.traffic
    state = all_sum([float(entry.state_bytes)], shard)[0] / shard.world_size
    steps = sum(entry.steps)
    samples = workload.samples(int(settings["batch_per_rank"])) * int(settings["accumulate"]) * shard.world_size
    uneven = rounds.uneven_from(0)  # a warm-up is over before
    timing = clock.summary(1000 * np.array(entry.per_step()), samples, uneven, entry.clock.split(), steps)
    mean = 1000 * sum(entry.seconds) / steps
    timing["mean_ms"] = round(mean, 3)
    if uneven:
        timing["samples_per_s"] = round(1000 * samples / mean, 3)
    timing["update_ms"] = round(1000 * float(np.mean(entry.updates)), 3) if entry.updates else None
    return {
        "timing": timing,
        "bytes_per_step": traffic.per_step(sent, entry.nic.total, spec.nodes, steps, shard),
        "collectives_per_step": round(sent[2] / steps, 2),
        "rounds_per_step": round(rounds.sending / rounds.steps, 4) if rounds.steps else 0.0,
        "state_bytes_per_rank": round(state),
    }
