"""The timelines of results/timelines, when each gradient of a model is ready on some GPU: `birder.predict.Timeline` in files.

experiments/timelines.py lists, makes and records them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from birder.predict import Cluster, Link
from birder.predict import timeline as files
from birder.predict.methods import low_rank_numbers
from birder.predict.timeline import Gradient, Timeline
from experiments.records.record import ROOT
from launch.errors import UserError, refused
from launch.words import there_are

FOLDER = ROOT / "results" / "timelines"


def load(name: str | Path) -> Timeline:
    """The timeline `name` of results/timelines, or of a file when `name` is a path. Raises UserError."""
    path = Path(name)
    if path.suffix != ".json":
        path = FOLDER / f"{name}.json"
    with refused(f"{path} is not a readable timeline", OSError), refused("", ValueError):
        try:
            return files.read(path)
        except FileNotFoundError:
            raise UserError(f"no timeline {name!s}{there_are(str(name), names())}") from None


def names() -> list[str]:
    """All timelines of results/timelines."""
    return sorted(p.stem for p in FOLDER.glob("*.json"))


def write(timeline: Timeline, path: Path) -> Path:
    """Writes a timeline's file. Raises UserError."""
    with refused(f"cannot write {path}", OSError), refused("", ValueError):
        return files.write(timeline, path)


# ---- what a node of many GPUs sends, and what happens inside it, by arithmetic alone ----------------------------------

BUCKET_MB = 25.0
"""Size of DDP's buckets and of the methods' units; a replay of a `fraction` of the elements scales it by the same factor."""


def bucket_delay_ms(timeline: Timeline) -> float:
    """What the all-reduce inside a node adds to dense methods: the time of one bucket. The rest runs during backward."""
    share = min(1.0, BUCKET_MB * 2**20 / (4 * timeline.elements))
    return timeline.intra_node.all_reduce_ms * share


def nic_bytes(method: str, elements: int, nodes: int, gpus: int, *, ring: bool = True) -> float:
    """Bytes that one node's NIC sends per step, without padding and scales. method: fp32, bf16, flat, hierarchical, none."""
    if nodes == 1 or method == "none":
        return 0.0
    if method in ("fp32", "bf16"):
        return Cluster(nodes, gpus, Link(1.0), ring=False).all_reduce(elements * (4 if method == "fp32" else 2)).nbytes
    there, bits = Cluster(nodes, gpus, Link(1.0), ring=ring), elements / 8
    if method == "hierarchical":
        return 2 * there.by_nodes(bits).nbytes
    return (there.all_to_all(bits) + there.all_gather(bits)).nbytes


# ---- a model scaled down: parts of its tensors, or some of them whole -------------------------------------------------

LARGE = 1 / 8
"""A matrix with more than this share of the model's elements is cut by rows where whole tensors are selected."""


def flattened(timeline: Timeline, fraction: float) -> Timeline:
    """The timeline whose tensors are flat and hold `fraction` of their elements; 1: unchanged."""
    if fraction >= 1:
        return timeline
    kept = (dataclasses.replace(g, shape=(max(1, round(g.numel * fraction)),)) for g in timeline.gradients)
    return dataclasses.replace(timeline, gradients=tuple(kept))


def select(timeline: Timeline, fraction: float) -> Timeline:
    """A timeline with about `fraction` of the elements in whole tensors: every k-th by size, of matrices and of vectors.

    Tensors of more than `LARGE` of all elements are kept with a fraction of their rows: they have no like.
    """
    if fraction >= 1:
        return timeline
    step = round(1 / fraction)
    kept: list[Gradient] = []
    for vectors in (True, False):
        kind = [g for g in timeline.gradients if (len(g.shape) < 2) is vectors]
        large = [g for g in kind if g.numel > LARGE * timeline.elements]
        others = sorted((g for g in kind if g not in large), key=lambda g: (g.numel, g.name))
        kept += others[step // 2 :: step] or others[-1:]
        kept += [dataclasses.replace(g, shape=(max(1, round(g.shape[0] * fraction)), *g.shape[1:])) for g in large]
    # The step must not end earlier than the model's: a tensor that is ready last is there in any case.
    last = max(timeline.gradients, key=lambda g: (g.ready_ms, -g.numel))
    names = {g.name: g for g in (last, *kept)}
    chosen = tuple(names[g.name] for g in timeline.gradients if g.name in names)
    return dataclasses.replace(timeline, gradients=chosen)


def shares(timeline: Timeline, part: Timeline, rank: int) -> float:
    """Share of the numbers that PowerSGD sends for the whole model which it sends for a selection."""
    sizes = [sum(sum(low_rank_numbers(g.shape, rank)) for g in t.gradients) for t in (part, timeline)]
    return sizes[0] / sizes[1]
