"""The campaign's trials: one fault at a random moment of a run, then a resume, compared bit for bit with an undisturbed run.

A trial ends well when the resumed run's last checkpoint equals the undisturbed one's in every tensor of every rank, or when
the run is refused in one clear line within LIMIT_S; and when nothing is left: no process, no temporary file, no mount.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from birder import checkpoint
from launch import process
from launch.emulated import launcher as emulated
from tests.test_launch import descendants

ROOT = Path(__file__).resolve().parents[1]
NODES, STEPS, EVERY = 2, 120, 20
SILENCE_S = 8.0
"""Seconds instead of the default 30: trials wait for it."""
LIMIT_S = float(os.environ.get("CAMPAIGN_LIMIT_S", "60"))
"""Within which a run that cannot go on says so, from the fault on."""
PATIENCE_S = 240.0
"""For a whole run on a machine that does other things; more is a hang, and the trial has failed."""

METHODS = {
    "sgdm": [],
    "sgdm_nesterov": [],
    "adamw": [],
    "bertadam": ["optimizer.lr=1e-3"],
    "lamb": ["optimizer.lr=1e-3"],
    "onebit_adam": ["optimizer.warmup_steps=30"],
    "onebit_lamb": ["optimizer.lr=1e-3", "optimizer.eps=1e-4", "optimizer.warmup_steps=30"],
    "zero_one_adam": ["optimizer.lr=1e-3", "optimizer.eps=1e-4"],
    "birder": [],
    "slamb": ["optimizer.lr=1e-3"],
    "cser": ["optimizer.lr=0.02"],
    "csea": ["optimizer.lr=0.02"],
    "cser_pl": ["optimizer.lr=0.02"],
    "ef_sgd": ["optimizer.lr=0.02"],
    "qsparse": ["optimizer.lr=0.02"],
    "local_sgd": ["optimizer.lr=0.02"],
    "sparse_loco": [],
}
FAULTS = (
    *("kill rank", "kill agent", "kill launcher", "SIGTERM", "SIGINT", "SIGHUP", "stop rank", "cut link", "full disk"),
    *("torn file", "flipped bit", "swapped files", "NaN on one rank"),
)
DAMAGE = ("torn file", "flipped bit", "swapped files")
MOMENTS = ("start", "step", "save", "evaluation", "end")
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP, "kill launcher": signal.SIGKILL}


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


def plan(seed: int, clusters: tuple[str, ...]) -> Iterator[Trial]:
    """All pairs of a fault and a method in random order, again and again. The same for the same seed."""
    draw, number = random.Random(seed), 0
    while True:
        pairs = [(f, m) for f in FAULTS for m in METHODS]
        draw.shuffle(pairs)
        for fault, method in pairs:
            cluster = "emulated" if fault == "cut link" else draw.choice(clusters)
            trial = Trial(number, cluster, method, fault, draw.choice(MOMENTS), round(draw.uniform(0, 1.0), 3))
            if cluster in clusters:
                yield trial
                number += 1


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
        command += [f"cluster.silence_s={SILENCE_S}", "scale=quick", "train.batch_per_rank=8", "train.epochs=100"]
        command += [f"train.max_steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep=3", "resume=auto"]
        command += ["train.eval_every=30", "train.threads=1", "workload._target_=tests.campaign_workload.SlowDigits"]
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
        for pid in descendants(self.launcher.pid):
            with contextlib.suppress(OSError):
                if word in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and (
                    word == b"worker.py") != (b"torch.distributed.run" in line):  # fmt: skip
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
    kept = folder / f"undisturbed/{method}"
    if not kept.exists():
        shutil.rmtree(folder / "reference", ignore_errors=True)  # of a campaign that was broken off
        run = Run(folder / "reference", Trial(-1, "local", method, "", "", 0.0))
        code, said = run.end()
        last = run.dir / f"checkpoints/step-{STEPS:08d}"
        if code or not last.exists():
            raise RuntimeError(f"no trial: the undisturbed run of {method} failed: {said}")
        kept.parent.mkdir(exist_ok=True)
        shutil.copytree(last, kept)
        shutil.rmtree(folder / "reference")
    return content(kept)


def attempt(trial: Trial, folder: Path) -> Trial:
    """Runs a trial in `folder` and notes its outcome. Leaves nothing there but what undisturbed runs ended with."""
    began, place = time.monotonic(), folder / f"trial{trial.number}"
    disk, draw = place / "disk", random.Random(f"{trial.number} {trial.fault}")
    runs: list[Run] = []
    shutil.rmtree(place, ignore_errors=True)
    disk.mkdir(parents=True)
    mounted = False
    try:
        wanted = undisturbed(folder, trial.method)
        if trial.fault == "full disk":
            made = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True
            )
            if made.returncode:
                trial.outcome, trial.said = "missed", "no file system can be mounted here"
                return trial
            mounted = True
        nan = f"{draw.randrange(NODES)} {draw.randrange(1, STEPS)} {place}/nan" if "NaN" in trial.fault else ""
        runs.append(Run(place, trial, nan))
        hit, said = disturb(runs[0], trial, draw)
        (disk / "filler").unlink(missing_ok=True)
        runs.append(Run(place, trial))
        code, line = runs[-1].end()
        if left := runs[-1].left():
            raise Wrong(f"left: {', '.join(left[:3])}")
        if code == 0:
            compare(content(runs[-1].dir / f"checkpoints/step-{STEPS:08d}"), wanted)
            trial.outcome, trial.said = ("equal" if hit else "missed"), said
        elif line.startswith("error: ") and len(line) < 300 and time.monotonic() - runs[-1].began < LIMIT_S:
            trial.outcome, trial.said = "refused", line
        else:
            raise Wrong(f"the resumed run ended with status {code}: {line[:200]}")
    except (Wrong, AssertionError, OSError, ValueError) as error:
        trial.outcome, trial.said = "wrong", f"{type(error).__name__}: {error}"
    finally:
        for run in runs:
            if not run.over:
                run.launcher.kill()
                run.launcher.communicate()
        if mounted:
            subprocess.run(["umount", "--lazy", disk], check=True)
        trial.seconds = round(time.monotonic() - began, 1)
        trial.said = trial.said.replace(str(folder), "...")
        if trial.outcome != "wrong":
            shutil.rmtree(place, ignore_errors=True)
    return trial


def disturb(run: Run, trial: Trial, draw: random.Random) -> tuple[bool, str]:
    """Waits for the moment, does the fault, waits for the end: (whether the run was still under way, what it said)."""
    kills = trial.fault.startswith("kill") or trial.fault in SIGNALS
    if "NaN" in trial.fault:
        hit = True
    elif trial.fault in DAMAGE:
        hit = run.wait_for(lambda: len(list((run.dir / "checkpoints").glob("step-????????"))) >= 2)
        run.launcher.kill()
    else:
        drafts = run.dir / "checkpoints"
        moment = {
            "start": lambda: True,
            "step": lambda: run.steps() > 0,
            "save": lambda: any(drafts.glob("step-*.tmp")),
            "evaluation": lambda: run.steps() >= 29,
            "end": lambda: (drafts / f"step-{STEPS - EVERY:08d}").exists(),
        }[trial.moment]
        hit = run.wait_for(moment)
        time.sleep(trial.delay_s * (3 if trial.moment == "start" else 0.3 if trial.moment != "save" else 0.005))
        hit = hit and strike(run, trial, draw)
    struck = time.monotonic()
    code, said = run.end()
    if left := [p for p in run.left() if trial.fault != "kill launcher" or p.startswith("process")]:
        raise Wrong(f"left after the fault: {', '.join(left[:3])}")
    if trial.fault in DAMAGE:
        damage(run.dir / "checkpoints", trial.fault, draw)
    elif hit and code:
        if time.monotonic() - struck > LIMIT_S:
            raise Wrong(f"the end took {time.monotonic() - struck:.0f} s")
        one_line = said.startswith(("error: ", "interrupted: ", "ended by ")) and len(said) < 400
        if not (one_line or trial.fault == "kill launcher" or (kills and not said)):
            raise Wrong(f"no clear line, but: {said[:200]}")
    return hit, said


def strike(run: Run, trial: Trial, draw: random.Random) -> bool:
    """Does the fault. False when there is nobody left to do it to."""
    if trial.fault in SIGNALS:
        run.launcher.send_signal(SIGNALS[trial.fault])
        return not run.over or run.launcher.returncode != 0
    if trial.fault == "cut link":
        with open(run.dir / "control", "a") as control:
            control.write("cut 1\n")
        return not run.over
    if trial.fault == "full disk":
        with open(run.folder / "disk/filler", "wb") as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"\0" * 65536)
                filler.flush()
        return not run.over
    found: list[int | None] = [None]

    def search() -> bool:
        found[0] = run.pid_of(trial.fault, draw)
        return found[0] is not None

    if not run.wait_for(search) or found[0] is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(found[0], signal.SIGSTOP if trial.fault == "stop rank" else signal.SIGKILL)
        return not run.over
    return False


def damage(checkpoints: Path, fault: str, draw: random.Random) -> None:
    """Damages the newest checkpoint, as a disk, a copy or a person may."""
    folders = sorted(checkpoints.glob("step-????????"))
    if len(folders) < 2:
        raise Wrong("fewer than two checkpoints to damage")
    files = sorted(p for p in folders[-1].iterdir() if p.suffix == ".safetensors")
    file = draw.choice(files)
    if fault == "torn file":
        os.truncate(file, draw.randrange(file.stat().st_size))
    elif fault == "flipped bit":
        whole = bytearray(file.read_bytes())
        whole[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        file.write_bytes(whole)
    else:
        shutil.copy(folders[-2] / file.name, file)
    newest = checkpoint.latest(checkpoints)
    if newest is None or newest[1] != folders[-2]:
        raise Wrong(f"{fault}: {folders[-1].name} passes for whole")


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    if found.keys() != wanted.keys():
        raise Wrong("the resumed run ended with other tensors")
    if odd := [k for k in found if not torch.equal(found[k], wanted[k])]:
        raise Wrong(f"{len(odd)} of {len(found)} tensors differ, {odd[0]} first")


def done(results: Path) -> dict[int, Trial]:
    """The trials that a file of results holds."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {t.number: t for t in (Trial(**json.loads(line)) for line in lines)}


def next_trial(pending: list[Trial], tried: Iterable[Trial]) -> Trial:
    """The one whose fault, method and cluster were tried least, so that a few trials already reach many of each."""
    seen = list(tried)
    faults, methods = Counter(t.fault for t in seen), Counter(t.method for t in seen)
    places = Counter((t.fault, t.cluster) for t in seen)
    return min(pending, key=lambda t: (faults[t.fault] + methods[t.method], places[t.fault, t.cluster], t.number))


def go_through(seed: int, count: int, seconds: float, folder: Path, results: Path) -> list[Trial]:
    """The first `count` trials of a seed, those that `results` does not hold yet, as far as the time reaches."""
    end, earlier = time.monotonic() + seconds, done(results)
    pending = [t for t in itertools.islice(plan(seed, clusters()), count) if t.number not in earlier]
    while pending and time.monotonic() < end:
        pending.remove(trial := next_trial(pending, earlier.values()))
        earlier[trial.number] = attempt(trial, folder)
        with open(results, "a") as file:
            file.write(json.dumps(asdict(trial)) + "\n")
        print(f"{trial.number}: {trial.fault}, {trial.moment}, {trial.method} on {trial.cluster}: {trial.outcome}"
              f" in {trial.seconds:.0f} s {trial.said}", flush=True)  # fmt: skip
    return list(earlier.values())
