"""`predict`: every method's step on a cluster, as a table that ends with one plain sentence; `crossover`. Imports no torch.

The interval of a step time has four causes, all in the same direction at each end:

    the link        its rate times 1 + spread and 1 - spread (`Link.spread`, where it was measured)
    interference    encoding on a GPU either takes nothing from backward, or its full time (`Layout.gpu`)
    the model       +-`MODEL_ERROR`, the 95th percentile of its error against replayed steps (docs/predict.md)
    what is known   how far the prediction is from a step that was measured (`beyond_ms`)

A speedup's interval divides the far ends of the two rows by each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from birder.predict.cluster import Cluster, Link
from birder.predict.costs import Costs
from birder.predict.layouts import DDP, HALVES, WIDTHS, TrainingPlan
from birder.predict.methods import METHODS, WARM, MethodSpec, every
from birder.predict.simulation import Layout, Step, simulate
from birder.predict.timeline import Timeline

MODEL_ERROR = 0.10
"""Relative. The bound, which communication does not touch, is the timeline's and has none of it."""
NEAR = 0.05
"""Where bf16 is that near to the bound, and where a method gains less than that over bf16, nothing is worth a change."""
NOT_COMPARED = "none of the methods that are compared sends less, keeps one model on all ranks and fits"
TIE = 0.02
"""Steps that differ by less, relative, are as good as equal."""


@dataclass(frozen=True)
class PredictedRow:
    """One method. ms with its interval low..high; state_bytes: of optimizer and hook, on one rank.

    beyond: ms of it that were not simulated, but missing in the prediction of a step that was measured.
    """

    method: MethodSpec
    step: Step
    low: float
    high: float
    state_bytes: float
    beyond: float = 0.0

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def ms(self) -> float:
        return self.step.ms + self.beyond


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns; printed, a table with its sentence."""

    timeline: Timeline
    cluster: Cluster
    costs: Costs
    rows: tuple[PredictedRow, ...]

    def __getitem__(self, name: str) -> PredictedRow:
        """The row of a method. Raises KeyError for one that was not asked for."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name} was not predicted; there are: {', '.join(r.name for r in self.rows)}")

    def has(self, name: str) -> bool:
        return any(r.name == name for r in self.rows)

    def speedup(self, name: str, baseline: str = "fp32") -> tuple[float, float, float]:
        """(speedup, low, high) of a method over a baseline."""
        own, base = self[name], self[baseline]
        return base.ms / own.ms, base.low / own.high, base.high / own.low

    @property
    def winner(self) -> str | None:
        """The method to run: one that pays, or "bf16"; None where that is not decided. Wants rows of bf16 and of none."""
        return decide(self)[0]

    @property
    def sentence(self) -> str:
        """Which method, how much it wins; or that nothing should be changed."""
        return decide(self)[1]

    def __str__(self) -> str:
        return render(self)


def predict(
    timeline: Timeline,
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    costs: Costs | None = None,
    layout: Layout | None = None,
    beyond_ms: float = 0.0,
    *,
    local_steps: int | None = None,
    plan: TrainingPlan = DDP,
) -> Prediction:
    """Every method's step. methods: names in `METHODS`; None: `DEFAULT`. costs: of the timeline's GPU where it is known.

    beyond_ms: what a step that was measured took above its prediction. Where it took longer, the rest is added to every
    method that communicates, and their intervals begin where they would without it. Where it took less, intervals reach as
    much lower, to the bound at most.

    local_steps: between two means of local SGD and DiLoCo; None: their own. plan: how ranks share the model.

    Raises ValueError for an unknown method or one that the plan cannot run, and for a device whose costs are not known.
    """
    costs = costs or Costs.of_gpu(timeline.gpu)
    chosen, plan = plan.choose(methods, cluster), plan.on(cluster)
    alone = plan.timeline(timeline, cluster, 0)  # what it computes, without FSDP's collectives
    if plan.sharding == "fsdp":
        return Prediction(alone, cluster, costs, tuple(_sharded(timeline, cluster, m, costs, plan) for m in chosen))
    computed = {width: plan.timeline(timeline, cluster, width) for width in (2, 4)}
    whole, cluster = cluster, plan.between(cluster)
    layout = layout or Layout(gpu=timeline.gpu != "cpu")
    bound = simulate(computed[2], cluster, METHODS["none"], costs, layout).ms
    rows = []
    for method in chosen:
        method = method if local_steps is None else every(method, local_steps)
        timeline = computed[
            WIDTHS.get(method.name, 4) or 2
        ]  # nothing is bound by more than the least that is scattered
        step = simulate(timeline, cluster, method, costs, layout)
        low, high = _interval(timeline, cluster, method, costs, layout, step, bound)
        more = 0.0 if method.name == "none" else beyond_ms
        low, high = max(min(low, bound), low + min(more, 0.0)), high + max(more, 0.0)
        state = plan.state(method, whole) * timeline.elements
        rows.append(PredictedRow(method, step, low, high, state, max(more, 0.0)))
    return Prediction(alone, whole, costs, tuple(rows))


def _sharded(t: Timeline, cluster: Cluster, method: MethodSpec, costs: Costs, plan: TrainingPlan) -> PredictedRow:
    """A dense method where FSDP shards over all ranks: its collectives are in the timeline, and nothing else is sent."""
    width = WIDTHS[method.name]
    alone = Cluster(1, 1, cluster.between, cluster.inside, parts=plan.shards(cluster))
    (row,) = predict(plan.timeline(t, cluster, width), alone, [method.name], costs).rows
    (bound,) = predict(plan.timeline(t, cluster, 0), alone, ["none"], costs).rows
    unsure = min(MODEL_ERROR * row.ms, row.ms - bound.ms)
    wide = 2 if t.precision in HALVES else 4
    numbers = 2 * wide * t.whole + width * t.elements  # two gathers, one scatter
    sent = plan.accumulation * cluster.sharded(1.0).nbytes * numbers if width and cluster.nodes > 1 else 0.0
    step, state = replace(row.step, nic_bytes=sent), plan.state(method, cluster) * t.elements
    return replace(row, step=step, low=row.low - unsure, high=row.high + unsure, state_bytes=state)


def _interval(
    t: Timeline, cluster: Cluster, method: MethodSpec, costs: Costs, layout: Layout, step: Step, bound: float
) -> tuple[float, float]:
    spread = cluster.spread
    ends = [step.ms]
    if spread:
        ends += [simulate(t, cluster.faster(1 + s), method, costs, layout).ms for s in (spread, -spread)]
    low, high = min(ends), max(ends)
    if layout.gpu and method.name != "none":
        high += step.encode_ms
    # Near the bound the timeline decides: no more can be wrong than what communication adds.
    unsure = min(MODEL_ERROR * step.ms, abs(step.ms - bound))
    return low - unsure, high + unsure


def advised(
    found: Sequence[Prediction],
    lost: Mapping[str, float] | None = None,
    fits: Callable[[str], bool] = lambda name: True,
) -> tuple[PredictedRow | None, bool | None]:
    """(a method, whether it pays; None: not decided). The one rule for the command line, the page and its pictures.

    A method pays that gains `NEAR` over bf16 by the first prediction, and whose saving is above 0 in all of them. Of those
    within `NEAR` of the fastest that pays those with least of `lost` remain. The first in the table that is within `TIE` of
    the fastest of these is advised. These times are those of a `whole_run`. Where nothing pays the method is the fastest.
    Methods whose models differ between ranks are not advised, nor what does not fit.
    """
    p = found[0]
    rows = _candidates(p, fits)
    fastest = min(rows, key=lambda r: r.ms, default=None)
    if no_gain(p, fastest) or (fastest and not any(_gains(p, r) for r in rows)):
        return fastest, False
    if not (those := paying(found, fits)):
        return fastest, None
    ms = {r.name: whole_run(p, r) for r in those}
    near = [r for r in those if ms[r.name] <= (1 + NEAR) * min(ms.values())]
    price = {r.name: (lost or {}).get(r.name, 1.0) for r in near}
    kept = [r for r in near if price[r.name] == min(price.values())]
    return next(r for r in kept if ms[r.name] <= (1 + TIE) * min(ms[k.name] for k in kept)), True


def whole_run(p: Prediction, row: PredictedRow, warm: float | None = None) -> float:
    """ms of a step, the mean over a run. warm: its share of dense steps; None: the usual one of the method."""
    if warm is None:
        warm = WARM if row.method.warm and p.has("fp32") else 0.0
    return warm * p["fp32"].ms + (1 - warm) * row.ms if warm else row.ms


def paying(found: Sequence[Prediction], fits: Callable[[str], bool] = lambda name: True) -> list[PredictedRow]:
    """The methods of which one is `advised`."""
    return [r for r in _candidates(found[0], fits) if worth(found, r.name)]


def worth(found: Sequence[Prediction], name: str, baseline: str = "bf16") -> bool:
    """Whether a method pays against a baseline, by the rule of `advised`. Wants rows of both and of none."""
    p = found[0]
    gains = _gains(p, p[name], baseline) and min(end.speedup(name, baseline)[1] for end in found) > 1
    return gains and not _bounded(p, baseline)


def _candidates(p: Prediction, fits: Callable[[str], bool]) -> list[PredictedRow]:
    return [r for r in p.rows if not (r.method.dense or r.method.local) and fits(r.name)]


def _gains(p: Prediction, row: PredictedRow, baseline: str = "bf16") -> bool:
    return p.speedup(row.name, baseline)[0] >= 1 + NEAR


def _bounded(p: Prediction, name: str) -> bool:
    """Whether a method is near the bound. Costs that were not simulated do not justify compressing."""
    return p[name].step.ms <= (1 + NEAR) * p["none"].ms


def decide(p: Prediction, fits: Callable[[str], bool] = lambda name: True) -> tuple[str | None, str]:
    """(`Prediction.winner` of the methods that fit, one sentence), by `advised`."""
    if not (p.has("bf16") and p.has("none")):
        best = min((r for r in p.rows if r.name != "none"), key=lambda r: r.ms, default=None)
        if best is None:
            return None, "nothing was predicted."
        return best.name, f"{best.method.label} is the fastest: {digits(best.ms)} ms a step."
    best, pays = advised((p,), fits=fits)
    why = no_gain(p, best)
    if why:
        return "bf16", f"do not compress: {why}."
    if best is None:
        return None, f"not decided: {NOT_COMPARED}."
    ratio, low, high = p.speedup(best.name, "bf16")
    wins = f"{best.method.label} is {ratio:.2f}x as fast as bf16 ({low:.2f} to {high:.2f})"
    if p.has("fp32"):
        wins += f" and {p.speedup(best.name)[0]:.2f}x as fast as fp32"
    if pays is False:
        return "bf16", f"do not compress: {wins}, less than {100 * NEAR:g} % more."
    if pays is None:
        return None, f"not decided: {wins}, which is within what the prediction can tell."
    return best.name, f"{wins}: {digits(best.ms)} ms a step, the bound is {digits(p['none'].ms)}."


def no_gain(p: Prediction, best: PredictedRow | None) -> str | None:
    """Why the best of the compressed methods can gain nothing over bf16; None: it may."""
    bf16, bound = p["bf16"], p["none"]
    if _bounded(p, "bf16"):
        return f"bf16 is within {100 * NEAR:g} % of the bound ({digits(bf16.step.ms)} against {digits(bound.ms)} ms)"
    if best is not None and best.ms > bf16.ms:
        return f"bf16 takes {digits(bf16.ms)} ms, and no compressed method is faster"
    return None


HEAD = (
    "method",
    "ms/step",
    "interval",
    "x fp32",
    "x bf16",
    "NIC/step",
    "exposed ms",
    "update ms",
    "state/rank",
    "waits for",
)


def cells(p: Prediction) -> list[list[str]]:
    """The table's rows; columns: HEAD."""
    return [
        [
            r.method.label,
            digits(r.ms),
            f"{digits(r.low)} to {digits(r.high)}",
            *(f"{p.speedup(r.name, base)[0]:.2f}" if p.has(base) else "—" for base in ("fp32", "bf16")),
            size(r.step.nic_bytes),
            digits(r.step.exposed_ms, 3),
            digits(r.step.update_ms, 3),
            size(r.state_bytes),
            r.step.waits_for or "—",
        ]
        for r in p.rows
    ]


def render(p: Prediction) -> str:
    """The table as text, its assumptions, its sentence."""
    lines = aligned([HEAD, *cells(p)], left=(0, 9), rule=True)
    c, t = p.cluster, p.timeline
    link = (
        f"{digits(c.between.gbps, 3)} Gbit/s between nodes"
        if c.nodes > 1
        else f"{digits(c.inside.gbps)} Gbit/s inside the node"
    )
    source = (c.between if c.nodes > 1 else c.inside).source
    link += f" ({source})" if source != Link.source else ""
    about = [
        f"{t.name}: {digits(t.elements / 1e6)} M parameters, {digits(t.step_ms)} ms of forward and backward on {t.gpu}",
        f"{c.nodes} x {c.ranks_per_node} ranks, {link}; kernels: {p.costs.source}",
    ]
    notes = [f"{r.method.label}: {r.method.about}" for r in p.rows if r.method.about]
    return "\n".join([*about, "", *lines, "", *notes, *([""] if notes else []), p.sentence])


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int], rule: bool = False) -> list[str]:
    """Lines of a table; columns number `left` begin at the left. rule: a line of dashes behind the first row."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [[t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in enumerate(zip(row, widths))] for row in rows]
    dashes = [["-" * w for w in widths]] if rule else []
    return ["  ".join(line).rstrip() for line in [lines[0], *dashes, *lines[1:]]]


def size(nbytes: float) -> str:
    """1.5 MB, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5 or unit == "GB":
            break
        nbytes /= 1000
    return f"{digits(nbytes, 3)} {unit}"


def digits(value: float, count: int = 4) -> str:
    """A number of so many digits, or whole where it has more before the point or is next to 0: never with an exponent."""
    return f"{value:.0f}" if value >= 10**count - 0.5 or abs(value) < 1e-4 else f"{value:.{count}g}"


def crossover(
    timeline: Timeline,
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    costs: Costs | None = None,
    layout: Layout | None = None,
    *,
    baseline: str = "bf16",
    gain: float | None = None,
    lowest: float = 0.1,
    highest: float = 1000.0,
    beyond_ms: float = 0.0,
    local_steps: int | None = None,
    plan: TrainingPlan = DDP,
    unsure: float = 0.0,
) -> dict[str, float | None]:
    """Gbit/s of a NIC below which each method pays against `baseline`, as `worth` says of it alone.

    gain: instead, below which it is faster by more than that, intervals aside. None: it does not, at any rate from `lowest`
    to `highest`; `highest`: it does, at all of them. beyond_ms, local_steps, plan: as in `predict`. unsure: of computing,
    relative. Raises ValueError as `predict`, for one node, which has no link to others, and for sharding=fsdp.
    """
    _require_nodes(cluster)
    if not 0 < lowest < highest:
        raise ValueError(f"lowest must be positive and below highest, got {lowest:g} and {highest:g}")
    if plan.sharding == "fsdp":
        raise ValueError("with sharding=fsdp there are no replicas to compress between: try sharding=hsdp")
    costs, plan = costs or Costs.of_gpu(timeline.gpu), plan.on(cluster)
    chosen = [m for m in plan.choose(methods, cluster) if m.name not in ("none", baseline)]
    factors = (1.0, 1 - unsure, 1 + unsure) if unsure and gain is None else (1.0,)
    timelines = [timeline.scaled(f) for f in factors]

    def pays(name: str) -> Callable[[float], bool]:
        def at(gbps: float) -> bool:
            there, names = cluster.at(gbps), (baseline, name, "none")
            found = [
                predict(t, there, names, costs, layout, beyond_ms, local_steps=local_steps, plan=plan)
                for t in timelines
            ]
            if gain is None:
                return worth(found, name, baseline)
            return found[0].speedup(name, baseline)[0] > 1 + gain

        return at

    return {m.name: _below(pays(m.name), lowest, highest) for m in chosen}


def _require_nodes(cluster: Cluster) -> None:
    if cluster.nodes == 1:
        raise ValueError("with one node there is no link between nodes whose rate could matter")


def _below(pays: Callable[[float], bool], lowest: float, highest: float) -> float | None:
    if not pays(lowest):
        return None
    if pays(highest):
        return highest
    low, high = lowest, highest
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def sweep(
    timeline: Timeline,
    cluster: Cluster,
    over: str,
    values: Sequence[float],
    methods: Sequence[str] | None = None,
    costs: Costs | None = None,
    layout: Layout | None = None,
    *,
    local_steps: int | None = None,
    plan: TrainingPlan = DDP,
) -> list[Prediction]:
    """A prediction for each value of `gbps` or `nodes`, as `predict` makes it.

    Raises ValueError for another name, and for rates where one node has no link to others.
    """
    if over not in ("gbps", "nodes"):
        raise ValueError(f"a sweep goes over gbps or nodes, not {over!r}")
    if over == "gbps":
        _require_nodes(cluster)

    def there(value: float) -> Cluster:
        return cluster.at(value) if over == "gbps" else replace(cluster, nodes=value if value % 1 else int(value))  # type: ignore[arg-type]

    return [predict(timeline, there(v), methods, costs, layout, local_steps=local_steps, plan=plan) for v in values]
