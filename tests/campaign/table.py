"""docs/reliability.md, written from the trials of results/published/campaign.jsonl: `python -m tests.campaign.table`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.campaign.run import ROOT
from tests.campaign.trials import FAULTS, METHODS, Trial, done

RESULTS, PAGE = ROOT / "results/published/campaign.jsonl", ROOT / "docs/reliability.md"
BEGIN, END = "<!-- trials: written by `make campaign` -->", "<!-- end of trials -->"
OUTCOMES = ("equal", "refused", "wrong")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines])


def text(trials: Iterable[Trial]) -> str:
    """The tables: each fault on each cluster, and each method."""
    every = list(trials)
    tried = [t for t in every if t.outcome != "missed"]
    by_fault = Counter((t.fault, t.cluster, t.outcome) for t in tried)
    by_method = Counter((t.method, t.outcome) for t in tried)
    totals = Counter(t.outcome for t in tried)
    first = []
    for fault in FAULTS:
        row: list[object] = [fault]
        for cluster in ("local", "emulated"):
            counts = [by_fault[fault, cluster, o] for o in OUTCOMES]
            row += [sum(counts), *counts] if sum(counts) else ["—"] * 4
        first.append(row)
    second = []
    for method in METHODS:
        counts = [by_method[method, o] for o in OUTCOMES]
        second.append([f"`{method}`", *([sum(counts), *counts] if sum(counts) else ["—"] * 4)])
    missed = len(every) - len(tried)
    head = [f"{c}: {w}" for c in ("local", "emulated") for w in ("tried", *OUTCOMES)]
    return "\n\n".join(
        [
            f"{len(tried)} trials: {totals['equal']} equal, {totals['refused']} refused, {totals['wrong']} wrong. "
            f"In {missed} more the run was over before its fault came; they count for nothing.",
            table(["fault", *head], first),
            table(["method", "tried", *OUTCOMES], second),
        ]
    )


def page(old: str, trials: Iterable[Trial]) -> str:
    """The page with the tables of `trials` in place of those it has."""
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{text(trials)}\n\n{END}", old, flags=re.DOTALL)


def write(results: Path = RESULTS, target: Path = PAGE) -> None:
    """Writes the page again."""
    target.write_text(page(target.read_text(), done(results).values()))


if __name__ == "__main__":
    write()
