"""Timelines from architectures: what is counted, when gradients are ready, which GPUs there are. All on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from birder.predict.architecture import CAST, Work, count
from birder.predict.costs import HOST_US
from birder.predict.gpus import GPU, GPUS, HOPPER, KINDS, MEMORY, REACHED, find


def mlp(batch: int, width: int = 256, layers: int = 3) -> tuple[nn.Module, object]:
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        x = torch.randn(batch, width)
    return net, lambda: net(x).square().mean()


def work(batch: int = 64, precision: str = "fp32", **options: int) -> Work:
    net, loss = mlp(batch, **options)
    return count(net, loss, precision, batch=batch)  # type: ignore[arg-type]


def test_products_are_counted_as_torch_does_by_hand() -> None:
    # Forward 2 b w^2 of each of 3 layers; backward the same for weights, and for the inputs of all but the first.
    assert work(64).tflop * 1e12 == 2 * 64 * 256**2 * (3 + 3 + 2)


def test_products_of_experts_are_counted_as_those_of_the_rows_that_each_one_has() -> None:
    rows, width, wide, experts = 64, 32, 48, 4
    with torch.device("meta"):
        net, x = nn.ParameterList([nn.Parameter(torch.randn(experts, width, wide))]), torch.randn(rows, width)
        x.requires_grad_()
        ends = torch.zeros(experts, dtype=torch.int32)

    def loss() -> Tensor:
        return torch._grouped_mm(x.bfloat16(), net[0], offs=ends).square().mean()

    # Forward, and backward for the weights and for the input.
    assert count(net, loss, "bf16").tflop * 1e12 == 3 * 2 * rows * width * wide


def test_a_product_that_nobody_can_count_is_refused_by_name() -> None:
    with torch.device("meta"):
        net, whole = nn.Linear(32, 32, bias=False), torch.zeros(32, 32, dtype=torch.int8)

    def loss() -> Tensor:
        return net.weight.sum() + torch._int_mm(whole, whole).sum()

    with pytest.raises(ValueError, match="operator _int_mm, a matrix product, are not known"):
        count(net, loss, "fp32")


def test_counting_leaves_the_model_as_it_was() -> None:
    net, loss = mlp(64)
    halves = [count(net, loss, precision).saved_bytes for precision in ("bf16", "fp32", "bf16")]  # type: ignore[arg-type]
    assert halves[0] == halves[2] < halves[1]
    assert {p.dtype for p in net.parameters()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_are_counted_apart(precision: str) -> None:
    net, loss = mlp(64)
    trained = count(net, loss, precision).saved_bytes  # type: ignore[arg-type]
    net[1].requires_grad_(False)  # type: ignore[index]  # the gradient passes through it
    found = count(net, loss, precision)  # type: ignore[arg-type]
    assert found.elements == 2 * 256**2
    # Its input is not kept: the activation of one layer less.
    assert found.saved_bytes == trained - 64 * 256 * (2 if precision == "bf16" else 4)
    t = found.timeline(find("a100"))
    assert (t.frozen, t.frozen_bytes, t.whole) == ((256**2,), 4 * 256**2, 3 * 256**2)


def test_a_kernel_takes_its_operations_and_its_bytes() -> None:
    gpu = find("a100")
    assert gpu.ms(1e12, 0, "bf16") == pytest.approx(1e3 / (312 * REACHED["bf16"]))
    assert gpu.ms(0, 1e9, "bf16") == pytest.approx(1e3 / (2039 * MEMORY))
    assert gpu.ms(1e12, 0, "bf16", "attention") == pytest.approx(gpu.ms(1e12, 0, "bf16") / KINDS["attention"])
    assert gpu.link.gbps == pytest.approx(8 * 230)  # of NVLink's 300 GB/s
    assert find("4090").link.gbps == pytest.approx(8 * 230 * 32 / 300)
    assert find("h100").ms(1e12, 0, "bf16", "attention") == pytest.approx(1e3 / (989 * HOPPER))


@pytest.mark.parametrize("gpu", [g for g in GPUS.values() if "tf32" in g.tflops], ids=lambda g: g.name)
def test_tf32_is_at_least_as_fast_as_fp32(gpu: GPU) -> None:
    for kind in KINDS:
        assert gpu.ms(1e12, 0, "tf32", kind) <= gpu.ms(1e12, 0, "fp32", kind)
    assert find("a100").ms(1e12, 0, "tf32") == pytest.approx(1e3 / (156 * REACHED["tf32"]))


def test_gradients_are_ready_from_the_last_layer_to_the_first_within_backward() -> None:
    t = work(4096, width=2048).timeline(find("a100"))
    ready = [g.ready_ms for g in t.gradients]
    assert ready == sorted(ready, reverse=True)
    assert len(set(ready)) == 3
    assert t.forward_ms < min(ready)
    assert max(ready) <= t.step_ms


def test_a_tied_embedding_is_ready_when_its_last_part_is() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.middle = nn.Embedding(1000, 64), nn.Linear(64, 64)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.middle(self.embedding(tokens)) @ self.embedding.weight.T

    with torch.device("meta"):
        net, tokens = Tied(), torch.zeros(8, 32, dtype=torch.long)
    t = count(net, lambda: net(tokens).square().mean(), "fp32").timeline(find("v100"))
    ready = {g.name: g.ready_ms for g in t.gradients}
    assert max(ready, key=lambda n: ready[n]) == "embedding.weight"
    assert t.elements == 1000 * 64 + 64 * 64 + 64


def test_mixed_precision_moves_half_the_bytes_and_casts_parameters() -> None:
    full, half = work(4096), work(4096, "bf16")
    cast = CAST * (2 * half.elements + 4096 * 256)  # parameters, gradients and the input
    moved = sum(k.nbytes for k in half.kernels) - cast
    assert moved == pytest.approx(sum(k.nbytes for k in full.kernels) / 2, rel=1e-3)
    assert half.saved_bytes == pytest.approx(full.saved_bytes / 2, rel=1e-3)
    assert half.tflop == full.tflop


def attention(causal: bool, size: int = 512) -> Work:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x)
            return nn.functional.scaled_dot_product_attention(q, x, x, is_causal=causal)

    with torch.device("meta"):
        net, x = Own(), torch.randn(2, 4, size, 64)
    return count(net, lambda: net(x).square().mean(), "bf16")


def test_attention_is_fused_counted_and_halved_by_a_causal_mask() -> None:
    def of(found: Work) -> float:
        return sum(k.flops for k in found.kernels if k.kind == "attention")

    assert of(attention(False)) == pytest.approx(3.5 * 4 * 2 * 4 * 512**2 * 64)
    assert of(attention(True)) == of(attention(False)) / 2
    # What it saves grows with the sequence, not with its square.
    assert attention(True, 1024).saved_bytes < 2.1 * attention(True).saved_bytes


def test_a_compiler_fuses_what_does_not_multiply() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mul(2).add(1).exp().sigmoid()

    def of(compiled: bool) -> Work:
        with torch.device("meta"):
            net, x = Chain(), torch.randn(4096, 64)
        return count(net, lambda: net(x).sum(), "fp32", compiled=compiled)

    eager, fused = of(False), of(True)
    assert fused.tflop == eager.tflop
    assert len(fused.kernels) < len(eager.kernels) / 2
    assert sum(k.nbytes for k in fused.kernels) < 0.7 * sum(k.nbytes for k in eager.kernels)


def test_dropout_is_one_kernel_and_none_in_evaluation() -> None:
    def of(p: float) -> int:
        with torch.device("meta"):
            net, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p)), torch.randn(4, 8)
        return len(count(net, lambda: net(x).sum(), "fp32").kernels)

    assert of(0.5) == of(0.0) + 2  # forward and backward


def test_a_small_model_waits_for_the_host() -> None:
    found = work(1, layers=30)
    t = found.timeline(find("h100"))
    forward, backward = (us / 1e3 for us in HOST_US)
    assert t.forward_ms == pytest.approx(found.forward * forward, rel=0.02)
    assert t.step_ms == pytest.approx(t.forward_ms + (len(found.kernels) - found.forward) * backward, rel=0.02)
    assert t.step_ms == pytest.approx(found.timeline(find("b200")).step_ms, rel=0.02)  # no GPU is fast enough


@pytest.mark.parametrize(("limited", "full"), [("a800", "a100"), ("h800", "h100")])
def test_a_gpu_of_limited_nvlink_computes_as_the_full_one_and_sends_slower(limited: str, full: str) -> None:
    assert work(4, "bf16").timeline(find(limited)).step_ms == work(4, "bf16").timeline(find(full)).step_ms
    assert find(limited).link.gbps < find(full).link.gbps


def test_a_parameter_without_gradient_is_named() -> None:
    with torch.device("meta"):
        net, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"1\.weight gets no gradient"):
        count(net, lambda: net[0](x).sum(), "fp32")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("a100", "a100-sxm-80gb"),
        ("A100-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm"),
        ("NVIDIA A800 80GB PCIe", "a800-pcie"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA A30", "a30"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("T4 PCIe", "t4"),
        ("B200 192 GB", "b200"),
        ("L4", "l4"),
        ("l40s", "l40s"),
    ],
)
def test_a_gpu_is_found_however_it_is_written(said: str, name: str) -> None:
    assert find(said).name == name


def test_every_gpu_is_found_by_its_own_name_and_label() -> None:
    for name, gpu in GPUS.items():
        assert find(name) is gpu
        assert find(gpu.label) is gpu
        assert gpu.peak("fp32") < gpu.peak("fp16")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("h1000", "did you mean h100"),
        ("abacus", "there are: v100-sxm"),
        ("MI300X", "there are: v100-sxm"),  # it was "did you mean 3090?"
        ("rtx 4080", "rtx-4090"),
        # Another variant, or two: an answer would be for another GPU than was asked about.
        ("NVIDIA H100 NVL", "h100"),
        ("h100,a100", "did you mean h100, a100"),
        ("a100-sxm-20gb", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "a100-sxm-40gb"),
        ("L40S SXM", "l40s"),
        ("rtx-a6000-ada", "rtx-a6000"),
    ],
)
def test_an_unknown_gpu_is_answered_with_the_nearest(said: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find(said)


def test_a_precision_that_a_gpu_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="V100 SXM 32 GB does not compute in bf16; it has fp32, fp16"):
        work(4, "bf16").timeline(find("v100"))
    with pytest.raises(ValueError, match="precision=bf17 is unknown; did you mean bf16"):
        find("v100").peak("bf17")
