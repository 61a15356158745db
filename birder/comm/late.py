"""Numbers that go between host and device while nobody waits for them."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(value: Tensor, device: torch.device) -> Tensor:
    """`value`, of the host, on `device`. Queued on the current stream: the host does not wait until it is there."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


class Late:
    """What a small tensor holds, on its way to the host. On CPU it is there at once."""

    def __init__(self, value: Tensor) -> None:
        """Queued on the current stream."""
        self._event: torch.cuda.Event | None = None
        self._host = value.detach()
        if value.is_cuda:
            pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._host = pinned.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            # Of the tensor's device, where the copy is queued; the current device may be another one.
            self._event.record(torch.cuda.current_stream(value.device))

    @property
    def there(self) -> bool:
        """Whether `read` would not wait. Differs between ranks: nothing that they do together may depend on it."""
        return self._event is None or self._event.query()

    def read(self) -> list[int]:
        """The numbers. Waits for them, which takes no time one step after they were requested."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return [int(x) for x in self._host.numpy().reshape(-1)]

    def __reduce__(self) -> tuple[type[Late], tuple[Tensor]]:
        return Late, (torch.tensor(self.read(), device="cpu"),)
