"""What each method does in a step, as data: rounds, kernels, bytes of state. Imports no torch.

Names: those of the optimizers and of torch's hooks. A method with `_hierarchical` treats a node as one worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from birder.predict.gpus import nearest

LOW_RANK_RATE = 2
"""PowerSGD compresses a matrix where this saves more than this factor: torch's default."""
WARM = 0.15
"""Share of a run that 1-bit Adam and 1-bit LAMB begin with in dense steps: the least that their papers take."""


@dataclass(frozen=True)
class Round:
    """What one kind of step sends.

    share:    of all steps.
    wire:     none | dense | onebit | lowrank.
    nbytes:   per element on the wire (dense). density: share of the elements that is sent.
    encode:   kernels that make a message, serve: those of the server, decode: those that read the result.
    phases:   of a 1-bit all-reduce. small: further collectives of a few bytes, where scales do not travel behind the bits.
    layout:   bucket (DDP's) | unit (the optimizer's) | fused (one of everything, after backward).
    split:    whether what comes before the first collective has a separate thread (birder/comm/runtime.py), as all units
              have; False: one thread does it all.
    screens:  NaN and inf are kept out of the error; a separate pass where there is a cost for it ("screen").
    rank:     of PowerSGD.
    coded:    as codes with scales, which no ring can add up: flat, an all-to-all and an all-gather.
    growth:   above 0: it comes in steps that grow by this factor, so that its share depends on the length of a run (`over`).
    """

    share: float = 1.0
    wire: str = "dense"
    nbytes: float = 4.0
    density: float = 1.0
    encode: tuple[str, ...] = ()
    serve: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    phases: int = 2
    small: int = 0
    layout: str = "bucket"
    split: bool = True
    screens: bool = False
    rank: int = 1
    coded: bool = False
    growth: float = 0.0

    @property
    def lane(self) -> str:
        """Where messages are made, of birder/predict/simulation.py."""
        return "encode" if self.split else "comm"


@dataclass(frozen=True)
class MethodSpec:
    """A row of the tables.

    update:  kernels over all parameters after the last message.
    kept:    bytes that optimizer and hook keep, for each parameter of the model, of a rank's shard, of the chunk it serves.
    about:   what was assumed besides the method's rules; "" for nothing.
    hooked:  a hook of DDP or none: the optimizer is the user's, whose state and update are not in `kept` and, where they are
             known, not in `update`.
    dense:   one of these that sends as many numbers as there are parameters.
    local:   models differ between ranks: more of training changes than what is sent.
    warm:    a run begins with dense steps, `WARM` of all, which the row leaves out.
    """

    name: str
    label: str
    rounds: tuple[Round, ...]
    update: tuple[str, ...]
    kept: tuple[float, float, float]
    hierarchical: bool = False
    about: str = ""
    hooked: bool = False
    dense: bool = False
    local: bool = False
    warm: bool = False

    def state(self, workers: int, shards: int) -> float:
        """Bytes on a rank per parameter of the model, without those of the user's own optimizer."""
        model, shard, chunk = self.kept
        return model + shard / shards + chunk / (workers * shards)

    def by_nodes(self) -> MethodSpec:
        """The same with nodes as workers."""
        return replace(self, name=f"{self.name}_hierarchical", label=f"{self.label}, hierarchical", hierarchical=True)


def _row(
    name: str, label: str, kept: tuple[float, float, float], update: str, *rounds: Round, about: str = "", **more: bool
) -> MethodSpec:
    """update: kernels, separated by spaces."""
    return MethodSpec(name, label, rounds, tuple(update.split()), kept, about=about, **more)


def _dense(
    name: str, label: str, nbytes: float, encode: str, decode: str = "", about: str = "", coded: bool = False
) -> MethodSpec:
    sent = Round(nbytes=nbytes, encode=tuple(encode.split()), decode=tuple(decode.split()), coded=coded)
    return _row(name, label, (0, 0, 0), "sgdm", sent, about=about, hooked=True, dense=True)


_BIRDER = Round(wire="onebit", encode=("encode",), serve=("reduce_bits",), layout="unit")
_SIGMA = replace(_BIRDER, encode=("modulate_adam",), serve=("serve_sigma",))
_LION = replace(_BIRDER, encode=("eager", "eager", "split_signs"), serve=("add_average", "split_signs"))
_FEEDBACK = replace(_LION, encode=("add_momentum", "split_signs"), screens=True)
_MESSAGE = replace(_FEEDBACK, encode=("eager", "eager", "add_message", "split_signs"))
_EFFICIENT = replace(_LION, encode=(*("eager",) * 7, "add_message", "split_signs"), decode=("eager", "write_signs"))
_DEEPSPEED = replace(
    _FEEDBACK,
    encode=("eager",) * 12,
    serve=("unpack_rows", *("eager",) * 7),
    decode=("eager",) * 6,
    small=2,
    layout="fused",
    split=False,
)
SYNCS_OF_ZERO_ONE_ADAM = 0.598
"""Share of steps with a 1-bit round under the coded schedule of a run of 118,000 steps (see tests)."""


def _one_phase(of: Round, *encode: str) -> Round:
    return replace(of, encode=encode, serve=(), decode=("assemble",), phases=1)


def _blocks(share: float, density: float) -> Round:
    """A mean of chosen elements, in fp32."""
    return Round(share, density=density, encode=("eager", "eager", "copy"), decode=("copy",), layout="unit")


def _alone(every: int, talks: Round, encode: tuple[str, ...] = ("eager",)) -> tuple[Round, Round]:
    """Steps on each rank alone, and `talks` in one of so many."""
    return Round(1 - 1 / every, "none", encode=encode, layout="unit"), replace(talks, share=1 / every)


def _sparse(name: str, label: str, kept: float, about: str, *rounds: Round, local: bool = True) -> MethodSpec:
    """Of the CSER paper's family."""
    return _row(name, label, (kept, 0, 0), "eager", *rounds, about=about, local=local)


def _low_rank(rank: int) -> MethodSpec:
    sent = Round(wire="lowrank", rank=rank, encode=("low_rank",))
    about = "the hook's error is in the state; compressing steps only"
    return _row(f"powersgd{rank}", f"PowerSGD rank {rank}", (4, 0, 0), "sgdm", sent, about=about, hooked=True)


def rare(growth: float, steps: int) -> int:
    """How many of so many steps there are in 1, ..., k, max(k + 1, floor(growth k)), ..."""
    count, step = 0, 1
    while step <= steps:
        count, step = count + 1, max(step + 1, int(step * growth))
    return count


RUN_STEPS = 100_000
"""Of a run, where nobody says."""


def over(method: MethodSpec, steps: int = RUN_STEPS) -> MethodSpec:
    """The method in a run of so many steps, where some of its rounds come ever more rarely; any other unchanged."""
    usual = tuple(r for r in method.rounds if not r.growth)
    if len(usual) == len(method.rounds):
        return method
    (moments,) = (r for r in method.rounds if r.growth)
    count = rare(moments.growth, steps)
    rounds = [*(replace(r, share=1 - count / steps) for r in usual), replace(moments, share=count / steps)]
    about = f"{method.about.partition(';')[0]}; moments in {count} of {steps:,} steps"
    return replace(method, rounds=tuple(rounds), about=about)


_APPLY, _ADAM, _OWN, _LATER = "apply_bits", "write_signs move_adam", "this project's", "compression stage"
_DILOCO = "H = 500, AdamW inside, momentum outside"
_INT4 = Round(nbytes=0.5 + 2 / 256, encode=("eager",) * 9, decode=("eager",) * 8, layout="unit", coded=True)
_ZERO_ONE = (
    replace(_MESSAGE, share=SYNCS_OF_ZERO_ONE_ADAM),
    Round(1 - SYNCS_OF_ZERO_ONE_ADAM, "none", encode=("eager", "eager"), layout="unit"),
)
_ZERO_ONE_ABOUT = "mean over the published schedule of 118,000 steps, variance rounds not counted"
_SIGMA_ONE = _one_phase(_SIGMA, "modulate_adam", "owned", "settle")
# Both moments, and the bits of the step.
_MOMENTS = Round(nbytes=8 + 1 / 8, encode=("modulate_adam",), decode=("eager", "eager"), layout="unit", growth=1.1)
_MOMENTS_ONE = replace(_MOMENTS, nbytes=8 + 1 / 16)
_BIRDER_ONE = _one_phase(_BIRDER, "encode", "owned")
_FLAT = (
    _row("birder", "Birder", (0, 8, 0), _APPLY, _BIRDER),
    _row(
        "birder_one_phase", "Birder one-phase", (0, 8, 0), _APPLY, _BIRDER_ONE, about=f"{_OWN} variant of the reduction"
    ),
    _row("sigma_delta", "Sigma-delta Adam", (0, 16, 4), _APPLY, _SIGMA, _MOMENTS, about=_OWN),
    _row("sigma_delta_local", "Sigma-delta Adam, local form", (0, 12, 4), _APPLY, _SIGMA, about=_OWN),
    _row(
        "sigma_delta_one_phase", "Sigma-delta Adam, one-phase", (0, 16, 0), _APPLY, _SIGMA_ONE, _MOMENTS_ONE, about=_OWN
    ),
    _row("lion", "Distributed Lion", (0, 4, 0), _APPLY, _LION, about="majority vote"),
    _row("efficient_adam", "Efficient-Adam", (0, 12, 4), "eager eager", _EFFICIENT),
    _row("onebit_adam", "1-bit Adam", (8, 4, 4), _ADAM, _FEEDBACK, about=_LATER, warm=True),
    _row("onebit_lamb", "1-bit LAMB", (12, 4, 4), "write_signs lamb", _MESSAGE, about=_LATER, warm=True),
    _row(
        "zero_one_adam",
        "0/1 Adam",
        (16, 4, 4),
        "write_signs eager eager eager",
        *_ZERO_ONE,
        about=_ZERO_ONE_ABOUT,
        local=True,
    ),
)
METHODS: dict[str, MethodSpec] = {
    m.name: over(m)
    for m in (
        _dense("fp32", "DDP fp32", 4.0, "scale"),
        _dense("bf16", "DDP bf16", 2.0, "cast", "widen"),
        _dense("fp16", "DDP fp16", 2.0, "cast", "widen"),
        # A scale of two bytes for every 256 elements; a server reads the messages of all workers, 1/n of the elements each.
        _dense("fp8", "fp8 all-reduce", 1.0 + 2 / 256, "eager " * 4, "eager " * 4, "eager passes", coded=True),
        _dense("int4", "4-bit all-reduce", 0.5 + 2 / 256, "eager " * 6, "eager " * 8, "eager passes", coded=True),
        _low_rank(1),
        _low_rank(4),
        *_FLAT,
        _row(
            "onebit_adam_fused",
            "1-bit Adam, fused after backward",
            (8, 4, 4),
            _ADAM,
            replace(_FEEDBACK, layout="fused"),
            about=f"{_LATER}, as its reference implementation orders it",
            warm=True,
        ),
        _row(
            "deepspeed",
            "1-bit Adam as DeepSpeed's (re-created)",
            (12, 0, 4),
            "eager " * 4,
            _DEEPSPEED,
            about=f"{_LATER}, eager passes over one fused buffer",
            warm=True,
        ),
        *(m.by_nodes() for m in _FLAT),
        _sparse(
            "cser", "CSER", 8, "R_C2 = 64, R_C1 = 4, H = 16", _blocks(15 / 16, 1 / 64), _blocks(1 / 16, 1 / 64 + 1 / 4)
        ),
        _sparse("cser_pl", "CSER-PL", 4, "R_C1 = 8, H = 4", *_alone(4, _blocks(1, 1 / 8))),
        _sparse("csea", "CSEA", 4, "R_C1 = 32", _blocks(1, 1 / 32)),
        _sparse("ef21_sgdm", "EF21-SGDM", 12, "R = 32", _blocks(1, 1 / 32), local=False),
        _sparse("ef_sgd", "EF-SGD", 8, "R = 32", _blocks(1, 1 / 32), local=False),
        _sparse("qsparse", "QSparse-local-SGD", 12, "R = 4, H = 8", *_alone(8, _blocks(1, 1 / 4))),
        _sparse("local_sgd", "local SGD", 4, "H = 8", *_alone(8, _blocks(1, 1))),
        _row("diloco", "DiLoCo", (16, 0, 0), "adam", *_alone(500, _blocks(1, 1), ()), about=_DILOCO, local=True),
        _row("diloco_int4", "DiLoCo 4-bit", (16, 4, 0), "adam", *_alone(500, _INT4, ()), about=_DILOCO, local=True),
        _row(
            "slamb",
            "SLAMB",
            (9, 0, 0),
            "lamb",
            _blocks(0.99, 0.1),
            replace(_blocks(0.01, 1.1), layout="fused"),
            about="k = 0.1, H = 100; tensors that are always sent whole not counted",
            local=True,
        ),
        _row("none", "no communication", (0, 0, 0), "sgdm", Round(wire="none"), hooked=True, dense=True),
    )
}
DEFAULT = (
    "fp32",
    "bf16",
    "fp16",
    "powersgd1",
    "powersgd4",
    "birder",
    "birder_one_phase",
    "sigma_delta",
    "onebit_adam",
    "birder_hierarchical",
    "birder_one_phase_hierarchical",
    "sigma_delta_hierarchical",
    "onebit_adam_hierarchical",
    "onebit_lamb",
    "zero_one_adam",
    "cser",
    "slamb",
    "local_sgd",
    "none",
)
"""Methods of a table when none are named; hierarchical ones where a node has several ranks."""
DENSE = ("sgdm", "sgdm_nesterov", "adamw", "bertadam", "lamb", "muon")
"""Optimizers that send what DDP sends: rows by wire, not by optimizer."""


def find(names: Sequence[str] | None, nodes: int, ranks_per_node: int) -> list[MethodSpec]:
    """The methods of these names, or the default ones. Raises ValueError for a name that is unknown."""
    if names is None:
        names = [n for n in DEFAULT if min(nodes, ranks_per_node) > 1 or not METHODS[n].hierarchical]
    if dense := [n for n in names if n in DENSE]:
        raise ValueError(f"{dense[0]} sends whole gradients: say how they travel, fp32 or bf16")
    if unknown := [n for n in names if n not in METHODS]:
        raise ValueError(f"no method {unknown[0]!r}{nearest(unknown[0], METHODS)}")
    return [METHODS[n] for n in names]


def every(method: MethodSpec, steps: int) -> MethodSpec:
    """Local SGD or DiLoCo with a round of averaging in every `steps`; any other method unchanged. Raises ValueError."""
    if steps < 1:
        raise ValueError(f"local_steps must be at least 1, got {steps}")
    if method.name not in ("local_sgd", "diloco", "diloco_int4"):
        return method
    quiet, talks = method.rounds
    rounds = (replace(quiet, share=1 - 1 / steps), replace(talks, share=1 / steps))
    return replace(method, rounds=rounds, about=method.about.replace(method.about.split(",")[0], f"H = {steps}"))


def low_rank_numbers(shape: tuple[int, ...], rank: int) -> tuple[int, int, int]:
    """How many numbers PowerSGD all-reduces for a tensor: uncompressed, P, Q."""
    rows, columns = math.prod(shape[:1]), math.prod(shape[1:])
    r = min(rows, columns, rank)
    if (rows + columns) * r * LOW_RANK_RATE < rows * columns:
        return 0, rows * r, columns * r
    return rows * columns, 0, 0
