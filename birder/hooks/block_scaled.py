"""Gradients in 4 or 8 bits with a scale for every block: a hook of DDP for any dense optimizer, torch's own among them.

    state = BlockScaled("int4")
    ddp.register_comm_hook(state, block_scaled_hook)

The two-phase form of ZeRO++'s quantized gradients (qgZ: "ZeRO++: Extremely Efficient Collective Communication for Giant Model
Training", arXiv 2306.10209) without its reduction inside a node. The error kept by each worker is that of "LoCo: Low-Bit
Communication Adaptor for Large-scale Model Training", arXiv 2407.04480, without its moving average. Rank i of n has
the gradient g_i of a bucket, cut into blocks of B elements. Q is the largest code, 7 of int4 and 448 of fp8 (e4m3):

    (1) a_i = g_i + e_i                                    e_i = 0 at first, and always without error_feedback
    (2) s = max |a_i| / Q of each block, as bf16;   c = a_i / s, rounded to an integer (int4) or to fp8
    (3) e_i = a_i - s c
    (4) chunk j of (c, s) goes to rank j: all-to-all;   h = mean_i s_i c_i                            fp32
    (5) h by (2), to all ranks: all-gather;   every rank's gradient is s c

A rank sends 2 (n-1)/n (bits/8 + 2/B) bytes for an element: 0.51 of int4 and 1.01 of fp8 with 2 (n-1)/n = 1 and B = 256, where
bf16 takes 2. What is rounded in (5) is not fed back.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from birder.comm import ByteCounter, Collectives, Topology, finish
from birder.comm.collectives import backend_for, gather_numbers
from birder.comm.groups import borrow, give_back
from birder.comm.launcher import digest_of
from birder.hooks.attachment import NotCopied, done, odd_ranks, on_thread
from birder.hooks.bucket_hook import block_scaled_hook as block_scaled_hook
from birder.optim.block_codes import LARGEST, decode, encode
from birder.optim.checks import check_gradient, require, require_choice


class BlockScaled(NotCopied):
    """The state of `block_scaled_hook`. Every rank of the group makes one, in the same order as other groups.

    code:           "int4" or "fp8" (e4m3).
    block:          elements that share a scale, an even number.
    error_feedback: each rank keeps what rounding took from its gradients and adds it in the next step: fp32, 4 bytes for
                    each parameter. It is not in checkpoints: a resumed run begins with 0.
    group:          the model's process group; None: the whole world.
    topology:       nodes x ranks per node, for the counter alone; None: one node for each rank.

    counter: payload bytes and collectives of this rank.

    An element that is not finite makes its block so on all ranks, as in an all-reduce, and no error is kept of it.
    Raises ValueError for arguments out of range, RuntimeError in backward for sparse gradients.
    """

    def __init__(
        self,
        code: str = "int4",
        *,
        block: int = 256,
        error_feedback: bool = False,
        group: dist.ProcessGroup | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.code = require_choice("code", code, *LARGEST)
        even = isinstance(block, int) and not isinstance(block, bool) and block >= 2 and block % 2 == 0
        require(even, "block", block, "an even number of at least 2")
        self.block, self.error_feedback = block, error_feedback
        self.counter = ByteCounter()
        self._over, size = group or dist.group.WORLD, dist.get_world_size(group)
        self._topology = topology or Topology(size, 1)
        self.link = Collectives(self._over, self._topology, self.counter)
        self._own: dist.ProcessGroup | None = None
        """From the first bucket on: its messages overlap DDP's, in another order."""
        self._sound = True
        self._errors: dict[Tensor, Tensor] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def state_bytes(self) -> int:
        """Bytes that are kept on this rank between steps."""
        return sum(4 * e.numel() for e in self._errors.values())

    def close(self) -> None:
        """Ends the thread, if there is one. The process group is that of the next `BlockScaled` or `attach`, unless something
        failed: what was sent might reach that one."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._own is not None and self._sound:
            give_back(self._own)
            self._own = None

    # ---- a bucket ----------------------------------------------------------------------------------------------------

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """What DDP calls for every bucket that is ready, in the same order on every rank."""
        buffer, params = bucket.buffer(), bucket.parameters()
        if self.link.size == 1:
            return done(buffer)
        check_gradient(buffer)
        if self._own is None:
            self._open(buffer.device)

        def run() -> Tensor:
            try:
                return self.reduce(buffer, params)
            except BaseException:
                self._sound = False
                raise

        if buffer.is_cuda and backend_for(self._own, buffer.device) != "gloo":
            return self._on_stream(buffer, run)
        if buffer.is_cuda:
            return done(run())  # on a thread it would not be in the order of the caller's stream
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)  # one bucket after the other, during backward
        return on_thread(self._thread, run)

    def _on_stream(self, buffer: Tensor, run: Callable[[], Tensor]) -> Future[Tensor]:
        device = buffer.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device, priority=-1)
        stream, later = self._streams[device], Future[Tensor](devices=[device])
        stream.wait_stream(torch.cuda.current_stream(device))
        buffer.record_stream(stream)
        with torch.cuda.stream(stream):
            later.set_result(run())  # DDP's stream waits for what this one has been given
        return later

    def _open(self, device: torch.device) -> None:
        """Borrows a process group. Raises RuntimeError on all ranks where their arguments differ: messages of other sizes
        would end the process, or hang."""
        digest = digest_of((self.code, self.block, self.error_feedback))
        if odd := odd_ranks(gather_numbers(self._over, [digest], device)):
            raise RuntimeError(
                f"ranks {odd} differ from rank 0 in code, block or error_feedback of BlockScaled: make them equal"
            )
        self._own = borrow(self._over, device)
        self.link = Collectives(self._own, self._topology, self.counter)

    @torch.no_grad()
    def reduce(self, buffer: Tensor, params: list[Tensor]) -> Tensor:
        """Replaces a bucket's gradients, one after the other those of `params`, by their means over ranks."""
        n, size = self.link.size, buffer.numel()
        a = buffer.float()
        if self.error_feedback:
            # Where no rank has a gradient DDP drops the mean, and the error would be lost with it.
            known = {p: self._errors[p] for p in params if p.grad is not None and p in self._errors}
            sizes = [p.numel() * (2 if p.is_complex() else 1) for p in params]  # in a bucket all numbers are real
            zeros = a.new_zeros(max(sizes))
            a = a + torch.cat([known.get(p, zeros[:k]) for p, k in zip(params, sizes, strict=True)])  # (1)
        rows = torch.nn.functional.pad(a, (0, -size % (n * self.block))).view(n, -1)
        message = encode(rows, self.code, self.block)  # (2)
        if self.error_feedback:
            e = a - decode(message, self.code, self.block).view(-1)[:size]  # (3)
            parts = torch.where(e.isfinite(), e, 0.0).split(sizes)
            self._errors.update({p: e for p, e in zip(params, parts, strict=True) if p.grad is not None})
        received = decode(finish(self.link.all_to_all(message)), self.code, self.block)  # (4)
        h = self.link.sum_of_rows(received)
        message = encode(h.div_(n).view(1, -1), self.code, self.block).view(-1)
        result = finish(self.link.all_gather(message))  # (5)
        return buffer.copy_(decode(result, self.code, self.block).view(-1)[:size])
