"""The parts of `make gpu-check`, each in a separate process: `python -m experiments.bench.gpu_parts NAME FILE [--rehearse]`.
What each finds out: experiments/gpu_check.py.

A part appends what it finds to FILE, a JSON object a line, as soon as it has it; `ok` is false where something is not as it
must be. The last line is {"done": true}: without it the part was cut off.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from experiments.bench import LARGE, LARGEST, gpu_kernels
from experiments.records.record import ROOT

OF_COPY = 0.85
"""Of a copy's bandwidth at the largest size that a kernel reaches at least."""
JUDGED, OVERHEAD = ("resnet50", 32), 0.03
"""What a hook may cost at most of such a step: a ResNet-50 with 32 images."""

FOR_RUNS = ("hydra", "omegaconf", "pydantic", "sklearn", "psutil", "filelock", "pandas")
"""Packages without which there are no whole runs. No other part needs them."""
GIVEN_UP = 3
"""Runs that fail one after the other, after which no more are begun."""

Row = dict[str, Any]


def device(rehearse: bool) -> torch.device:
    return torch.device("cpu" if rehearse else "cuda")


def bandwidth(rehearse: bool) -> Iterator[Row]:
    from experiments.bench import kernels as bench

    where = device(rehearse)
    backend = bench.backend_name(where)
    for elements in (2**14, 2**16) if rehearse else (LARGEST, LARGE):
        for row in bench.measure(where, elements, 2 if rehearse else None):
            judged = not rehearse and elements == LARGEST
            ok = not judged or (backend == "cuda" and row["of_copy"] >= OF_COPY)
            yield {"backend": backend, **row, "ok": ok}


def methods(rehearse: bool) -> Iterator[Row]:
    from experiments.bench import gpu_methods

    if rehearse:
        yield from gpu_methods.measure(2, "gloo", "cpu", 14)
        return
    yield from gpu_methods.measure(1, "cpu:gloo,cuda:nccl", "cuda")
    yield from gpu_methods.measure(4, "gloo", "cuda")


def nccl(rehearse: bool) -> Iterator[Row]:
    from experiments.bench import gpu_methods

    yield from gpu_methods.measure(torch.cuda.device_count(), "cpu:gloo,cuda:nccl", "cuda")


def hooks(rehearse: bool) -> Iterator[Row]:
    from experiments.bench import hooks as bench

    where = device(rehearse)
    models = (("tiny", 4),) if rehearse else (JUDGED, ("resnet50", 128), ("bert_base", 16))
    few = dict(list(bench.METHODS.items())[:5:4]) if rehearse else None
    if not rehearse:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    with bench.alone(where):
        for model, batch in models:
            for row in bench.measure_model(where, model, batch, 2 if rehearse else 30, few):
                judged = not rehearse and (model, batch) == JUDGED and "hook" not in row["method"]
                yield {**row, "ok": hook_is_light(row, judged)}
        for row in bench.count_model(where, *models[0], few):
            yield {**row, "ok": hook_is_light(row, False)}


def hook_is_light(row: Row, judged: bool) -> bool:
    """Whether a method waits no more than DDP alone, Birder once while coordinates are unseen; `judged`: nor takes longer."""
    if "error" in row:
        return False
    allowed = 1 if row.get("unseen") else 0
    return row.get("more_waits", 0) <= allowed and (not judged or row.get("overhead", 1) < OVERHEAD)


def recorded(rehearse: bool, folder: Path) -> Iterator[Row]:
    """Each a file next to the report; results/timelines is where a good one belongs."""
    models = (("tiny", 4, "fp32"),) if rehearse else tuple(
        (model, batch, precision)
        for model, batch in (("resnet50", 32), ("resnet50", 128), ("bert_base", 32))
        for precision in ("tf32", "amp")
    )  # fmt: skip
    for model, batch, precision in models:
        out = folder / f"timeline-{model}-b{batch}-{precision}.json"
        command = [sys.executable, "experiments/timelines.py", "record", "--model", model]
        command += ["--batch", str(batch), "--precision", precision, "--device", device(rehearse).type]
        command += ["--steps", "2" if rehearse else "20", "--out", str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        step_ms = json.loads(out.read_text())["step_ms"] if done.returncode == 0 else None
        said = {} if step_ms is not None else {"error": done.stderr.strip()[-300:]}
        yield {"timeline": out.name, "step_ms": step_ms, "ok": step_ms is not None, **said}


def accuracy(rehearse: bool, folder: Path) -> Iterator[Row]:
    """Seed after seed until the time is over."""
    if missing := [package for package in FOR_RUNS if importlib.util.find_spec(package) is None]:
        yield {"ok": False, "error": f"whole runs need packages that are not here ({', '.join(missing)}): docs/gpu.md"}
        return
    failed = 0
    seeds = range(1) if rehearse else range(1000)
    for seed in seeds:
        for optimizer in ("birder",) if rehearse else ("sgdm", "adamw", "onebit_adam", "birder"):
            name = f"{optimizer}-{seed}"
            command = [sys.executable, "experiments/run.py", "+exp=digits", f"optimizer={optimizer}", f"seed={seed}"]
            command += [f"run_name={name}", f"output_dir={folder / 'runs'}", f"results_dir={folder / 'results'}"]
            command += ["wandb=disabled", "cluster.ranks_per_node=2"] if rehearse else ["wandb=disabled"]
            if rehearse:
                command += ["scale=quick", "train.max_steps=3", "train.threads=1"]
            else:
                command += ["cluster.ranks_per_node=4", "cluster.backend=gloo", "cluster.device=cuda"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            found = sorted((folder / "results" / "records").glob("*.json"), key=os.path.getmtime)[-1:]
            metric = json.loads(found[0].read_text())["metric"] if found and done.returncode == 0 else {}
            said = {} if metric else {"error": (done.stderr or done.stdout).strip()[-300:]}
            failed = 0 if metric else failed + 1
            yield {
                "optimizer": optimizer,
                "seed": seed,
                metric.get("name", "metric"): metric.get("value"),
                "ok": bool(metric),
                **said,
            }
            if failed == GIVEN_UP:
                return


PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "kernels": gpu_kernels.measure,
    "methods": methods,
    "bandwidth": bandwidth,
    "hooks": hooks,
    "nccl": nccl,
    "timelines": recorded,
    "accuracy": accuracy,
}
IN_FOLDER = ("timelines", "accuracy")
"""Parts that also leave files next to the report."""


def main(arguments: list[str]) -> int:
    """Runs one part. Exit status: 0; 1 something is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args(arguments)
    more = (options.file.parent,) if options.name in IN_FOLDER else ()
    ok, began = True, time.monotonic()
    with options.file.open("a") as out:

        def say(row: Row) -> None:
            out.write(json.dumps(row) + "\n")
            out.flush()

        try:
            for row in PARTS[options.name](options.rehearse, *more):
                ok = ok and row["ok"]
                say({**row, "at_s": round(time.monotonic() - began, 1)})
        except Exception as error:
            ok = False
            say({"ok": False, "error": f"{type(error).__name__}: {str(error).strip()[-1000:]}"})
        say({"done": True})
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
