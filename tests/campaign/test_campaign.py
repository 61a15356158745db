"""Random faults at random moments, then a resume: equal bit for bit, or refused in one line; nothing left.

Of twenty trials as many as TIME_S holds with `make test-clusters`; all of them with `make campaign` (30 minutes a time;
trials that stand in results/published/campaign.jsonl are not repeated).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
import warnings
from pathlib import Path

import pytest

from tests.campaign import soak
from tests.campaign import table as campaign_table
from tests.campaign import trials as campaign
from tests.campaign.run import ROOT
from tests.campaign.trials import Trial

TIME_S = 60.0
"""What continuous integration gives: a trial that would not end by then, were it as long as the longest, is skipped."""
FULL, FULL_S = 200, 1800.0
METHODS = ("sgdm", "onebit_adam", "birder", "cser")


class Place:
    """Where the trials of one session are, and how long they took."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.end, self.longest = folder, time.monotonic() + TIME_S, 0.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("campaign"))


def twenty() -> list[Trial]:
    plan = (t for t in campaign.plan(1, ("local", "emulated")) if t.method in METHODS)
    pending, drawn = list(itertools.islice(plan, FULL)), []
    for _ in range(20):  # where the time ends early, those that were reached differ as much as they can
        pending.remove(trial := campaign.next_trial(pending, drawn))
        drawn.append(trial)
    return drawn


@pytest.mark.cluster
@pytest.mark.xdist_group("sandbox")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trial", twenty(), ids=lambda t: f"{t.fault}, {t.moment}, {t.method}, {t.cluster}")
def test_a_fault_at_random(trial: Trial, place: Place) -> None:
    if time.monotonic() + place.longest > place.end:
        pytest.skip(f"the {TIME_S:.0f} s of these trials are over")
    if trial.cluster not in campaign.clusters():
        pytest.skip("no emulated network here")
    again = dataclasses.replace(trial)
    campaign.attempt(trial, place.folder)
    place.longest = max(place.longest, trial.seconds)
    if (
        trial.outcome == "wrong"
    ):  # on a machine with other work a moment may last longer than it may: once more, and said
        warnings.warn(f"a trial was repeated: {trial}", stacklevel=1)
        trial = campaign.attempt(again, place.folder)
    if trial.outcome == "missed":
        pytest.skip(f"no fault: {trial.said or 'the run was over'}")
    assert trial.outcome in ("equal", "refused"), trial


@pytest.mark.campaign
@pytest.mark.timeout(0)
def test_campaign(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CAMPAIGN_SECONDS", FULL_S))
    jobs = int(os.environ.get("CAMPAIGN_JOBS", max(1, (os.cpu_count() or 1) // 2)))
    trials = campaign.go_through(0, FULL, seconds, tmp_path, campaign_table.RESULTS, jobs)
    campaign_table.write()
    assert [t for t in trials if t.outcome == "wrong"] == []


def test_the_plan_is_the_same_for_a_seed_and_reaches_every_fault_and_method() -> None:
    def first(seed: int, clusters: tuple[str, ...] = ("local", "emulated")) -> list[Trial]:
        return list(itertools.islice(campaign.plan(seed, clusters), FULL))

    assert first(0) == first(0) != first(1)
    assert [t.number for t in first(0)] == list(range(FULL))
    assert {t.fault for t in first(0)} == set(campaign.FAULTS)
    assert {t.method for t in first(0)} == set(campaign.METHODS)
    assert {t.moment for t in first(0)} == set(campaign.MOMENTS)
    assert {t.cluster for t in first(0, ("local",))} == {"local"}
    methods = {p.stem for p in (ROOT / "conf/optimizer").glob("*.yaml")}
    assert methods == set(campaign.METHODS)


def test_what_was_tried_least_comes_next() -> None:
    pending, tried = list(itertools.islice(campaign.plan(0, ("local", "emulated")), FULL)), []
    for _ in range(len(campaign.METHODS) + 3):
        pending.remove(trial := campaign.next_trial(pending, tried))
        tried.append(trial)
    assert {t.fault for t in tried} == set(campaign.FAULTS)
    assert {t.method for t in tried} == set(campaign.METHODS)


def test_the_page_holds_what_the_trials_gave() -> None:
    trials = campaign.done(campaign_table.RESULTS).values()
    assert campaign_table.PAGE.read_text() == campaign_table.page(campaign_table.PAGE.read_text(), trials)


def test_counts() -> None:
    made = [
        Trial(n, "local", "birder", "SIGINT", "step", 0.1, o)
        for n, o in enumerate(["equal", "equal", "refused", "missed"])
    ]
    shown = campaign_table.text([*made, Trial(4, "emulated", "cser", "cut link", "end", 0.1, "wrong")])
    assert shown.startswith("4 trials: 2 equal, 1 refused, 1 wrong. In 1 more")
    assert "| SIGINT | 3 | 2 | 1 | 0 | — | — | — | — |" in shown
    assert "| cut link | — | — | — | — | 1 | 0 | 0 | 1 |" in shown
    assert "| `birder` | 3 | 2 | 1 | 0 |" in shown


def test_the_soak_tells_a_leak_from_a_wave() -> None:
    def seen(memory: float = 0.0, files: float = 0.0) -> list[dict[str, list[int]]]:
        looks = []
        for step in range(0, 2000, 10):
            waves = {
                "memory": [int(10**9 + step * memory)] * 2,
                "files": [20 + (step % 7 == 0) + int(step * files)] * 2,
            }
            looks.append({"step": [step], "threads": [9, 9], **waves})
        return looks

    assert soak.verdict(seen(), 2000)[1] == []
    assert [g.split(" of ")[0] for g in soak.verdict(seen(memory=40_000), 2000)[1]] == ["memory"] * 2
    assert [g.split(" of ")[0] for g in soak.verdict(seen(files=0.01), 2000)[1]] == ["files"] * 2
    assert soak.verdict(seen()[:11], 2000)[1] == ["too few looks after the first steps: give it more steps"]
