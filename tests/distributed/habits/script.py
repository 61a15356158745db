"""`Script`: an ordinary training script. A habit is a subclass that does one thing otherwise; its `twin` shows the outcome.

The loss of the small model is sum_p <p, G_p> with tensors G that rank and step give: the gradient is G, whatever the
parameters are. So what a habit means by its gradients can be written down, and the twin is the plain script with these.
"""

from __future__ import annotations

import functools
import os
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import birder
from birder import Topology
from tests.distributed.habits.methods import METHODS, Method

Gradients = dict[str, Tensor]
DEVICE = os.environ.get("HABITS_DEVICE", "cpu")
"""Where models and batches are: cpu, or cuda, which all ranks then share."""


@dataclass(frozen=True)
class Way:
    """How ranks communicate."""

    name: str
    ranks: int
    local: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of attach."""

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    @property
    def overlap(self) -> bool:
        return self.options.get("overlap", True) and not self.alone

    @property
    def sharded(self) -> bool:
        return self.name.startswith("FSDP2")


WAYS = {
    w.name: w
    for w in (
        Way("DDP", 2, 2),
        Way("DDP, overlap=False", 2, 2, {"overlap": False}),
        Way("hierarchical", 4, 2, {"hierarchical": True}),
        Way("hierarchical, overlap=False", 4, 2, {"hierarchical": True, "overlap": False}),
        Way("one process", 1, 1),
        Way("FSDP2", 4, 2),
        Way("FSDP2, overlap=False", 4, 2, {"overlap": False}),
        Way("Accelerate", 2, 2),
        Way("Accelerate, overlap=False", 2, 2, {"overlap": False}),
        Way("Trainer", 2, 2),
        Way("Lightning", 2, 2),
    )
}


class Part(nn.Module):
    """Some parameters. The gradient of its output is what it is given for them; others are not used."""

    def __init__(self, prefix: str, **params: Tensor) -> None:
        super().__init__()
        self.prefix = prefix
        for name, value in params.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, gradients: Gradients) -> Tensor:
        parts = [
            (p * gradients[f"{self.prefix}.{name}"]).sum()
            for name, p in self.named_parameters()
            if f"{self.prefix}.{name}" in gradients
        ]
        return sum(parts, torch.zeros((), device=DEVICE))  # type: ignore[return-value]


SHAPES = {
    "conv": {"weight": (8, 3, 3, 3), "bias": (8,)},
    "embed": {"weight": (23, 9)},
    "first": {"weight": (37, 9), "bias": (37,)},
    "second": {"weight": (5, 37), "bias": (5,)},
    "scale": {"weight": (1,)},
}
NAMES = [f"{part}.{name}" for part, shapes in SHAPES.items() for name in shapes]
SIZES = {f"{part}.{name}": shape for part, shapes in SHAPES.items() for name, shape in shapes.items()}
USED_ROWS = 17


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for part, shapes in SHAPES.items():
            self.add_module(part, Part(part, **{name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}))

    def forward(self, gradients: Gradients) -> Tensor:
        parts: list[Part] = list(self.children())  # type: ignore[arg-type]
        used = [part for part in parts if any(name.startswith(part.prefix + ".") for name in gradients)]
        return sum((part(gradients) for part in used), torch.zeros((), device=DEVICE))  # type: ignore[return-value]


@functools.lru_cache(maxsize=512)
def _drawn(rank: int, step: int, micro: int) -> Gradients:
    made = {}
    for k, (name, shape) in enumerate(SIZES.items()):
        common = torch.randn(shape, generator=torch.Generator().manual_seed(100_000 * micro + 1000 * step + k))
        own = torch.randn(
            shape, generator=torch.Generator().manual_seed(100_000 * micro + 1000 * step + 50 * (rank + 1) + k)
        )
        made[name] = (((common + 0.5 * own) * 256).round() / 256).to(DEVICE)  # exact sums: in any order, the same
    made["embed.weight"][USED_ROWS:] = 0.0
    return made


def drawn(rank: int, step: int, micro: int = 0) -> Gradients:
    """What the loss of one batch has for a gradient. Rows of the embedding from USED_ROWS on are never used."""
    return {name: g.clone() for name, g in _drawn(rank, step, micro).items()}


class Stop(Exception):
    """A habit's own check has failed: what it says is a fault."""


SCRIPTS: dict[str, type[Script]] = {}
"""All of them, by name."""


class Script:
    """The plain training script."""

    def __init_subclass__(cls) -> None:
        SCRIPTS[cls.__name__] = cls

    steps: ClassVar[int] = 9
    since: ClassVar[int] = 1
    """The first step that the habit has a part in: 0, before the first."""
    says: ClassVar[str | None] = None
    """What a refusal's line has to match; None: nothing is refused."""
    refuses: ClassVar[bool] = False
    """Whether it must be refused."""
    ways: ClassVar[tuple[str, ...]] = (
        "DDP",
        "DDP, overlap=False",
        "hierarchical",
        "hierarchical, overlap=False",
        "one process",
    )
    tolerance: ClassVar[float] = 0.0
    norm_tolerance: ClassVar[float] = 0.0
    """For methods whose norms are added up in another order than the twin's."""
    twin: ClassVar[Any] = None
    twin_way: ClassVar[str] = ""
    """The way in which the twin is played; "": the same."""
    accelerate: ClassVar[bool] = True
    """Whether Accelerate's users have this habit, too."""
    names: ClassVar[tuple[str, ...]] = tuple(NAMES)
    """The parameters that are compared."""
    by_one: ClassVar[bool] = False
    """Whether one rank alone does it. It is enough then that this one is told, which ends its process, as in a real run."""
    races: ClassVar[bool] = False
    """Whether it is right or refused depends on when a thread reads the parameters."""
    torch_fails: ClassVar[bool] = False
    """Whether torch's own optimizers go wrong under DDP; then there is no control."""
    apart: ClassVar[str] = ""
    """Whose replicas may differ although the method keeps them equal: "dense", "all" or nobody's."""

    def __init__(self, method: Method, way: Way, rank: int) -> None:
        self.method, self.way, self.rank = method, way, rank
        self.t = 0
        self.trace: list[dict[str, np.ndarray]] = []
        self.stayed: list[tuple[str, ...]] = []

    # ---- what habits change ------------------------------------------------------------------------------------------

    def applies(self) -> bool:
        return not (self.by_one and self.way.sharded and self.method.sums_over_shards)

    def build(self) -> None:
        self.model = self.make_model()
        self.make_and_wrap()
        self.prepared()

    def make_and_wrap(self) -> None:
        """The optimizer and the wrapped model, connected."""
        if self.way.name.startswith("Accelerate"):
            from tests.distributed.habits.with_accelerate import accelerate

            accelerate(self)
            return
        if self.way.sharded:  # fully_shard puts other parameters in place
            self.ddp = self.wrap(self.model)
            self.opt = self.make_optimizer(self.trained())
        else:
            self.opt = self.make_optimizer(self.trained())
            self.ddp = self.wrap(self.model)
        self.attach(self.ddp, self.opt)

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        return Net().to(DEVICE)

    def trained(self) -> Any:
        return self.model.parameters()

    def make_optimizer(self, params: Any, **options: Any) -> Any:
        return self.method.make(params, **options)

    ddp_options: ClassVar[dict[str, Any]] = {}

    def wrap(self, model: nn.Module) -> nn.Module:
        if self.way.alone:
            return model
        if self.way.sharded:
            # torch itself needs both dimensions to average over all ranks
            return shard(model, mesh(self.way) if self.method.torch else mesh(self.way)["shard"])
        return DistributedDataParallel(model, **({"bucket_cap_mb": 0.002} | self.ddp_options))

    def attach(self, model: nn.Module, opt: Any) -> Any:
        if self.way.alone or self.method.torch:
            return None
        options = {"unit_mb": 0.002, **self.way.options}
        if self.way.sharded:
            options["mesh"] = mesh(self.way)
        elif self.way.ranks == 4:
            options["topology"] = Topology(2, 2)
        self.attachment = birder.attach(model, opt, **options)
        return self.attachment

    def prepared(self) -> None:
        """After attach."""

    def gradients(self, t: int, rank: int) -> Gradients:
        """What the loss of `rank` in step t has for a gradient."""
        return drawn(rank, t)

    def step(self) -> None:
        """One step of the loop: number self.t, from 1."""
        self.opt.zero_grad()
        self.backward()
        self.between()
        self.update()
        self.after()

    def backward(self) -> None:
        self.loss().backward()

    def train(self) -> None:
        """The loop."""
        for t in range(1, self.steps + 1):
            self.begin(t)
            self.step()
            self.record()

    def begin(self, t: int) -> None:
        """Step number t begins."""
        self.t = t
        self.stayed.append(self.stays(t))

    def loss(self) -> Tensor:
        return self.ddp(self.gradients(self.t, self.rank))

    def between(self) -> None:
        """Between backward and step."""

    def update(self) -> None:
        self.opt.step()

    def after(self) -> None:
        """After the step."""

    def finish(self) -> None:
        """After the last step: checks of the habit's own raise Stop."""

    def stays(self, t: int) -> tuple[str, ...]:
        """The parameters that must not move in step t."""
        return ()

    # ---- helpers -------------------------------------------------------------------------------------------------------

    def inner(self) -> nn.Module:
        return self.ddp.module if isinstance(self.ddp, DistributedDataParallel) else self.ddp  # type: ignore[return-value]

    def named(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def of(self, part: str) -> list[Tensor]:
        return list(getattr(self.model, part).parameters())

    def values(self) -> dict[str, np.ndarray]:
        named = self.named()
        found = zip(named, wholes(named.values()), strict=True)
        return {name: p.detach().float().contiguous().clone().cpu().numpy() for name, p in found}

    def record(self) -> None:
        self.trace.append(self.values())


def whole(p: Any) -> Tensor:
    return wholes([p])[0]


def wholes(params: Iterable[Any]) -> list[Tensor]:
    """FSDP's parameters whole, others as they are. One all-gather for all: `full_tensor` has one for each."""
    found = list(params)
    sharded = [i for i, p in enumerate(found) if hasattr(p, "full_tensor")]
    if not sharded:
        return found
    mesh = found[sharded[0]].device_mesh
    group, rows = mesh.get_group(mesh.ndim - 1), []
    for p in (found[i] for i in sharded):
        mine = p.to_local().detach().cpu()
        rows.append(mine.new_zeros(-(-p.shape[0] // group.size()), *p.shape[1:]))
        rows[-1][: len(mine)] = mine
    own = torch.cat([part.flatten() for part in rows])
    ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(ranks, own, group=group)
    parts = zip(*(rank.split([part.numel() for part in rows]) for rank in ranks), strict=True)
    for i, part, of in zip(sharded, rows, parts, strict=True):
        found[i] = torch.cat([one.view(part.shape) for one in of])[: found[i].shape[0]]
    return found


@functools.lru_cache(maxsize=8)
def _mesh(replicas: int, shards: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, (replicas, shards), mesh_dim_names=("replicate", "shard"))


def mesh(way: Way) -> Any:
    return _mesh(way.ranks // way.local, way.local)


def shard(model: nn.Module, over: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for part in model.children():
        fully_shard(part, mesh=over)
    return fully_shard(model, mesh=over)


@dataclass
class Ran:
    """What became of a script on one rank: values before the first step and after each; how it ended."""

    trace: list[dict[str, np.ndarray]]
    step: int = 0
    error: str = ""
    """The exception's line, with its type before it."""
    ours: bool = False
    """Whether it was raised by a `raise` of the package."""
    fault: str = ""
    where: str = ""
    skipped: bool = False
    dies: bool = False
    stays: list[tuple[str, ...]] = field(default_factory=list)


def find(name: str) -> type[Script]:
    from tests.distributed.habits import catalogue  # noqa: F401  # defines them

    return SCRIPTS[name]


def play(rank: int, world: int, habit: str, method: str, way: str) -> Ran:
    """Runs the script on this rank."""
    if world > 1:
        _settle()
    script = find(habit)(METHODS[method], WAYS[way], rank)
    ran = Ran(script.trace, stays=script.stayed)
    if not script.applies():
        ran.skipped = True
        return ran
    try:
        script.build()
        script.record()
        script.train()
        script.t += 1
        script.finish()
    except Stop as e:
        ran.fault = str(e)
    except BaseException as e:
        frames = traceback.extract_tb(e.__traceback__)
        last = frames[-1]
        ran.ours = f"{'/'}birder/" in last.filename and (last.line or "").startswith("raise")
        ran.error = f"{type(e).__name__}: {e}"
        ran.dies = script.by_one
        ran.where = "".join(traceback.format_exception(e))
    finally:
        ran.step = script.t
        attachment = getattr(script, "attachment", None)
        if attachment is not None and not ran.error:
            attachment.close()
    return ran


def _settle() -> None:
    """All ranks have ended the cell before."""
    dist.barrier()


ONE_LINE = re.compile(r"^(RuntimeError|ValueError|TypeError): [^\n]{20,400}$")
