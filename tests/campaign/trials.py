"""The campaign's trials: one fault at a random moment of a run, then a resume, compared bit for bit with an undisturbed run.

A trial ends well when the resumed run's last checkpoint equals the undisturbed one's in every tensor of every rank, or when
the run is refused in one clear line within LIMIT_S; and when nothing is left: no process, no temporary file, no mount.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

import torch

from birder import checkpoint
from tests.campaign.run import EVERY, METHODS, NODES, STEPS, Run, Trial, Wrong, clusters, content, undisturbed

LIMIT_S = float(os.environ.get("CAMPAIGN_LIMIT_S", "60"))
"""Within which a run that cannot go on says so, from the fault on."""
FAULTS = (
    *("kill rank", "kill agent", "kill launcher", "SIGTERM", "SIGINT", "SIGHUP", "stop rank", "cut link", "full disk"),
    *("torn file", "flipped bit", "swapped files", "NaN on one rank"),
)
DAMAGE = ("torn file", "flipped bit", "swapped files")
MOMENTS = ("start", "step", "save", "evaluation", "end")
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP, "kill launcher": signal.SIGKILL}


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
    if fault == "swapped files":  # those that are alike, such as an empty one, are no damage
        files = [f for f in files if f.read_bytes() != (folders[-2] / f.name).read_bytes()]
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


def go_through(seed: int, count: int, seconds: float, folder: Path, results: Path, jobs: int = 1) -> list[Trial]:
    """The first `count` trials of a seed, those not in `results` yet, as far as time reaches; `jobs` at a time."""
    end, earlier = time.monotonic() + seconds, done(results)
    pending = [t for t in itertools.islice(plan(seed, clusters()), count) if t.number not in earlier]
    running: dict[Future[Trial], Trial] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        while running or (pending and time.monotonic() < end):
            while len(running) < jobs and pending and time.monotonic() < end:
                pending.remove(trial := next_trial(pending, [*earlier.values(), *running.values()]))
                running[pool.submit(attempt, trial, folder)] = trial
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                del running[ended]
                trial = earlier[ended.result().number] = ended.result()
                with open(results, "a") as file:
                    file.write(json.dumps(asdict(trial)) + "\n")
                print(f"{trial.number}: {trial.fault}, {trial.moment}, {trial.method} on {trial.cluster}: {trial.outcome}"
                      f" in {trial.seconds:.0f} s {trial.said}", flush=True)  # fmt: skip
    return list(earlier.values())
