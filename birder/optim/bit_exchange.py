"""What methods share that send one bit for each element and no scale: Birder, sigma-delta Adam, Distributed Lion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from birder import kernels
from birder.comm import Communicator, GatherShards, GatherWorkers, Requests
from birder.optim.layout import Unit


def buffers(unit: Unit, comm: Communicator) -> dict[str, Tensor]:
    """This rank's shard, what workers have sent [workers, c], the server's or the owner's part, the result."""
    bits = unit.padded // comm.shards // 8
    sizes = {"bits": bits, "rows": bits, "chunk": bits // comm.workers, "result": unit.padded // 8}
    return {name: unit.bytes(size) for name, size in sizes.items()}


def packed(elements: slice, n: int = 1) -> slice:
    """Where the bits of these elements stand; or one worker's share of them, of n."""
    return slice(elements.start // (8 * n), elements.stop // (8 * n))


def columns(rows: Tensor, part: slice) -> Tensor:
    """These bytes of each worker: uint8[n, c] -> uint8[n, part], contiguous. All of them are not copied."""
    return rows[:, part].contiguous()


def one_phase(
    unit: Unit, comm: Communicator, owners: dict[str, Any], settle: Callable[..., None] | None = None
) -> Requests[Tensor]:
    """Every word of the result from the worker that owns it (birder/kernels/one_phase.py): uint8[padded/8].

    The bits are in `unit.buffers`. owners: options of `kernels.owned`. settle: told where in the shard this rank's words are.
    """
    bits, chunk, runs, n = unit.buffers["bits"], unit.buffers["chunk"], unit.shard_runs(comm), comm.workers
    for at, start in runs:
        mine = {"n": n, "worker": comm.worker, "start": start, **owners}
        kernels.owned(bits[packed(at)], **mine, out=chunk[packed(at, n)])
        if settle is not None:
            settle(at, bits[packed(at)], **mine)
    rows = yield GatherWorkers(chunk, unit.buffers["rows"])
    for at, start in runs:
        kernels.assemble(columns(rows, packed(at, n)), start=start, **owners, out=bits[packed(at)])
    return (yield GatherShards(bits, unit.buffers["result"]))


def move(unit: Unit, decay: float) -> None:
    """x = x - lr q - lr decay x with the bits q of `unit.result`; coordinates that nobody has seen stay."""
    lr, active = unit.group["lr"], unit.state.get("active")
    kernels.apply_bits(unit.params, unit.offsets, unit.result, lr=lr, decay=lr * decay, active=active)
