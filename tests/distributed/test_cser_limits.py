"""CSER's settings at which it must be another method, written down here with torch's own SGD."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from birder import CSER, EFSGD, QSparseLocalSGD, attach, overall_ratio
from tests.helpers import toy
from tests.helpers.ranks import run_ranks
from tests.helpers.virtual import World

WORLD, STEPS, LR, H = 3, 40, 0.1, 4
# Sums in another order, and products fused with sums, differ by rounding, which gradients at slightly different points
# amplify; parameters are of size 1.
TOLERANCE = 2e-5
NONE = {"gradient_ratio": None}

CASES: dict[str, tuple[type, dict]] = {
    "all is sent": (CSER, {"gradient_ratio": 1, "model_ratio": 1, "reset_every": H}),
    "no error to reset": (CSER, {"gradient_ratio": 1, "model_ratio": 8, "reset_every": 1}),
    "model sent in each step": (CSER, {**NONE, "model_ratio": 1, "reset_every": 1, "implementation": "II"}),
    "error sent in each step": (CSER, {"gradient_ratio": 8, "model_ratio": 1, "reset_every": 1}),
    "released, all is sent": (CSER, {"gradient_ratio": 1, "model_ratio": 1, "reset_every": H, "variant": "released"}),
    "EF-SGD, all is sent": (EFSGD, {"ratio": 1}),
    "QSparse, all is sent": (QSparseLocalSGD, {"ratio": 1, "sync_every": 1}),
    "local SGD": (CSER, {**NONE, "model_ratio": 1, "reset_every": H, "implementation": "II"}),
    "local SGD, infinite ratio": (
        CSER,
        {"gradient_ratio": math.inf, "model_ratio": 1, "reset_every": H, "implementation": "I"},
    ),
    "local SGD, released": (CSER, {**NONE, "model_ratio": 1, "reset_every": H, "variant": "released"}),
    "local SGD by QSparse": (QSparseLocalSGD, {"ratio": 1, "sync_every": H}),
    "CSER-PL": (CSER, {**NONE, "model_ratio": 4, "reset_every": H, "implementation": "II", "block": 8}),
    "CSER-PL, released": (CSER, {**NONE, "model_ratio": 4, "reset_every": H, "variant": "released", "block": 8}),
    "EF-SGD": (EFSGD, {"ratio": 4, "block": 8}),
    "QSparse, H = 1": (QSparseLocalSGD, {"ratio": 4, "sync_every": 1, "block": 8}),
}
SGD = list(CASES)[:7]
LOCAL = list(CASES)[7:11]


def virtual_run(rank: int, world: int) -> list[dict]:
    """Of each of WORLD virtual ranks: the parameters, and the bytes of every step."""
    results: list[dict] = [{} for _ in range(WORLD)]
    for name, (cls, options) in CASES.items():
        made = World(lambda p, cls=cls, options=options: cls(p, LR, **options), WORLD)
        sent = []
        for step in range(1, STEPS + 1):
            made.ranks.counter.reset()
            made.step(step)
            sent.append([counter.total for counter in made.counters])
        for w, x in enumerate(made.models()):
            results[w][name] = (x.numpy(), [of_step[w] for of_step in sent])
    return results


@functools.cache
def runs() -> list[dict]:
    return run_ranks(virtual_run, 1)[0]


def torch_sgd(every: int, world: int = WORLD) -> torch.Tensor:
    """`world` models, each stepped by torch.optim.SGD on its own batches, and averaged every `every` steps."""
    torch.set_num_threads(1)
    models = [toy.make() for _ in range(world)]
    optimizers = [torch.optim.SGD(m.parameters(), LR, momentum=0.9, nesterov=True) for m in models]
    for step in range(1, STEPS + 1):
        for w, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            toy.loss(model, w, step).backward()
            optimizer.step()
        if step % every == 0:
            mean = torch.stack([toy.flat(m) for m in models]).mean(0)
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return toy.flat(models[0])


def torch_data_parallel_sgd() -> torch.Tensor:
    """One model, stepped on the mean of the losses of all workers."""
    model = toy.make()
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=0.9, nesterov=True)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        torch.stack([toy.loss(model, w, step) for w in range(WORLD)]).mean().backward()
        optimizer.step()
    return toy.flat(model)


@pytest.mark.parametrize("name", SGD)
def test_with_everything_sent_it_is_sgd(name):
    expected = torch_data_parallel_sgd().numpy()
    for r in runs():
        assert abs(r[name][0] - expected).max() < TOLERANCE
    assert abs(runs()[0]["local SGD"][0] - expected).max() > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_local_sgd_averages_the_whole_model_every_h_steps(name):
    expected = torch_sgd(H).numpy()
    for r in runs():
        x, sent = r[name]
        assert abs(x - expected).max() < TOLERANCE
        assert all((n > 0) == (step % H == 0) for step, n in enumerate(sent, 1))
    assert all((r["local SGD"][0] == runs()[0]["local SGD"][0]).all() for r in runs())  # STEPS is a multiple of H


def test_where_no_gradient_is_sent_the_released_form_is_the_papers():
    for r in runs():
        assert (r["CSER-PL"][0] == r["CSER-PL, released"][0]).all()
        assert r["CSER-PL"][1] == r["CSER-PL, released"][1]
    assert abs(runs()[0]["CSER-PL"][0] - runs()[1]["CSER-PL"][0]).max() > 100 * TOLERANCE


def test_qsparse_that_synchronises_in_each_step_is_error_feedback_sgd():
    for r in runs():
        assert abs(r["EF-SGD"][0] - r["QSparse, H = 1"][0]).max() < TOLERANCE
        assert r["EF-SGD"][1] == r["QSparse, H = 1"][1]
    assert abs(runs()[0]["EF-SGD"][0] - torch_data_parallel_sgd().numpy()).max() > 100 * TOLERANCE


def counted_run(rank: int, world: int, d: int, cls: type, options: dict) -> tuple:
    model = torch.nn.Linear(d, 1, bias=False)
    ddp = DistributedDataParallel(model)
    optimizer = cls(model.parameters(), LR, block=16, **options)
    attachment = attach(ddp, optimizer, unit_mb=0.001)
    for _ in range(16):
        optimizer.zero_grad()
        ddp(torch.ones(1, d)).sum().backward()
        optimizer.step()
    return attachment.counter.total / 16, optimizer.steps


RATIOS = [
    (CSER, {"gradient_ratio": 8, "model_ratio": 2, "reset_every": 4}, overall_ratio(8, 2, 4)),
    (CSER, {"gradient_ratio": None, "model_ratio": 4, "reset_every": 4}, overall_ratio(None, 4, 4)),
    (CSER, {"gradient_ratio": 8, "model_ratio": 2, "reset_every": 4, "variant": "released"}, 4 / (3 / 8 + 1 / 2)),
    (QSparseLocalSGD, {"ratio": 4, "sync_every": 8}, 32),
    (EFSGD, {"ratio": 8}, 8),
]


@pytest.mark.parametrize(("cls", "options", "ratio"), RATIOS)
def test_bytes_per_step_are_32_bits_over_the_ratio(cls, options, ratio):
    d, world = 16 * 8 * 6, 2
    expected = 2 * (world - 1) / world * 4 * d / ratio
    if cls is QSparseLocalSGD:  # a byte in each synchronisation says whether a script has changed parameters
        expected += (world - 1) / options["sync_every"]
    for sent, _ in run_ranks(counted_run, world, d, cls, options):
        assert sent == pytest.approx(expected, rel=1e-12)


def test_a_half_precision_wire_halves_updates_but_not_models():
    d = 16 * 8 * 6
    for options, factor in (
        ({"gradient_ratio": 8, "model_ratio": 2, "reset_every": 32}, 2),
        ({"gradient_ratio": None, "model_ratio": 2, "reset_every": 1, "implementation": "II"}, 1),
    ):
        exact, half = (run_ranks(counted_run, 2, d, CSER, {**options, "wire": wire})[0][0] for wire in ("fp32", "bf16"))
        assert exact == pytest.approx(factor * half)
