"""Tables of launches are kept: also those of a model that needs more in a step than there is room for at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from birder.kernels import segments


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ROOM", 4)
    monkeypatch.setattr(segments, "_made", segments.SegmentCache())


def steps(number: int, tables: int) -> list[list[Any]]:
    """What `launches` answers in some steps, of so many tensors each."""
    tensors = [torch.zeros(32) for _ in range(tables)]
    kinds = (torch.float32,)
    return [[segments.launches([t], [0], kinds)[0] for t in tensors] for _ in range(number)]


@pytest.mark.parametrize("tables", [3, 4, 5, 40])
def test_a_step_finds_what_an_earlier_one_has_made(tables: int) -> None:
    *_, before, last = steps(4, tables)
    assert all(a is b for a, b in zip(before, last, strict=True))
    assert len(segments._made) == tables


def test_what_never_comes_again_takes_no_room() -> None:
    kept = [torch.zeros(32) for _ in range(100)]  # addresses that differ
    for t in kept:
        segments.launches([t], [0], (torch.float32,))
    assert len(segments._made) == segments._made.room == 4
