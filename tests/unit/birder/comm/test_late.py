"""Numbers on their way to the host: which stream their event is recorded on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from birder.comm.late import Late


class OnSecondGpu:
    """A tensor on cuda:1, while cuda:0 is the current device."""

    is_cuda, device, dtype, shape = True, torch.device("cuda", 1), torch.int64, (1,)

    def detach(self) -> OnSecondGpu:
        return self


def test_a_number_is_there_when_the_stream_of_its_own_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is queued on that stream; an event of the current device's would be over before it."""
    recorded = []
    copied = []

    def empty(shape, dtype, device, pin_memory):
        assert (device, pin_memory) == ("cpu", True)
        return SimpleNamespace(copy_=lambda value, non_blocking: copied.append(value.device))

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    monkeypatch.setattr(
        torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream=None: recorded.append(stream))
    )
    Late(OnSecondGpu())  # type: ignore[arg-type]
    assert copied == [torch.device("cuda", 1)]
    assert recorded == [("stream of", torch.device("cuda", 1))]
