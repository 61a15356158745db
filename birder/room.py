"""Room that is used again in every step, so that a step allocates nothing once the first one is over."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Empty = Callable[..., Tensor]
"""What makes an uninitialised tensor, called as torch.empty is: `torch.empty` itself or `Room.empty`."""


class Room:
    """Buffers handed out in the order of the requests, the same ones after each `rewind`.

    A unit asks for the same sizes in the same order in every step, so the k-th request finds the k-th buffer large enough;
    one that is not is replaced. What was handed out is valid until the next `rewind`.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._next = 0

    def rewind(self) -> None:
        """Begins again with the first buffer."""
        self._next = 0

    def empty(self, size: int | tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """As `torch.empty`, on the same device in all calls."""
        nbytes = dtype.itemsize * (size if isinstance(size, int) else math.prod(size))
        place, self._next = self._next, self._next + 1
        if place == len(self._kept):
            self._kept.append(torch.empty(0, dtype=torch.uint8, device=device))
        if self._kept[place].numel() < nbytes:
            self._kept[place] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._kept[place][:nbytes].view(dtype).view(size)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._kept)
