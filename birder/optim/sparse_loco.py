"""SparseLoCo: local AdamW, and every H steps the largest entries of what each worker has moved, with error feedback.

Source: "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (arXiv 2508.15706). Rank i, in every step t:

    (1) m_i = beta1 m_i + (1 - beta1) g_i;   v_i = beta2 v_i + (1 - beta2) g_i^2
    (2) x_i = x_i - lr ((m_i / (1 - beta1^t)) / (sqrt(v_i / (1 - beta2^t)) + eps) + weight_decay x_i)

every H steps after (2), with z the model of the last synchronisation and e_i = 0 at first:

    (3) e_i = beta e_i + (z - x_i)                       the pseudo-gradient z - x_i
    (4) c_i = top-k(e_i);   e_i = e_i - c_i              the k largest of each chunk of a parameter
    (5) D = mean_j c_j                                   by all-gather of values and their places
    (6) w = mu w + D;   z = z - alpha (D + mu w);   x_i = z

A synchronisation of an interval in which a caller has changed parameters (`LocalSteps`) sends e_i whole, in fp32, with
alpha = 1 and mu = 0: then z = mean_j x_j, but for what was withheld before, and e_i = 0.

mu = 0 is the paper's form: the error, which decays by beta, stands in the place of an outer momentum. H = 1 with the error as
the only momentum is the form of DeMo, without its cosine transform.

DiLoCo ("DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105) is mu > 0, all of z - x_i sent:

    message="dense"   D = mean_i (z - x_i)                         by all-reduce, no e
    message="int4"    (4) c_i = Q(e_i);   e_i = e_i - c_i          Q: birder/optim/block_codes.py, a scale for each chunk
                      (5) h = mean_j c_j on the server of a chunk, r;   D = Q(h);   e_r = e_r + n (h - D)

so that with int4 D + mean_i e_i is what all have moved. One-process reference: tests/helpers/reference_sparse_loco.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from birder.comm import AllGather, AllToAll, GatherShards, GatherWorkers, Mean, Requests, ShardMean, WorkerMean
from birder.comm.collectives import Collectives
from birder.optim.block_codes import decode, encode
from birder.optim.checks import pair, require, require_choice, require_fraction, require_number, require_whole
from birder.optim.contract import WIRES
from birder.optim.layout import ALIGN, Unit, round_up
from birder.optim.local_steps import LocalSteps

LARGEST_CHUNK = 1 << 15
"""A place in a chunk travels as int16."""


class SparseLoCo(LocalSteps):
    """SparseLoCo (see the module's docstring for the equations). Models differ between ranks but for after (6).

    lr, betas, eps, weight_decay: of the inner AdamW.
    sync_every:     H.
    top_k, chunk:   k entries of each chunk of a parameter are sent; `chunk` is a multiple of 32 up to 32,768.
    message:        "top_k", or of DiLoCo "dense" or "int4". Then `top_k` is not used, nor `chunk` but as the block of int4.
    error_decay:    beta of (3), in [0, 1]; 0: what a message leaves is dropped.
    outer_lr:       alpha.
    outer_momentum: mu, in [0, 1).
    options:        wire (of the values of top_k; what rounding takes from them stays in e), max_grad_norm, seed.

    With hierarchical communication a node is one worker: (3) takes the mean of z - x_i over its ranks, and each local rank
    keeps e for its own shard.

    State: m and v, fp32[D], and but for "dense" e, fp32[D / ranks per node], rank-local; z and, with mu above 0, w, fp32[D],
    the same on all ranks. D counts whole chunks: a parameter begins with a new chunk.
    """

    compressed: ClassVar[bool] = True
    local_models: ClassVar[bool] = True
    carried: ClassVar[dict[str, str]] = {"m": "mean", "v": "mean", "error": "mean", "common": "copy", "outer": "copy"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        sync_every: int = 30,
        top_k: int = 64,
        chunk: int = 4096,
        error_decay: float = 0.95,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        message: str = "top_k",
        **options: Any,
    ) -> None:
        self.message = require_choice("message", message, "top_k", "dense", "int4")
        wire = options.get("wire", "fp32")
        require(message == "top_k" or wire == "fp32", "wire", wire, f"fp32 with message={message!r}")
        self.sync_every = require_whole("sync_every", sync_every)
        self.chunk = require_whole("chunk", chunk, ALIGN)
        fits = chunk % ALIGN == 0 and chunk <= LARGEST_CHUNK
        require(fits, "chunk", chunk, f"a multiple of {ALIGN} up to {LARGEST_CHUNK}")
        self.top_k = require_whole("top_k", top_k)
        require(message != "top_k" or top_k <= chunk, "top_k", top_k, f"at most chunk = {chunk}")
        self.error_decay = require_number("error_decay", error_decay, "in [0, 1]", high=1.0)
        self.outer_lr = require_number("outer_lr", outer_lr)
        self.outer_momentum = require_fraction("outer_momentum", outer_momentum)
        super().__init__(params, {"lr": lr, "betas": pair(betas), "eps": eps, "weight_decay": weight_decay}, **options)

    @property
    def alignment(self) -> int:
        return ALIGN if self.message == "dense" else self.chunk

    def init_unit(self, unit: Unit) -> None:
        shard = unit.padded // self.comm.shards
        unit.keep("m", "v", "common")
        if self.message != "dense":
            unit.state["error"] = unit.zeros(shard)
        if self.outer_momentum:
            unit.state["outer"] = unit.zeros()
        unit.buffers = {"result": unit.zeros() if self.comm.shards > 1 else unit.zeros(0)}
        if self.message != "top_k":
            return
        # Whole words, so that each of the rows that are received can be read as floats.
        message = round_up(self._entries(unit) * (WIRES[self.wire].itemsize + torch.int16.itemsize), 4)
        unit.buffers |= {
            "message": unit.bytes(message),  # values, then places
            "received": unit.bytes(message * self.comm.workers),
            "mean": unit.zeros(shard),
        }

    # ---- math, collective, math ----------------------------------------------------------------------------------------

    def exchange(self, unit: Unit, grad: Tensor, step: int) -> Requests[None]:
        drift = self.drift(unit, self._inner_step(unit, grad, step), step)  # (1), (2)
        if drift is None:
            return
        drift = yield ShardMean(drift)
        if self.message == "int4":
            unit.result = yield from self._in_codes(unit, drift)
            return
        if self.message == "dense":
            mean = yield WorkerMean(drift)
        else:
            rows = yield GatherWorkers(self._compress(unit, drift), unit.buffers["received"])  # (3), (4)
            mean = self._mean(unit, rows)  # (5)
        unit.result = yield GatherShards(mean, unit.buffers["result"])

    def _inner_step(self, unit: Unit, grad: Tensor, step: int) -> Tensor:
        """What (2) takes from x, in the buffer of the gradient."""
        # Products and sums apart from each other: fused, their rounding would depend on where in a buffer they stand.
        m, v, group = unit.state["m"], unit.state["v"], unit.group
        beta1, beta2 = group["betas"]
        m.mul_(beta1).add_(grad * (1 - beta1))
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        root = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        torch.div(m, root, out=grad)
        # Where there never was a gradient m / root may be 0 / 0.
        grad.masked_fill_(m == 0, 0.0).div_(1 - beta1**step)
        if group["weight_decay"]:
            grad.add_(self.flat_parameters(unit).mul_(group["weight_decay"]))
        return grad.mul_(group["lr"])

    def _in_codes(self, unit: Unit, drift: Tensor) -> Requests[Tensor]:
        """(3) to (5) of message="int4": D of the whole unit."""
        n, error = self.comm.workers, unit.state["error"].mul_(self.error_decay).add_(drift)
        rows = torch.nn.functional.pad(error, (0, -len(error) % (n * self.chunk))).view(n, -1)  # of each server
        codes = encode(rows, "int4", self.chunk)
        error.sub_(decode(codes, "int4", self.chunk).view(-1)[: len(error)])
        h = Collectives.sum_of_rows(decode((yield AllToAll(codes)), "int4", self.chunk)).div_(n)
        codes = encode(h.view(1, -1), "int4", self.chunk).view(-1)
        own = error[self.comm.worker * len(h) :][: len(h)]
        own.add_(h.sub_(decode(codes.view(1, -1), "int4", self.chunk).view(-1))[: len(own)], alpha=n)
        every = decode((yield AllGather(codes)).view(self.comm.shards * n, -1), "int4", self.chunk)
        return every.view(self.comm.shards, -1)[:, : len(error)].reshape(-1)

    def _compress(self, unit: Unit, drift: Tensor) -> Tensor:
        """The message of (4), uint8; e becomes what is left."""
        error = unit.state["error"].mul_(self.error_decay).add_(drift).view(-1, self.chunk)
        places = error.abs().topk(self.top_k, dim=1, sorted=False).indices
        values, small = self._parts(unit, unit.buffers["message"])
        values.copy_(error.gather(1, places))
        small.copy_(places)
        error.scatter_add_(1, places, -values.float())
        return unit.buffers["message"]

    def _entries(self, unit: Unit) -> int:
        """How many entries a rank sends of its shard."""
        return unit.padded // self.comm.shards // self.chunk * self.top_k

    def _parts(self, unit: Unit, message: Tensor) -> tuple[Tensor, Tensor]:
        """Values, in the type of `wire`, and their places in the chunk, int16: [chunks, k] each."""
        entries, wire = self._entries(unit), WIRES[self.wire]
        values = message[: entries * wire.itemsize].view(wire)
        places = message[entries * wire.itemsize :].view(torch.int16)[:entries]
        return values.view(-1, self.top_k), places.view(-1, self.top_k)

    def _mean(self, unit: Unit, rows: Tensor) -> Tensor:
        """D of (5) for this rank's shard, added up in the order of the workers."""
        mean = unit.buffers["mean"].zero_().view(-1, self.chunk)
        for row in rows:
            values, places = self._parts(unit, row)
            mean.scatter_add_(1, places.long(), values.float())
        return mean.div_(self.comm.workers).view(-1)

    def meet(self, unit: Unit, whole: bool) -> Requests[Any]:
        z = unit.state["common"]
        if whole:  # all of e is sent: z gets the same bits on all ranks, e becomes 0
            x = z - unit.result  # z of this rank: the caller may have changed it at one alone
            if "error" in unit.state:
                x -= yield GatherShards(unit.state["error"])
                unit.state["error"].zero_()
            z.copy_((yield Mean(x)))
            return None
        change = unit.result
        if self.outer_momentum:
            w = unit.state["outer"].mul_(self.outer_momentum).add_(change)
            change = w * self.outer_momentum + change
        change = change * self.outer_lr
        z.sub_(change)  # (6)
        return change.neg_()
