"""What is said beside a speedup table: what was run, on what, what the numbers are not. No torch."""

from __future__ import annotations

from typing import Any

from experiments.records.record import ResultRecord
from experiments.report.formats import number

EMULATED = {"loopback", "emulated", "netns", "veth"}
"""Kinds of link that connect nodes which are all on one machine."""


def title(r: ResultRecord) -> str:
    """Experiment, shape and batch of the runs of a table."""
    ranks = f"{_count(r.nodes, 'node')} x {_count(r.ranks_per_node, 'rank')}"
    train = r.config.get("train", {})
    batch = f", batch {train['batch_per_rank']} per rank" if train.get("batch_per_rank") else ""
    batch += f" x {train['accumulate']} micro-batches" if train.get("accumulate", 1) > 1 else ""
    precision = "" if train.get("precision", "fp32") == "fp32" else f", {train['precision']} autocast"
    return f"{r.exp}: {ranks}, cluster {r.cluster}{batch}{precision}, scale {r.scale}"


MODELS = {
    "resnet50": "ResNet-50",
    "bert_squad_base": "BERT-Base",
    "bert_base": "BERT-Base",
    "methods": "All methods on one task",
}
"""What is trained, where an experiment or a timeline is not called by it."""


def trained(r: ResultRecord) -> str:
    """The same in words, for a picture: what is trained, and its batch."""
    batch = (r.config.get("train") or {}).get("batch_per_rank")
    return MODELS.get(r.exp, r.exp) + (f", batch {batch} per rank" if batch else "")


def hardware(r: ResultRecord) -> str:
    """The machine in words."""
    h = r.hardware
    gpus = h.get("gpus") or []
    kinds = [f"{gpus.count(g)} x {g}" for g in dict.fromkeys(gpus)] if h.get("device") != "cpu" else []
    return ", ".join([*kinds, f"{h.get('cores')} cores ({h.get('cpu') or 'unknown CPU'})", f"{h.get('memory_gb')} GiB"])


def honesty(records: tuple[ResultRecord, ...] | list[ResultRecord]) -> str:
    """In plain words, what these runs are not: emulated nodes, unshaped links, synthetic data, a quick scale."""
    done = [r for r in records if r.status == "completed"] or list(records)
    r = done[0]
    words = []
    if r.nodes == 1:
        words.append("one node, nothing crosses a network")
    elif r.link["kind"] in EMULATED:
        how = "as processes" if r.cluster == "local" else "emulated"
        words.append(f"{r.nodes} nodes {how} on one machine")
    if r.nodes > 1 and r.link["shaped"]:
        words.append(_shaped(done))
    elif r.nodes > 1 and r.link["kind"] in EMULATED:
        words.append("loopback network, not shaped: no real link behaves like this")
    elif r.nodes > 1:
        rate = f", {number(r.link['mbit_per_s'])} Mbit/s" if r.link["mbit_per_s"] else ", rate not recorded"
        words.append(f"{r.link['kind']}{rate}" + (" measured" if r.link["measured"] else ""))
    if r.link["dilation"] not in (None, 1):
        words.append(_dilated(r.link))
    if any(r.data["synthetic"] for r in done):
        words.append("synthetic data")
    if r.scale == "quick":
        words.append("quick scale, not the paper's setting")
    return "; ".join(words)


def _shaped(records: list[ResultRecord]) -> str:
    link = records[0].link
    rates = [r.link["mbit_per_s"] for r in records if r.link["mbit_per_s"]]
    set_rate = link.get("set_mbit_per_s")
    if not rates and not set_rate:
        return "links shaped to an unrecorded rate"
    low, high = (number(min(rates)), number(max(rates))) if rates else ("", "")
    measured = low if low == high else f"{low}–{high}"
    if set_rate is None:
        return f"links shaped to {measured} Mbit/s per node" + (" (measured)" if link["measured"] else "")
    text = f"links shaped to {number(set_rate)} Mbit/s per node and direction"
    return text + (f" (measured: {measured} Mbit/s of TCP)" if link["measured"] else "")


def _dilated(link: dict[str, Any]) -> str:
    text = f"time dilation {number(link['dilation'])}"
    if link.get("link_gbps"):
        text += f", so that the link stands for {number(link['link_gbps'])} Gbit/s; step times are wall-clock here"
    return text


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")
