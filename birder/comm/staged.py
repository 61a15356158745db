"""Messages of GPU tensors on gloo, which sends none itself: through pinned memory of the host.

Several ranks can then share one GPU, which NCCL refuses: all that is tested with several ranks runs on one card. The host
waits for what is sent to be there, so this is for correctness and accuracy, not for speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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

        def like(t: Tensor) -> Tensor:
            return torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=on_gpu)

        copies: dict[int, Tensor] = {}
        for i, t in enumerate(out):
            if i != me and id(t) not in copies:
                copies[id(t)] = like(t).copy_(t, non_blocking=True)
        self.out = [t if i == me else copies[id(t)] for i, t in enumerate(out)]
        self.into = [t if i == me else like(t) for i, t in enumerate(into)]
        if on_gpu:
            torch.cuda.current_stream(into[0].device).synchronize()

    def bring(self) -> None:
        """Queues what was received to come to the device, on the current stream."""
        for i, (target, received) in enumerate(zip(self._target, self.into, strict=True)):
            if i != self._me:
                target.copy_(received, non_blocking=True)
