"""`GPU`: what a data sheet says of a GPU, and which share of it training is assumed to reach. Imports no torch.

Peaks are those of dense matrix products. A kernel that does F operations and moves B bytes takes

    (1) t = F / (reached peak) + B / (reached bandwidth)

The two are added up: small and narrow products, which reach little of the peak, move many bytes for what they compute. One
set of shares is meant for every model (`REACHED`, `MEMORY`); `UNSURE` of a time is the interval that a prediction states.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from birder.predict.cluster import NVLINK, Link

REACHED = {"fp32": 0.85, "tf32": 0.35, "bf16": 0.8, "fp16": 0.8}
"""Share of the peak that large matrix products reach. TF32 is far below: its kernels take one layout of operands. Where fp32
would be faster, TF32 is taken to be as fast."""
KINDS = {"": 1.0, "attention": 0.6, "convolution": 0.7}
"""What other kernels that multiply reach, relative to matrix products: fused attention, convolutions."""
MEMORY = 0.85
"""Share of the memory's bandwidth that a kernel reaches."""
UNSURE = 0.3
"""A time from an architecture may be so much shorter or longer, relative: eight of ten published ones are not further off
(results/published/tables/step_times.md)."""
INSIDE_REACHED = NVLINK.gbps / 8 / 300
"""Share of NVLink's or PCIe's rate that large collectives reach inside a node: that of 8 A100."""
PRECISIONS = tuple(REACHED)


@dataclass(frozen=True)
class GPU:
    """A GPU. tflops: peak by precision; gb_per_s: of its memory; gb: its size; inside_gb_per_s: to another GPU of the node,
    each way, by `inside` (NVLink or PCIe); relative: what 16-bit products reach of the peak, with an A100's share as 1;
    attention: share of the peak that fused attention reaches, where it is not that of `KINDS`."""

    name: str
    label: str
    tflops: dict[str, float]
    gb_per_s: float
    gb: float
    inside_gb_per_s: float
    inside: str
    relative: float = 1.0
    attention: float | None = None

    def peak(self, precision: str) -> float:
        """TFLOP/s. Raises ValueError where the GPU does not compute in that precision."""
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision} is unknown{nearest(precision, PRECISIONS)}")
        if precision not in self.tflops:
            raise ValueError(f"{self.label} does not compute in {precision}; it has {', '.join(self.tflops)}")
        return self.tflops[precision]

    def ms(self, flops: float, nbytes: float, precision: str, kind: str = "") -> float:
        """(1), in ms. kind: of `KINDS`."""
        share = KINDS[kind] * REACHED[precision] * (self.relative if precision in ("bf16", "fp16") else 1.0)
        if kind == "attention":
            share = self.attention or share
        rate = share * self.peak(precision)
        if precision == "tf32":
            rate = max(rate, KINDS[kind] * REACHED["fp32"] * self.peak("fp32"))
        compute = flops / (rate * 1e9) if flops else 0.0
        return compute + nbytes / (MEMORY * self.gb_per_s * 1e6)

    def is_called(self, word: str) -> bool:
        """Whether a word of a name fits: its family, "pcie" or "sxm" by its link, its memory within a tenth."""
        if word in ("pcie", "sxm"):
            return (word == "pcie") == (self.inside == "PCIe")
        if memory := re.fullmatch(r"(\d+)gb", word):
            return abs(int(memory[1]) / self.gb - 1) < 0.1
        return word in self.name.split("-")

    @property
    def link(self) -> Link:
        """To the other GPUs of a node, as large collectives find it."""
        rate = INSIDE_REACHED * self.inside_gb_per_s
        return Link(8 * rate, NVLINK.latency_us, source=f"{rate:.3g} GB/s by {self.inside}: assumed")


NVLINK2, NVLINK3, NVLINK4, NVLINK5 = ((gb, "NVLink") for gb in (150.0, 300.0, 450.0, 900.0))
NVLINK_LIMITED = (200.0, "NVLink")
"""Of an A800 and an H800."""
PCIE3, PCIE4, PCIE5 = ((gb, "PCIe") for gb in (16.0, 32.0, 64.0))


def _peaks(*tflops: float) -> dict[str, float]:
    """By precision. fp32 and 16 bits; with fp16 alone where there are two, TF32 between them where there are three."""
    names = {2: ("fp32", "fp16"), 3: ("fp32", "tf32", "bf16", "fp16")}[len(tflops)]
    return dict(zip(names, (*tflops, tflops[-1])))


LIMITED = 1.1
"""Where a multiprocessor does 512 operations in a cycle, a fourth of an A100's, its memory keeps up: an L20, one of these,
reaches 115 of 119.5 TFLOP/s, an A100 271 of 312 (github.com/DefTruth/CUDA-Learn-Notes, hgemm; ml-engineering, below)."""
HOT = 0.88
"""At its power limit an H200 holds 755 of 989 TFLOP/s, a B200 1429 of 2250 (ml-engineering, below; at first 834, 1745)."""
HOPPER = 0.35
"""What FlashAttention-2, torch's, reaches on an H100 (arXiv 2407.08608)."""
_A100, _H100, _H100_PCIE = _peaks(19.5, 156.0, 312.0), _peaks(67.0, 495.0, 989.0), _peaks(51.0, 378.0, 756.0)
GPUS: dict[str, GPU] = {
    g.name: g
    for g in (
        GPU("v100-sxm", "V100 SXM 32 GB", _peaks(15.7, 125.0), 900, 32, *NVLINK2, 0.75),
        GPU("v100-sxm-16gb", "V100 SXM 16 GB", _peaks(15.7, 125.0), 900, 16, *NVLINK2, 0.75),
        GPU("v100-pcie", "V100 PCIe 16 GB", _peaks(14.0, 112.0), 900, 16, *PCIE3, 0.75),
        GPU("t4", "T4", _peaks(8.1, 65.0), 320, 16, *PCIE3),
        GPU("a100-sxm-80gb", "A100 SXM 80 GB", _A100, 2039, 80, *NVLINK3),
        GPU("a100-sxm-40gb", "A100 SXM 40 GB", _A100, 1555, 40, *NVLINK3),
        GPU("a100-pcie-80gb", "A100 PCIe 80 GB", _A100, 1935, 80, *PCIE4, 0.96),
        GPU("a100-pcie-40gb", "A100 PCIe 40 GB", _A100, 1555, 40, *PCIE4, 0.96),
        GPU("a800-sxm", "A800 SXM", _A100, 2039, 80, *NVLINK_LIMITED),
        GPU("a800-pcie", "A800 PCIe", _A100, 1935, 80, *PCIE4, 0.96),
        GPU("a30", "A30", _peaks(10.3, 82.0, 165.0), 933, 24, *PCIE4),
        GPU("h100-sxm", "H100 SXM", _H100, 3350, 80, *NVLINK4, HOT, HOPPER),
        GPU("h100-pcie", "H100 PCIe", _H100_PCIE, 2000, 80, *PCIE5, HOT, HOPPER),
        GPU("h800-sxm", "H800 SXM", _H100, 3350, 80, *NVLINK_LIMITED, HOT, HOPPER),
        GPU("h200", "H200", _H100, 4800, 141, *NVLINK4, HOT, HOPPER),
        GPU("h20", "H20", _peaks(44.0, 74.0, 148.0), 4000, 96, *NVLINK4),
        GPU("b200", "B200", _peaks(75.0, 1125.0, 2250.0), 8000, 180, *NVLINK5, 0.73, HOPPER),
        GPU("l40s", "L40S", _peaks(91.6, 183.0, 362.0), 864, 48, *PCIE4),
        GPU("l20", "L20", _peaks(59.8, 59.8, 119.5), 864, 48, *PCIE4, LIMITED),
        GPU("l4", "L4", _peaks(30.3, 60.0, 121.0), 300, 24, *PCIE4),
        GPU("a10", "A10", _peaks(31.2, 62.5, 125.0), 600, 24, *PCIE4),
        GPU("a10g", "A10G", _peaks(35.0, 35.0, 70.0), 600, 24, *PCIE4, LIMITED),
        GPU("a40", "A40", _peaks(37.4, 74.8, 149.7), 696, 48, *PCIE4),
        GPU("rtx-3090", "RTX 3090", _peaks(35.6, 35.6, 71.0), 936, 24, *PCIE4, LIMITED),
        GPU("rtx-4090", "RTX 4090", _peaks(82.6, 82.6, 165.2), 1008, 24, *PCIE4, LIMITED),
        GPU("rtx-5090", "RTX 5090", _peaks(104.8, 104.8, 209.5), 1792, 32, *PCIE5, LIMITED),
        GPU("rtx-a6000", "RTX A6000", _peaks(38.7, 77.4, 154.8), 768, 48, *PCIE4),
    )
}
"""From the makers' data sheets. The first of a family is meant where no variant is named: A100 is the one with 80 GB and SXM.
RTX: products with sums in fp32, which training uses; PCIe: one way, of 16 lanes. `relative` of A100, H100, H200 and B200:
rates of matrix products that were measured (github.com/stas00/ml-engineering, compute/accelerator); of V100: the
profile of BERT-Large (experiments/cells/claimed.py); of others it is not known."""
WORDS = {
    *("", "nvidia", "geforce", "tesla", "quadro", "tensor", "core", "gpu", "graphics", "card"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e"),
}
"""What may stand in a GPU's name without telling it from others."""


def find(name: str) -> GPU:
    """The GPU of a name as people, data sheets or `torch.cuda.get_device_name` write it.

    Raises ValueError, also for a variant that is not among `GPUS`: an H100 NVL, a slice of one (MIG), other memory.
    """
    plain = re.sub(r"\b(\d\d+) ?gb?\b|\b(40|80)\b", r"\1\2gb", re.sub(r"sxm\d", "sxm", name.lower()))
    said = [w for w in (w.removeprefix("rtx") for w in re.findall(r"[a-z0-9]+", plain)) if w not in WORDS]
    families = {g.name.removeprefix("rtx-").split("-")[0]: g for g in reversed(GPUS.values())}
    family = next((w for w in said if w in families), None)
    variants = [g for g in GPUS.values() if family in g.name.split("-")]
    # The first of equals.
    best = max(variants, key=lambda g: sum(g.is_called(w) for w in said), default=None)
    if best is None or not all(map(best.is_called, said)):
        raise ValueError(f"no GPU {name!r} is known{nearest(name.lower(), [*GPUS, *families], GPUS)}")
    return best


def near(name: str, known: Iterable[str]) -> list[str]:
    """The names that were probably meant, the nearest first; none where nothing is near."""
    # The usual cutoff, 0.6, takes a 3090 for an MI300X.
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.61)


def nearest(name: str, known: Iterable[str], shown: Iterable[str] = ()) -> str:
    """What follows on "is unknown": the nearest names, or where nothing is near, all that are `shown`, by default `known`."""
    every = list(dict.fromkeys(known))
    close = near(name, every)
    return f"; did you mean {', '.join(close)}?" if close else f"; there are: {', '.join(list(shown) or every)}"
