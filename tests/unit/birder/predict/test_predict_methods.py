"""The table of methods.py against the methods: four ranks in this process take steps, and say what they send, keep and call.

Predicting loads no torch, so the table is data. Here each method is asked for the same numbers, on flat ranks and by nodes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import birder
from birder import kernels
from birder.comm import Topology
from birder.comm.runtime import OwnTurn, lockstep
from birder.comm.virtual import communicators
from birder.kernels import reference
from birder.predict import METHODS, Cluster, Costs, Gradient, IntraNode, Layout, Link, Timeline, simulate
from birder.predict.costs import BYTES
from birder.predict.methods import MethodSpec, every, over

SIDE = 256
WARM = {"warmup_steps": 2}
CYCLES: dict[str, tuple[str, dict[str, Any], int]] = {
    # the class, options as the table assumes them, and after how many steps what is sent repeats
    "birder": ("Birder", {}, 1),
    "birder_one_phase": ("Birder", {"reduce": "one_phase"}, 1),
    "sigma_delta_local": ("SigmaDeltaAdam", {"variance": "local"}, 1),
    "sigma_delta": ("SigmaDeltaAdam", {"share_growth": 1.0}, 1),  # as in the first steps of a run
    "sigma_delta_one_phase": ("SigmaDeltaAdam", {"share_growth": 1.0, "reduce": "one_phase"}, 1),
    "lion": ("Lion", {}, 1),
    "efficient_adam": ("EfficientAdam", {}, 1),
    "onebit_adam": ("OneBitAdam", WARM, 1),
    "onebit_lamb": ("OneBitLAMB", WARM, 1),
    "cser": ("CSER", {}, 16),
    "csea": ("CSER", {"gradient_ratio": None, "model_ratio": 32, "reset_every": 1, "implementation": "II"}, 1),
    "cser_pl": ("CSER", {"gradient_ratio": None, "model_ratio": 8, "reset_every": 4, "implementation": "II"}, 4),
    "ef21_sgdm": ("EF21SGDM", {}, 1),
    "ef_sgd": ("EFSGD", {}, 1),
    "qsparse": ("QSparseLocalSGD", {}, 8),
    "local_sgd": ("QSparseLocalSGD", {"ratio": 1, "sync_every": 8}, 8),
    "diloco": ("SparseLoCo", {"sync_every": 4, "message": "dense", "outer_momentum": 0.9}, 4),
    "diloco_int4": (
        "SparseLoCo",
        {"sync_every": 4, "message": "int4", "chunk": 256, "outer_momentum": 0.9, "top_k": 1},
        4,
    ),
    "slamb": ("SLAMB", {}, 100),
}
BY_NODES = (
    "birder",
    "birder_one_phase",
    "sigma_delta",
    "sigma_delta_local",
    "sigma_delta_one_phase",
    "lion",
    "efficient_adam",
    "onebit_adam",
    "onebit_lamb",
)
STATE_APART = {"local_sgd"}
"""Run here as a case of another method, which keeps more."""
KERNELS_APART = {"lion"}
"""Of which `BYTES` has stand-ins that move as many bytes."""


def asked(name: str, topology: Topology, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """nic: bytes that a node sends to others in a step, the mean over a cycle; state: bytes of a rank; calls: kernels."""
    kind, options, cycle = CYCLES[name]
    comms = communicators(topology, topology.ranks_per_node > 1)
    made = []
    for comm in comms:
        p = nn.Parameter(torch.linspace(-1, 1, SIDE * SIDE).view(SIDE, SIDE).clone())
        made.append(getattr(birder, kind)([p], lr=1e-3, **options))
        made[-1].bind(comm, OwnTurn())
    calls: set[str] = set()

    class Recording:
        def __getattr__(self, kernel: str) -> Any:
            calls.add(kernel)
            return getattr(reference, kernel)

    monkeypatch.setattr(kernels, "backend", lambda device: Recording())
    sent = []
    before = -(-3 // cycle) * cycle  # the warm-up is over, and every coordinate has been seen
    for step in range(1, before + cycle + 1):
        calls.clear()
        for rank, optimizer in enumerate(made):
            optimizer.comm.counter.reset()
            for p in optimizer.param_groups[0]["params"]:
                p.grad = (p.detach() * step + rank).sin()
        with torch.no_grad():
            lockstep(comms, [o.stepping() for o in made], lambda rank: None)
        sent.append(sum(c.counter.inter for c in comms[: topology.ranks_per_node]))
    return SimpleNamespace(nic=sum(sent[-cycle:]) / cycle, state=made[0].state_bytes(), calls=calls, first=made[0])


def tabled(name: str, topology: Topology) -> tuple[MethodSpec, float]:
    """The table's row, and the bytes that a node sends by it."""
    method = METHODS[name if topology.ranks_per_node == 1 else f"{name}_hierarchical"]
    method = over(every(method, 4) if name.startswith("diloco") else method, steps=10)
    gradient, about = Gradient("p", (SIDE, SIDE), 1.0), IntraNode(0.0, 0.0, 0.0, "none")
    timeline = Timeline("made", "made", "cpu", "fp32", 1, 1, 1.0, 1.0, (gradient,), about, source="a test")
    cluster = Cluster(topology.nodes, topology.ranks_per_node, Link(10.0), ring=False)
    return method, simulate(timeline, cluster, method, Costs(), Layout()).nic_bytes


CASES = [(name, Topology(4, 1)) for name in CYCLES] + [(name, Topology(2, 2)) for name in BY_NODES]


@pytest.mark.parametrize(("name", "topology"), CASES)
def test_a_method_sends_keeps_and_calls_what_the_table_says(
    name: str, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, (method, nic) = asked(name, topology, monkeypatch), tabled(name, topology)
    # Scales, 4 bytes for a chunk; SLAMB draws each element.
    assert found.nic == pytest.approx(nic, rel=0.02 if name == "slamb" else 0.002)
    assert method.local is found.first.local_models
    if name not in STATE_APART:
        workers, shards = (4, 1) if topology.ranks_per_node == 1 else (2, 2)
        assert found.state == pytest.approx(method.state(workers, shards) * SIDE * SIDE, rel=0.001)
    if name not in KERNELS_APART:
        named = {*method.update, *(k for r in method.rounds for k in (*r.encode, *r.serve, *r.decode))}
        fused = {k for k in BYTES if hasattr(reference, k) and getattr(kernels, k) is not getattr(reference, k)}
        assert named & fused == found.calls & fused
