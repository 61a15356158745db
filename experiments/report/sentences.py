"""What is said beside a speedup table: what was run, on what, what the numbers are not, and what they show. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.records.labels import is_compressed
from experiments.records.record import ResultRecord
from experiments.report import turns
from experiments.report.formats import number, times

if TYPE_CHECKING:
    from experiments.report.speedup import Row, SpeedupTable

EMULATED = {"loopback", "emulated", "netns", "veth"}
"""Kinds of link that connect nodes emulated on one machine."""


def title(r: ResultRecord) -> str:
    """Experiment, shape and batch of the runs of a table."""
    ranks = f"{_count(r.nodes, 'node')} x {_count(r.ranks_per_node, 'rank')}"
    train = r.config.get("train", {})
    batch = f", batch {train['batch_per_rank']} per rank" if train.get("batch_per_rank") else ""
    batch += f" x {train['accumulate']} micro-batches" if train.get("accumulate", 1) > 1 else ""
    precision = "" if train.get("precision", "fp32") == "fp32" else f", {train['precision']} autocast"
    return f"{r.exp}: {ranks}, cluster {r.cluster}{batch}{precision}, scale {r.scale}"


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
        words.append(f"{r.nodes} nodes emulated on one machine")
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


def conclusion(table: SpeedupTable) -> str | None:
    """Whether compression pays in this table, in one or two sentences; None without an fp32 row or a compressed one."""
    base = table.baseline("fp32")
    compressed = [row for row in table.rows if is_compressed(row.record.wire) and row.seconds]
    if base is None or not compressed:
        return None
    compressed.sort(key=lambda row: row.seconds or 0.0)
    bound = table.baseline("none")
    limit = f"the bound, without communication, is {times(table.speedup(bound, 'fp32'))}" if bound else None
    faster = [row for row in compressed if (table.speedup(row, "fp32") or 0) > 1]
    if not faster:
        best = compressed[0]
        text = f"On this link, do not compress: the fastest compressed method, {best.label}, reaches "
        text += f"{times(table.speedup(best, 'fp32'))} of the speed of fp32 DDP"
        return f"{text}; {limit}." if limit else f"{text}."
    each = [f"{row.label} {times(table.speedup(row, 'fp32'))}{_doubt(table, row, base)}" for row in faster]
    text = f"Faster than fp32 DDP: {', '.join(each)}"
    text = f"{text}; {limit}." if limit else f"{text}."
    half = table.baseline("bf16")
    if half is not None:
        ratio = times(table.speedup(faster[0], "bf16"))
        verdict = "beats" if (table.speedup(faster[0], "bf16") or 0) > 1 else "does not beat"
        if (found := table.ratio(faster[0], "bf16")) is not None and found.tie:
            verdict = "ties with"
        text += f" The fastest, {faster[0].label}, {verdict} bf16 DDP ({ratio})."
    return text + _tied(faster)


def _tied(rows: list[Row]) -> str:
    """Which of the rows, the fastest first, cannot be told from the fastest; empty where there is none or no interval."""
    found = [(row, turns.ratio(row.record, rows[0].record)) for row in rows[1:]]
    same = [row.label for row, ratio in found if ratio is not None and ratio.tie]
    return f" Not to be told from {rows[0].label}: {', '.join(same)}." if same else ""


def _doubt(table: SpeedupTable, row: Row, base: Row) -> str:
    """Whether a speedup over `base` may be none: its interval says, or without one the spread of the steps."""
    if (ratio := table.ratio(row, base.record.wire)) is not None:
        return " (a tie)" if ratio.tie else ""
    return " (within the spread)" if _overlap(row, base) else ""


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


def _overlap(row: Row, base: Row) -> bool:
    if row.uneven:  # its spread is that of different kinds of step
        return False
    high, low = row.record.timing.get("p90_ms"), base.record.timing.get("p10_ms")
    return high is not None and low is not None and high >= low
