"""Products of bf16 matrices by the kernels of fp32: the same numbers, where they are wanted and nowhere else."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.config import compose
from experiments.records import record
from experiments.training.products import PRODUCTS, check_device, products_of, slow
from experiments.training.world import world
from launch.errors import UserError
from tests.helpers.ranks import fresh_world

# Both ways add up the same exact products in fp32: results differ by an ulp of bf16 (2^-8) where two orders of a sum
# round apart. Weights move little in three steps.
LOSSES = 2e-3
RUN = [
    "+exp=bert_squad", "optimizer=bertadam", "train.precision=bf16", "workload.attention=eager", "train.max_steps=3",
    "train.timing_warmup=1", "train.threads=1", "wandb=disabled", "cluster.nodes=1", "cluster.ranks_per_node=1",
]  # fmt: skip


class Watched(TorchDispatchMode):
    """Notes the dtype of every product that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def convolved(how: str) -> list[torch.Tensor]:
    """The output of a convolution under autocast, and its gradients: with a bias, and with none and gaps between its taps."""
    torch.manual_seed(2)
    first, second = torch.nn.Conv2d(8, 12, 3, padding=1), torch.nn.Conv2d(12, 6, 3, stride=2, dilation=2, bias=False)
    x = torch.randn(4, 8, 14, 14, requires_grad=True)
    with products_of({"bf16_matmul": how}):
        with torch.autocast("cpu", torch.bfloat16):
            y = second(torch.relu(first(x)))
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    grads = [one.grad for one in (x, first.weight, first.bias, second.weight)]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def learned(how: str) -> list[torch.Tensor]:
    """The output of a small layer with attention under autocast, and its gradients."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(96, 64)
    x = torch.randn(4, 32, 96, requires_grad=True)
    with products_of({"bf16_matmul": how}):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            y = torch.softmax(y @ y.transpose(1, 2), dim=-1) @ y
        y.float().square().sum().backward()
    assert y.dtype is torch.bfloat16
    grads = [one.grad for one in (x, layer.weight, layer.bias)]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def test_a_product_is_the_rounded_one_of_fp32() -> None:
    torch.manual_seed(0)
    a, b, bias = (torch.randn(size).bfloat16() for size in ((48, 96), (96, 64), (64,)))
    with products_of({"bf16_matmul": "fp32"}):
        got = [a @ b, torch.addmm(bias, a, b), torch.bmm(a[None], b[None])[0], torch.addmm(bias, a, b, alpha=2, beta=3)]
    exact = [a.float() @ b.float()] * 3 + [2 * (a.float() @ b.float())]
    for one, product, add in zip(got, exact, (0, bias.float(), 0, 3 * bias.float()), strict=True):
        assert one.dtype is torch.bfloat16
        # A bias is added before the sum is rounded, in an order that is the kernel's.
        assert torch.allclose(one.float(), product + add, rtol=2**-8, atol=1e-6)
    assert torch.equal(got[0], exact[0].bfloat16())


@pytest.mark.parametrize(("of", "tensors"), [(learned, 4), (convolved, 5)])
def test_forward_and_backward_take_the_detour_and_agree_with_native_ones(
    of: Callable[[str], list[torch.Tensor]], tensors: int
) -> None:
    with Watched() as watched:
        native = of("native")
    assert watched.seen == {torch.bfloat16}
    with Watched() as watched:
        ours = of("fp32")
    assert watched.seen == {torch.float32}
    assert len(native) == tensors
    for theirs, mine in zip(native, ours, strict=True):
        scale = theirs.float().abs().max()
        assert (theirs.float() - mine.float()).abs().max() < 2**-6 * scale  # a few roundings one after the other


def test_other_products_are_left_alone() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with products_of({"bf16_matmul": "fp32"}):
        assert torch.equal(a @ b, torch.mm(a, b))
        assert (a.double() @ b.double()).dtype is torch.float64


def train_with(rank: int, size: int, given: list[str]) -> set[torch.dtype]:
    from experiments.training.loop import train

    with Watched() as watched:
        train(compose.make_spec(compose.compose(given)))
    return watched.seen


@pytest.mark.slow
def test_a_run_with_them_is_nearly_the_native_one(tmp_path: Path) -> None:
    losses = {}
    for how in ("native", "fp32"):
        results = tmp_path / how
        given = [*RUN, f"train.bf16_matmul={how}", f"results_dir={results}", f"output_dir={tmp_path}/outputs"]
        (seen,) = fresh_world(train_with, 1, given, grouped=False)
        assert (torch.bfloat16 in seen) == (how == "native")
        (made,) = record.read_all(results)
        assert made.config["train"]["bf16_matmul"] == how
        with open(results / str(made.curve), newline="") as file:
            losses[how] = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert len(losses["native"]) == len(losses["fp32"]) > 1
    for theirs, mine in zip(losses["native"], losses["fp32"], strict=True):
        assert math.isclose(theirs, mine, rel_tol=LOSSES)


def test_where_they_make_no_sense_is_said() -> None:
    for precision in ("fp32", "fp16"):
        given = ["+exp=digits", "optimizer=sgdm", "train.bf16_matmul=fp32", f"train.precision={precision}"]
        with pytest.raises(UserError, match=r"goes with train\.precision=bf16"):
            compose.resolve(compose.compose(given))
    gpu = torch.device("cuda:0")
    with pytest.raises(UserError, match="is for CPUs"):
        check_device({"bf16_matmul": "fp32"}, gpu)
    check_device({"bf16_matmul": "native"}, gpu)
    check_device({"bf16_matmul": "fp32"}, torch.device("cpu"))


def test_a_cpu_that_is_slow_in_bf16_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu, native = torch.device("cpu"), torch.device("cuda:0"), {"precision": "bf16", "bf16_matmul": "native"}
    for fast in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda fast=fast: fast)
        assert slow(native, cpu) is not fast
        assert not slow(native, gpu)
        assert not slow(native | {"bf16_matmul": "fp32"}, cpu)
        assert not slow(native | {"precision": "fp32"}, cpu)


def test_a_gpu_is_told_before_the_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("experiments.training.world.allow_tf32", lambda *_: pytest.fail("torch's settings are changed"))
    spec = compose.make_spec(compose.compose([*RUN, "train.bf16_matmul=fp32"]))
    with pytest.raises(UserError, match=r"is for CPUs.*set train\.bf16_matmul=native"), world(spec):
        pytest.fail("nothing runs")
