"""Claims with something measured beside them: replayed cells, emulated links, accuracies. From records alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.cells import suite
from experiments.records.record import ResultRecord
from experiments.report import accuracy, captions, replayed, speedup
from experiments.report.accuracy import AccuracyTable, Cell
from experiments.report.claims import CLOSE, TABLES, Claim, met, paper
from experiments.report.formats import DASH, fraction, mean_sd, metric_unit, times
from experiments.report.paired import BETTER, OPEN, PARITY, WORSE, difference
from experiments.report.replayed import Results
from experiments.report.speedup import SpeedupTable


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
    verdict = met(factor, found, ", where computing hides the link")
    return Claim(
        f"Birder is up to {factor:g} times as fast as full precision, {name}, 64 A100, 10 Gbit/s",
        source,
        "replayed",
        f"[1 to 8 nodes of 8 A100]({TABLES}/paper.md), hierarchical, best over the nodes, against fp32 DDP",
        f"{times(found[0][0])} to {times(found[-1][0])} over {len(found)} settings of batch, precision and link",
        verdict,
    )


def newest(records: Sequence[ResultRecord], exp: str, cluster: str = "emulated") -> list[SpeedupTable]:
    """The latest table for each shape of a cluster, emulated links unless told, the fewest nodes first."""
    found: dict[tuple[int, int], SpeedupTable] = {}
    for table in speedup.build([r for r in records if r.exp == exp and r.cluster == cluster]):
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
            found.append((row.record.nodes, ratio, captions.versus(table, row, "fp32")))
    if not found:
        return None
    shown = ", ".join(f"{text.strip()} with {nodes} nodes" for nodes, _, text in found)
    verdict = met(factor, [(ratio, f"{nodes} nodes") for nodes, ratio, _ in found])
    return Claim(
        f"Birder is up to {factor:g} times as fast as full precision, ResNet-50",
        source,
        "trained",
        f"[ResNet-50, synthetic 64x64 images, 4 a rank]({TABLES}/resnet50.md), emulated nodes of one rank, time dilated to "
        "10 Gbit/s",
        shown,
        f"{verdict}; nodes of 8 GPUs are the replayed rows",
    )


# ---- accuracy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A method beside the best of the dense ones that a claim names, on one task. verdict: one of paired.py's."""

    task: str
    where: str
    verdict: str
    text: str


def outcomes(records: Sequence[ResultRecord], methods: Sequence[str], bases: Sequence[str]) -> list[Outcome]:
    """On every task that both were run on with several seeds, what was lost first."""
    found: list[tuple[AccuracyTable, Outcome]] = []
    for table in accuracy.build(list(records)):
        theirs = [c for c in table.one_of_each if c.valid and c.records[0].method in bases]
        base = max(theirs, key=lambda c: table.sign * (c.mean or 0.0), default=None)
        mine = [c for c in table.one_of_each if c.records[0].method in methods]
        found += [(table, made) for c in mine if base and (made := _outcome(table, c, base)) is not None]
        tried = [c for c in table.cells if c.records[0].method in methods and len(c.records) > 1]
        if base and not mine and tried:  # no rate of it has kept all of its seeds
            told = f"every rate lost seeds, of {len(tried)} tried; {base.label} has {mean_sd(*base.summary(None))}"
            found.append((table, Outcome("", _where(tried[0]), WORSE, told)))
    names = _names([table for table, _ in found])
    said = [replace(o, task=name + o.task) for name, (_, o) in zip(names, found, strict=True)]
    return sorted(said, key=lambda o: ORDER.index(o.verdict))


def _outcome(table: AccuracyTable, cell: Cell, base: Cell) -> Outcome | None:
    """None for a single seed that both have: it decides nothing."""
    relative = table.parity is None or table.parity.relative
    margin = CLOSE if table.parity is None else table.parity.margin
    gap = difference(cell.by_seed, base.by_seed, relative)
    if gap is None or gap.n < 2:
        return None
    unit = "" if relative else metric_unit(str(table.metric["name"]))
    text = f"{gap.text(relative)}{unit}, {mean_sd(*cell.summary(None))} against {mean_sd(*base.summary(None))} ({base.label})"
    lost = len(cell.records) - len(cell.valid)
    text += f", {lost} of {len(cell.records)} seeds failed" if lost else ""
    others = [c for c in table.chosen if c.records[0].method == cell.records[0].method and c is not cell]
    if others:
        worst = min(others, key=lambda c: table.sign * (c.mean or 0.0))
        apart = difference(worst.by_seed, base.by_seed, relative)
        text += (
            f"; the best of {len(others) + 1} variants, the worst has {apart.text(relative) if apart else DASH}{unit}"
        )
    short = "" if cell.records[0].method in ("Birder", "0/1 Adam", "CSER", "SLAMB") else f" ({cell.records[0].method})"
    verdict = accuracy.counted(gap.verdict(margin, table.higher_is_better), cell, base)
    return Outcome(short, _where(cell), verdict, text)


def _where(cell: Cell) -> str:
    exp = cell.records[0].exp
    return f"[{exp}]({TABLES}/{exp}.md)"


ORDER = (WORSE, OPEN, PARITY, BETTER)
"""Of verdicts: what was lost stands first."""


TASKS = {
    "scikit-learn digits": "digits",
    "image folder tinyimagenet32_c100": "images of 100 classes",
    "text of wikitext-2": "language model",
}
"""What data are called, where not by their own names."""


def _names(tables: Sequence[AccuracyTable]) -> list[str]:
    """What tasks are called: data, length and workers; only where several are alike their batch, then the schedule."""
    firsts = [(table.slug, table.cells[0].records[0]) for table in tables]
    names = {}
    for slug, r in firsts:
        data = str(r.data["name"]).partition(" (")[0]
        names[slug] = f"{TASKS.get(data, data)}, {accuracy.length_of(r)}, {r.nodes * r.ranks_per_node} workers"
    for more in (lambda r: f"batch {accuracy.batch_of(r)}", accuracy.schedule_of):
        alike = {slug for slug in names if list(names.values()).count(names[slug]) > 1}
        names |= {slug: f"{names[slug]}, {more(r)}" for slug, r in dict(firsts).items() if slug in alike}
    return [names[slug] for slug, _ in firsts]


def same_accuracy(
    records: Sequence[ResultRecord], text: str, source: str, methods: Sequence[str], bases: Sequence[str]
) -> Claim | None:
    """A method against the best of the dense ones named, over all tasks that were run."""
    found = outcomes(records, methods, bases)
    if not found:
        return None
    by = {verdict: [o.task for o in found if o.verdict == verdict] for verdict in ORDER}
    verdict = [f"not reached on {'; '.join(by[WORSE])}"] * bool(by[WORSE])
    verdict += [f"not decided on {'; '.join(by[OPEN])}"] * bool(by[OPEN])
    verdict += [f"confirmed on {'; '.join([*by[PARITY], *by[BETTER]])}"] * bool(by[PARITY] or by[BETTER])
    verdict.append("the paper's own tasks need GPUs")
    shown = "<br>".join(f"{o.verdict}: {o.task}: {o.text}" for o in found)
    run = "each with the best rate tried: " + ", ".join(dict.fromkeys(o.where for o in found))
    return Claim(text, source, "trained", run, shown, ".<br>".join(verdict))


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
