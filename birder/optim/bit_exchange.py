"""What methods share that send one bit for each element and no scale: Birder, sigma-delta Adam, Distributed Lion.

`Modulator` is the sigma-delta quantizer. Numbers u_i in [-1, 1] of n workers become +-1 for all, and no error is ever
forgotten. Two phases, with sgn(0) = +1:

    (1) z_i = u_i + e_i;   q_i = sgn(z_i);   e_i = clip(z_i - q_i, -1, 1)             worker i
    (2) a = gain mean_i q_i + s;   q = sgn(a);   s = clip(a - q, -1, 1)               server of a chunk

One phase, at half the bytes: every coordinate has an owner, the workers in turn, 32 coordinates at a time.

    (1') r_i = clip(r_i + gain u_i / n, -2, 2)                                        worker i
    (2') q = sgn(r_i);   r_i = r_i - q                                                worker i, where it is the owner

With a gain of 1 none of the clips ever changes a number, and |sum_t q - sum_t mean_i u_i| is bounded for all times: by 2 for
two phases where errors start at 0. The proof: docs/appendix/methods.md. With a larger gain the clips keep errors from
winding up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from birder import kernels
from birder.comm import AllGather, AllToAll, Communicator, GatherShards, GatherWorkers, Requests
from birder.kernels import weyl
from birder.kernels.philox import uniform16
from birder.kernels.reference import UNITS
from birder.optim.checks import require_choice
from birder.optim.layout import Unit

ERRORS = {"fp32": torch.float32, "int8": torch.int8}

CARRIED = {"worker_error": "mean", "server_error": "cut", "owner_error": "sum"}
"""What becomes of the errors with another number of workers: what is still owed to each coordinate stays the same."""


def buffers(unit: Unit, comm: Communicator) -> dict[str, Tensor]:
    """This rank's shard, what workers have sent [workers, c], the server's or the owner's part, the result."""
    bits = unit.padded // comm.shards // 8
    sizes = {"bits": bits, "rows": bits, "chunk": bits // comm.workers, "result": unit.padded // 8}
    return {name: unit.bytes(size) for name, size in sizes.items()}


Runs = list[tuple[slice, int]]
"""Runs of consecutive element numbers that make up a shard or a chunk (`Unit.numbered`); one, but with FSDP."""


def part(t: Tensor, at: slice, runs: Runs) -> Tensor:
    """What a tensor has of one of the runs: numbers of elements [d]; their bits, or one worker's share of these; a view.

    Or the bits of each worker, uint8[n, c]: contiguous, and only where there are several runs copied.
    """
    elements, size = runs[-1][0].stop, t.shape[-1]
    return t[..., at.start * size // elements : at.stop * size // elements].contiguous()


def each_run(kernel: Callable[..., Any], runs: Runs, *tensors: Tensor, out: Tensor, **options: Any) -> Tensor:
    """Calls a kernel that draws by element number for each run. tensors: as `part` takes them, and in one dimension `out`."""
    for at, start in runs:
        kernel(*(part(t, at, runs) for t in tensors), **options, start=start, out=part(out, at, runs))
    return out


def one_phase(unit: Unit, comm: Communicator, owners: dict[str, Any], error: Tensor | None = None) -> Requests[Tensor]:
    """Every word of the result from the worker that owns it (birder/kernels/reference.py): uint8[padded/8].

    The bits are in `unit.buffers`. owners: options of `kernels.owned`. error: from which the bits that are sent are taken,
    (2').
    """
    bits, runs, mine = unit.buffers["bits"], unit.shard_runs(comm), {"n": comm.workers, "worker": comm.worker, **owners}
    chunk = each_run(kernels.owned, runs, bits, **mine, out=unit.buffers["chunk"])
    if error is not None:
        for at, start in runs:
            kernels.settle(error[at], part(bits, at, runs), **mine, start=start)  # (2')
    rows = yield GatherWorkers(chunk, unit.buffers["rows"])
    each_run(kernels.assemble, runs, rows, **owners, out=bits)
    return (yield GatherShards(bits, unit.buffers["result"]))


def move(unit: Unit, decay: float) -> None:
    """x = x - lr q - lr decay x, with q the bits of `unit.result`, whose unseen coordinates stay, or its numbers, fp32."""
    lr, active = unit.group["lr"], unit.state.get("active")
    if unit.result.is_floating_point():
        for p, q in zip(unit.params, unit.views(unit.result), strict=True):
            p.mul_(1.0 - lr * decay).sub_(q, alpha=lr)
        return
    kernels.apply_bits(unit.params, unit.offsets, unit.result, lr=lr, decay=lr * decay, active=active)


class Modulator:
    """The quantizer's options, and its part of a unit's state: `worker_error` (e) and `server_error` (s), or `owner_error`.

    reduce: "two_phase" or "one_phase".
    errors: "fp32", or "int8" for a quarter of the memory.
    start:  "uniform": every worker's errors begin with random numbers in [-1, 1), so that workers' bits do not move in
            step. "zero": at 0.
    seed:   of these numbers, and of the owners' order.
    """

    def __init__(self, *, reduce: str, errors: str, start: str, seed: int) -> None:
        self.one_phase = require_choice("reduce", reduce, "two_phase", "one_phase") == "one_phase"
        self.errors = require_choice("errors", errors, *ERRORS)
        self.start = require_choice("start", start, "uniform", "zero")
        self.seed = seed
        self.limit = 2 if self.one_phase else 1
        self.name = "owner_error" if self.one_phase else "worker_error"

    def init_unit(self, unit: Unit, comm: Communicator) -> None:
        """Makes the errors and the messages' buffers. e and r: [padded/shards]; s: [padded/(shards workers)]."""
        size, kind = unit.padded // comm.shards, ERRORS[self.errors]
        unit.state[self.name] = unit.zeros(size, kind)
        if not self.one_phase:
            unit.state["server_error"] = unit.zeros(size // comm.workers, kind)
        if self.start == "uniform":
            one = UNITS[self.limit] if self.errors == "int8" else 1
            for at, first in unit.shard_runs(comm):
                drawn = uniform16(
                    at.stop - at.start, seed=self.seed, step=0, stream=comm.worker, start=first, device=unit.device
                )
                unit.state[self.name][at] = (drawn.float() / 2**15 - 1.0) * one
        unit.buffers = buffers(unit, comm)

    def encoding(self, unit: Unit, comm: Communicator, step: int, gain: float = 1.0) -> dict[str, Any]:
        """What the kernels of (1) need: options of `kernels.modulate` and `kernels.modulate_adam`."""
        return {
            "weight": gain / comm.workers if self.one_phase else 1.0,
            "limit": self.limit,
            "dither": weyl.turned(step, worker=comm.worker, workers=comm.workers) / 2**16,
            "out": unit.buffers["bits"],
        }

    def exchange(self, unit: Unit, comm: Communicator, step: int, gain: float = 1.0) -> Requests[Tensor]:
        """Sends the bits in `unit.buffers["bits"]`. Ends with all of q: uint8[padded/8]."""
        if self.one_phase:
            owners = {"seed": self.seed, "step": weyl.STEP, "turn": step % comm.workers}
            return (yield from one_phase(unit, comm, owners, unit.state["owner_error"]))
        rows = yield AllToAll(unit.buffers["bits"], unit.buffers["rows"])
        chunk, error = unit.buffers["chunk"], unit.state["server_error"]
        dither = weyl.turned(step, by=weyl.ROOT) / 2**16
        kernels.serve_sigma(rows, error, gamma=gain, dither=dither, out=chunk)  # (2)
        return (yield AllGather(chunk, unit.buffers["result"]))
