"""One SLURM job, seen from where it was submitted: through sbatch, scontrol and scancel. Needs no accounting database."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import failure, process
from launch.errors import UserError
from launch.failure import Cause

ENDED = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended well",
    "DEADLINE": "its deadline passed",
    "FAILED": "a command in it failed",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for",
    "PREEMPTED": "a job of higher priority took its nodes",
    "TIMEOUT": "its time was up; set cluster.time=HH:MM:SS",
}
"""States in which nothing of a job runs any more, and what they mean."""

# Ended from outside: what its ranks report is a consequence.
_FROM_OUTSIDE = {"BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}
_FIRST_TASK = re.compile(r"^srun: error: \S+: tasks? (\d+)\S*: (Exited with exit code (\d+)|Killed)?", re.MULTILINE)
_REQUEUED = re.compile(r"^.* DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE).*$", re.MULTILINE)


class NoController(Exception):
    """A command of SLURM failed. The message is its own."""


@dataclass(frozen=True)
class State:
    """What the controller says of a job. `name` is "" once it has forgotten the job."""

    name: str
    reason: str = ""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        return self.name in ENDED or not self.name


def ask(command: Sequence[str], timeout_s: float = 120) -> str:
    """The output of a command of SLURM. Raises NoController."""
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoController(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NoController(_said(done.stderr) or f"{command[0]} ended with status {done.returncode}")
    return done.stdout


@functools.cache
def gpus(partition: str | None) -> int | None:
    """The fewest GPUs of a node in the partition (None: the default one), as SLURM lists them; None where nobody answers."""
    chosen = partition or os.environ.get("SBATCH_PARTITION")
    try:
        said = ask(["sinfo", "--noheader", "--format=%P|%G", *([f"--partition={chosen}"] if chosen else [])], 30)
    except NoController:
        return None
    lines = [line.partition("|") for line in said.split("\n") if "|" in line]
    mine = [listed for name, _, listed in lines if chosen or name.strip().endswith("*")]
    # "gpu:a100:4(S:0-1),gpu:2,nvme:1" has 6; "(null)" none.
    counts = [sum(map(int, re.findall(r"(?:^|,)gpu:(?:[^:,()]+:)?(\d+)", listed))) for listed in mine]
    return min(counts, default=None)


def environment() -> dict[str, str]:
    """This environment without what belongs to a job that this process may itself be part of.

    Nor what would make an array of the job: its tasks would all train into one folder.
    """
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    others = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("SLURM_")}
    return {k: v for k, v in others.items() if k != "SBATCH_ARRAY_INX"}


def submit(command: Sequence[str]) -> str:
    """Submits a job; its id. Raises UserError when SLURM refuses it. An interrupt leaves no job behind."""
    # In a new session: Ctrl-C must not end it between the job's making and the word of its id.
    sbatch = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = sbatch.communicate()
    except BaseException:
        with process.undisturbed():
            try:
                out, _ = sbatch.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                sbatch.kill()
                out, _ = sbatch.communicate()
            if job := _id(out):
                cancel(job)
        raise
    if sbatch.returncode or not (job := _id(out)):
        raise UserError(f"sbatch refused the job: {_said(err) or 'it did not say why'}")
    return job


def state(job: str) -> State:
    """The state of a job now. Raises NoController when nobody can be asked."""
    try:
        said = ask(["scontrol", "--oneliner", "show", "job", job])
    except NoController as error:
        if "Invalid job id" in str(error):
            return State("")
        raise
    facts = dict(re.findall(r"\b(JobState|Reason|Restarts)=(\S*)", said))
    return State(facts.get("JobState", ""), facts.get("Reason", "None"), int(facts.get("Restarts", 0)))


def under_way(names: Sequence[str]) -> list[str]:
    """The jobs of these names that have not ended. Raises NoController."""
    return ask(["squeue", "--noheader", "--format=%i", f"--name={','.join(names)}"]).split() if names else []


def cancel(job: str) -> bool:
    """Cancels a job and waits until its processes are gone: True. False when they are not after 90 seconds."""
    with contextlib.suppress(NoController):  # it may have ended by itself
        ask(["scancel", job])
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        with contextlib.suppress(NoController):
            if state(job).ended:
                return True
        time.sleep(0.5)
    return False


def explain(run_dir: Path, job: str, ended: str, log: str) -> Cause:
    """Why a job did not end well.

    ended: the name of its last state, "" where the controller has forgotten the job.
    log:   what SLURM said in logs/slurm.log, this submission's part.
    """
    label = f"SLURM job {job} {ended or 'ended'}"
    if ended in _FROM_OUTSIDE:
        return Cause(f"{label}: {ENDED[ended]}")
    log = _REQUEUED.split(log)[-1]  # an earlier life of the job explains nothing
    first = _FIRST_TASK.search(log)
    node, code = 0, 1
    if first:
        node, code = int(first[1]), -9 if first[2] == "Killed" else int(first[3] or 1)
    cause = failure.explain(run_dir, killed=[], agent=node, code=code)
    if cause.user_error:
        return cause
    if first is None and not cause.traceback:
        return Cause(f"{label} before its ranks could start; see {run_dir / 'logs' / 'slurm.log'}", log.strip())
    meaning = f" ({ENDED[ended]})" if ended == "OUT_OF_MEMORY" else ""
    return Cause(f"{label}{meaning}: {cause.reason}", cause.traceback)


def _id(out: str) -> str:
    """The job's id in the output of `sbatch --parsable`, "id" or "id;cluster"; "" where there is none."""
    lines = out.split()
    return lines[-1].partition(";")[0] if lines else ""


def _said(text: str) -> str:
    """An error of a command of SLURM in one line."""
    lines = [re.sub(r"^\w+: error: ", "", line.strip()) for line in text.splitlines() if line.strip()]
    return "; ".join(lines)
