"""Trains one method on one task. Writes a record of time, bytes and accuracy.

    python experiments/run.py +exp=NAME [key=value ...]

NAME is a file of conf/exp. Examples, each typed after `python experiments/run.py`:

    +exp=digits optimizer=birder            one run
    +exp=digits cluster.nodes=4 --dry-run   prints each node's command only
    -m +exp=digits optimizer=sgdm,birder    a job for each value in sequence
    +exp=digits --cfg job --resolve         prints the configuration only
    +exp=digits run_name=mine checkpoint.every=100 resume=auto
                                            saves checkpoints; the same
                                            command resumes

Under torchrun it trains in the world that torchrun has made:

    torchrun --nproc-per-node 2 experiments/run.py +exp=digits

docs/configuration.md lists all keys. The syntax is Hydra's (--hydra-help). --version prints version and commit. To
compare all methods of an experiment, use experiments/compare.py.
Exit status: 0 success; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

if not __package__:  # run as a script
    import _script  # noqa: F401

import hydra
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.config import compose
from experiments.config.compose import Composed
from experiments.records import record
from experiments.records.record import ResultRecord
from experiments.report import formats, metrics
from experiments.report.formats import DASH
from experiments.report.table import Table, terminal
from experiments.runs import command, start, study
from launch.errors import UserError
from launch.failure import RunFailed
from launch.spec import RunSpec
from launch.words import manual, say


@command.report_errors
def main() -> int:
    """The Hydra application."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(manual(__doc__))
        return 0
    # Hydra wants its flags before the overrides; users write them anywhere. "--": a flag may take a value, or none (--info).
    typed_in = ["cluster.dry_run=true" if a == "--dry-run" else a for a in sys.argv[1:] if a != "--"]
    overrides = compose.readable([a for a in typed_in if _is_override(a)])
    flags = [a for a in typed_in if not _is_override(a)]
    if wrong := [a for a in get_args_parser().parse_known_args(flags)[1] if a.startswith("-")]:
        raise UserError(f"unrecognized arguments: {' '.join(wrong)}; --help lists the flags, --hydra-help Hydra's")
    # Hydra makes a folder for the jobs of -m, which a dry run must not leave.
    dry = "cluster.dry_run=true" in overrides
    with tempfile.TemporaryDirectory() if dry else contextlib.nullcontext() as folder:
        sys.argv[1:] = [*flags, "--", *overrides, *([f"hydra.sweep.dir={folder}"] if folder else [])]
        return _run(flags, overrides)


def _run(flags: list[str], overrides: list[str]) -> int:
    jobs: list[Job] = []

    def job(config: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        # Unresolved: a reference that was typed (key=${...}) is one to this configuration, not to Hydra's own.
        task = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)
        assert isinstance(task, list)
        typed = [*searched(hydra_config), *map(str, task)]
        jobs.append(Job(compose.composed(config, dict(hydra_config.runtime.choices), typed)))

    # Hydra's own reports of errors are many lines long: have it raise, and say it in one.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")(job)()
    except compose.CONFIG_ERRORS as error:
        return command.report(compose.explain(error, overrides))
    except OSError as error:  # Hydra makes a folder for the jobs of -m
        raise UserError(f"cannot write to {error.filename}: {error.strerror}; set output_dir=FOLDER") from error
    if not jobs and set(flags) <= {"-m", "--multirun"}:
        raise UserError(f"no job to run: a pattern matches no name in {' '.join(overrides)}")
    several = len(jobs) > 1 and not start.under_torchrun()
    if several:
        check(jobs)
    for number, one in enumerate(jobs, start=1):
        if several:
            say(f"job {number} of {len(jobs)}: {' '.join(one.overrides)}")
        try:
            if start.under_torchrun():
                start.join(one.composed)
            else:
                one.spec = start.launch(one.composed, alone=True)
        except (UserError, RunFailed) as error:
            # The other jobs of a sweep go on.
            one.said, one.status = str(error), command.report(error)
    failed = [one for one in jobs if one.status]
    if len(jobs) > 1:
        if any(one.record() is not None for one in jobs):
            as_table(jobs).show(terminal())
        if failed:
            say(f"{len(failed)} of {len(jobs)} jobs failed:", sys.stderr)
            for one in failed:
                say(f"  {' '.join(one.overrides)}", sys.stderr)
            return 1
    return failed[0].status if failed else 0


@dataclass
class Job:
    """One run of a sweep. said, status: of one that failed, why and the exit status."""

    composed: Composed
    spec: RunSpec | None = None
    said: str = ""
    status: int = 0

    @property
    def overrides(self) -> list[str]:
        return self.composed.overrides

    def record(self) -> ResultRecord | None:
        """What it has measured; None where nothing was run to its end."""
        path = record.place(self.spec.config["results_dir"], self.spec.id) if self.spec else None
        return record.read(path) if path is not None and path.is_file() else None


def check(jobs: Sequence[Job]) -> None:
    """All are checked before the first one starts: a mistake shows now, not after an hour. Raises UserError."""
    names = []
    for one in jobs:
        compose.check(one.composed)
        resolved = compose.resolve(one.composed)
        names += [(resolved["output_dir"], resolved["exp"], name)] if (name := resolved["run_name"]) else []
    if twice := [place for place in names if names.count(place) > 1]:
        raise UserError(f"run_name={twice[0][2]} is of one run, and there are {len(jobs)} jobs: leave run_name out")


def searched(hydra_config: HydraConf) -> list[str]:
    """The override for where Hydra also looks (hydra.searchpath, --config-dir), so that a command can be typed again."""
    typed = [s.path for s in hydra_config.runtime.config_sources if s.provider == "command-line"]
    places = [*hydra_config.searchpath, *typed]
    return [f"hydra.searchpath={json.dumps(places, ensure_ascii=False)}"] if places else []


def as_table(jobs: Sequence[Job]) -> Table:
    """What the jobs of a sweep have come to: what differs between them, step time and metric."""
    shared = set.intersection(*(set(job.overrides) for job in jobs))
    rows = []
    for number, job in enumerate(jobs, start=1):
        r = job.record()
        result = (
            f"failed: {job.said}" if r is None else study.outcome(r) if r.metric or r.status != "completed" else DASH
        )
        time = DASH if r is None else formats.number(metrics.step_ms(r))
        rows.append([f"{number}", " ".join(o for o in job.overrides if o not in shared), time, result])
    return Table.text(["job", "overrides", "step ms", "result"], rows)


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith(("+", "~")))


if __name__ == "__main__":
    command.start(main)
