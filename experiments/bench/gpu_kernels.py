"""Every Triton kernel against its definition on the CPU, bit for bit: each group of kernels in a separate process.

A kernel that reads or writes where it must not spoils its process for all later ones, and Triton compiles each variant at its
first use, about a second each: so groups run at the same time, and each one's result is there when it ends.
`python -m experiments.bench.gpu_kernels GROUP [--rehearse]` is one of these processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from experiments.records.record import ROOT

REHEARSED = ("one phase",)
"""Groups of a rehearsal, of which each has one case, in Triton's interpreter."""
CORES = 2
"""Of the machine, for each process: one compiles while the definition runs on the CPU."""


def measure(rehearse: bool) -> Iterator[dict[str, Any]]:
    """A row for each group, as they end; in a rehearsal for some of them, interpreted."""
    names = list(REHEARSED) if rehearse else groups()
    at_once = 1 if rehearse else max(1, min(len(names), (os.cpu_count() or 1) // CORES))
    with ThreadPoolExecutor(at_once) as pool:
        running = [pool.submit(_row, name, rehearse) for name in names]
        for future in as_completed(running):
            yield future.result()


def groups() -> list[str]:
    """The names of all groups on a GPU. Nothing is run, and no GPU touched."""
    from birder.kernels import reference
    from tests.helpers.kernel_cases import cases

    return list(cases(reference, "cuda"))


def _row(name: str, rehearse: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "experiments.bench.gpu_kernels", name, *(["--rehearse"] if rehearse else [])]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": str(CORES)} | ({"TRITON_INTERPRET": "1"} if rehearse else {})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    try:
        return {"kernels": name, **json.loads(lines[-1])}
    except (IndexError, ValueError):
        said = (done.stderr or done.stdout).strip()[-1000:]
        return {"kernels": name, "ok": False, "error": f"ended with status {done.returncode}: {said}"}


def main(name: str, rehearse: bool) -> int:
    """Runs one group, and prints its result as JSON. Exit status: 0; 1 a kernel is not as it must be."""
    from birder.kernels import cuda
    from tests.helpers.kernel_cases import cases

    runs = cases(cuda, "cpu" if rehearse else "cuda")[name]
    runs = runs[2:3] or runs[:1] if rehearse else runs
    wrong, first = 0, ""
    for number, run in enumerate(runs):
        try:
            run()
        except Exception as error:
            wrong += 1
            first = first or f"case {number}: {type(error).__name__}: {str(error).strip()[:500]}"
            if "CUDA error" in str(error):  # nothing that this process does later means anything
                break
    result: dict[str, Any] = {"cases": len(runs), "wrong": wrong, "ok": not wrong}
    print(json.dumps(result | ({"error": first} if first else {})))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--rehearse" in sys.argv[2:]))
