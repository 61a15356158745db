"""A cluster that SLURM manages: one job through sbatch, one torchrun agent per node through srun.

submitit is not used: it pickles a Python function and writes the sbatch script itself, and this needs a torchrun per node
and a script (<run_dir>/job.sh) that a user can read, change and submit again.

The repository, the Python environment, the run directory and the data must lie at the same paths on all nodes (a shared
file system). A job outlives the launcher's death, and `cluster.wait=false`: `scancel` ends it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, Template

from launch import failure, link_file, process
from launch.base import Launcher
from launch.errors import UserError, refused
from launch.files import Tail
from launch.slurm import job as slurm_job
from launch.slurm.job import NoController, State
from launch.spec import RunSpec
from launch.words import say

NODE_PROGRAM = Path(__file__).resolve().with_name("node.py")
_REMIND_S = 300.0  # between two words about a job that waits for the same reason

_SCRIPT = Template(
    Path(__file__).with_name("job.sh.j2").read_text("utf-8"), undefined=StrictUndefined, keep_trailing_newline=True
)

_KEYS = {
    "chdir": "the folder that this is started from",
    "output": "output_dir",
    "error": "output_dir",
    "gpus-per-node": "cluster.gpus_per_node",
}
"""What the user knows an option of sbatch by, where it is not cluster.<option>."""


@dataclass(kw_only=True, eq=False, repr=False)
class SlurmLauncher(Launcher):
    """N nodes of one SLURM job.

    Without gpus_per_node it asks for as many as ranks where backend is nccl, or where it is auto and the partition's nodes
    have so many or the scale is the paper's; else for none.
    """

    partition: str | None = None
    account: str | None = None
    time: str | int | None = None
    constraint: str | None = None
    gpus_per_node: str | int | None = None
    cpus_per_node: int | None = None
    sbatch: Mapping[str, Any] | None = None
    interface: str | None = None
    wait: bool = True
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        gpus_per_node = self.gpus_per_node
        self._ask_for_gpus = gpus_per_node is None and self.backend == "auto"
        if gpus_per_node is None and self.backend == "nccl":
            gpus_per_node = self.ranks_per_node
        number = re.search(r"(?:^|:)(\d+)$", str(gpus_per_node or 0))
        if not number:
            directive("gpus-per-node", gpus_per_node)  # refused where it is more than a line
            raise UserError(
                f"cluster.gpus_per_node={gpus_per_node} is a kind of GPU without their number: {gpus_per_node}:N"
            )
        gpus = int(number[1])
        if gpus < self.ranks_per_node and (gpus_per_node or self.backend == "nccl"):
            raise UserError(
                f"cluster.gpus_per_node={gpus_per_node} is fewer than the {self.ranks_per_node} ranks of a node: "
                "set cluster.gpus_per_node or cluster.ranks_per_node"
            )
        self.options: dict[str, Any] = {
            "nodes": self.nodes,
            "ntasks-per-node": 1,
            "cpus-per-task": self.cpus_per_node or self.ranks_per_node,
            "requeue": None,
            "open-mode": "append",
        }
        chosen: dict[str, Any] = {key: getattr(self, key) for key in ("partition", "account", "time", "constraint")}
        chosen["gpus-per-node"] = gpus_per_node or None
        self.options |= {key: value for key, value in chosen.items() if value is not None}
        reserved = {*self.options, *chosen, "job-name", "output", "error", "chdir"}
        for key, value in (self.sbatch or {}).items():
            _check_option(str(key), value, reserved)
        self.options |= dict(self.sbatch or {})
        for key, value in self.options.items():
            directive(key, value)

    def _gpus(self, spec: RunSpec) -> dict[str, int]:
        """The GPUs that the job asks for where nobody has said how many. Raises UserError where they cannot be enough.

        The nodes decide, not the machine that the job is submitted from.
        """
        if not self._ask_for_gpus:
            return {}
        paper = (spec.config.get("scale") or {}).get("name") == "paper"
        found = slurm_job.gpus(self.partition)
        if paper and found is not None and found < self.ranks_per_node:
            where = f"partition {self.partition}" if self.partition else "the partition"
            raise UserError(
                f"scale=paper needs {self.ranks_per_node} GPUs on a node, and SLURM lists {found} in {where}: set "
                "cluster.partition or cluster.ranks_per_node, or cluster.backend=gloo for CPUs"
            )
        wanted = paper if found is None else found >= self.ranks_per_node
        return {"gpus-per-node": self.ranks_per_node} if wanted else {}

    def check(self, spec: RunSpec) -> None:
        self.script(spec)  # a path that cannot stand in it is found before anything is written
        if self.dry_run:
            return  # shows what it would do where there is no SLURM, too
        missing = [c for c in ("sbatch", "srun", "scontrol", "sinfo", "scancel") if shutil.which(c) is None]
        if missing:
            raise UserError(
                f"cluster=slurm needs {missing[0]}, which is not here: start it on a SLURM cluster's login node"
            )
        with refused("SLURM does not answer", NoController):
            said = slurm_job.ask(["sinfo", "--all", "--noheader", "--format=%P|%D"])
            running = slurm_job.under_way([spec.id])
        if running:
            raise UserError(
                f"job {running[0]} of this run has not ended: wait for it, or end it with scancel {running[0]}"
            )
        sizes = dict(line.rsplit("|", 1) for line in said.split())
        default = next((name for name in sizes if name.endswith("*")), None)
        wanted = self.partition or os.environ.get("SBATCH_PARTITION") or default
        if wanted is None:
            raise UserError(
                f"this cluster has no default partition: set cluster.partition to one of {', '.join(sizes)}"
            )
        nodes = {name.rstrip("*"): int(count) for name, count in sizes.items()}
        for name in wanted.rstrip("*").split(","):
            if name not in nodes:
                raise UserError(f"no partition '{name}'; there are: {', '.join(sorted(nodes)) or 'none'}")
        most = max(nodes[name] for name in wanted.rstrip("*").split(","))
        if self.nodes > most:
            raise UserError(
                f"{self.nodes} nodes asked for, and partition {wanted.rstrip('*')} has {most}: set cluster.nodes"
            )

    def command(self, spec: RunSpec, node_rank: int) -> list[str]:
        """torchrun's command line, the same for all nodes: launch/slurm/node.py fills in what stands in braces."""
        absolute = dataclasses.replace(spec, run_dir=str(spec.path.absolute()))
        return self.torchrun(absolute, endpoint="{endpoint}", is_host="{is_host}", local_addr="{address}")

    def all_options(self, spec: RunSpec) -> dict[str, Any]:
        """What the job asks for: sbatch's long options and their values."""
        logs = _logs(spec)
        options = {
            "job-name": spec.id,
            "chdir": Path.cwd(),
            "output": f"{logs}/output.log",
            "error": f"{logs}/slurm.log",
            **self._gpus(spec),
            **self.options,
        }
        return {key: value for key, value in options.items() if value is not False}

    def script(self, spec: RunSpec) -> str:
        """The job's script: complete and the same for every start of the job."""
        folder = spec.path.absolute()
        node = [self.python, str(NODE_PROGRAM), "--ranks", str(self.ranks_per_node), "--backend", self.backend]
        node += ["--interface", self.interface] if self.interface else []
        exports = {"BIRDER_RESUME": "auto", **self.torchrun_environment()}
        paths: dict[str, str | Path] = {
            "cwd": Path.cwd(),
            "script": folder / "job.sh",
            "left": folder / failure.TORCHRUN,
        }
        paths |= {"ranks": folder / "ranks", "errors": folder / "errors", "log": f"{_logs(spec)}/node%n.log"}
        return _SCRIPT.render(
            id=spec.id,
            command=" ".join(spec.command.split()),
            directives="\n".join(directive(key, value) for key, value in self.all_options(spec).items()),
            exports="\n".join(f"export {k}={shlex.quote(v)}" for k, v in exports.items()),
            node=shlex.join(node),
            torchrun=shlex.join(self.command(spec, 0)),
            **{name: shlex.quote(str(path)) for name, path in paths.items()},
        )

    def submission(self, spec: RunSpec) -> list[str]:
        """sbatch's command line, with the script's options once more: a site's SBATCH_* would count before the script."""
        given = self.all_options(spec).items()
        options = [f"--{key}" if value is None or value is True else f"--{key}={value}" for key, value in given]
        return ["sbatch", "--parsable", *options, str(spec.path.absolute() / "job.sh")]

    def preview(self, spec: RunSpec) -> str:
        return f"{self.script(spec)}\n{shlex.join(self.submission(spec))}"

    def run(self, spec: RunSpec) -> None:
        logs = spec.path / "logs"
        logs.mkdir(exist_ok=True)
        link_file.write(spec.path, link_file.of(kind="network"))
        (spec.path / "job.sh").write_text(self.script(spec))
        output, log = Tail(logs / "output.log"), Tail(logs / "slurm.log")
        with process.stop_signals():
            job = slurm_job.submit(self.submission(spec))
            try:
                say(f"SLURM job {job}: submitted")
                if not self.wait:
                    watch = shlex.join(["tail", "-f", str(output.path)])
                    say(f"it runs on its own; to watch or end it:\n  {watch}\n  scancel {job}")
                    return
                ended = self._follow(job, output)
            except BaseException:
                with process.undisturbed():
                    if not slurm_job.cancel(job):
                        say(f"SLURM job {job}: cancelled, but not ended yet; see squeue", sys.stderr)
                raise
        if ended != "COMPLETED" and not (ended == "" and self._all_done(spec)):
            failure.report(slurm_job.explain(spec.path, job, ended, log.rest()))

    def _follow(self, job: str, output: Tail) -> str:
        """Shows what rank 0 prints until the job has ended; the name of its last state."""
        printed, when = "", 0.0
        while True:
            try:
                now = slurm_job.state(job)
            except NoController as error:
                now = State("UNKNOWN", " ".join(str(error).split()))  # the controller will answer again
            waits = now.name in ("PENDING", "UNKNOWN")
            news = now.name.lower() + f" ({now.reason})" * waits + f", restart {now.restarts}" * (now.restarts > 0)
            known = now.ended or (waits and now.reason == "None")
            if not known and (news != printed or (waits and time.monotonic() - when > _REMIND_S)):
                say(f"SLURM job {job}: {news}")
                printed, when = news, time.monotonic()
            until = time.monotonic() + (0 if now.ended else self.poll_s)
            while True:
                sys.stdout.write(output.rest())
                sys.stdout.flush()
                if time.monotonic() >= until:
                    break
                time.sleep(0.2)
            if now.ended:
                return now.name

    def _all_done(self, spec: RunSpec) -> bool:
        """Whether every rank said that it has finished."""
        done = {r["rank"] for r in failure.ranks(spec.path) if r["state"] == "done"}
        return done == set(range(self.nodes * self.ranks_per_node))


def _logs(spec: RunSpec) -> str:
    """The folder of logs, for sbatch and srun, which fill in %n and others."""
    return str(spec.path.absolute() / "logs").replace("%", "%%")


def directive(key: str, value: Any) -> str:
    """An option of sbatch as a line of its script. Raises UserError for a value that is more than one line of text.

    sbatch reads these lines by other rules than a shell: a backslash escapes also within quotes of either kind, an unquoted #
    begins a comment.
    """
    if value is None or value is True:
        return f"#SBATCH --{key}"
    text = str(value)
    if not text.isprintable():
        shown = text.encode("unicode_escape").decode()[:60]
        raise UserError(f"{_KEYS.get(key, f'cluster.{key}')} must be one line of printable text, not '{shown}'")
    if not re.fullmatch(r"[\w@%+=:,./-]*", text, re.ASCII):
        text = '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'
    return f"#SBATCH --{key}={text}"


def _check_option(key: str, value: Any, reserved: set[str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
        raise UserError(f"cluster.sbatch.{key}: write sbatch's long options, without the leading dashes")
    if key in reserved:
        raise UserError(f"cluster.sbatch.{key} is set by other keys: see conf/cluster/slurm.yaml")
    if key in ("array", "ntasks", "wrap", "test-only"):  # tasks of an array would all train into the same folder
        raise UserError(
            f"cluster.sbatch.{key} cannot be: a job is one run with a torchrun on each node; run.py -m makes several"
        )
    if isinstance(value, Mapping | list) or not str(value).isprintable():
        raise UserError(f"cluster.sbatch.{key} must be one line of text, a number, true, false or null")
