"""Arguments out of range: every method names the option, and what would be right, in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import birder
from birder.hooks.block_scaled import BlockScaled

WARMED = {"warmup_steps": 2}
NEEDED: dict[str, dict[str, Any]] = {"OneBitLAMB": WARMED, "OneBitAdam": WARMED, "ZeroOneAdam": WARMED}
"""What a method cannot be made without."""
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "Lion": [
        ({"vote": "mean"}, "vote"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"lr": -1.0}, "lr"),
    ],
    "LAMB": [
        ({"eps": 0.0}, "eps must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"min_coeff": -0.1}, "min_coeff must be at least 0"),
        ({"max_coeff": 0.0}, "max_coeff must be above 0"),
        ({"min_coeff": 3.0, "max_coeff": 2.0}, "max_coeff must be above 0, at least min_coeff"),
        ({"phi": (2.0, 1.0)}, "phi must be two rising numbers"),
        ({"phi": (1.0,)}, "phi must be two rising numbers"),
        ({"eps": math.inf}, "eps must be"),
    ],
    "Muon": [
        ({}, "muon must be False for parameters of less than two dimensions"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"nesterov": 1}, "nesterov must be True or False"),
    ],
    "OneBitLAMB": [
        ({"warmup_steps": 0}, "warmup_steps must be a whole number"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"min_coeff": -1.0}, "min_coeff must be at least 0"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "max_coeff must be above 0, at least min_coeff"),
        ({"coeff_beta": 1.0}, "coeff_beta must be in"),
        ({"factor_min": 1.5}, "factor_min must be in"),
        ({"factor_max": 0.9}, "factor_max must be at least 1"),
        ({"factor_threshold": 1.0}, "factor_threshold must be in"),
        ({"wire": "int8"}, "wire must be one of"),
    ],
    "SLAMB": [
        ({"fraction": 0.0}, r"fraction must be in \[2\^-15, 1\], got 0.0"),
        ({"fraction": 1.5}, "fraction must be"),
        ({"beta3": 1.1}, "beta3 must be"),
        ({"sync_every": 0}, "sync_every must be"),
        ({"sync_phase": -1}, "sync_phase must be"),
        ({"dense_below": -1}, "dense_below must be"),
        ({"form": "v3"}, "form must be paper, v1 or v2, got 'v3'"),
        ({"unseen": "stay"}, "unseen must be step or hold"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff must be"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
    ],
    "SigmaDeltaAdam": [
        ({"variance": "mean"}, "variance must be of_mean, shared or local"),
        ({"share_growth": 0.9}, "share_growth must be at least 1"),
        ({"gamma": 0.0}, "gamma must be positive or None"),
        ({"full_scale": 0.0}, "full_scale must be positive or None"),
        ({"errors": "bf16"}, "errors must be fp32 or int8"),
        ({"start": "one"}, "start must be uniform or zero"),
        ({"reduce": "three"}, "reduce must be two_phase or one_phase"),
        ({"idle": "stay"}, "idle must be decay or hold"),
        ({"wire": "fp16"}, "wire must be fp32 or bf16"),
        ({"wire": "bf16", "variance": "local"}, "wire must be left out"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
    "Birder": [
        ({"lr": -1.0}, "lr must be .*, got"),
        ({"beta": 1.0}, "beta must be .*, got"),
        ({"beta": -0.1}, "beta must be .*, got"),
        ({"weight_decay": -1.0}, "weight_decay must be .*, got"),
        ({"eps": -1e-08}, "eps must be .*, got"),
        ({"idle": "x"}, "idle must be .*, got"),
        ({"intra": "x"}, "intra must be .*, got"),
        ({"seed": -1}, "seed must be .*, got"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be .*, got"),
        ({"wire": "fp8"}, "wire must be .*, got"),
        ({"wire": "bf16"}, "wire must be left out"),  # it would change nothing
        ({"bits": "x"}, "bits must be .*, got"),
        ({"beta2": 1.0}, "beta2 must be .*, got"),
        ({"beta": False}, "beta must be"),
        ({"eps": math.inf}, "eps must be"),
        ({"decoupled": "no"}, "decoupled must be"),
    ],
    "OneBitAdam": [
        ({"warmup_steps": 0}, "warmup_steps must be a whole number"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
    ],
    "CSER": [
        ({"gradient_ratio": 0}, "gradient_ratio must be a whole number"),
        ({"gradient_ratio": 2.5}, "gradient_ratio must be a whole number"),
        ({"model_ratio": None}, "model_ratio must be a whole number"),
        ({"reset_every": 0}, "reset_every must be a whole number"),
        ({"implementation": "III"}, "implementation must be I or II"),
        ({"variant": "v2"}, "variant must be paper or released"),
        ({"block": 0}, "block must be a whole number"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"momentum": 0.0, "weight_decay": 0.1, "variant": "released"}, "momentum must be above 0"),
        ({"compressor": "sign"}, "compressor must be one of blocks, random_k, top_k, got 'sign'"),
        ({"compressor": "top_k", "implementation": "II"}, "compressor must be blocks or random_k with implem"),
        ({"compressor": "top_k", "variant": "released"}, "compressor must be blocks or random_k with implem"),
        ({"nesterov": 1}, "nesterov must be"),
    ],
    "QSparseLocalSGD": [
        ({"ratio": True}, "ratio must be a whole number"),
        ({"sync_every": -1}, "sync_every must be a whole number"),
        ({"compressor": "topk"}, "compressor must be one of"),
    ],
    "EFSGD": [
        ({"ratio": None}, "ratio must be a whole number"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"compressor": None}, "compressor must be one of"),
    ],
    "AdamW": [
        ({"eps": math.inf}, "eps must be"),
        ({"betas": (True, 0.9)}, "betas must be"),
        ({"betas": (0.9,)}, "betas must be"),
    ],
    "BertAdam": [
        ({"tensor_clip": math.nan}, "tensor_clip must be"),
    ],
    "SGDM": [
        ({"nesterov": "yes"}, "nesterov must be"),
        ({"momentum": False}, "momentum must be"),
    ],
    "ZeroOneAdam": [
        ({"warmup_steps": 0}, "warmup_steps must be a whole number"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
        ({"kappa": 0}, "kappa must be a whole number"),
        ({"kappa": -1}, "kappa must be a whole number"),
        ({"kappa": 1.5}, "kappa must be a whole number"),
        ({"local_doubling": 0}, "local_doubling must be a whole number"),
        ({"local_doubling": -1}, "local_doubling must be a whole number"),
        ({"local_doubling": 1.5}, "local_doubling must be a whole number"),
        ({"local_limit": 0}, "local_limit must be a whole number"),
        ({"local_limit": -1}, "local_limit must be a whole number"),
        ({"local_limit": 1.5}, "local_limit must be a whole number"),
        ({"variant": "0/1"}, "variant must be paper or deepspeed"),
    ],
    "SparseLoCo": [
        ({"sync_every": 0}, "sync_every must be a whole number"),
        ({"sync_every": 2.5}, "sync_every must be a whole number"),
        ({"chunk": 48}, "chunk must be a multiple of 32"),
        ({"chunk": 16}, "chunk must be a whole number >= 32"),
        ({"chunk": 65536}, "chunk must be a multiple of 32 up to 32768"),
        ({"top_k": 0}, "top_k must be a whole number"),
        ({"top_k": 65, "chunk": 64}, "top_k must be at most chunk = 64"),
        ({"error_decay": 1.5}, r"error_decay must be in \[0, 1\]"),
        ({"error_decay": math.nan}, r"error_decay must be in \[0, 1\]"),
        ({"outer_lr": -1.0}, "outer_lr must be at least 0"),
        ({"outer_lr": math.inf}, "outer_lr must be at least 0"),
        ({"outer_momentum": 1.0}, r"outer_momentum must be in \[0, 1\)"),
        ({"outer_momentum": True}, r"outer_momentum must be in \[0, 1\)"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"eps": -1.0}, "eps must be at least 0"),
        ({"message": "int8"}, "message must be top_k, dense or int4"),
        ({"message": "int4", "wire": "bf16"}, "wire must be fp32 with message='int4'"),
        ({"wire": "int8"}, "wire must be one of fp32, bf16, fp16"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "words"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_an_argument_out_of_range_is_named_in_one_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}") as error:
        getattr(birder, name)([torch.nn.Parameter(torch.zeros(3))], **NEEDED.get(name, {}) | options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("message", ["dense", "int4"])
def test_an_option_of_another_message_is_not_in_the_way(message: str) -> None:
    """The default top_k is 64, of which these make no use."""
    p = torch.nn.Parameter(torch.ones(40))
    optimizer = birder.SparseLoCo([p], message=message, chunk=32, sync_every=1)
    p.grad = torch.ones(40)
    optimizer.step()
    assert (p < 1).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"code": "int3"}, "int4 or fp8"), ({"block": 7}, "even"), ({"block": 0}, "even"), ({"block": 2.0}, "even")],
)
def test_so_are_those_of_a_hook(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BlockScaled(**options)
