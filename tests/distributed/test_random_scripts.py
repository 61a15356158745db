"""Training scripts put together at random: layers, memory formats, groups, frozen and unused parts, accumulation, a resume.

Dense methods are held to torch's own under the same DDP. Methods of one bit are held to themselves without overlap and with
other buckets, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

STEPS = 7
RESUMED = 3
"""The step before which a script that resumes does so."""
TORCH: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "SGDM": (torch.optim.SGD, birder.SGDM, {"momentum": 0.9}),
    "AdamW": (torch.optim.AdamW, birder.AdamW, {"eps": 1e-3}),  # a small eps would show how DDP rounds means
}
COMPRESSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Birder": (birder.Birder, {}),
    "SigmaDeltaAdam": (birder.SigmaDeltaAdam, {}),
    "Lion": (birder.Lion, {}),
    "OneBitAdam": (birder.OneBitAdam, {"warmup_steps": 2}),
    "CSER": (birder.CSER, {"block": 8, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 2}),
}
SCALED = ("OneBitAdam", "CSER")
"""Methods whose scales or blocks are of a unit: other units are other numbers."""


class Net(nn.Module):
    """Images, words or vectors. `aside` takes part in all steps, in every second one, on rank 0 alone, or never."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([3, 4, 5, 8])
        self.kind = draw.choice(["images", "words", "vectors"])
        if self.kind == "images":
            norm: nn.Module = nn.BatchNorm2d(width) if draw.random() < 0.5 else nn.GroupNorm(1, width)
            conv = nn.Conv2d(3, width, 3, padding=1, bias=draw.random() < 0.5)
            self.body = nn.Sequential(conv, norm, nn.ReLU(), nn.ConvTranspose2d(width, 4, 2), nn.AdaptiveAvgPool2d(1))
            self.out = nn.Linear(4, 3)
        elif self.kind == "words":
            self.embed = nn.Embedding(17, 8, padding_idx=draw.choice([None, 0]))
            self.recurrent = nn.GRU(8, 8, batch_first=True)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.out = nn.Linear(8, 17, bias=False)
            if draw.random() < 0.5:
                self.out.weight = self.embed.weight
        else:
            layers = [nn.Linear(6, 6) for _ in range(draw.randint(1, 4))]
            if draw.random() < 0.4:
                layers[0] = nn.utils.parametrizations.weight_norm(layers[0])
            self.body = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
            self.out = nn.Linear(6, 3)
            if draw.random() < 0.4:
                self.out.weight = nn.Parameter(torch.randn(6, 3).t())
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.aside = nn.Linear(6, 6)
        self.when = draw.choice(["always", "sometimes", "on rank 0", "never"])

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        if self.kind == "words":
            h = self.recurrent(self.embed(x))[0]
            h = h + self.attend(h, h, h)[0]
        else:
            h = self.body(x).flatten(1)
        y = self.out(h) * self.scale
        there = {"always": True, "sometimes": step % 2, "on rank 0": rank == 0, "never": False}[self.when]
        return y + self.aside(torch.ones(6)).mean() if there else y

    def batch(self, step: int, rank: int, part: int) -> Tensor:
        g = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        if self.kind == "words":
            return torch.randint(17, (3, 4), generator=g)
        return torch.randn(*((4, 3, 5, 5) if self.kind == "images" else (5, 6)), generator=g)


@dataclass(frozen=True)
class Script:
    """What is drawn besides the model."""

    format: torch.memory_format
    frozen: float
    parts: int
    groups: int
    bucket_mb: float
    unit_mb: float
    views: bool
    to_none: bool
    autocast: bool
    resumes: bool
    decay: float
    clip: float | None
    falls: bool

    @classmethod
    def drawn(cls, draw: random.Random) -> Script:
        return cls(
            format=draw.choice([torch.contiguous_format, torch.channels_last]),
            frozen=draw.choice([0.0, 0.2]),
            parts=draw.choice([1, 1, 2, 3]),
            groups=draw.randint(1, 3),
            bucket_mb=draw.choice([25, 0.0005, 0.002]),
            unit_mb=draw.choice([25, 0.0005, 0.002]),
            views=draw.random() < 0.5,
            to_none=draw.random() < 0.7,
            autocast=draw.random() < 0.25,
            resumes=draw.random() < 0.5,
            decay=draw.choice([0.0, 0.1]),
            clip=draw.choice([None, None, 0.5]),
            falls=draw.random() < 0.6,
        )


def trained(rank: int, seed: int, make: Any, options: dict[str, Any], how: str) -> np.ndarray:
    """The model's parameters. how: "torch", "plain" or "ours"; all but "ours" have DDP's default buckets and no views."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net, script = Net(draw), Script.drawn(draw)
    if net.kind == "images":
        net = net.to(memory_format=script.format)
    for p in net.parameters():
        p.requires_grad_(draw.random() >= script.frozen)
    net.scale.requires_grad_(True)
    limit = {} if how == "torch" else {"max_grad_norm": script.clip}
    unit_mb = script.unit_mb if how == "ours" or make.__name__ in SCALED else 25

    def begun(net: Net) -> tuple[DistributedDataParallel, Any]:
        params = [p for p in net.parameters() if p.requires_grad]
        size = -(-len(params) // script.groups)
        groups = [{"params": params[i : i + size], "lr": 0.01 + i / 1000} for i in range(0, len(params), size)]
        optimizer = make(groups, weight_decay=script.decay, **options, **limit)
        shape = {"bucket_cap_mb": script.bucket_mb, "gradient_as_bucket_view": script.views} if how == "ours" else {}
        ddp = DistributedDataParallel(net, find_unused_parameters=True, **shape)
        if how != "torch":
            birder.attach(ddp, optimizer, overlap=how == "ours", unit_mb=unit_mb)
        return ddp, optimizer

    ddp, optimizer = begun(net)
    for step in range(STEPS):
        if script.resumes and step == RESUMED:
            model, state = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
            if how != "torch":
                optimizer.attachment.close()
            net = copy.deepcopy(net)
            ddp, optimizer = begun(net)
            net.load_state_dict(model)  # after DDP, which gives all ranks rank 0's
            optimizer.load_state_dict(state)
        if script.falls:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        optimizer.zero_grad(set_to_none=script.to_none)
        for part in range(script.parts):
            with ddp.no_sync() if part < script.parts - 1 else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=script.autocast and net.kind != "words"):
                    y = ddp(net.batch(step, rank, part), step, rank).float()
                ((y.square().mean() + F.softplus(y).mean()) / script.parts).backward()
        if how == "torch" and script.clip:
            nn.utils.clip_grad_norm_(net.parameters(), script.clip)
        optimizer.step()
    return toy.flat(net).numpy()


def both(rank: int, world: int, seeds: range) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
    found = []
    for seed in seeds:
        for name, (theirs, ours, options) in TORCH.items():
            ends = trained(rank, seed, theirs, options, "torch"), trained(rank, seed, ours, options, "ours")
            found.append((name, seed, *ends))
        for name, (method, options) in COMPRESSED.items():
            ends = trained(rank, seed, method, options, "plain"), trained(rank, seed, method, options, "ours")
            found.append((name, seed, *ends))
    return found


@pytest.mark.parametrize("seeds", [range(3), slow(range(3, 9))], ids=["few", "more"])
def test_random_scripts_train_as_with_torch_whatever_the_layout(seeds: range) -> None:
    first, second = run_ranks(both, 2, seeds)
    for (name, seed, expected, ours), (*_, others) in zip(first, second, strict=True):
        assert np.isfinite(ours).all(), (name, seed)
        if name in TORCH:  # torch adds gradients and rounds in another order
            np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-4, err_msg=f"{name}, seed {seed}")
        else:
            np.testing.assert_array_equal(ours, expected, err_msg=f"{name}, seed {seed}")
        if name != "CSER":  # its models differ between resets
            np.testing.assert_array_equal(ours, others, err_msg=f"{name}, seed {seed}")
