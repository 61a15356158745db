"""Runs everything that needs a GPU: `make gpu-check`.

    python experiments/gpu_check.py
    python experiments/gpu_check.py --rehearse     on the CPU, at tiny sizes

It takes 20 minutes at most on one GPU. The most useful parts come first. Each part has a time limit and writes its result at
once, so a later failure loses nothing:

    kernels    every Triton kernel against its CPU definition, bit for bit
    methods    every optimizer against the CPU: 1 rank on NCCL, 4 ranks that
               share the GPU; resume; autocast
    bandwidth  every kernel at 25 and 100 million elements, against a copy
    hooks      DDP alone and with each method, on ResNet-50 (b32, b128) and
               BERT-Base: ms, launches, waits of the host
    nccl       `methods` over all GPUs, if there are at least two
    timelines  ResNet-50 and BERT-Base as this GPU computes them
    accuracy   whole runs on scikit-learn's digits with 4 ranks on the GPU, as
               many as the time allows

The report is OUT/TIME/report.md, next to a file of JSON lines for each part. A rehearsal shows that the command works and
says nothing about a GPU. No network is needed, and this package need not be installed: docs/appendix/gpu.md lists what must
be there.
Exit status: 0 success; 1 a check failed or a part was cut off; 2 no GPU, or bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.bench import LARGEST
from experiments.records.record import ROOT
from experiments.report.table import Table
from experiments.runs import command
from launch.errors import UserError, refused
from launch.files import write_whole
from launch.words import say, there_are

LIMITS = {
    "kernels": 240,
    "methods": 300,
    "bandwidth": 120,
    "hooks": 300,
    "nccl": 240,
    "timelines": 180,
    "accuracy": 600,
}
"""Seconds that each part may take, in the order in which they run. The last one takes what is left of the whole time."""
TOTAL = 1200
REHEARSAL = 180
"""Seconds for everything, and for everything in a rehearsal, where no other number is given."""
GRACE = 5
"""Seconds that a part has to end after SIGTERM."""


def gpus() -> int:
    """The number of CUDA GPUs that torch finds."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hardware() -> str:
    """What was measured on, in a line."""
    import torch

    if not torch.cuda.is_available():
        return f"a rehearsal on the CPU, torch {torch.__version__}: no number here says anything about a GPU"
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"{names}; torch {torch.__version__}, CUDA {torch.version.cuda}"


def run_part(name: str, folder: Path, rehearse: bool, limit: float) -> None:
    """Runs one part in a new process group, for `limit` seconds at most."""
    command = [sys.executable, "-m", "experiments.bench.gpu_parts", name, str(folder / f"{name}.jsonl")]
    command += ["--rehearse"] if rehearse else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    for name_of in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        environment.setdefault(name_of, "lo")  # all ranks are here; the machine's own name need not resolve
    if rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and all that it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue


def rows(folder: Path, name: str) -> tuple[list[dict[str, Any]], bool]:
    """What a part has found so far, and whether it came to its end."""
    path = folder / f"{name}.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
    return [row for row in found if "done" not in row], any("done" in row for row in found)


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else "—" if value is None else str(value).replace("\n", " ")[:200]


def write_report(folder: Path, names: Sequence[str], began: float, finished: Sequence[str]) -> bool:
    """Writes report.md again; whether all is well so far."""
    text = [f"# GPU check\n\nOn {hardware()}. {time.time() - began:.0f} s.\n"]
    well = True
    for name in names:
        if name not in finished:
            text.append(f"## {name}\n\nNot run yet.\n")
            continue
        found, done = rows(folder, name)
        bad = sum(not row["ok"] for row in found)
        cut = not done and name != "accuracy"  # which runs until the time is over
        well = well and not bad and not cut and bool(found)
        verdict = f"cut off by its time limit, or ended early ({name}.log)" if cut else "complete"
        text.append(f"## {name}\n\n{len(found)} results, {bad} not as they must be; {verdict}.\n")
        keys = list(dict.fromkeys(k for row in found for k in row if k != "at_s"))
        if found:
            text.append(Table.text(keys, [[show(row.get(k)) for k in keys] for row in found]).markdown() + "\n")
    write_whole(folder / "report.md", "\n".join(text))
    return well


def check(options: argparse.Namespace) -> int:
    """Runs the parts. Raises UserError without a GPU."""
    found = 0 if options.rehearse else gpus()
    if not found and not options.rehearse:
        raise UserError(
            "make gpu-check needs a CUDA GPU and finds none: ARGS=--rehearse runs it on the CPU at tiny sizes"
        )
    names = [n for n in LIMITS if n in options.parts and (n != "nccl" or found > 1)]
    if not names:
        raise UserError(
            f"nccl needs at least two GPUs, and here {'is one' if found else 'is none'}: name further --parts"
        )
    folder = options.out.resolve() / time.strftime("%Y%m%d-%H%M%S")
    with refused(f"cannot write to {options.out}", OSError):
        folder.mkdir(parents=True)
    began, total = time.time(), 60 * options.minutes
    finished: list[str] = []
    well = True
    for name in names:
        left = total - (time.time() - began)
        if left < GRACE:
            break
        say(f"{name} ...")
        run_part(name, folder, options.rehearse, min(left, LIMITS[name]))
        finished.append(name)
        well = write_report(folder, names, began, finished)
        found_rows, _ = rows(folder, name)
        bad = [row for row in found_rows if not row["ok"]]
        say(f"  {len(found_rows)} results, {len(bad)} not as they must be, {time.time() - began:.0f} s")
        for row in bad:
            say("  " + ", ".join(f"{k}: {show(v)}" for k, v in row.items() if k not in ("ok", "at_s")))
    if not options.rehearse:
        try:
            publish(folder, options.command)
        except ImportError as error:
            say(f"no record of kernels and hooks is written, all results are in {folder}: {error}")
    say(f"report: {folder / 'report.md'}")
    return 0 if well and len(finished) == len(names) else 1


def publish(folder: Path, command: str) -> None:
    """Writes a record of this GPU into the report's folder, like the one that `make bench` writes of the CPU.

    `make bench ARGS="--tables-only --results FOLDER"` makes its page; to publish it copy it to results/published/records.
    """
    from experiments import replay

    largest = [row for row in rows(folder, "bandwidth")[0] if row.get("elements") == LARGEST]
    more = {name: rows(folder, part)[0] for name, part in (("compared", "kernels"), ("methods", "methods"))}
    more["hooks"] = [row for row in rows(folder, "hooks")[0] if "step_ms" in row]
    if largest:
        plan = {"kernels": largest, "backend": largest[0]["backend"], **{k: v for k, v in more.items() if v}}
        suite, options = replay.parse(["suite=bench", f"--results={folder / 'results'}", f"--output={folder}"])
        replay.write_kernels(suite, options, plan, "cuda", command)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError for what is not known."""
    parser = command.parser(__doc__)
    parser.add_argument("--rehearse", action="store_true", help="all of it on the CPU, at tiny sizes")
    parser.add_argument("--minutes", type=float, help="for everything; default 20, in a rehearsal 3")
    parser.add_argument("--parts", default=",".join(LIMITS), help="some of: " + ", ".join(LIMITS))
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "gpu_check", help="folder for the report")
    options = parser.parse_args(arguments)
    if options.minutes is None:
        options.minutes = (REHEARSAL if options.rehearse else TOTAL) / 60
    options.parts = options.parts.split(",")
    options.command = command.typed("gpu_check", list(arguments if arguments is not None else sys.argv[1:]))
    if odd := [name for name in options.parts if name not in LIMITS]:
        raise UserError(f"--parts knows no {odd[0]!r}{there_are(odd[0], LIMITS)}")
    if not options.minutes > 0:  # nor NaN
        raise UserError(f"--minutes must be positive, got {options.minutes:g}")
    if 60 * options.minutes < GRACE:
        raise UserError(f"--minutes={options.minutes:g} does not do for any part: give 1 or more")
    return options


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    return check(parse(arguments))


if __name__ == "__main__":
    command.start(main)
