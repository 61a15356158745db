"""Messages staged in host memory, as those of GPU tensors on gloo are; here CPU tensors play the GPU's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import birder
from birder.comm import Topology, staged
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import slow

METHODS = {
    "SGDM": {"lr": 0.1},
    "Birder": {},
    "Birder one-phase": {"reduce": "one_phase"},
    "OneBitAdam": {"warmup_steps": 2},
    "OneBitLAMB": {"warmup_steps": 2},
    "CSER": {"gradient_ratio": 2, "reset_every": 3, "block": 8},
    "SLAMB": {"sync_every": 3},
}


def trained(rank: int, world: int, stage: bool) -> list:
    """Parameters of each method after 5 steps, and how many exchanges were staged."""
    count = 0
    made = staged.Staging.__init__

    def counted(self, *arguments):
        nonlocal count
        count += 1
        made(self, *arguments)

    staged.Staging.__init__ = counted  # type: ignore[method-assign]
    staged.needed = lambda tensor: stage  # type: ignore[assignment]
    results = []
    for name, options in METHODS.items():
        for hierarchical in (False, True) if world == 4 and name in ("Birder", "OneBitAdam") else (False,):
            model = toy.make()
            ddp = DistributedDataParallel(model, find_unused_parameters=True)
            optimizer = getattr(birder, name.split()[0])(model.parameters(), **{"lr": 0.01, **options})
            topology = Topology(2, 2) if hierarchical else Topology(1, world)
            attachment = birder.attach(
                ddp,
                optimizer,
                hierarchical=hierarchical,
                topology=topology,
                overlap=name != "OneBitAdam",
                unit_mb=0.001,
            )
            toy.train(ddp, optimizer, rank, range(5))
            attachment.close()
            results.append(toy.flat(model).numpy())
    return [*results, count]


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, slow(4)])
def test_staged_messages_are_the_same_messages(world):
    plain, through_host = run_ranks(trained, world, False), run_ranks(trained, world, True)
    for a, b in zip(plain, through_host, strict=True):
        assert a[-1] == 0
        assert b[-1] > 100
        for x, y in zip(a[:-1], b[:-1], strict=True):
            assert (x == y).all()


def test_own_entries_stay_and_a_tensor_sent_to_all_is_copied_once():
    part = torch.arange(4.0)
    into = list(torch.zeros(3, 4))
    staging = staged.Staging([part] * 3, into, me=1)
    assert staging.out[1] is part
    assert staging.into[1] is into[1]
    assert staging.out[0] is staging.out[2]
    assert staging.out[0] is not part
    staging.into[0].fill_(7.0)
    staging.into[2].fill_(9.0)
    assert not into[0].any()  # until it is waited for
    staging.bring()
    assert [row[0].item() for row in into] == [7.0, 0.0, 9.0]
