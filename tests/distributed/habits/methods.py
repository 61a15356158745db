"""The methods of the table, with options that bring every phase of them into a few steps on a small model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import birder
from birder.optim.local_steps import LocalSteps


@dataclass(frozen=True)
class Method:
    """elementwise: what one parameter does depends on its own gradients alone, not on other parameters of its unit.

    norms:  last bits depend on memory formats: of lengths of whole tensors by the order of a sum, of AdamW by its fused step.
    scaled: the step depends on the parameter's value (trust ratios, weight decay).
    """

    cls: str
    options: dict[str, Any] = field(default_factory=dict)
    elementwise: bool = True
    norms: bool = False
    scaled: bool = False

    @property
    def torch(self) -> bool:
        return self.cls.startswith("torch.")

    @property
    def type(self) -> Any:
        return getattr(torch.optim, self.cls[6:]) if self.torch else getattr(birder, self.cls)

    @property
    def local(self) -> bool:
        return not self.torch and self.type.local_models

    @property
    def meets(self) -> int:
        """Every so many steps of a rank alone, ranks meet at a common point; 0: they do not train alone."""
        return 0 if self.torch or not issubclass(self.type, LocalSteps) else self.options["sync_every"]

    def brings_together(self, t: int) -> bool:
        """Whether step t averages all models, also what has no gradient in it: of SLAMB's released forms 1, 4, 7, ..."""
        return "form" in self.options and t % self.options["sync_every"] == 1

    @property
    def compressed(self) -> bool:
        return not self.torch and self.type.compressed

    @property
    def clips(self) -> bool:
        return "max_grad_norm" in self.options

    @property
    def sums_over_shards(self) -> bool:
        """Whether ranks of an FSDP replica meet in every step, as in torch's clip_grad_norm_: all of them must make it."""
        return self.cls in ("BertAdam", "LAMB", "OneBitLAMB") or self.clips

    @property
    def averages(self) -> bool:
        """Whether there are steps in which gradients are averaged in full precision."""
        return not self.compressed or "warmup_steps" in self.options

    @property
    def on_shards(self) -> bool:
        return self.torch or self.type.on_shards

    def add(self, optimizer: Any, params: list[torch.nn.Parameter]) -> None:
        for group in by_dimensions(params) if self.cls == "Muon" else [{"params": params}]:
            optimizer.add_param_group(group)

    def make(self, params: Any, **more: Any) -> Any:
        return self.type(by_dimensions(params) if self.cls == "Muon" else params, **(self.options | more))


def by_dimensions(params: Any) -> list[dict[str, Any]]:
    """Groups for Muon, which takes matrices alone: what has fewer dimensions goes to its AdamW."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    split = []
    for group in groups:
        own = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for muon in (True, False):
            some = [p for p in own if ((p[1] if isinstance(p, tuple) else p).ndim >= 2) is muon]
            split += [{**group, "params": some, "muon": muon}] if some else []
    return split


_CSER = {"lr": 0.01, "gradient_ratio": 2, "model_ratio": 2, "reset_every": 3, "block": 8}
_ONEBIT = {"lr": 1e-3, "eps": 1e-4, "warmup_steps": 3}
_ZERO_ONE = {"lr": 5e-5, "eps": 1e-4, "warmup_steps": 3, "local_doubling": 2, "local_limit": 4}
_SLAMB = {"lr": 1e-2, "sync_every": 3, "dense_below": 40, "fraction": 0.25}
_LOCO = {"lr": 1e-3, "sync_every": 3, "top_k": 4, "chunk": 32, "weight_decay": 0.0}
METHODS = {
    "torch SGD": Method("torch.SGD", {"lr": 0.01, "momentum": 0.9}),
    "torch AdamW": Method("torch.AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
    "SGDM": Method("SGDM", {"lr": 0.01}),
    "AdamW": Method("AdamW", {"lr": 1e-3, "weight_decay": 0.0}, norms=True),
    "BertAdam": Method("BertAdam", {"lr": 1e-3, "weight_decay": 0.0}, norms=True),
    "LAMB": Method("LAMB", {"lr": 1e-3}, norms=True, scaled=True),
    "Muon": Method("Muon", {"lr": 1e-3, "weight_decay": 0.0}, norms=True),
    "Birder": Method("Birder", {"lr": 1e-3}),
    "Birder decay": Method("Birder", {"lr": 1e-3, "weight_decay": 0.1}, scaled=True),
    "Birder coupled decay": Method("Birder", {"lr": 1e-3, "weight_decay": 0.1, "decoupled": False}, scaled=True),
    "Birder hold": Method("Birder", {"lr": 1e-3, "idle": "hold"}),
    "Birder beta2": Method("Birder", {"lr": 1e-3, "beta2": 0.99}),
    "Birder weyl": Method("Birder", {"lr": 1e-3, "bits": "weyl"}),
    "Birder one phase": Method("Birder", {"lr": 1e-3, "reduce": "one_phase"}, elementwise=False),
    "Birder no bits": Method("Birder", {"lr": 1e-3, "bits": "none"}),
    "Birder u": Method("Birder", {"lr": 1e-3, "intra": "u"}),
    "Birder clipped": Method("Birder", {"lr": 1e-3, "max_grad_norm": 5.0}, elementwise=False, norms=True),
    "Lion": Method("Lion", {"lr": 1e-3}),
    "Lion average": Method("Lion", {"lr": 1e-3, "vote": "average"}),
    "SigmaDeltaAdam": Method("SigmaDeltaAdam", {"lr": 1e-3}),
    "SigmaDeltaAdam local": Method("SigmaDeltaAdam", {"lr": 1e-3, "variance": "local", "errors": "int8"}),
    "SigmaDeltaAdam one phase": Method(
        "SigmaDeltaAdam", {"lr": 1e-3, "variance": "shared", "reduce": "one_phase"}, elementwise=False
    ),
    "EfficientAdam": Method("EfficientAdam", {"lr": 1e-3}, elementwise=False),
    "OneBitAdam": Method("OneBitAdam", _ONEBIT, elementwise=False),
    "OneBitAdam decay": Method("OneBitAdam", _ONEBIT | {"weight_decay": 0.1}, elementwise=False, scaled=True),
    "OneBitLAMB": Method("OneBitLAMB", _ONEBIT, elementwise=False, norms=True, scaled=True),
    "ZeroOneAdam": Method("ZeroOneAdam", _ZERO_ONE, elementwise=False),
    "ZeroOneAdam deepspeed": Method("ZeroOneAdam", _ZERO_ONE | {"variant": "deepspeed"}, elementwise=False),
    "CSER": Method("CSER", _CSER),
    "CSER R_C1=1": Method("CSER", _CSER | {"model_ratio": 1}),
    "CSER II": Method("CSER", _CSER | {"implementation": "II"}),
    "CSER released": Method("CSER", _CSER | {"variant": "released"}),
    "CSER decay": Method("CSER", _CSER | {"weight_decay": 0.1}, scaled=True),
    "CSER top-k": Method("CSER", _CSER | {"compressor": "top_k"}),
    "CSEA": Method("CSER", _CSER | {"gradient_ratio": None}),
    "local SGD": Method("CSER", _CSER | {"gradient_ratio": None, "model_ratio": 1, "implementation": "II"}),
    "EFSGD": Method("EFSGD", {"lr": 0.01, "ratio": 2, "block": 8}),
    "EFSGD released": Method(
        "EFSGD", {"lr": 0.01, "ratio": 2, "block": 8, "variant": "released", "weight_decay": 0.1}, scaled=True
    ),
    "EF21SGDM": Method("EF21SGDM", {"lr": 0.1, "ratio": 2, "block": 8}),
    "QSparseLocalSGD": Method("QSparseLocalSGD", {"lr": 0.01, "ratio": 2, "sync_every": 3, "block": 8}),
    "SLAMB": Method("SLAMB", _SLAMB, norms=True, scaled=True),
    "SLAMB v1": Method("SLAMB", _SLAMB | {"form": "v1"}, norms=True, scaled=True),
    "SLAMB v2": Method("SLAMB", _SLAMB | {"form": "v2"}, norms=True, scaled=True),
    "SparseLoCo": Method("SparseLoCo", _LOCO),
    "SparseLoCo outer": Method("SparseLoCo", _LOCO | {"outer_momentum": 0.5}),
    "DiLoCo": Method("SparseLoCo", _LOCO | {"message": "dense", "outer_momentum": 0.5}),
    "DiLoCo 4-bit": Method("SparseLoCo", _LOCO | {"message": "int4", "outer_momentum": 0.5}),
}
CONTROLS = [name for name, m in METHODS.items() if m.torch]
OURS = [name for name, m in METHODS.items() if not m.torch]
FEW = ["AdamW", "Birder", "OneBitAdam", "ZeroOneAdam", "CSER", "SLAMB"]
