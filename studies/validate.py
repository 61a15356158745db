"""Compares real training on emulated links with its prediction.

    python studies/validate.py [resnet50] [nodes=2,4] [gbps=2.5,10]

Trains ResNet-50, a small BERT and a small GPT on 2, 4 and 8 emulated nodes at three rates. For each, `experiments/compare.py`
times steps of four methods on random data, interleaved in one world. The prediction uses only what the world measured before
the methods ran (experiments/cells/trained.py). Recorded worlds are not run again, so the same command continues after an
interruption.

Everything takes 2.5 hours on a quiet machine. Records are below results_dir=FOLDER; default: results/local/validation.
Exit status: 0 success; 1 a run failed; 2 bad input; 130 Ctrl-C.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments import compare
from experiments.cells.trained import Trained
from experiments.records.record import LOCAL, ResultRecord, read_all
from experiments.report import prediction
from experiments.report.formats import number
from experiments.report.table import Table
from experiments.runs import command
from launch.errors import UserError
from launch.failure import RunFailed
from launch.words import manual

MODELS: dict[str, list[str]] = {
    "resnet50": [],
    "bert_squad_base": ["workload.preset=small", "workload.embedded_words=null", "cluster.dilation=10"],
    "zero_one_gpt2": ["workload.preset=mini", "workload.vocab_size=8000", "cluster.dilation=10"],
}
"""Experiments of conf/exp, and what they have besides. The small BERT and GPT have the links of an A100 ten times as fast as
this machine: there is no A100's time for them."""
METHODS = {"zero_one_gpt2": ["adamw", "onebit_adam", "birder"]}
"""Optimizers that are compared, where an experiment has others too, without a prediction (experiments/cells/trained.py)."""
NODES, GBPS = (2, 4, 8), (2.5, 5.0, 10.0)
TURNS = ["timing.rounds=12", "timing.steps=1"]
RESULTS = Path(LOCAL) / prediction.VALIDATION
KEYS = "nodes", "gbps", "results_dir"
"""What is given besides experiments."""


@dataclass(frozen=True)
class ComparedWorld:
    """One interleaved comparison."""

    exp: str
    nodes: int
    gbps: float

    def overrides(self, results: Path) -> list[str]:
        """What makes it: arguments of experiments/compare.py."""
        pairs = [f"cluster.nodes={self.nodes}", f"cluster.link_gbps={self.gbps:g}", *MODELS[self.exp], *TURNS]
        pairs += ["cluster=emulated", "scale=quick", "wandb=disabled", f"results_dir={results}"]
        return [f"+exp={self.exp}", *pairs]

    def made(self, records: Sequence[ResultRecord]) -> bool:
        """Whether it is recorded, and nothing in it failed."""
        mine = [
            r.status == "completed"
            for r in records
            if (r.exp, r.nodes, r.link.get("link_gbps")) == (self.exp, self.nodes, self.gbps) and r.turns
        ]
        return bool(mine) and all(mine)

    def __str__(self) -> str:
        return f"{self.exp}, {self.nodes} nodes, {self.gbps:g} Gbit/s"


def worlds(asked: Sequence[str] = ()) -> Iterator[ComparedWorld]:
    """The worlds that are meant. asked: as in the module's docstring, none: all. Raises UserError for anything else."""
    pairs = dict(a.split("=", 1) for a in asked if "=" in a)
    if unknown := sorted(set(pairs) - set(KEYS)):
        raise UserError(f"the validation knows {', '.join(KEYS)} and experiments, not {unknown[0]}=")
    exps = _among([a for a in asked if "=" not in a], list(MODELS))
    nodes = _among(pairs.get("nodes"), [str(n) for n in NODES])
    rates = _among(pairs.get("gbps"), [f"{g:g}" for g in GBPS])
    for exp, n, rate in itertools.product(exps, nodes, rates):
        yield ComparedWorld(exp, int(n), float(rate))


def _among(names: str | list[str] | None, known: list[str]) -> list[str]:
    """Names, in the order of those that are known; all of them where none is named."""
    chosen = names.split(",") if isinstance(names, str) else names or known
    if unknown := [n for n in chosen if n not in known]:
        raise UserError(f"the validation knows {', '.join(known)}, not {unknown[0]}")
    return [n for n in known if n in chosen]


def run(asked: Sequence[str], made_by: Callable[[list[str], list[str] | None], int]) -> None:
    """Trains in the worlds that are not recorded, and prints the comparison. asked: as in `worlds`.

    made_by: makes a comparison from its overrides and optimizers, None for all, and returns its exit status. Raises UserError
    and RunFailed.
    """
    every = list(worlds(asked))
    given = [a.partition("=")[2] for a in asked if a.startswith("results_dir=")]
    results = Path(given[-1]) if given else RESULTS
    for place, world in enumerate(every, start=1):
        if world.made(_recorded(results)):
            continue
        print(f"[{place}/{len(every)}] {world}", flush=True)
        if code := made_by(world.overrides(results), METHODS.get(world.exp)):
            raise RunFailed(f"{world}: ended with status {code}; type the command again to continue here")
    found = prediction.trained_rows([r for r in _recorded(results) if any(w.made([r]) for w in every)])
    print(table(found).grid())
    print(prediction.trained_summary(found).grid())


def _recorded(results: Path) -> list[ResultRecord]:
    return read_all(results) if results.is_dir() else []


def table(found: Sequence[Trained]) -> Table:
    """One line for each row."""
    head = ("experiment", "nodes", "Gbit/s", "method", "predicted, ms", "trained, ms", "difference")
    lines = []
    for t in found:
        ms = [number(t.predicted_ms), number(t.measured_ms), f"{t.error:+.1%}"]
        lines.append([t.record.exp, str(t.record.nodes), number(t.record.link.get("link_gbps")), t.record.method, *ms])
    return Table.text(head, lines)


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if "--help" in given or "-h" in given:
        print(manual(__doc__))
        return 0
    run(given, compare.compare)
    return 0


if __name__ == "__main__":
    command.start(main)
