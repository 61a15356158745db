"""Arguments of the optimizers, as in the files of conf/optimizer. Ranges are those of the constructors."""

from __future__ import annotations

from typing import Literal

from experiments.config.kinds import (
    AtLeastOne,
    AtMostOne,
    Betas,
    Bounds,
    Count,
    CountOrZero,
    Decay,
    Fraction,
    NotNegative,
    Positive,
    Share,
    Steps,
    Switch,
    doc,
)
from experiments.config.schema import Section

Wire = Literal["fp32", "bf16", "fp16"]


class Optimizer(Section):
    lr: NotNegative = doc("base learning rate, before the schedule's factor")
    weight_decay: NotNegative = doc("of all parameters but those that the workload leaves out")


class _Momentum(Optimizer):
    momentum: Decay = doc("weight of the past in the momentum")


class _Adam(Optimizer):
    betas: Betas = doc("weights of the past in momentum and variance")
    eps: NotNegative = doc("added to the root of the variance")
    wire: Wire = doc("what dense all-reduces carry", "fp32")


class SGDM(_Momentum):
    nesterov: Switch = doc("Nesterov's form of the momentum", False)
    wire: Wire = doc("what the all-reduce carries", "fp32")


class AdamW(_Adam):
    pass


class Muon(_Adam, _Momentum):
    nesterov: Switch = doc("Nesterov's form of the momentum")


class BertAdam(_Adam):
    tensor_clip: Positive | None = doc("norm to which each tensor's gradient is clipped", 1.0)


class LAMB(_Adam):
    eps: Positive = doc("added to the root of the variance")
    bias_correction: Switch = doc("as published; DeepSpeed's code has none")
    min_coeff: NotNegative = doc("lower bound of the ratio |x|/|r|")
    max_coeff: Positive | None = doc("upper bound of the ratio")
    phi: Bounds | None = doc("bounds of |x| in the ratio")


class EfficientAdam(Optimizer):
    betas: Betas = doc("weights of the past in momentum and variance")
    eps: NotNegative = doc("added to the root of the variance")


class OneBitAdam(_Adam):
    warmup_steps: Steps = doc("dense steps before the variance is frozen")
    bias_correction: Switch = doc("as in Adam; its authors' blog and code (DeepSpeed) have none")


class OneBitLAMB(_Adam):
    eps: Positive = doc("added to the root of the variance")
    warmup_steps: Steps = doc("dense steps before variance and ratios are frozen")
    min_coeff: NotNegative = doc("lower bound of the ratio |x|/|r| in the warm-up")
    max_coeff: Positive | None = doc("upper bound of the ratio in the warm-up")
    coeff_beta: Decay = doc("weight of the past in the average of the ratios")
    factor_min: AtMostOne = doc("lower bound of the factor on the frozen ratio")
    factor_max: AtLeastOne = doc("upper bound of that factor")
    factor_threshold: Decay = doc("how much that factor may change in a step")


class ZeroOneAdam(_Adam):
    warmup_steps: Steps = doc("steps in which all ranks sync and the variance is refreshed")
    kappa: Count = doc("variance rounds after which the gap between them doubles")
    local_doubling: Steps = doc("steps in which the interval between syncs doubles")
    local_limit: Count = doc("largest interval between syncs")
    variant: Literal["paper", "deepspeed"] = doc("Algorithm 1, or the reference implementation")


class Birder(Optimizer):
    beta: Decay = doc("weight of the past in both moments")
    beta2: Decay | None = doc("the same of b alone, both bias-corrected; this project's", None)
    bits: Literal["independent", "weyl", "sigma_delta", "none"] = doc(
        "random bits: independent in each step, or this project's: evenly spread over steps (weyl), or signs of u and "
        "an error that is kept (sigma_delta); none: floats, to compare with",
        "independent",
    )
    decoupled: Switch = doc("weight decay x -= lr*wd*x; false: g += wd*x")
    eps: NotNegative = doc("u = m/(b + eps)")
    idle: Literal["decay", "hold"] = doc("b where the gradient is exactly 0")
    intra: Literal["gradient", "u"] = doc("what is averaged inside a node, with comm.topology=hierarchical")
    reduce: Literal["two_phase", "one_phase"] = doc("the paper's exchange, or the same law from half the bytes")


class SigmaDeltaAdam(Optimizer):
    betas: Betas = doc("weights of the past in momentum and variance")
    eps: NotNegative = doc("added to the root of the variance")
    variance: Literal["of_mean", "shared", "local"] = doc(
        "v of the workers' mean gradient, the mean of theirs, or each one's own"
    )
    share_growth: AtLeastOne = doc("by what factor the steps grow that share v; 1: every step")
    wire: Literal["fp32", "bf16"] = doc("what v is shared as", "fp32")
    gamma: Positive | None = doc(
        "gain of the mean of the workers' bits; null: 1 with of_mean, else the root of the number of workers"
    )
    full_scale: Positive | None = doc(
        "what one worker's bit stands for; null: half the root of the workers with of_mean, at least 1; else 1"
    )
    reduce: Literal["two_phase", "one_phase"] = doc("all-to-all and all-gather, or one all-gather of half the bytes")
    errors: Literal["fp32", "int8"] = doc("how errors are kept")
    start: Literal["uniform", "zero"] = doc("how workers' errors begin")
    idle: Literal["decay", "hold"] = doc("v where the gradient is exactly 0")


class Lion(Optimizer):
    betas: Betas = doc("weights of the past in the step and in the momentum")
    vote: Literal["majority", "average"] = doc("1 bit down, or 8")


class _Blocks(_Momentum):
    nesterov: Switch = doc("Nesterov's form of the momentum")
    variant: Literal["paper", "released"] = doc("as published, or as in the released code")
    block: Count = doc("elements of a block, the unit of choice of the compressor blocks")
    compressor: Literal["blocks", "random_k", "top_k"] = doc("which elements of a vector are sent", "blocks")
    wire: Wire = doc("what updates and errors are sent as", "fp32")


class CSER(_Blocks):
    gradient_ratio: Count | None = doc("R_C2: 1/R_C2 of the updates are sent; null: none")
    model_ratio: Count = doc("R_C1: 1/R_C1 of the errors are averaged")
    reset_every: Count = doc("H, steps between these averages")
    implementation: Literal["I", "II"] = doc("I keeps the common model, II does without")


class QSparseLocalSGD(_Blocks):
    ratio: Count = doc("R: 1/R of the elements are sent")
    sync_every: Count = doc("H, steps between messages")


class EFSGD(_Blocks):
    ratio: Count = doc("R: 1/R of the elements are sent")


class EF21SGDM(_Momentum):
    ratio: Count = doc("R: 1/R of the elements are sent")
    block: Count = doc("elements of a block, the unit of choice of the compressor blocks")
    compressor: Literal["blocks", "random_k", "top_k"] = doc("which elements of a vector are sent", "blocks")


class SLAMB(_Adam):
    eps: Positive = doc("added to the root of the variance")
    beta3: Fraction = doc("weight left of a fresh element for each step without being averaged")
    fraction: Share = doc("k, the share of elements sent in a step")
    sync_every: Count = doc("H, steps between averages of the models")
    sync_phase: CountOrZero | None = doc("models are averaged in steps t with t mod H = this; null: as published")
    dense_below: CountOrZero = doc("smaller tensors are sent whole")
    form: Literal["paper", "v1", "v2"] = doc("as published, or the released code's two forms")
    unseen: Literal["step", "hold"] = doc("elements with v = 0: step by m/eps, or stay")
    min_coeff: NotNegative = doc("lower bound of the ratio |x|/|r|")
    max_coeff: Positive | None = doc("upper bound of the ratio")
    bias_correction: Switch = doc("of both moments")


class SparseLoCo(_Adam):
    sync_every: Count = doc("H, local steps between synchronisations")
    top_k: Count = doc("k, entries sent of each chunk of a parameter")
    chunk: Count = doc("elements of a chunk, a multiple of 32")
    error_decay: Fraction = doc("what a synchronisation leaves of the error")
    outer_lr: NotNegative = doc("learning rate of the outer step")
    outer_momentum: Decay = doc("Nesterov momentum of the outer step; 0: none")
    message: Literal["top_k", "dense", "int4"] = doc(
        "the k largest of each chunk; or of DiLoCo all, in fp32 or in 4 bits with a scale for each chunk", "top_k"
    )


OPTIMIZERS: dict[str, type[Optimizer]] = {
    f"birder.{name}": kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer and not name.startswith("_")
}
"""Every class above that is called as an optimizer is."""
