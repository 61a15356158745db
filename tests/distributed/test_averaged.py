"""`optimizer.averaged()`: weights that are loaded inside, and a rank that comes late."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from birder import attach
from birder.optim import state
from tests.helpers.ordinary import LOCAL, Trunk, apart, train
from tests.helpers.ranks import run_ranks


def averaged_late(rank: int, world: int) -> list[str]:
    """Rank 1 comes to `averaged` once rank 0 has been warned; of what."""
    model = Trunk()
    optimizer = LOCAL["QSparse"](model.parameters())
    attachment = attach(DistributedDataParallel(model), optimizer)
    store, usual, seen = dist.distributed_c10d._get_default_store(), state.ALONE_S, []

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if category is RuntimeWarning:
            seen.append(str(message))
            store.set("warned", "")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show  # type: ignore[assignment]
            if rank == 0:
                state.ALONE_S = 0.2
            else:
                store.wait(["warned"])
            with optimizer.averaged():
                pass
    finally:
        state.ALONE_S = usual
        attachment.close()
    return seen


def loaded_inside(rank: int, world: int) -> dict[str, tuple[bool, bool, bool]]:
    """The best weights of one layer are loaded again where they are evaluated."""
    found = {}
    for name, make in LOCAL.items():
        model = Trunk()
        optimizer = make(model.parameters())
        ddp = DistributedDataParallel(model)
        attachment = attach(ddp, optimizer)
        train(ddp, optimizer, rank, 2)
        with optimizer.averaged():
            best = {k: v.clone() for k, v in model.first.state_dict().items()}
        train(ddp, optimizer, rank, 2, seed=1)
        own = [p.detach().clone() for p in model.parameters()]
        with optimizer.averaged():
            swapped = [p.detach().clone() for p in model.last.parameters()]
            with torch.no_grad():
                for p, v in zip(
                    model.last.parameters(), swapped, strict=True
                ):  # as an average of weights, and put back
                    p.mul_(0.5)
                    p.copy_(v)
            model.first.load_state_dict(best)
        now = {k: v.clone() for k, v in model.first.state_dict().items()}
        kept = [torch.equal(p, v) for p, v in zip(model.parameters(), own, strict=True)]
        names = [n for n, _ in model.named_parameters()]
        others = all(same for n, same in zip(names, kept, strict=True) if not n.startswith("first."))
        train(ddp, optimizer, rank, 1, seed=2)
        with optimizer.averaged():
            together = all(apart(p) == 0.0 for p in model.parameters())
        found[name] = all(torch.equal(now[k], best[k]) for k in best), others, together
        attachment.close()
    return found


def test_weights_that_are_loaded_inside_averaged_stay() -> None:
    for found in run_ranks(loaded_inside, 2):
        assert found == dict.fromkeys(LOCAL, (True, True, True))


def test_a_rank_that_waits_in_averaged_says_for_whom() -> None:
    first, second = run_ranks(averaged_late, 2)
    assert len(first) == 1
    assert "every rank" in first[0]
    assert second == []
