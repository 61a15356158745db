"""Claims with something measured beside them: replayed cells, emulated links, accuracies. From records alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.cells import suite
from experiments.records.record import ResultRecord
from experiments.report import accuracy, replayed, speedup
from experiments.report.accuracy import AccuracyTable
from experiments.report.claims import TABLES, Claim, joined, listed, paper
from experiments.report.formats import fraction, mean_sd, times
from experiments.report.replayed import Results
from experiments.report.speedup import SpeedupTable

CLOSE = 0.01
"""A metric within this share of the baseline's counts as the same."""


def birder_replayed(records: Sequence[ResultRecord]) -> list[Claim]:
    """2.5x and 6.3x on the replayed cluster."""
    results = replayed.collect(suite.load("paper"), records)
    models = {"resnet50": "ResNet-50", "bert_base": "BERT-Base"}
    found = [_replayed(results, key, name) for key, name in models.items()]
    return [claim for claim in found if claim is not None]


def _replayed(results: Results, architecture: str, name: str) -> Claim | None:
    factor, source = paper(f"maximum speedup, {name}, testbed", "Birder")
    plan = results.suite
    found: list[tuple[float, str]] = []
    for setting in results.settings():
        model, rate, link = setting
        if plan.architecture(model) == architecture:
            best = results.best(setting, "birder_hierarchical")
            where = f"{plan.models[model].short} {plan.rates.get(rate or '', '')} at {plan.links[link].gbit:g} Gbit/s"
            found += [] if best is None else [(best, where)]
    if not found:
        return None
    found.sort()
    below, above = [f for f in found if f[0] < factor], [f for f in found if f[0] >= factor]
    hidden = f"not reached under {listed(below)}, where computing hides the link"
    verdict = "; ".join([f"confirmed under {listed(above)}"] * bool(above) + [hidden] * bool(below))
    return Claim(
        f"Birder is up to {factor:g} times as fast as full precision, {name}, 64 A100, 10 Gbit/s",
        source,
        "replayed",
        f"[1 to 8 nodes of 8 A100]({TABLES}/paper.md), hierarchical, best over the nodes, against fp32 DDP",
        f"{times(found[0][0])} to {times(found[-1][0])} over {len(found)} settings of batch, precision and link",
        verdict,
    )


def newest(records: Sequence[ResultRecord], exp: str) -> list[SpeedupTable]:
    """The latest table on emulated links for each shape of the cluster, the fewest nodes first."""
    found: dict[tuple[int, int], SpeedupTable] = {}
    for table in speedup.build([r for r in records if r.exp == exp and r.cluster == "emulated"]):
        shape = table.records[0].nodes, table.records[0].ranks_per_node
        if shape not in found or _time(found[shape]) < _time(table):
            found[shape] = table
    return [found[shape] for shape in sorted(found)]


def _time(table: SpeedupTable) -> tuple[str, str]:
    return max((r.time, r.id) for r in table.records)


def birder_trained(records: Sequence[ResultRecord]) -> Claim | None:
    """Real gradients on emulated links, one rank a node."""
    factor, source = paper("maximum speedup, ResNet-50, testbed", "Birder")
    found = []
    for table in newest(records, "resnet50"):
        row = next((row for row in table.rows if row.record.method == "Birder"), None)
        if row is not None and (ratio := table.speedup(row, "fp32")):
            found.append((row.record.nodes, ratio, table.versus(row, "fp32")))
    if not found:
        return None
    shown = ", ".join(f"{text.strip()} with {nodes} nodes" for nodes, _, text in found)
    enough = [str(nodes) for nodes, ratio, _ in found if ratio >= factor]
    verdict = f"confirmed with {', '.join(enough)} nodes of one rank" if enough else "not reached"
    return Claim(
        f"Birder is up to {factor:g} times as fast as full precision, ResNet-50",
        source,
        "trained",
        f"[ResNet-50, synthetic 64x64 images, 4 a rank]({TABLES}/resnet50.md), emulated nodes, time dilated to 10 Gbit/s",
        shown,
        f"{verdict} on emulated links; nodes of 8 GPUs are the replayed rows",
    )


# ---- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Best learning rate of a method on a task. higher: whether more is better."""

    method: str
    mean: float
    sd: float | None
    seeds: int
    higher: bool

    @property
    def shown(self) -> str:
        return mean_sd(self.mean, self.sd)

    def as_good_as(self, other: Score) -> bool:
        gap = (other.mean - self.mean) * (1 if self.higher else -1)
        return gap <= CLOSE * abs(other.mean)


def score(table: AccuracyTable, method: str) -> Score | None:
    """The best rate of a method in a table, of its best variant; learning rates that failed are no candidates."""
    best = next((c for c in table.one_of_each if c.valid and c.records[0].method == method), None)
    if best is None:
        return None
    mean, sd = best.summary(None)
    return Score(method, mean or 0.0, sd, len(best.valid), table.higher_is_better)


def scores(
    records: Sequence[ResultRecord], exp: str, words: str, method: str, bases: Sequence[str]
) -> tuple[Score, list[Score]] | None:
    """The method and those of `bases` that were run in the same setting: that with most seeds of the method.

    words: part of the table's title.
    """
    found: list[tuple[Score, list[Score]]] = []
    for table in accuracy.build([r for r in records if r.exp == exp]):
        ours = score(table, method)
        dense = [s for base in bases if (s := score(table, base)) is not None]
        if words in table.title and ours is not None and dense:
            found.append((ours, dense))
    return max(found, key=lambda pair: pair[0].seeds, default=None)


TASKS = (
    ("Fashion-MNIST", "methods", "", f"[all methods, tuned]({TABLES}/methods.md)"),
    ("SQuAD 1.1 F1", "bert_squad", "5000", f"[6-layer MiniLM, 5,000 questions]({TABLES}/bert_squad.md)"),
    ("Penn Treebank perplexity", "ptb", "4 epochs", f"[two LSTM layers, 4 epochs]({TABLES}/ptb.md)"),
    ("images of 100 classes, top-1", "cifar100", "20 epochs", f"[ResNet-20, 20 epochs]({TABLES}/cifar100.md)"),
)


def same_accuracy(
    records: Sequence[ResultRecord], text: str, source: str, method: str, bases: Sequence[str], tasks: Sequence[int]
) -> Claim | None:
    """A method against the best of the dense ones named, on the tasks of these numbers."""
    said: list[str] = []
    equal: list[str] = []
    worse: list[str] = []
    runs: list[str] = []
    for name, exp, words, where in (TASKS[i] for i in tasks):
        found = scores(records, exp, words, method, bases)
        if found is None:
            continue
        ours, dense = found
        best = max(dense, key=lambda s: s.mean * (1 if s.higher else -1))
        said.append(f"{name}: {ours.shown} against {best.shown} ({best.method}), n = {ours.seeds}")
        if ours.as_good_as(best):
            equal.append(name)
        else:
            worse.append(f"{name} ({ours.shown} against {best.shown} after as many steps)")
        runs.append(where)
    if not said:
        return None
    verdict = [f"confirmed within {100 * CLOSE:g} % on {joined(equal)}"] * bool(equal)
    verdict += [f"not reached on {joined(worse)}"] * bool(worse)
    verdict.append("the paper's own tasks need GPUs")
    return Claim(text, source, "trained", "; ".join(runs), "; ".join(said), "; ".join(verdict))


# ---- bytes ------------------------------------------------------------------------------------------------------------


def birder_bytes(records: Sequence[ResultRecord]) -> Claim | None:
    """1 bit each way, from the byte counter."""
    for table in newest(records, "resnet50"):
        for row in table.rows:
            ratio = table.payload_ratio(row)
            if row.record.method == "Birder" and ratio and row.record.nodes == 4:
                verdict = "confirmed" if abs(ratio * 32 - 1) < CLOSE else "not reached"
                return Claim(
                    "Birder sends 1 bit per parameter each way from the first step on, 1/32 of fp32",
                    "Birder, NeurIPS 2023, abstract; verified",
                    "trained",
                    f"[ResNet-50 on 4 emulated nodes]({TABLES}/resnet50.md), payload counted where it is sent",
                    f"{fraction(ratio)} of the fp32 all-reduce's bytes",
                    f"{verdict} after the first steps, which also send which coordinates have a gradient",
                )
    return None
