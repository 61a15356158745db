"""A long run of many ranks, watched: `python -m tests.campaign.soak [--ranks 16] [--steps 2000] [--method birder]`.

Every second it reads memory, threads and open files of each rank. After the first 100 steps all must stay flat: no more
threads or files than then, and no more than GROWTH of memory on top of what was there. Prints the figures; status 0 or 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.helpers import ROOT

SETTLED = 100
"""Steps after which nothing may grow any more."""
GROWTH = 0.02
"""Of a rank's memory: the allocator's own waves. A leak of one gradient in each step would be many times that."""


def ranks_of(launcher: int, ranks: int) -> list[psutil.Process]:
    """The rank processes, once all are there."""
    found = []
    with contextlib.suppress(psutil.Error):
        for p in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = p.cmdline()
                if any(a.endswith("worker.py") for a in line) and "torch.distributed.run" not in line:
                    found.append(p)
    return found if len(found) == ranks else []


def look(processes: list[psutil.Process], step: int) -> dict[str, list[int]] | None:
    """Memory (resident bytes), threads and files of each rank; None when one of them has ended."""
    try:
        return {
            "step": [step],
            "memory": [p.memory_info().rss for p in processes],
            "threads": [p.num_threads() for p in processes],
            "files": [p.num_fds() for p in processes],
        }
    except psutil.Error:
        return None


def soak(ranks: int, steps: int, method: str, folder: Path) -> list[dict[str, list[int]]]:
    """What was seen, second by second. Raises RuntimeError when the run fails."""
    command = [sys.executable, str(ROOT / "experiments/run.py"), "+exp=digits", f"optimizer={method}", "cluster=local"]
    command += [
        "cluster.nodes=2",
        f"cluster.ranks_per_node={ranks // 2}",
        "run_name=soak",
        "wandb=disabled",
        "scale=quick",
    ]
    command += [f"output_dir={folder}/outputs", f"results_dir={folder}/results", "train.batch_per_rank=4"]
    command += [
        "train.epochs=100000",
        f"train.max_steps={steps}",
        f"train.eval_every={max(1, steps // 4)}",
        "train.threads=1",
    ]
    command += [f"checkpoint.every={max(1, steps // 10)}"]
    curve = folder / "outputs/digits/soak/curve.csv"
    seen: list[dict[str, list[int]]] = []
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as launcher:  # type: ignore[call-overload]
        processes: list[psutil.Process] = []
        while launcher.poll() is None:
            processes = processes or ranks_of(launcher.pid, ranks)
            step = len(curve.read_text().splitlines()) - 1 if curve.exists() else 0
            if processes and (found := look(processes, step)):
                seen.append(found)
            time.sleep(1)
        if launcher.returncode:
            raise RuntimeError(launcher.stderr.read().decode())
    return seen


def verdict(seen: list[dict[str, list[int]]], steps: int) -> tuple[dict[str, object], list[str]]:
    """Figures, and what is not flat: medians of the last third of all looks against those of the first third.

    Medians, for a checkpoint that is being written holds a file open. The last look is left out: ranks that end close theirs.
    """
    settled = [s for s in seen[:-1] if SETTLED <= s["step"][0] < steps]
    third = len(settled) // 3
    if not third:
        return {}, ["too few looks after the first steps: give it more steps"]
    ranks, grown = range(len(settled[0]["memory"])), []
    figures: dict[str, object] = {
        "ranks": len(ranks),
        "looks": len(settled),
        "steps": [settled[0]["step"][0], settled[-1]["step"][0]],
    }
    for what in ("memory", "threads", "files"):
        early, late = (
            [statistics.median_high(s[what][r] for s in part) for r in ranks]
            for part in (settled[:third], settled[-third:])
        )
        figures[what] = {"first third": max(early), "last third": max(late)}
        allowed = GROWTH if what == "memory" else 0.0
        grown += [f"{what} of rank {r}: {early[r]} -> {late[r]}" for r in ranks if late[r] > early[r] * (1 + allowed)]
    return figures, grown


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--method", default="birder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        figures, grown = verdict(soak(options.ranks, options.steps, options.method, Path(folder)), options.steps)
    print(json.dumps(figures, indent=1))
    print("\n".join(grown) or "flat")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
