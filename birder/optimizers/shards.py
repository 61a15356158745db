"""Units of parameters that FSDP has sharded: where this rank's shards stand, and which element numbers they have."""

from __future__ import annotations

from torch import Tensor

from birder.optimizers.layout import Unit, local, round_up


def first_element(p: Tensor) -> int:
    """Number within a parameter of the first element on this rank. p: a DTensor, sharded over its first dimension.

    FSDP gives every rank ceil(rows / ranks) rows while there are any.
    """
    mesh = p.device_mesh  # type: ignore[attr-defined]
    rows = -(-p.shape[0] // mesh.size())
    return min(mesh.get_local_rank() * rows, p.shape[0]) * (p.numel() // p.shape[0])


def lay_out(unit: Unit, multiple: int) -> None:
    """Turns a unit cut from whole parameters into one of the shards on this rank, a run of numbers for each of them.

    Elements keep their numbers of the unit of whole parameters, so that random numbers do not depend on the number of
    shards. A shard begins where it would within a run of `multiple` elements there: what belongs together in such a run (the
    words of bits among which `reduce="one_phase"` shares out workers) stays together.
    """
    places, end = [], 0
    unit.params = [local(p) for p in unit.wholes]
    for p, shard, offset in zip(unit.wholes, unit.params, unit.offsets, strict=True):
        first = offset + first_element(p)
        inside = first % multiple if shard.numel() else 0
        places.append(end + inside)
        if shard.numel():
            unit.runs.append((end, unit.start + first - inside))
            end += round_up(inside + shard.numel(), multiple)
    unit.offsets, unit.numel = places, max(end, multiple)


def refresh(unit: Unit) -> None:
    """Takes the shards anew: FSDP may have put them elsewhere since (lazy initialisation, a loaded state)."""
    unit.params = [local(p) for p in unit.wholes]
