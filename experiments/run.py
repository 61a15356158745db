"""Runs one experiment: `python experiments/run.py +exp=bert_squad [key=value ...]`, with Hydra's whole syntax.

Composes once, starts its own workers (`cluster=...` says where) and waits for them. Under torchrun it starts nothing
and trains in that world. `-m` runs one job after the other. Exit status: 0; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys

if not __package__:  # run as a script
    import _script  # noqa: F401

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from experiments.config import compose
from experiments.runs import command, start
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped


def main() -> int:
    """The Hydra application."""
    # Hydra wants its flags before the overrides; users write them anywhere.
    typed_in = ["cluster.dry_run=true" if a == "--dry-run" else a for a in sys.argv[1:]]
    arguments = compose.as_of_now(compose.quote_hosts(sorted(typed_in, key=_is_override)))
    sys.argv[1:] = arguments
    jobs = 0
    failed: list[tuple[str, int]] = []
    bugs: list[Exception] = []

    def job(config: DictConfig) -> None:
        nonlocal jobs
        jobs += 1
        hydra_config = HydraConfig.get()
        composed = compose.composed(config, dict(hydra_config.runtime.choices), list(hydra_config.overrides.task))
        try:
            line = command.typed("run", composed.overrides)
            if start.under_torchrun():
                start.join(composed, command=line)
            else:
                start.launch(composed, command=line, alone=True)
        except (UserError, RunFailed) as error:
            # The other jobs of a sweep go on.
            failed.append((" ".join(composed.overrides), command.report(error)))
        except Exception as error:
            bugs.append(error)
            raise

    # Hydra's own reports of errors are many lines long: have it raise, and say it in one.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(version_base="1.3", config_path=str(compose.CONF), config_name="config")(job)()
    except compose.CONFIG_ERRORS as error:
        if bugs:
            raise
        return command.report(compose.explain(error, [a for a in arguments if _is_override(a)]))
    except (KeyboardInterrupt, Stopped, UserError) as error:
        return command.report(error)
    if jobs > 1 and failed:
        print(f"{len(failed)} of {jobs} jobs failed:", file=sys.stderr)
        for overrides, _ in failed:
            print(f"  {overrides}", file=sys.stderr)
        return 1
    return failed[0][1] if failed else 0


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and ("=" in argument or argument.startswith(("+", "~")))


if __name__ == "__main__":
    command.start(main)
