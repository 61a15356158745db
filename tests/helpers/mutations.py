"""Do the tests find faults? Puts one fault after the other into a copy of `birder`, and runs the fast tests that should fail.

`python -m tests.helpers.mutations [NAME ...]` (make mutants) prints a table, and ends with status 1 where more than one of
twenty faults lived. A test that fails, and one that does not end in time, has found the fault.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import ROOT

TIMEOUT_S = 900.0
DISTRIBUTED, UNIT, GPU = "tests/distributed/test_", "tests/unit/birder/", "tests/gpu/test_"


@dataclass(frozen=True)
class Fault:
    """Where `right` stands, once, in a file of `birder`, the copy has `wrong`. tests: the files that should see it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def fault(name: str, file: str, right: str, wrong: str, *tests: str) -> Fault:
    return Fault(name, file, right, wrong, tests)


FAULTS = [
    fault(
        "a mean is not divided by n",
        "comm/collectives.py",
        "self.sum_of_rows((yield from self.all_to_all(rows))).div_(self.size)",
        "self.sum_of_rows((yield from self.all_to_all(rows)))",
        f"{DISTRIBUTED}mean.py",
    ),
    fault(
        "the mean within a node is not divided by its ranks",
        "comm/collectives.py",
        "self.all_to_all(rows, received))).div_(self.size)",
        "self.all_to_all(rows, received)))",
        f"{DISTRIBUTED}onebit_lamb.py",
    ),
    fault(
        "nobody waits for messages",
        "comm/collectives.py",
        "                w.wait()\n            if staging",
        "                pass\n            if staging",
        f"{DISTRIBUTED}contract.py",
    ),
    fault(
        "all tasks have the same tags",
        "comm/runtime.py",
        "self._submitted += 1",
        "self._submitted = 1",
        f"{DISTRIBUTED}contract.py",
    ),
    fault(
        "the second stream does not wait for the first",
        "comm/runtime.py",
        "            self._second.wait_stream(self._first)\n",
        "",
        f"{GPU}streams.py",
    ),
    fault(
        "the masked chunk of a server begins with its shard",
        "optim/onebit.py",
        "comm.chunk_of(mask.numel())",
        "slice((s := comm.shard_of(mask.numel())).start, s.start + (s.stop - s.start) // comm.workers)",
        f"{DISTRIBUTED}onebit_lamb.py",
    ),
    fault(
        "the warm-up is a step shorter",
        "optim/onebit_adam.py",
        "step <= self.warmup_steps",
        "step < self.warmup_steps",
        f"{DISTRIBUTED}onebit_adam.py",
    ),
    fault(
        "the correction of a frozen variance goes on",
        "optim/onebit_adam.py",
        "beta2 ** min(step, self.warmup_steps)",
        "beta2**step",
        f"{DISTRIBUTED}onebit_adam.py",
    ),
    fault(
        "weight decay without the rate",
        "optim/bit_exchange.py",
        "decay=lr * decay",
        "decay=decay",
        f"{DISTRIBUTED}birder.py",
    ),
    fault(
        "random numbers of workers from the next word",
        "optim/bit_exchange.py",
        "**options, start=start",
        "**options, start=start + 32",
        f"{DISTRIBUTED}birder.py",
    ),
    fault(
        "all servers draw as the first",
        "optim/layout.py",
        "comm.chunk_of(self.padded)",
        "slice((s := comm.shard_of(self.padded)).start, s.start + (s.stop - s.start) // comm.workers)",
        f"{DISTRIBUTED}birder.py",
    ),
    fault(
        "the mean of bits is rounded down",
        "kernels/cpu.py",
        "half = n // np.int32(2)",
        "half = np.int32(0)",
        f"{UNIT}kernels",
    ),
    fault(
        "a coordinate without gradient decays under hold",
        "kernels/cpu.py",
        "new_b = old if x == zero else new_b",
        "new_b = new_b",
        f"{UNIT}kernels",
    ),
    fault(
        "resets come a step late",
        "optim/cser.py",
        "step % self.reset_every == 0",
        "step % self.reset_every == 1",
        f"{DISTRIBUTED}cser.py",
    ),
    fault(
        "the error has the other sign",
        "optim/cser.py",
        "self.flat_parameters(unit).sub_(p).sub_(z)",
        "self.flat_parameters(unit).add_(p).sub_(z)",
        f"{DISTRIBUTED}cser.py",
    ),
    fault(
        "what ranks chose for themselves is a sum",
        "optim/sparse.py",
        "mean.div_(len(rows))",
        "mean",
        f"{DISTRIBUTED}cser.py",
    ),
    fault(
        "the momentum after a sync is not divided by the rates",
        "optim/zero_one_adam.py",
        'unit.state["m"].copy_(u).div_(rate)',
        'unit.state["m"].copy_(u)',
        f"{DISTRIBUTED}zero_one_adam.py",
    ),
    fault(
        "the steps since the last sync are kept",
        "optim/zero_one_adam.py",
        "        u.zero_()\n",
        "",
        f"{DISTRIBUTED}zero_one_adam.py",
    ),
    fault(
        "the variance's correction without its root",
        "optim/lamb.py",
        "(1 - beta2**step) ** 0.5",
        "(1 - beta2**step)",
        f"{DISTRIBUTED}lamb.py",
    ),
    fault(
        "models are averaged a step early",
        "optim/slamb.py",
        "step % self.sync_every == self.sync_phase % self.sync_every",
        "(step + 1) % self.sync_every == self.sync_phase % self.sync_every",
        f"{DISTRIBUTED}slamb.py",
    ),
    fault(
        "parts of servers in the order of ranks",
        "checkpoint/elastic.py",
        "shard * self.workers + worker if self.rule",
        "worker * self.shards + shard if self.rule",
        f"{DISTRIBUTED}elastic.py",
    ),
    fault(
        "element numbers of a part begin with the unit",
        "optim/layout.py",
        "number + low - place",
        "number",
        f"{DISTRIBUTED}birder.py",
    ),
    fault(
        "a checkpoint's sum is not compared",
        "checkpoint/files.py",
        "if _seal(file) != seal:",
        "if False:",
        f"{UNIT}test_checkpoint_files.py",
        f"{DISTRIBUTED}checkpoint_damage.py",
    ),
    fault(
        "the received part of a shard stands in the first one's place",
        "comm/communicator.py",
        "out.view(self.shards, -1)[self.shard]",
        "out.view(self.shards, -1)[0]",
        f"{UNIT}comm/test_communicator.py",
        f"{DISTRIBUTED}contract.py",
    ),
]


def copy_to(folder: Path) -> None:
    """All that tests read; the library and the tests are copies."""
    for path in ROOT.iterdir():
        if path.name in ("birder", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != ".git":
            (folder / path.name).symlink_to(path)


def found(fault: Fault, folder: Path) -> str:
    """What the tests say of a fault: the first that fails, "too slow", or nothing."""
    path = folder / "birder" / fault.file
    text, stamps = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text(text.replace(fault.right, fault.wrong))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-m",
        "not slow",
    ]
    env = {**os.environ, "PYTHONPATH": str(folder), "NUMBA_CACHE_DIR": str(folder / "numba")}
    try:
        done = subprocess.run(
            [*command, *fault.tests], cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "too slow"
    finally:
        path.write_text(text)
        os.utime(path, ns=stamps)  # numba and Python compile it only once
    if done.returncode == 0:
        return ""
    if done.returncode != 1:
        sys.exit(
            f"{fault.name}: pytest ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0].partition(" ")[2] if failed else "failed"


def stale(faults: list[Fault]) -> list[str]:
    """What is wrong with faults that cannot be put in."""
    wrong = [f for f in faults if (ROOT / "birder" / f.file).read_text().count(f.right) != 1]
    return [f"{f.name}: birder/{f.file} does not hold this once: {f.right}" for f in wrong]


def main(names: list[str]) -> int:
    chosen = [f for f in FAULTS if not names or f.name in names]
    if wrong := stale(chosen):
        sys.exit("\n".join(wrong))
    lived = 0
    print("| fault | in birder/ | found by | s |\n|---|---|---|--:|")
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for one in chosen:
            began = time.monotonic()
            by = found(one, Path(folder))
            lived += not by
            print(f"| {one.name} | {one.file} | {by or '**not found**'} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"\n{len(chosen) - lived} of {len(chosen)} found")
    return int(lived > len(chosen) // 20)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
