"""What a step's time goes to: from the spans of birder/comm/trace.py to the record's split, a chrome trace and a picture.

`+profile=step` adds to a run `<run_dir>/profile/step<k>.json`, which chrome://tracing and ui.perfetto.dev open, and
`step<k>.png`: the timed step k whose time is nearest to the median, on every rank. CPU only: on CUDA work is queued.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from birder.comm import Span
from launch.errors import refused

LANES = {
    "compute": "#bbbbbb",
    "encode": "#4477aa",
    "wire": "#ee6677",
    "decode": "#ccbb44",
    "apply": "#228833",
    "exposed": "#aa3377",
}
"""Kinds of interval that are shown, one lane each for every rank."""


def pieces(spans: Sequence[Span]) -> list[Span]:
    """The spans as lanes show them.

    A unit's work without its waits is encode, up to the end of its first wait, and decode from then on: what a server makes
    of the messages it has received, and everything later, is decode. Where the gradients were taken by an all-reduce,
    backward contains the wait for it: compute then ends when the last of them begins, and the rest is exposed.
    """
    waits = [s for s in spans if s.kind == "wait"]
    first: dict[int | None, float] = {}
    for w in waits:
        first[w.unit] = min(first.get(w.unit, w.end), w.end)
    found = [s for s in spans if s.kind in LANES and s.kind != "compute"]
    for s in spans:
        if s.kind == "work":
            inside = sorted(w[2:4] for w in waits if w.thread == s.thread and s.begin <= w.begin and w.end <= s.end)
            for begin, end in _gaps(s.begin, s.end, inside):
                kind = "encode" if begin < first.get(s.unit, end) else "decode"
                found.append(Span(kind, s.unit, begin, end, s.thread))
    own = any(s.kind == "exposed" for s in spans)
    began = [s.begin for s in spans if s.kind == "wire"]
    for s in spans:
        if s.kind == "compute":
            last = s.end if own or not began else min(max(s.begin, *began), s.end)
            found.append(Span("compute", None, s.begin, last))
            if last < s.end:
                found.append(Span("exposed", None, last, s.end))
    return sorted(found, key=lambda s: (s.begin, s.end))


def split(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of one step on one rank; names as in the record's `timing.split`, without _ms.

    encode:       everything that makes messages and reads them, on whatever thread.
    wire:         at least one collective was under way.
    exposed_wire: after the last gradient was ready, until everything had been received.
    """
    shown = pieces(spans)
    if not any(s.kind in ("encode", "wire") for s in shown):
        return {}
    return {
        "encode": sum(s.seconds for s in shown if s.kind in ("encode", "decode")),
        "wire": covered((s.begin, s.end) for s in shown if s.kind == "wire"),
        "exposed_wire": sum(s.seconds for s in shown if s.kind == "exposed"),
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _gaps(begin: float, end: float, inside: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What is left of begin..end outside of sorted intervals."""
    left = []
    for low, high in inside:
        if low > begin:
            left.append((begin, low))
        begin = max(begin, high)
    return [*left, (begin, end)] if begin < end else left


Step = tuple[int, float, float, list[Span]]
"""A step of one rank: its number, when it began on this rank's clock, its seconds, and its pieces."""


class KeptSpans:
    """The spans of the first `most` timed steps of one rank."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.steps: list[Step] = []

    def keep(self, step: int, began: float, seconds: float, spans: list[Span]) -> None:
        if len(self.steps) < self.most:
            self.steps.append((step, began, seconds, pieces(spans)))


def typical(ranks: Sequence[KeptSpans]) -> int | None:
    """Position of the step whose time, on its slowest rank, is nearest to the median."""
    times = [max(step[2] for step in steps) for steps in zip(*(kept.steps for kept in ranks))]
    if not times:
        return None
    middle = sorted(times)[len(times) // 2]
    return min(range(len(times)), key=lambda i: abs(times[i] - middle))


def chrome_trace(ranks: Sequence[Step]) -> dict[str, Any]:
    """A step of all ranks in Chrome's trace format: a process for each rank, a thread for each kind. Microseconds."""
    events: list[dict[str, Any]] = []
    for rank, (_, began, seconds, spans) in enumerate(ranks):
        about = {"ph": "M", "pid": rank, "tid": 0}
        events.append({**about, "name": "process_name", "args": {"name": f"rank {rank}"}})
        for lane, kind in enumerate(("step", *LANES)):
            events.append({**about, "tid": lane, "name": "thread_name", "args": {"name": kind}})
        whole = Span("step", None, began, began + seconds)
        for s in (whole, *spans):
            name = s.kind if s.unit is None else f"{s.kind} {s.unit}"
            lane = ("step", *LANES).index(s.kind)
            times = {"ts": round(1e6 * (s.begin - began), 1), "dur": round(1e6 * s.seconds, 1)}
            events.append({"ph": "X", "name": name, "cat": s.kind, "pid": rank, "tid": lane, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(ranks: Sequence[Step], title: str, path: Path) -> None:
    """The same step as a picture, PNG: time to the right, every rank's lanes below each other."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("default"):
        rows = len(ranks) * len(LANES)
        figure = Figure(figsize=(8, 1.4 + 0.22 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        labels = []
        for rank, (_, began, _, spans) in enumerate(ranks):
            for lane, (kind, colour) in enumerate(LANES.items()):
                y = rank * len(LANES) + lane
                labels.append(f"rank {rank}  {kind}" if lane == 0 else kind)
                for s in (s for s in spans if s.kind == kind):
                    left, width = 1000 * (s.begin - began), 1000 * s.seconds
                    axes.barh(y, width, left=left, height=0.8, color=colour, edgecolor="white", linewidth=0.3)
            axes.axhline((rank + 1) * len(LANES) - 0.5, color="#888888", linewidth=0.6)
        axes.set_yticks(range(rows), labels, fontsize=8)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.set_xlabel("ms after the start of the step")
        waits = 1000 * max(sum(s.seconds for s in spans if s.kind == "exposed") for *_, spans in ranks)
        whole = 1000 * max(seconds for _, _, seconds, _ in ranks)
        figure.suptitle(f"{waits:.0f} of {whole:,.0f} ms are spent waiting for communication\n{title}", fontsize=9)
        figure.savefig(path, dpi=110)


def write(ranks: Sequence[KeptSpans], folder: Path, title: str) -> list[Path]:
    """Writes both files of the typical step below `folder`, and returns their paths; none without timed steps.

    Raises UserError when they cannot be written.
    """
    position = typical(ranks)
    if position is None:
        return []
    steps = [kept.steps[position] for kept in ranks]
    number = steps[0][0]
    with refused(f"cannot write the profile to {folder}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        trace, picture = folder / f"step{number}.json", folder / f"step{number}.png"
        trace.write_text(json.dumps(chrome_trace(steps)))
        draw(steps, f"{title}, step {number}", picture)
    return [trace, picture]
