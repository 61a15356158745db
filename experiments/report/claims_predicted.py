"""Claims with a prediction or an arithmetic beside them, and those that only a cluster can tell. No torch."""

from __future__ import annotations

from birder.predict import Cluster, Link, predict
from experiments.cells import claimed, timelines
from experiments.report.claims import Claim, joined, met, paper
from experiments.report.formats import number, times


def birder_predicted() -> list[Claim]:
    """The same from the predictor: full link rate, NCCL's flat ring as baseline."""
    cluster = Cluster(8, 8, Link(10.0, claimed.LATENCY_US))
    forms = {"birder": "flat", "birder_hierarchical": "hierarchical"}
    made = []
    for name, model, batch in (
        ("ResNet-50", "resnet50", 32),
        ("ResNet-50", "resnet50", 128),
        ("BERT-Base", "bert_base", 12),
    ):
        factor, source = paper(f"maximum speedup, {name}, testbed", "Birder")
        found = []
        for rate in ("tf32", "amp"):
            p = predict(timelines.load(f"{model}_b{batch}_{rate}"), cluster, ["fp32", *forms])
            found += [(p.speedup(method)[0], f"{rate.upper()}, {form}") for method, form in forms.items()]
        made.append(
            Claim(
                f"Birder is up to {factor:g} times as fast as full precision, {name}, batch {batch} per GPU",
                source,
                "predicted",
                f"`python experiments/predict.py timeline={model}_b{batch}_tf32`, and `_amp`: 8 x 8 A100, 10 Gbit/s",
                f"{times(min(found)[0])} to {times(max(found)[0])}, flat and hierarchical, in TF32 and AMP",
                met(factor, found),
            )
        )
    return made


def onebit_volumes() -> list[Claim]:
    """1-bit Adam's 5x and 1-bit LAMB's 4.6x: the share of dense steps that they mean."""
    made = []
    for name, share in (("1-bit Adam", 0.15), ("1-bit LAMB", 1000 / 7500)):
        factor, source = paper("volume reduction, at most", name)
        reached = 1 / (share + (1 - share) / 16)
        needed = (1 / factor - 1 / 16) / (15 / 16)
        made.append(
            Claim(
                f"{name} sends up to {factor:g} times less than fp16 {name.removeprefix('1-bit ')}",
                source,
                "computed",
                "1/(w + (1 - w)/16), w the share of dense steps",
                f"{times(reached)} with the published {100 * share:.1f} %",
                met(factor, [(reached, f"the published warm-up of {100 * share:.1f} %")])
                + f"; {factor:g}x is that of {100 * needed:.1f} %",
            )
        )
    return made


def slamb_volume() -> Claim:
    """Half of what 1-bit LAMB sends."""
    factor, source = paper("data sent, large-batch BERT", "SLAMB")
    k, every, warmup = 0.1, 100, 0.15
    theirs = 16 * warmup + (1 - warmup)
    ours = {wire: wire * (k + 1 / every) for wire in (16, 32)}
    needed = (ours[16] / factor - 1) / 15
    shown = ", ".join(f"{ours[w]:.2f} bits in fp{w}, {ours[w] / theirs:.2f} of it" for w in (16, 32))
    return Claim(
        f"SLAMB sends {factor:g} of the state of the art, large-batch BERT",
        source,
        "computed",
        "bits per parameter and step each way, k = 0.1, H = 100, against 1-bit LAMB with 15 % dense fp16 steps; without the "
        "tensors that are always sent whole",
        f"1-bit LAMB {theirs:.2f} bits; SLAMB {shown}",
        f"confirmed under values of 16 bits and a 1-bit LAMB that has {100 * needed:.0f} % dense steps or more; not reached "
        "with fp32 values, which the released code sends",
    )


# ---- speed of the others, predicted -----------------------------------------------------------------------------------


def cser_speeds() -> list[Claim]:
    """Nearly 10x and 4.5x: how fast a GPU must compute."""
    resnet = tuple((g.name, g.shape) for g in timelines.load("resnet50_b32_tf32").gradients)
    cifar = {32: (64, 4, 16), 256: (512, 8, 64), 1024: (2048, 16, 128)}
    imagenet = {32: (64, 4, 16), 256: (512, 16, 32), 1024: (2048, 8, 256)}
    made = []
    for data, model, shapes, ratios, half, images in (
        ("CIFAR-100", "WRN-40-8", claimed.wrn_40_8(), cifar, False, 16),
        ("ImageNet", "ResNet-50, fp16", resnet, imagenet, True, 32),
    ):
        factor, source = paper(f"acceleration, {data}", "CSER")
        needs = claimed.cser_needs(shapes, factor, list(ratios.values()), half)
        shown = [
            f"R_C = {r}: {'never' if need is None else f'{number(need)} ms or less'}"
            for r, need in zip(ratios, needs, strict=True)
        ]
        most = max((need for need in needs if need is not None), default=None)
        peak, least = claimed.V100_TFLOPS[half], claimed.least_ms(data, images, claimed.V100_TFLOPS[half])
        limit = (
            f"at its peak of {peak:g} TFLOP/s a V100 takes {number(least)} ms for {images} images, by their operations"
        )
        if most is None or most < least:
            verdict = f"not reached: {limit}"
        else:
            verdict = f"confirmed under a V100 that reaches {100 * least / most:.0f} % of its peak or more: {limit}"
        made.append(
            Claim(
                f"CSER is {'nearly ' if factor == 10 else ''}{factor:g} times as fast as SGD, {data}, {model}, 8 V100",
                source,
                "predicted",
                "how long forward and backward may last for a step of CSER to be so much shorter than one of "
                f"{'fp16' if half else 'fp32'} DDP: 8 nodes, 10 Gbit/s",
                "; ".join(shown),
                verdict,
            )
        )
    return made


def slamb_scaling() -> Claim:
    """90 % on 1,024 A100."""
    value, source = paper("scaling efficiency, BERT-XL", "SLAMB")
    found = []
    for reached in (0.3, 0.4, 0.5):
        compute = claimed.xl_compute_ms(64, 128, reached)
        ours, dense = (claimed.efficiency(m, compute, latency_us=0.0) for m in ("slamb", "bf16"))
        found.append((reached, ours, dense))
    ring = claimed.efficiency("slamb", claimed.xl_compute_ms(64, 128, 0.4))
    shown = [
        f"{100 * ours:.0f} % at {100 * r:.0f} % of the peak (bf16 all-reduce {100 * d:.0f} %)" for r, ours, d in found
    ]
    enough = [f"{100 * r:.0f} %" for r, ours, _ in found if 100 * ours >= value]
    where = f"GPUs that reach {joined(enough)} of their peak" if enough else "any of these"
    return Claim(
        f"SLAMB scales with {value:g} % efficiency to 1,024 A100, BERT-XL (2.8 B)",
        source,
        "predicted",
        "128 nodes of 8 A100 at 100 Gbit/s against one node; 64 sequences of 128 tokens a GPU and step; values in fp32, "
        "averaged by collectives whose latency is hidden",
        "; ".join(shown),
        f"{'confirmed' if enough else 'not reached'} under {where}; not reached with a flat ring of 1,024 ranks and "
        f"{claimed.LATENCY_US:g} µs a message ({100 * ring:.0f} %); batch and shape are this project's choice",
    )


def bert_large_speeds(zero_one: tuple[int, int, int], steps: int) -> list[Claim]:
    """1-bit Adam's 3.3x over Adam, 0/1 Adam's 2x over 1-bit Adam. zero_one: the schedule's rounds over `steps`."""
    claims = []
    factor, source = paper("BERT-Large pre-training throughput, at most", "1-bit Adam, ICML 2021, abstract")
    ethernet = claimed.bert_large_run(Cluster(16, 4, Link(4.1), inside=Link(1e6)), steps, 23_000, zero_one)
    ratio = ethernet.adam / ethernet.onebit
    claims.append(
        Claim(
            f"1-bit Adam pre-trains BERT-Large up to {factor:g} times as fast as Adam",
            source,
            "predicted",
            f"64 V100, 4 a node, 4.1 Gbit/s as its authors measured, batch 4,096, {steps:,} steps of which 23,000 are dense",
            f"{times(ratio)}: {number(ethernet.adam)} ms a step against {number(ethernet.onebit)}",
            met(factor, [(ratio, "64 GPUs on 40 GbE")]) + "; the paper's 256 are not predicted",
        )
    )
    factor, source = paper("throughput and end-to-end time against 1-bit Adam", "0/1 Adam")
    found = [
        (where, claimed.bert_large_run(cluster, steps, 23_000, zero_one))
        for where, cluster in (
            ("40 GbE at 2.7 Gbit/s, 16 nodes of 4", Cluster(16, 4, Link(2.7), inside=Link(1e6))),
            ("40 GbE at 2.7 Gbit/s, 32 nodes of 4", Cluster(32, 4, Link(2.7), inside=Link(1e6))),
            ("100 Gbit/s InfiniBand, 8 nodes of 8", Cluster(8, 8, Link(100.0), inside=Link(1e6))),
        )
    ]
    claims.append(
        Claim(
            f"0/1 Adam trains up to {factor:g} times as fast as 1-bit Adam",
            source,
            "predicted",
            f"BERT-Large on V100, batch 64 a GPU, {steps:,} steps, 23,000 of 1-bit Adam's dense; nothing beside backward",
            "; ".join(f"{where}: {times(r.onebit / r.zero_one)}" for where, r in found),
            met(factor, [(r.onebit / r.zero_one, where) for where, r in found], ", where there is less to save"),
        )
    )
    return claims


# ---- what only a cluster can tell -------------------------------------------------------------------------------------


def untried() -> list[Claim]:
    """Claims for which there is a configuration and no machine."""
    rows = (
        (
            "1-bit Adam fine-tunes BERT-Large on SQuAD up to {:g} times as fast",
            ("SQuAD fine-tuning throughput, at most", "1-bit Adam, ICML 2021"),
            "V100, or the time that they take for a window",
        ),
        (
            "1-bit LAMB pre-trains BERT-Large up to {:g} times as fast",
            ("end-to-end speedup", "1-bit LAMB"),
            "256 GPUs, or published step times",
        ),
        (
            "SLAMB trains Swin-B on ImageNet in {:g} hours on 128 A100",
            ("Swin-B/ImageNet, 128 GPUs, time", "SLAMB"),
            "128 A100 and ImageNet (`conf/exp/slamb_swin_b.yaml`)",
        ),
        (
            "SLAMB reaches {:g} % on CIFAR-10 with ResNet-110",
            ("CIFAR-10 ResNet-110, global batch 1024, SLAMB", "README"),
            "GPUs for 200 epochs (`conf/exp/slamb_cifar10.yaml`)",
        ),
    )
    made = []
    for text, (quantity, who), needs in rows:
        value, source = paper(quantity, who)
        made.append(Claim(text.format(value), source, "nothing", "", "—", f"cannot be tried here: it needs {needs}"))
    return made
