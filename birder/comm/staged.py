"""Messages of GPU tensors on gloo, which sends none itself: through pinned memory of the host.

Several ranks can then share one GPU, which NCCL refuses: all that is tested with several ranks runs on one card. The host
waits for what is sent to be there, so this is for correctness and accuracy, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def needed(tensor: Tensor) -> bool:
    """Whether gloo takes the tensor only from the host."""
    return tensor.device.type != "cpu"


class Staging:
    """Host copies of what is sent, and room on the host for what is received.

    out: what is sent; the same tensor twice has one copy. into: received on the host, then copied to where it belongs.
    """

    def __init__(self, out: Sequence[Tensor], into: Sequence[Tensor], me: int) -> None:
        """me: the place of this rank's own entries, which neither travel nor are touched."""
        self._target, self._me = into, me
        on_gpu = into[0].is_cuda
        copies: dict[int, Tensor] = {}
        for i, t in enumerate(out):
            if i != me and id(t) not in copies:
                copies[id(t)] = torch.empty(t.shape, dtype=t.dtype, pin_memory=on_gpu).copy_(t, non_blocking=True)
        self.out = [t if i == me else copies[id(t)] for i, t in enumerate(out)]
        self.into = [
            t if i == me else torch.empty(t.shape, dtype=t.dtype, pin_memory=on_gpu) for i, t in enumerate(into)
        ]
        if on_gpu:
            torch.cuda.current_stream(into[0].device).synchronize()

    def arrival(self, work: Sequence[dist.Work]) -> Arrival:
        """What waits for all of `work`."""
        return Arrival(
            work, [(t, h) for i, (t, h) in enumerate(zip(self._target, self.into, strict=True)) if i != self._me]
        )


class Arrival:
    """As a `dist.Work`: `wait` returns when what was received is queued to come to the device, on the current stream."""

    def __init__(self, work: Sequence[dist.Work], copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self) -> None:
        for work in self._work:
            work.wait()
        for target, received in self._copies:
            target.copy_(received, non_blocking=True)
