"""The papers' headline claims next to what this project has run, computed or predicted of them. No torch.

The rows of docs/claims.md stand in pages/claims.j2. A verdict is decided by numbers, not written down. They come from
published records, from results/paper or from the predictor: each function of `EVIDENCE` gets the records, the claim's number
and what the row gives it, and returns the words of the row. `factors`, [(factor, under which assumption)], are what "up to"
is held against (`met`). None: nothing of it was run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from birder.predict import Cluster, Link, predict
from experiments.cells import claimed, suite, timelines
from experiments.records.record import ResultRecord
from experiments.report import accuracy as accuracies
from experiments.report import accuracy_page, captions, published, volume
from experiments.report import replayed as replays
from experiments.report.accuracy import AccuracyTable
from experiments.report.comparison import Cell
from experiments.report.formats import DASH, fraction, mean_sd, metric_unit, number, times
from experiments.report.metrics import BETTER, OPEN, PARITY, WORSE, StatedParity
from experiments.report.sentences import say
from experiments.report.speedup import newest

KINDS = ("trained", "replayed", "predicted", "computed", "nothing")
VERDICTS = ("confirmed", "exceeded", "not reached", "not decided", "cannot be tried here")
CLOSE = 0.01
"""Margin of an accuracy, as a share of the baseline's, where the experiment states none."""
STEPS = volume.LENGTHS[1]
"""Of 0/1 Adam's longer published run, BERT-Large."""
ONEBIT_WARMUP = 23_000
"""Dense steps of 1-bit Adam in it."""
Words = dict[str, Any]


class Accurate(NamedTuple):
    """A claim that a method is as accurate as dense ones. methods: those of this project that are the method."""

    claim: str
    source: str
    methods: tuple[str, ...]
    bases: tuple[str, ...]


ADAM = ("AdamW fp32", "BertAdam fp32")
ACCURATE = {
    "Birder": Accurate(
        "Birder is as accurate as SGDM and Adam",
        "Birder, NeurIPS 2023",
        ("Birder", "Birder hierarchical"),
        ("SGDM fp32", *ADAM),
    ),
    "1-bit Adam": Accurate("1-bit Adam converges as Adam does", "1-bit Adam, ICML 2021", ("1-bit Adam",), ADAM),
    "0/1 Adam": Accurate("0/1 Adam converges as Adam does", "0/1 Adam, ICLR 2023", ("0/1 Adam",), ADAM),
    "CSER": Accurate(
        "CSER is as accurate as SGD", "CSER, NeurIPS 2020", ("CSER",), ("SGDM Nesterov fp32", "SGDM fp32")
    ),
    "SLAMB": Accurate("SLAMB is as accurate as LAMB", "SLAMB, ICML 2023", ("SLAMB",), ("LAMB fp32", "AdamW fp32")),
}


class Records(list[ResultRecord]):
    """Records, and their tables of accuracies, made once."""

    @cached_property
    def tables(self) -> list[AccuracyTable]:
        return accuracies.build(self)


# ---- rows -------------------------------------------------------------------------------------------------------------


def paper(quantity: str, source: str) -> dict[str, Any]:
    """The entry of a published number whose quantity and source begin like this. Raises LookupError."""
    for entry in published.load():
        if entry["quantity"].startswith(quantity) and entry["source"].startswith(source):
            return entry
    raise LookupError(f"results/paper has no {quantity!r} of {source!r}")


def cited(quantity: str, source: str) -> Words:
    """The number of a claim, and where it stands."""
    found = paper(quantity, source)
    value = float(found["value"])
    return {"value": value, "number": f"{value:g}", "source": f"{found['source']}; {found['status']}"}


def evidence(records: Records, name: str, value: float = 0.0, why: str = "", **given: Any) -> list[Words]:
    """What a function of `EVIDENCE` has found, once, or nothing. value: the claim's number.

    Of factors also `met`, `least`, `most` and `count`. why: they are not reached.
    """
    found = EVIDENCE[name](records, value, **given)
    if found and (factors := sorted(found.get("factors", ()))):
        ends = {"least": times(factors[0][0]), "most": times(factors[-1][0]), "count": len(factors)}
        found = {"met": met(value, factors, why), **ends, **found}
    return [found] if found else []


def met(factor: float, found: Sequence[tuple[float, str]], why: str = "") -> str:
    """The verdict on "up to `factor`": under which assumptions it is met, exceeded, and not reached. why: of the last.

    Met is within `captions.NEAR`: a paper that says "up to 2.5" and a prediction of 12.8 disagree.
    """
    close, below, above = captions.by_factor(factor, found)
    return say("met", near=captions.NEAR, close=close, above=above, below=below, why=why)


def checked(rows: str) -> str:
    """The rows of the page's table. Raises ValueError for one without a kind or a verdict."""
    for row in rows.strip().splitlines():
        *_, run, _result, verdict = row.strip("| ").split(" | ")
        if not run.startswith(KINDS) or not verdict.startswith(VERDICTS):
            raise ValueError(f"a verdict begins with one of {', '.join(VERDICTS)}: {row!r}")
    return rows


# ---- measured ---------------------------------------------------------------------------------------------------------


def replayed(records: Records, value: float, architecture: str) -> Words | None:
    """Birder on the replayed cluster."""
    results = replays.collect(suite.load("paper"), records)
    plan, found = results.suite, []
    for setting in results.settings():
        model, rate, link = setting
        if plan.architecture(model) == architecture:
            best = results.best(setting, "birder_hierarchical")
            where = f"{plan.models[model].short} {plan.rates.get(rate or '', '')} at {plan.links[link].gbit:g} Gbit/s"
            found += [] if best is None else [(best[0], where)]
    return {"factors": found} if found else None


def trained(records: Records, value: float) -> Words | None:
    """Real gradients on emulated links, one rank a node."""
    found = []
    for table in newest(records, "resnet50"):
        row = next((row for row in table.rows if row.record.method == "Birder"), None)
        if row is not None and (ratio := table.speedup(row, "fp32")):
            found.append((ratio, f"{row.record.nodes} nodes", captions.versus(table, row, "fp32").strip()))
    shown = ", ".join(f"{text} with {where}" for _, where, text in found)
    return {"factors": [found_[:2] for found_ in found], "shown": shown} if found else None


def payload(records: Records, value: float) -> Words | None:
    """1 bit each way, from the byte counter."""
    for table in newest(records, "resnet50"):
        for row in table.rows:
            ratio = table.payload_ratio(row)
            if row.record.method == "Birder" and ratio and row.record.nodes == 4:
                met = abs(ratio * 32 - 1) < CLOSE
                return {"share": fraction(ratio), "whether": "confirmed" if met else "not reached"}
    return None


def accuracy(records: Records, value: float, method: str) -> Words | None:
    """A method of `ACCURATE` against the best of its claim's baselines, over all tasks that were run."""
    found = outcomes(records, method)
    if not found:
        return None
    shares = []
    for verdict in ORDER:
        mine = [o.task.partition(",")[0] for o in found if o.verdict == verdict]
        shares += [f"{verdict} in {len(mine)} ({', '.join(dict.fromkeys(mine))})"] * bool(mine)
    lost, kept = (sum(o.verdict in of for o in found) for of in ((WORSE,), (PARITY, BETTER)))
    said = [f"not reached in {lost}"] * bool(lost) + [f"confirmed in {kept}"] * bool(kept)
    whether = " and ".join(said) or "not decided in any"
    return {"count": len(found), "shown": "; ".join(shares), "whether": whether, "outcomes": found}


def endings(records: Records, value: float, optimizer: str) -> Words | None:
    """How many runs of an optimizer's variants have ended with a finite metric: at the chosen rate, or at all rates of a
    variant that lost a seed at each of them."""
    mine = [(t, c) for t in records.tables for c in t.cells if c.records[0].optimizer == optimizer]
    every = [(t, c) for t, c in mine if t.bests[c.label] in (c, None)]
    runs, ended = sum(len(c.counting) for _, c in every), sum(len(c.valid) for _, c in every)
    where = ", ".join(dict.fromkeys(_where(t) for t, _ in every))
    whether = "confirmed" if ended == runs else "not reached everywhere"
    return {"where": where, "ended": ended, "runs": runs, "whether": whether} if runs else None


class Outcome(NamedTuple):
    """A method against the best baseline of its claim, on one task: the columns of a table. verdict: one of `ORDER`."""

    verdict: str
    task: str
    method: str
    gap: str
    values: str
    base: str
    notes: str

    @property
    def cells(self) -> str:
        """Its row."""
        return " | ".join(self)


def outcomes(records: Records, method: str) -> list[Outcome]:
    """On every task that both were run on with several seeds, what was lost first."""
    methods, bases = ACCURATE[method].methods, ACCURATE[method].bases
    found: list[tuple[AccuracyTable, Outcome]] = []
    for table in records.tables:
        theirs = [c for c in table.cells if c.settled and c.method in bases]
        if not theirs:
            continue
        base = max(theirs, key=table.value)
        mine = [c for c in table.one_of_each if c.method in methods]
        found += [(table, made) for c in mine if (made := _outcome(table, c, base)) is not None]
        tried = [c for c in table.cells if c.method in methods and len(c.counting) > 1]
        if not mine and tried:  # no rate of it has kept all of its seeds
            values, reason = f"{DASH} / {mean_sd(*base.summary(None))}", f"every rate lost seeds, of {len(tried)} tried"
            found.append((table, Outcome(WORSE, "", tried[0].method, DASH, values, base.label, reason)))
    names = _names([table for table, _ in found])
    said = [o._replace(task=f"{name} ({_where(t)})") for name, (t, o) in zip(names, found, strict=True)]
    return sorted(said, key=lambda o: ORDER.index(o.verdict))


def _outcome(table: AccuracyTable, cell: Cell, base: Cell) -> Outcome | None:
    """None for a single seed that both have: it decides nothing, unless it is what the method's other seeds left."""
    others = [c for c in table.one_of_each if c.method != base.method]
    parity = table.parity or StatedParity(baseline=base.label, margin=CLOSE, relative=True)
    found = table.versus(base, others, parity)
    gap, relative, p = found.gap(cell), parity.relative, found.p
    if gap is None or (gap.n < 2 and found.verdict(cell) is not WORSE):
        return None
    unit = "" if relative else metric_unit(str(table.metric["name"]))
    notes = [f"p = {p[cell.label]:.2g} for {len(p)} methods"] if cell.label in p and len(p) > 1 else []
    lost = len(cell.records) - len(cell.valid)
    notes += [f"{lost} of {len(cell.records)} seeds failed"] * bool(lost)
    variants = [c for c in table.chosen if c.method == cell.method and c is not cell]
    if variants:
        worst = found.gap(min(variants, key=table.value))
        least = worst.text(relative) if worst else DASH
        notes.append(f"the best of {len(variants) + 1} variants, the worst has {least}{unit}")
    values = f"{mean_sd(*cell.summary(None))} / {mean_sd(*base.summary(None))}"
    shown = gap.text(relative) + unit, values, base.label, "; ".join(notes) or DASH
    return Outcome(found.verdict(cell), "", cell.method, *shown)


def _where(table: AccuracyTable) -> str:
    exp = table.setting.exp
    return f"[{exp}]({accuracy_page.TABLES}/{exp}.md)"


ORDER = (WORSE, OPEN, PARITY, BETTER)
"""Of verdicts: what was lost stands first."""


def _names(tables: Sequence[AccuracyTable]) -> list[str]:
    """What tasks are called: data, length and workers; where several have one name also their batch, then the schedule."""
    by_slug = {table.slug: table for table in tables}
    names = {slug: table.name for slug, table in by_slug.items()}
    for more in (lambda s: s.workload, lambda s: f"batch {s.batch}", lambda s: s.schedule):
        same = {slug for slug in names if list(names.values()).count(names[slug]) > 1}
        names |= {slug: ", ".join(filter(None, (names[slug], more(by_slug[slug].setting)))) for slug in same}
    return [names[table.slug] for table in tables]


# ---- predicted --------------------------------------------------------------------------------------------------------


def predicted(records: Records, value: float, model: str, batch: int) -> Words:
    """The same from the predictor: full link rate, NCCL's all-reduce as baseline."""
    cluster = Cluster.of_gpus(8, 8, Link(10.0, claimed.LATENCY_US))
    forms = {"birder": "flat", "birder_hierarchical": "hierarchical"}
    found = []
    for rate in ("tf32", "amp"):
        p = predict(timelines.load(f"{model}_b{batch}_{rate}"), cluster, ["fp32", *forms])
        found += [(p.speedup(method)[0], f"{rate.upper()}, {form}") for method, form in forms.items()]
    return {"factors": found}


def onebit_run(records: Records, value: float) -> Words:
    """1-bit Adam's run of BERT-Large against Adam's."""
    run = _bert_large(16, 4, 4.1)
    about = {"adam": number(run.adam), "onebit": number(run.onebit), "steps": f"{STEPS:,}"}
    return {"factors": [(run.adam / run.onebit, "64 GPUs on 40 GbE")], **about}


def zero_one_run(records: Records, value: float) -> Words:
    """0/1 Adam's run of BERT-Large against 1-bit Adam's."""
    runs = {
        "40 GbE at 2.7 Gbit/s, 16 nodes of 4": _bert_large(16, 4, 2.7),
        "40 GbE at 2.7 Gbit/s, 32 nodes of 4": _bert_large(32, 4, 2.7),
        "100 Gbit/s InfiniBand, 8 nodes of 8": _bert_large(8, 8, 100.0),
    }
    found = [(r.onebit / r.zero_one, where) for where, r in runs.items()]
    shown = "; ".join(f"{where}: {times(ratio)}" for ratio, where in found)
    return {"factors": found, "shown": shown, "steps": f"{STEPS:,}"}


def _bert_large(nodes: int, gpus: int, gbps: float) -> claimed.Run:
    rounds = volume.VolumeSchedules().rounds(STEPS, False)
    cluster = Cluster(nodes, gpus, Link(gbps), inside=Link(1e6))
    return claimed.bert_large_run(cluster, STEPS, ONEBIT_WARMUP, (rounds.dense, rounds.onebit, rounds.skipped))


def cser(
    records: Records, value: float, data: str, half: bool, images: int, ratios: dict[int, tuple[int, int, int]]
) -> Words:
    """How fast a GPU must compute. half: values of 16 bits; ratios: R_C: (R_C2, R_C1, H)."""
    resnet = tuple((g.name, g.shape) for g in timelines.load("resnet50_b32_tf32").gradients)
    needs = claimed.cser_needs(resnet if half else claimed.wrn_40_8(), value, list(ratios.values()), half)
    shown = [
        f"R_C = {r}: {'never' if need is None else f'{number(need)} ms or less'}"
        for r, need in zip(ratios, needs, strict=True)
    ]
    most = max((need for need in needs if need is not None), default=None)
    peak, least = claimed.V100_TFLOPS[half], claimed.least_ms(data, images, claimed.V100_TFLOPS[half])
    limit = f"at its peak of {peak:g} TFLOP/s a V100 takes {number(least)} ms for {images} images, by their operations"
    if most is None or most < least:
        return {"shown": "; ".join(shown), "whether": f"not reached: {limit}"}
    reached = f"confirmed under a V100 that reaches {100 * least / most:.0f} % of its peak or more: {limit}"
    return {"shown": "; ".join(shown), "whether": reached}


def slamb_scaling(records: Records, value: float) -> Words:
    """90 % on 1,024 A100."""
    found = []
    for reached in (0.3, 0.4, 0.5):
        compute = claimed.xl_compute_ms(64, 128, reached)
        ours, dense = (claimed.efficiency(m, compute, latency_us=0.0) for m in ("slamb", "bf16"))
        found.append((f"{100 * reached:.0f} %", 100 * ours, 100 * dense))
    enough = [reached for reached, ours, _ in found if ours >= value]
    return {
        "shown": "; ".join(f"{ours:.0f} % at {r} of the peak (bf16 all-reduce {d:.0f} %)" for r, ours, d in found),
        "whether": "confirmed" if enough else "not reached",
        "where": f"GPUs that reach {joined(enough)} of their peak" if enough else "any of these",
        "latency": claimed.LATENCY_US,
        "ring": 100 * claimed.efficiency("slamb", claimed.xl_compute_ms(64, 128, 0.4)),
    }


# ---- computed ---------------------------------------------------------------------------------------------------------


def dense_steps(records: Records, value: float, dense: int, steps: int) -> Words:
    """What a whole run sends less than fp16, and the share of dense steps that the claim means."""
    share, needed = dense / steps, (1 / value - 1 / 16) / (15 / 16)
    shown = f"{100 * share:.1f} %"
    factors = [(1 / (share + (1 - share) / 16), f"the published warm-up of {shown}")]
    return {"factors": factors, "share": shown, "needed": f"{100 * needed:.1f} %"}


def schedule(records: Records, value: float, reading: str) -> Words:
    """What 0/1 Adam saves, a per cent, from its schedule alone."""
    setting, target = volume.VolumeSchedules(), value / 100
    found = volume.measured(setting, reading)
    if any(saved >= target for saved, _ in found):
        nearest = min(found, key=lambda f: abs(f[0] - target))
        least, close, most = (f"{100 * saved:.1f} %, {words}" for saved, words in (found[0], nearest, found[-1]))
        whether = f"confirmed by the nearest reading: {close}; exceeded by others, up to {most}; least is {least}"
    else:
        passed = volume.passed_at(setting, volume.readings(setting, reading)[0][1], target)
        whether = f"not reached because these runs are too short: {value:g} % is passed at {passed} steps"
    ends = {end: f"{100 * found[at][0]:.1f} %" for end, at in (("least", 0), ("most", -1))}
    return {**ends, "count": len(found), "whether": whether, "steps": f"{STEPS:,}"}


def slamb_bits(records: Records, value: float) -> Words:
    """Half of what 1-bit LAMB sends."""
    k, every, warmup = 0.1, 100, 0.15
    theirs = 16 * warmup + (1 - warmup)
    ours = {wire: wire * (k + 1 / every) for wire in (16, 32)}
    shown = ", ".join(f"{ours[w]:.2f} bits in fp{w}, {ours[w] / theirs:.2f} of it" for w in (16, 32))
    return {"theirs": theirs, "shown": shown, "needed": 100 * (ours[16] / value - 1) / 15}


def joined(names: Sequence[Any]) -> str:
    """a, b and c"""
    return " and ".join(map(str, names)) if len(names) < 3 else ", ".join(map(str, names[:-1])) + f" and {names[-1]}"


EVIDENCE: dict[str, Callable[..., Words | None]] = {
    f.__name__: f
    for f in (
        *(replayed, trained, payload, accuracy, endings, predicted, onebit_run, zero_one_run),
        *(cser, slamb_scaling, dense_steps, schedule, slamb_bits),
    )
}
