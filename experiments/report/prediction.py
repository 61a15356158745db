"""What was measured next to what was predicted for it, and predictions over link rates. No torch.

Predictions of replayed cells know none of their times. They are a record, `FILE` of a results folder, made once: a machine
was fitted to the cells of one model and predicted those of the other (docs/predict.md). It holds what the cells took then:
what is measured again later has no prediction, and takes none away.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from birder.predict import METHODS as KNOWN
from birder.predict import Cluster, Link, Prediction, Timeline, crossover, sweep
from birder.predict.table import NEAR as NEAR
from experiments.cells import timelines, trained
from experiments.cells.trained import Trained
from experiments.records.record import ResultRecord
from experiments.report.differences import grouped
from experiments.report.formats import DASH, number, percent, times
from experiments.report.sentences import MODELS
from experiments.report.table import Table

FILE = Path("predict") / "replayed.csv"
COLUMNS = [
    *("time", "suite", "method", "link", "kind", "sends"),
    *("predicted_ms", "measured_ms", "low_ms", "high_ms", "why"),
]
UNSTEADY = 1.1
"""A cell whose slowest step is so many times its fastest is called unsteady."""
RANGE = 0.03
"""Of the range of a cell's own steps: a prediction as near as that to it counts as inside."""
HEAD = ("cells", "number", "median", "95th percentile", "worst", "within the cell's own range")


def load(results_dir: str | Path, records: Sequence[ResultRecord] | None = None) -> pd.DataFrame:
    """All cells that have a prediction, by the record's id, or those of `records`; empty where the folder has no file.

    Times in ms of the cluster's clock: predicted_ms, measured_ms, and the fastest and slowest timed step, low_ms, high_ms.
    link: emulated, or this machine's loopback. sends: whether anything leaves a node. error: predicted over measured, less 1.
    """
    path = Path(results_dir) / FILE
    if not path.is_file():
        return pd.DataFrame(columns=pd.Index([*COLUMNS, "error", "steady", "inside"]), index=pd.Index([], name="id"))
    found = pd.read_csv(path, index_col="id")
    if records is not None:
        times = {r.id: r.time for r in records}
        found = found[[times.get(str(name)) == time for name, time in found["time"].items()]].copy()
    found["error"] = found.predicted_ms / found.measured_ms - 1
    found["steady"] = found.high_ms <= UNSTEADY * found.low_ms
    found["inside"] = found.predicted_ms.between((1 - RANGE) * found.low_ms, (1 + RANGE) * found.high_ms)
    return found


def quantiles(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median, 95th percentile and largest of the errors' sizes, of at least one."""
    sizes = sorted(map(abs, errors))
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))], sizes[-1]


def line(name: str, errors: Sequence[float], *more: str) -> list[str]:
    """A row of a summary of predictions: how many, `quantiles`, and what more is known of them."""
    return [name, str(len(errors)), *(f"{size:.1%}" for size in quantiles(errors)), *more]


def of_cells(name: str, cells: pd.DataFrame) -> list[str]:
    """`line` of replayed cells; columns: HEAD."""
    return line(name, list(cells.error), percent(float(cells.inside.mean())))


def table(cells: pd.DataFrame) -> Table:
    """All, and by what makes a cell easy or hard. A part that is empty has no row."""
    emulated, loopback = (cells[cells.link == link] for link in ("emulated", "loopback"))
    sending = emulated[emulated.sends == 1]
    parts = {
        "all": cells if len(emulated) and len(loopback) else cells[:0],
        "links of a set rate": emulated,
        "of these, cells that send anything": sending,
        "of those, steady ones": sending[sending.steady],
        "loopback": loopback,
    }
    return Table.text(HEAD, [of_cells(name, part) for name, part in parts.items() if len(part)])


# ---- real training interleaved, next to its prediction from bound, links and machine --------------------------------------

VALIDATION = "validation"
"""Of a results folder: the records of `python studies/validate.py`."""
TRAINED = ("trained", "rows", "median", "95th percentile", "worst")


def trained_rows(records: Sequence[ResultRecord]) -> list[Trained]:
    """Every row that can be predicted, world by world: by experiment, nodes and rate."""
    worlds = grouped((r for r in records if r.turns.get("world")), lambda r: r.turns["world"])
    found = [row for _, world in sorted(worlds.items()) for row in trained.of_world(world)]
    return sorted(found, key=lambda t: (t.record.exp, t.record.nodes, t.record.link.get("link_gbps") or 0.0))


def trained_summary(found: Sequence[Trained]) -> Table:
    """Errors of all, and by experiment and method."""
    by_exp = grouped(found, lambda t: t.record.exp)
    by_method = grouped(sorted(found, key=lambda t: t.record.method), lambda t: t.record.method)
    parts = {"all": list(found), **by_exp, **by_method}
    return Table.text(TRAINED, [line(name, [t.error for t in part]) for name, part in parts.items() if part])


# ---- over link rates: which method wins where, for the page and its picture -------------------------------------------

METHODS = ("fp32", "bf16", "powersgd4", "birder", "birder_hierarchical", "onebit_adam", "none")
"""In the order in which those of equal time are advised."""
GBPS = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0)
LATENCY_US = 20.0
RANKS_PER_NODE = 8


def over_rates(timeline: Timeline, nodes: int, gbps: Sequence[float] = GBPS) -> list[Prediction]:
    """A prediction of `METHODS` for each rate of a node's link, Gbit/s."""
    return sweep(timeline, Cluster.of_gpus(nodes, RANKS_PER_NODE, Link(gbps[0], LATENCY_US)), "gbps", gbps, METHODS)


FORMS = ("birder", "birder_hierarchical")


def links_needed(factors: Mapping[str, float], nodes: int) -> Table:
    """For the timelines of the paper's GPU the link rate below which Birder is `factors[model]` times as fast as fp32."""
    rows = []
    for t in (t for t in map(timelines.load, timelines.names()) if t.gpu.startswith("A100") and t.model in factors):
        there = Cluster.of_gpus(nodes, RANKS_PER_NODE, Link(GBPS[0], LATENCY_US))
        found = crossover(t, there, [*FORMS, "fp32"], baseline="fp32", gain=factors[t.model] - 1)
        rates = [DASH if rate is None else number(rate) for rate in (found[form] for form in FORMS)]
        what = f"{MODELS[t.model]}, batch {t.batch_per_gpu}, {t.precision.upper()}"
        rows.append([what, times(factors[t.model]), number(t.step_ms), *rates])
    head = ("timeline", "published", "forward and backward, ms", *(f"{KNOWN[f].label}: Gbit/s, at most" for f in FORMS))
    return Table.text(head, rows)
