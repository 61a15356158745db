"""One run of the campaign: started, disturbed, looked after, and gone on with."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file

from launch import process
from launch.emulated import launcher as emulated
from tests.helpers import ROOT

NODES, STEPS, EVERY = 2, 120, 20
SILENCE_S = 8.0
"""Seconds instead of the default 30: trials wait for it."""
PATIENCE_S = 240.0
"""For a whole run on a machine that does other things; more is a hang, and the trial has failed."""

METHODS = {
    "sgdm": [],
    "sgdm_nesterov": [],
    "adamw": [],
    "muon": [],
    "bertadam": ["optimizer.lr=1e-3"],
    "lamb": ["optimizer.lr=1e-3"],
    "onebit_adam": ["optimizer.warmup_steps=30"],
    "onebit_lamb": ["optimizer.lr=1e-3", "optimizer.eps=1e-4", "optimizer.warmup_steps=30"],
    "zero_one_adam": ["optimizer.lr=1e-3", "optimizer.eps=1e-4"],
    "birder": [],
    "sigma_delta": [],
    "lion": [],
    "efficient_adam": [],
    "slamb": ["optimizer.lr=1e-3"],
    "cser": ["optimizer.lr=0.02"],
    "csea": ["optimizer.lr=0.02"],
    "cser_pl": ["optimizer.lr=0.02"],
    "ef_sgd": ["optimizer.lr=0.02"],
    "ef21_sgdm": ["optimizer.lr=0.2"],
    "qsparse": ["optimizer.lr=0.02"],
    "local_sgd": ["optimizer.lr=0.02"],
    "sparse_loco": [],
    "diloco": [],
}


@dataclass
class Trial:
    """One fault, and what came of it. outcome: equal | refused | missed (the run was over before the fault) | wrong."""

    number: int
    cluster: str
    method: str
    fault: str
    moment: str
    delay_s: float
    outcome: str = ""
    said: str = ""
    seconds: float = 0.0


def clusters() -> tuple[str, ...]:
    """What can be tried here."""
    return ("local", "emulated") if emulated.why_not() is None else ("local",)


class Wrong(Exception):
    """A trial did not end as it should. The message says how."""


class Run:
    """One start of experiments/run.py in `folder`."""

    def __init__(self, folder: Path, trial: Trial, nan: str = "") -> None:
        self.folder = folder
        self.dir = folder / "disk/outputs/digits/run"
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "experiments/run.py"), "+exp=digits", f"optimizer={trial.method}"]
        command += [f"cluster={trial.cluster}", f"cluster.nodes={NODES}", "cluster.ranks_per_node=1", "run_name=run"]
        command += [f"output_dir={folder}/disk/outputs", f"results_dir={folder}/results", "wandb=disabled"]
        command += [
            f"cluster.heartbeat_timeout_s={SILENCE_S}",
            "scale=quick",
            "train.batch_per_rank=8",
            "train.epochs=100",
        ]
        command += [f"train.max_steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=3", "resume=auto"]
        command += ["train.eval_every=30", "train.threads=1", "workload._target_=tests.campaign.workload.SlowDigits"]
        command += ["cluster.dilation=20"] if trial.cluster == "emulated" else []
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": str(ROOT),
            "CAMPAIGN_NAN": nan,
        }
        self.began, parent = time.monotonic(), os.getpid()

        def prepare() -> None:
            process.die_with_parent(parent)  # a campaign that is broken off leaves nothing either
            signal.signal(signal.SIGINT, signal.default_int_handler)

        self.launcher = subprocess.Popen(
            [*command, *METHODS[trial.method]],
            env=env,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=prepare,
        )

    @property
    def over(self) -> bool:
        return self.launcher.poll() is not None

    def wait_for(self, what: Callable[[], object]) -> bool:
        """Whether `what()` came true before the run was over."""
        while not what():
            if self.over:
                return False
            if time.monotonic() - self.began > PATIENCE_S:
                raise Wrong("the run hangs")
            time.sleep(0.002)
        return True

    def steps(self) -> int:
        with contextlib.suppress(OSError):
            return len((self.dir / "curve.csv").read_text().splitlines()) - 1
        return 0

    def pid_of(self, fault: str, draw: random.Random) -> int | None:
        """A rank or an agent of this run, if there is one already."""
        word = b"worker.py" if fault.endswith("rank") else b"torch.distributed.run"
        found = []
        for pid in process.descendants(self.launcher.pid):
            line = process.of_proc(pid, "cmdline")
            if word in line and (word == b"worker.py") != (b"torch.distributed.run" in line):
                found.append(pid)
        return draw.choice(found) if len(found) == NODES else None

    def end(self) -> tuple[int, str]:
        """Exit status and the last line of standard error."""
        try:
            _, err = self.launcher.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Wrong("the run hangs") from None
        return self.launcher.returncode, (err.strip().splitlines() or [""])[-1]

    def left(self) -> list[str]:
        """What of this run is still there: processes that name its folder, files in its temporary folder."""
        deadline = time.monotonic() + 20
        while True:
            # torch keeps a cache for each user there, not for each run.
            temporary = [p for p in (self.folder / "tmp").iterdir() if not p.name.startswith("torchinductor_")]
            found = [str(p.relative_to(self.folder)) for p in temporary]
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if path.parent.name != str(os.getpid()) and str(self.dir).encode() in path.read_bytes():
                        found.append(f"process {path.parent.name}")
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)


def content(folder: Path) -> dict[str, torch.Tensor]:
    return {f"{f.name}/{k}": t for f in sorted(folder.glob("*.safetensors")) for k, t in load_file(f).items()}


def undisturbed(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """The last checkpoint of a run that nothing happened to, on loopback; made once."""
    kept, place = folder / f"undisturbed/{method}", folder / f"reference-{method}"
    kept.parent.mkdir(exist_ok=True)
    with FileLock(f"{kept}.lock"):  # trials run side by side
        if not kept.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a campaign that was broken off
            run = Run(place, Trial(-1, "local", method, "", "", 0.0))
            code, said = run.end()
            last = run.dir / f"checkpoints/step-{STEPS:08d}"
            if code or not last.exists():
                raise RuntimeError(f"no trial: the undisturbed run of {method} failed: {said}")
            shutil.copytree(last, kept)
            shutil.rmtree(place)
    return content(kept)
