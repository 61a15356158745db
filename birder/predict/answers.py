"""The answer first: one or two plain sentences and six rows, from a model's timeline, a cluster and a plan. Imports no torch.

A method's saving against bf16 is 1 - t_method / t_bf16 of the same step. Its interval holds that of computing `UNSURE` faster
and slower, of encoding that delays backward, and of the model of communication, for both of them (table.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from birder.predict.cluster import Cluster
from birder.predict.costs import Costs
from birder.predict.gpus import GPU
from birder.predict.layouts import DDP, TrainingPlan
from birder.predict.methods import METHODS, MethodSpec
from birder.predict.table import (
    NEAR,
    NOT_COMPARED,
    PredictedRow,
    Prediction,
    advised,
    aligned,
    digits,
    no_gain,
    paying,
    predict,
    size,
)
from birder.predict.timeline import Timeline

NEEDS = {
    "birder": "birder.Birder",
    "birder_one_phase": "birder.Birder(..., reduce='one_phase')",
    "sigma_delta": "birder.SigmaDeltaAdam",
    "sigma_delta_local": "birder.SigmaDeltaAdam(..., variance='local')",
    "sigma_delta_one_phase": "birder.SigmaDeltaAdam(..., reduce='one_phase')",
    "lion": "birder.Lion",
    "efficient_adam": "birder.EfficientAdam",
    "onebit_adam": "birder.OneBitAdam",
    "onebit_adam_fused": "birder.OneBitAdam",
    "deepspeed": "birder.OneBitAdam",
    "onebit_lamb": "birder.OneBitLAMB",
    "ef21_sgdm": "birder.EF21SGDM",
    "ef_sgd": "birder.EFSGD",
}
"""What a method's name is in a script."""
FAR = 1.5
"""A method whose ranks' models differ is mentioned where it is so many times as fast as what is advised."""
LIKE_DILOCO = 1.1
"""DiLoCo is the one that is mentioned where it takes at most so many times the fastest one's step."""


@dataclass(frozen=True)
class Answer:
    """Predictions as assumed, and with computing so much faster and slower. memory: method -> GB of a rank.

    lost: method -> share of the studies of its accuracy in which it was worse than its baseline, less that of those in which
    it was not; none: not studied. saved_gb: of `memory`, activations. recompute: checkpointing can still be switched on.
    """

    prediction: Prediction
    ends: tuple[Prediction, ...]
    plan: TrainingPlan
    gpu: GPU | None
    memory: dict[str, float]
    lost: Mapping[str, float] = field(default_factory=dict)
    saved_gb: float = 0.0
    recompute: bool = True

    def saving(self, name: str) -> tuple[float, float, float]:
        """(share of the step that a method saves against bf16, low, high)."""
        each = [p.speedup(name, "bf16") for p in (self.prediction, *self.ends)]
        return 1 - 1 / each[0][0], 1 - 1 / min(low for _, low, _ in each), 1 - 1 / max(high for *_, high in each)

    @property
    def best(self) -> PredictedRow | None:
        """The method that is advised; where none pays the fastest that could be; None: there is none."""
        return self._advised[0]

    @property
    def pays(self) -> bool:
        """Whether it is advised to compress."""
        return self._advised[1] is True

    @property
    def winner(self) -> str | None:
        """`best` where it pays, "bf16" where nothing does; None: not decided. As `Prediction.winner`, of what fits."""
        best, pays = self._advised
        if pays is False or self.plan.sharding == "fsdp":
            return "bf16"
        return best.name if best and pays else None

    @cached_property
    def _advised(self) -> tuple[PredictedRow | None, bool | None]:
        return advised((self.prediction, *self.ends), self.lost, self.fits)

    @property
    def paying(self) -> list[PredictedRow]:
        """The methods of which `best` is one, where it pays."""
        return paying((self.prediction, *self.ends), self.fits)

    @property
    def far(self) -> PredictedRow | None:
        """The fastest method whose models differ, where it is `FAR` times as fast as all others that send."""
        rows = self.prediction.rows
        found = sorted((r for r in rows if r.method.local and self.fits(r.name)), key=lambda r: r.ms)
        near = [r for r in found if r.ms <= LIKE_DILOCO * found[0].ms and r.name == "diloco"]
        local = next(iter([*near, *found]), None)
        others = [r.ms for r in rows if not r.method.local and r.name != "none"]
        return local if local and others and local.ms * FAR < min(others) else None

    def fits(self, name: str) -> bool:
        return self.gpu is None or self.memory.get(name, 0.0) <= self.gpu.gb

    def sentences(self, accuracy: str = "") -> list[str]:
        """The answer. accuracy: what the best method costs there, in words, without a full stop."""
        p, best, far = self.prediction, self.best, self.far
        bf16, said = p["bf16"].ms, []
        if self.gpu and not any(self.fits(r.name) for r in p.rows):
            there = f"{digits(min(self.memory.values()), 3)} GB of {self.gpu.gb:g} GB on one {self.gpu.label}"
            said.append(f"It does not fit: {there}. {self.smaller()}")
        if self.plan.sharding == "fsdp":
            share = 1 - p["none"].ms / bf16
            why = "FSDP over all ranks has no replicas to compress between"
            other = min(p.cluster.nodes, p.cluster.ranks_per_node) > 1 and self._has_room("hsdp")
            more = " sharding=hsdp keeps its collectives inside the nodes." if share > NEAR and other else ""
            return [*said, f"Do not compress: {why}; {100 * share:.0f} % of its step is waiting.{more}"]
        if best is None or not self.pays:
            said.append(self._not())
        else:
            speed = f"{p.speedup(best.name, 'bf16')[0]:.2f}x as fast as bf16"
            saves = "saves {} % of the step [{}, {}] against bf16".format(*self._percent(best.name))
            said.append(f"Compress: {best.method.label} {saves}, {speed}{f'; {accuracy}' if accuracy else ''}.")
            said.append(self.needs(best.method))
        if far:
            gain = f"{far.method.label} ({far.method.about}) would be {digits(bf16 / far.ms, 3)}x as fast as bf16"
            said.append(f"{gain}, with a model of its own on every rank.")
        return said

    def smaller(self) -> str:
        """What needs less memory: shards of which a GPU has the room for one, where there can be more of them; fewer
        activations, where there is room for any."""
        c, own = self.prediction.cluster, self.plan.sharding
        inside = ["hsdp"] if min(c.nodes, c.ranks_per_node) > 1 else []
        wider = {"ddp": [*inside, "fsdp"], "hsdp": ["fsdp"], "fsdp": []}[own] if c.ranks > 1 else []
        fitting = next((s for s in wider if self._has_room(s)), None)
        chosen = next((s for s in (own, *wider) if self._enough(s)), (own, *wider)[-1])
        fewer = self._fewer(chosen)
        if fitting:
            return f"Shard it (sharding={fitting}){f', or {fewer}' if fewer and chosen == own else ''}."
        if fewer:
            return f"{fewer.capitalize()}." if chosen == own else f"Shard it (sharding={chosen}) and {fewer}."
        more = "more GPUs to shard it over (sharding=fsdp), or " if self._left("fsdp") <= 0 else ""
        return f"It needs {more}GPUs with more memory."

    def _enough(self, sharding: Any) -> bool:
        """Whether it has room for one sample's activations; of one sample for half of them: checkpointing keeps less."""
        return self.saved_gb / max(self.prediction.timeline.batch_per_gpu, 2) <= self._left(sharding)

    def _fewer(self, sharding: Any) -> str:
        """How it needs fewer activations, where that can make it fit; empty: in no way."""
        enough, batch = self._enough(sharding), self.prediction.timeline.batch_per_gpu
        again = ["checkpointing=true"] * self.recompute
        ways = ["a smaller batch"] * (batch > 1 and (enough or self.recompute)) + again
        return f"take {(' or ' if enough else ' and ').join(ways)}" if ways and self._left(sharding) > 0 else ""

    def _has_room(self, sharding: Any) -> bool:
        """Whether a GPU has it for bf16 with another sharding, as far as that is known."""
        return self.saved_gb <= self._left(sharding)

    def _left(self, sharding: Any) -> float:
        """GB that a GPU has left for activations of bf16 with another sharding; not known: any."""
        if self.gpu is None or not self.memory:
            return math.inf
        p, own = self.prediction, replace(self.plan, sharding=sharding)
        return self.gpu.gb - own.memory_gb(p.timeline, p.cluster, METHODS["bf16"], 0.0)

    def _percent(self, name: str) -> list[str]:
        """`saving` in per cent."""
        return [str(round(100 * share)) for share in self.saving(name)]

    def _not(self) -> str:
        best, pays = self._advised
        why = no_gain(self.prediction, best)
        if why:
            return f"Do not compress: {why}."
        if best is None:
            return f"Not decided: {NOT_COMPARED}."
        saves = "saves {} % of bf16's step [{}, {}]".format(*self._percent(best.name))
        said = f"{best.method.label}, the fastest whose ranks share one model, {saves}"
        if pays is None:
            return f"Not decided: {said}, which is within what this prediction can tell."
        return f"Do not compress: {said}, less than is worth a change."

    def needs(self, method: MethodSpec) -> str:
        """What a script needs for a method that is not dense and of which ranks share one model."""
        if method.name.startswith("powersgd"):
            return "It needs PyTorch's PowerSGD hook."
        optimizer = NEEDS[method.name.removesuffix("_hierarchical")]
        if self.plan.sharding == "hsdp":
            return f"It needs `{optimizer}` and `birder.attach(model, optimizer, mesh=mesh)`."
        more = ", hierarchical=True" if method.hierarchical else ""
        return f"It needs `{optimizer}` and `birder.attach(ddp, optimizer{more})`."

    def rows(self, count: int = 6) -> list[PredictedRow]:
        """The rows that are shown first: fp32, bf16, the fastest compressed ones, the bound, by time."""
        p = self.prediction
        fixed = [p[n] for n in ("fp32", "bf16", "none") if p.has(n)]
        others = sorted((r for r in p.rows if r not in fixed and not r.method.local), key=lambda r: r.ms)
        first = [r for r in (self.best, self.far) if r is not None]
        others = first + [r for r in others if r not in first]
        return sorted([*fixed, *others[: count - len(fixed)]], key=lambda r: -r.ms)

    def table(self) -> list[str]:
        """Lines of at most 80 columns."""

        def line(r: PredictedRow) -> tuple[str, ...]:
            value, low, high = self._percent(r.name)
            saves = ("", "") if r.name == "bf16" else (f"{value} %", f"[{low}, {high}]")
            gb = f"{self.memory[r.name]:.1f}{'' if self.fits(r.name) else ' !'}" if r.name in self.memory else ""
            sent = size(r.step.nic_bytes) if r.step.nic_bytes else "0"
            return (r.method.label, digits(r.ms), *saves, sent, gb)

        head = ("method", "ms/step", "saves", "interval", "NIC/step", "GB/rank")
        return aligned([head, *map(line, self.rows())], left=(0,))

    def plain(self) -> dict[str, Any]:
        """For --json. Times in ms, memory in GB, shares from 0 to 1. winner: None where nothing is decided."""
        p = self.prediction
        return {
            "pays": self.pays,
            "best": self.best.name if self.best else None,
            "winner": self.winner,
            "sentences": self.sentences(),
            "model": {"name": p.timeline.name, "parameters": p.timeline.elements, "compute_ms": p.timeline.step_ms},
            "gpu": p.timeline.gpu,
            "nodes": p.cluster.nodes,
            "ranks_per_node": p.cluster.ranks_per_node,
            "gbps": p.cluster.nic_gbps,
            "nics": p.cluster.nics,
            "rows": [
                {
                    "method": r.name,
                    "ms": r.ms,
                    "low_ms": r.low,
                    "high_ms": r.high,
                    "saves": dict(zip(("value", "low", "high"), self.saving(r.name))),
                    "nic_bytes": r.step.nic_bytes,
                    "exposed_ms": r.step.exposed_ms,
                    "memory_gb": self.memory.get(r.name),
                    "fits": self.fits(r.name) if r.name in self.memory else None,
                }
                for r in p.rows
            ],
        }


def answer(
    timeline: Timeline,
    cluster: Cluster,
    plan: TrainingPlan = DDP,
    methods: Sequence[str] | None = None,
    costs: Costs | None = None,
    *,
    gpu: GPU | None = None,
    saved_bytes: float | None = None,
    unsure: float = 0.0,
    local_steps: int | None = None,
    lost: Mapping[str, float] | None = None,
    recompute: bool = True,
) -> Answer:
    """Whether it pays. unsure: of computing, relative. saved_bytes: activations of a micro-batch; None: no answer on memory.

    methods: fp32, bf16 and the bound come in addition. lost, recompute: as of an Answer. Raises ValueError as `predict`.
    """
    names = _names(methods, cluster, plan, local_steps)
    costs, plan = costs or Costs.of_gpu(timeline.gpu), plan.on(cluster)
    made = [
        predict(timeline.scaled(f), cluster, names, costs, local_steps=local_steps, plan=plan)
        for f in (1, 1 - unsure, 1 + unsure)
    ]
    memory = memory_of(timeline, cluster, [r.method for r in made[0].rows], plan, gpu, saved_bytes)
    ends, saved_gb = tuple(made[1:]) if unsure else (), (saved_bytes or 0.0) / 1e9
    return Answer(made[0], ends, plan, gpu, memory, lost or {}, saved_gb, recompute)


def memory_of(
    timeline: Timeline,
    cluster: Cluster,
    methods: Sequence[MethodSpec],
    plan: TrainingPlan,
    gpu: GPU | None,
    saved_bytes: float | None,
) -> dict[str, float]:
    """`memory` of an Answer: none without a GPU's data sheet, or where `saved_bytes` is not known."""
    if gpu is None or saved_bytes is None:
        return {}
    return {m.name: plan.on(cluster).memory_gb(timeline, cluster, m, saved_bytes) for m in methods}


def _names(methods: Sequence[str] | None, cluster: Cluster, plan: TrainingPlan, local_steps: int | None) -> list[str]:
    kept = [m.name for m in plan.choose(methods, cluster)]
    if methods is None and local_steps and plan.on(cluster).takes(METHODS["diloco"]):
        kept.append("diloco")
    return [n for n in ("fp32", "bf16") if n not in kept] + [n for n in kept if n != "none"] + ["none"]
