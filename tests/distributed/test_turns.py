"""Methods in turns: each trains as in a run of its own, the bound sends and updates nothing, a failure is one method's."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from birder.comm import ByteCounter
from experiments.config import compose
from experiments.records import record
from experiments.report import metrics
from experiments.timing import plan
from experiments.training import machine
from launch.spec import RunSpec
from tests.helpers.ranks import fresh_world
from tests.helpers.tiers import slow

METHODS = (
    ["optimizer=sgdm", "comm.enabled=false"],
    ["optimizer=sgdm"],
    ["optimizer=sgdm", "optimizer.wire=bf16"],
    ["optimizer=onebit_adam", "optimizer.warmup_steps=2"],
    ["optimizer=local_sgd", "optimizer.reset_every=3"],
    ["optimizer=birder"],
)
ROUNDS, ANEW = 4, 3


def described(tmp_path: Path, *methods: list[str]) -> RunSpec:
    common = ["+exp=digits", "scale=quick", "cluster.nodes=2", "cluster.ranks_per_node=1", "train.batch_per_rank=8"]
    common += ["train.timing_warmup=2", "train.max_steps=40", "wandb=disabled", "train.threads=1"]
    common += [f"timing.rounds={ROUNDS}", f"results_dir={tmp_path}/results", f"output_dir={tmp_path}/outputs"]
    chosen = [compose.compose([*common, *m]) for m in methods]
    spec = plan.make(chosen, "g")
    spec.path.mkdir(parents=True, exist_ok=True)
    return spec


def _train(rank: int, world: int, spec: RunSpec, alone: bool, memory: float) -> dict[str, list[float]]:
    """Trains, in turns or alone; the losses of each method on this rank."""
    from experiments.timing import turns
    from experiments.training import loop
    from experiments.training.method import AttachedMethod

    seen: dict[str, list[float]] = {}
    step = AttachedMethod.step

    def noted(self: AttachedMethod, *arguments: Any) -> Any:
        loss = step(self, *arguments)
        seen.setdefault(f"{type(self.optimizer).__name__} {self.optimizer.wire}", []).append(float(loss))
        return loss

    AttachedMethod.step = noted  # type: ignore[method-assign]
    turns.MEMORY = memory
    machine.DRIFT = 1e9  # a busy machine is not what is tested
    (loop if alone else turns).train(spec)
    return seen


def in_turns(spec: RunSpec, memory: float = 0.8) -> tuple[list[dict[str, list[float]]], dict[str, record.ResultRecord]]:
    seen = fresh_world(_train, 2, spec, False, memory, grouped=False, ranks_per_node=1)
    records = record.read_all(spec.config["results_dir"])
    return seen, {r.id.removeprefix("g-"): r for r in records}


@pytest.mark.parametrize("places", [(0, 1, 5), slow((0, 2, 3, 4))], ids=["few", "rest"])
def test_each_method_trains_as_in_a_run_of_its_own(tmp_path: Path, places: tuple[int, ...]) -> None:
    """Bit for bit, with two ranks: a sum of two does not depend on how DDP's buckets lie."""
    spec = described(tmp_path, *(METHODS[place] for place in places))
    seen, records = in_turns(spec)
    for variant in spec.config["variants"][1:]:
        own = RunSpec(**{**vars(plan.spec_of(spec, variant)), "run_dir": str(tmp_path / variant["name"])})
        alone = fresh_world(_train, 2, own, True, 0.8, grouped=False, ranks_per_node=1)
        for rank in range(2):
            ((name, losses),) = alone[rank].items()
            mine = seen[rank][name]
            assert mine == losses[: len(mine)]
            assert len(mine) >= 2 + 1 + 2 * ROUNDS
        # The record of the run alone has taken the place of the one in turns.
        of_the_run = record.read(tmp_path / "results" / "records" / f"{variant['id']}.json")
        if variant["name"] in ("sgdm-fp32", "sgdm-bf16"):
            assert of_the_run.bytes_per_step == records[variant["name"]].bytes_per_step
    assert len(records) == len(places)


def test_records(tmp_path: Path) -> None:
    _, records = in_turns(described(tmp_path, *METHODS))
    assert {r.group for r in records.values()} == {"g"}
    for r in records.values():
        assert r.status == "completed"
        assert (r.turns["world"], r.turns["held"], r.turns["repeated"]) == ("g", "all", False)
        assert len(r.turns["ms"]) == len(r.turns["steps"]) == ROUNDS
        assert r.turns["bound_ms"]["before"] > 0
        assert set(r.turns["busy"]) == {"others", "steal", "load", "cores"}
        assert r.timing["steps"] == sum(r.turns["steps"])
        for name in ("sgdm-fp32", "sgdm-bf16", "sgdm-none"):
            found = metrics.interval(records[name], r)
            assert found is not None
            assert found.low <= found.value <= found.high
        assert r.metric == {}
    bound = records["sgdm-none"]
    assert bound.wire == "none"
    assert (bound.timing["update_ms"], bound.timing["split"], bound.state_bytes_per_rank) == (0.0, {}, 0)
    assert bound.bytes_per_step["payload_inter"] == 0
    assert metrics.interval(bound, bound) == metrics.Speedup(1.0, 1.0, 1.0)
    for name, r in records.items():
        if r is not bound:
            assert r.timing["update_ms"] > 0
            assert r.state_bytes_per_rank or name.startswith("local_sgd")
    assert records["birder-1bit"].bytes_per_step["payload_inter"] < records["sgdm-bf16"].bytes_per_step["payload_inter"]
    local = next(r for name, r in records.items() if name.startswith("local_sgd"))
    assert local.turns["steps"] == [3] * ROUNDS  # whole cycles
    assert local.rounds_per_step == pytest.approx(1 / 3, abs=1e-4)
    assert local.timing["typical"] == "mean"


def test_the_figures_of_a_record_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 nodes of 2 ranks, rounds of one and of three steps, of which the last alone sends anything."""
    from experiments.timing import results
    from experiments.training import traffic
    from experiments.workloads.base import Shard

    for module in (results, traffic):
        monkeypatch.setattr(module, "all_sum", lambda values, shard: [4 * v for v in values])
    monkeypatch.setenv("LOCAL_RANK", "0")
    counter = ByteCounter()
    sent = traffic.StepTraffic(counter)
    for step in range(4):
        if step == 3:
            counter.collective(intra=30, inter=60)
        sent.end_step()
    entry: Any = SimpleNamespace(steps=[1, 3], seconds=[0.1, 0.6], per_step=lambda: [0.1, 0.2], updates=[0.01, 0.03])
    entry.sent, entry.traffic, entry.state_bytes = [30, 60, 1], sent, 100
    entry.clock, entry.nic = SimpleNamespace(split=dict), SimpleNamespace(total=None)
    spec: Any = SimpleNamespace(config={"train": {"batch_per_rank": 8, "accumulate": 2}}, nodes=2)
    workload: Any = SimpleNamespace(samples=lambda batch: 3 * batch)
    found = results._measured(spec, Shard(0, 4), workload, entry)
    timing = found["timing"]
    assert (timing["steps"], timing["typical"], timing["median_ms"], timing["mean_ms"]) == (4, "mean", 150.0, 175.0)
    assert timing["samples_per_s"] == pytest.approx(3 * 8 * 2 * 4 / 0.175, abs=1e-3)
    assert timing["update_ms"] == 20.0
    assert found["bytes_per_step"] == {"payload_intra": 4 * 30 / 2 / 4, "payload_inter": 4 * 60 / 2 / 4}
    assert (found["collectives_per_step"], found["rounds_per_step"], found["state_bytes_per_rank"]) == (0.25, 0.25, 100)


@pytest.mark.parametrize(
    ("measured", "rounds", "drift", "repeated", "settled"),
    [
        ((1.0, 1.03), [(1.02, 1.0)], 0.02, False, [1.0]),
        ((1.0, 0.93), [(0.96, 0.97)], -0.04, False, [1.0]),
        # Slower by a fifth: the links are set to that, and the rounds are taken again, once.
        ((1.0, 1.3, 1.21), [(1.2, 1.2), (1.22, 1.2)], 0.0083, True, [1.0, 1.2]),
        ((1.0, 0.7, 0.6), [(0.8, 0.8), (0.6, 0.6)], -0.25, True, [1.0, 0.8]),
    ],
)
def test_a_pace_that_has_changed_is_said_and_the_rounds_are_repeated_once(
    monkeypatch: pytest.MonkeyPatch,
    measured: tuple[float, ...],
    rounds: list[tuple[float, ...]],
    drift: float,
    repeated: bool,
    settled: list[float],
) -> None:
    """measured: the bound before the rounds, and after them; rounds: its turns among them. Links that set nothing."""
    world, written = a_world(monkeypatch, measured, rounds, [[]] * len(rounds))
    world.run()
    (about,) = written
    assert about["drift"] == pytest.approx(drift, abs=1e-4)
    assert (about["repeated"], world.links.settled) == (repeated, settled)
    assert about["bound_ms"] == {"before": 1000 * settled[-1], "after": 1000 * measured[-1]}
    assert world.bound.forgotten == repeated


def test_where_links_follow_the_bound_it_has_drifted_from_what_they_were_set_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_to = [(1.1, 20.0, 500.0), (1.2, 22.0, 450.0), (1.3, 24.0, 400.0)]
    world, written = a_world(monkeypatch, (1.0, 1.2), [(1.2, 1.25, 1.23)], [set_to])
    world.run()
    (about,) = written
    assert about["drift"] == pytest.approx(1.215 / 1.2 - 1, abs=1e-4)  # the median of all four; not 1.215 / 1
    assert (about["repeated"], about["dilations"]) == (False, [20.0, 22.0, 24.0])
    assert (world.links.checked, about["dilation"]) == ((450.0, 22.0), 22.0)


def a_world(
    monkeypatch: pytest.MonkeyPatch, measured: tuple[float, ...], rounds: list[tuple[float, ...]], set_to: list[Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """A world whose bound takes these seconds, and what its records would say."""
    from experiments.timing import turns
    from experiments.workloads.base import Shard

    written: list[dict[str, Any]] = []
    monkeypatch.setattr(turns, "gathered", lambda mine: [mine])
    monkeypatch.setattr(turns.machine, "read", lambda: None)
    monkeypatch.setattr(turns.machine, "busy", lambda *_: None)
    monkeypatch.setattr(turns.rank_link, "of_run", lambda *_: None)
    monkeypatch.setattr(turns.results, "write", lambda *_, about, **of: written.append({**of, **about}))
    seconds, mine, theirs = iter(measured), iter(rounds), iter(set_to)
    world: Any = turns._World.__new__(turns._World)
    world.spec, world.shard, world.workload = SimpleNamespace(id="w", seed=0), Shard(), None
    world.config, world.main, world.held, world.bounds, world.variants = {"variants": [{}]}, False, True, [], []
    world.watch, world.exchange = None, SimpleNamespace(forget=lambda: None)
    world.bound = SimpleNamespace(turn=lambda *_: 0.0, forgotten=False, ready=[])
    world.bound.forget = lambda: setattr(world.bound, "forgotten", True)
    links = SimpleNamespace(settled=[], set_to=[], known={}, shapes=False, free=lambda: None, checked=None)
    links.settle = lambda bound_s: links.settled.append(bound_s) or 20.0
    links.check = lambda *asked: setattr(links, "checked", asked)
    world.links, world._prepare, world._profile = links, lambda: None, lambda: None
    world._measure_bound = lambda turns: next(seconds)

    def all_rounds() -> None:
        taken = list(next(mine))
        world.bound.per_step = lambda: taken
        links.set_to = list(next(theirs))

    world._all_rounds = all_rounds
    return world, written


def test_a_turn_is_as_long_as_on_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.timing import turns

    monkeypatch.setattr(turns.dist, "barrier", lambda: None)
    world = turns._World.__new__(turns._World)
    world.watch = None  # type: ignore[assignment]
    world._same = lambda entry, seconds=0.0: [seconds, 3.0, 2.0]  # type: ignore[method-assign]
    entry: Any = SimpleNamespace(begin=lambda _: None, turn=lambda *_: 1.0, end=lambda _: None)
    assert world._seconds(entry, 2) == 3.0


@pytest.mark.slow
def test_where_memory_does_not_hold_all_each_method_is_made_in_its_turn(tmp_path: Path) -> None:
    methods = [m for m in METHODS if m[0] != "optimizer=local_sgd"]
    spec = described(tmp_path, *methods)
    spec.config["timing"]["rounds_when_rebuilding"] = ANEW
    seen, records = in_turns(spec, memory=0.0)
    assert {r.status for r in records.values()} == {"completed"}
    assert {r.turns["held"] for r in records.values()} == {"one"}
    assert {len(r.turns["ms"]) for r in records.values()} == {ANEW}
    losses = seen[0]["Birder fp32"]
    begun = 2 + 2  # steps of a turn: warm-up, those that count
    assert losses[2 : 2 + begun] == losses[2 + begun : 2 + 2 * begun]  # after the first try, every turn begins anew


def test_a_method_that_cannot_be_made_or_loses_its_way_is_recorded_as_failed(tmp_path: Path) -> None:
    spec = described(tmp_path, ["optimizer=sgdm"], ["optimizer=birder"], ["optimizer=sgdm", "optimizer.wire=bf16"])
    variants = spec.config["variants"]
    variants[1]["config"]["optimizer"]["nonsense"] = 1
    variants[2]["config"]["optimizer"]["lr"] = 1e30
    _, records = in_turns(spec)
    assert records["sgdm-fp32"].status == "completed"
    assert (records["birder-1bit"].status, records["sgdm-bf16"].status) == ("failed", "failed")
    assert "nonsense" in str(records["birder-1bit"].reason)
    assert "lower optimizer.lr" in str(records["sgdm-bf16"].reason)
    assert [line.partition(":")[0] for line in plan.failures(spec)] == ["Birder", "SGDM bf16"]


@pytest.mark.parametrize("skipped", [0, 3, 10**6])
def test_steps_that_a_grad_scaler_skips_are_no_warm_up(skipped: int) -> None:
    """The first rounds would be of the dense stage."""
    from experiments.timing.entries import Variant

    variant = Variant.__new__(Variant)
    optimizer, skips = SimpleNamespace(steps=0), iter(range(skipped))
    variant.warm_up, variant.failed = 5, None
    variant.method = SimpleNamespace(optimizer=optimizer, scaler=object())  # type: ignore[assignment]

    def turn(steps: int, *_: Any) -> float:
        optimizer.steps += sum(next(skips, None) is None for _ in range(steps))
        return 0.0

    variant.turn = turn  # type: ignore[method-assign]
    variant.warm(None)  # type: ignore[arg-type]
    assert (optimizer.steps, variant.failed is None) == ((5, True) if skipped < 10 else (0, False))


def test_what_breaks_while_the_bound_is_measured_is_no_methods_failure(tmp_path: Path) -> None:
    from experiments.timing.turns import _World

    world = _World.__new__(_World)
    world.spec = RunSpec("g", "g", "digits", "", [], {"variants": [{"id": "g-last"}]}, str(tmp_path))
    world.main, world.held, world.steps, world.bound = True, True, 2, SimpleNamespace(id="")  # type: ignore[assignment]
    world.links = SimpleNamespace(pace=deque())  # type: ignore[assignment]
    world._seconds = lambda *_: 1.0  # type: ignore[method-assign]
    world._at(SimpleNamespace(id="g-last"))  # type: ignore[arg-type]
    assert plan.whose_turn(world.spec) == "g-last"
    world._measure_bound(1)
    assert plan.whose_turn(world.spec) is None


@pytest.mark.slow
def test_without_methods_the_bound_is_left(tmp_path: Path) -> None:
    config = described(tmp_path, ["optimizer=sgdm"]).config
    spec = plan.world(config, [], None, "calibration")
    spec.path.mkdir(parents=True)
    fresh_world(_train, 2, spec, False, 0.8, grouped=False, ranks_per_node=1)
    assert json.loads((spec.path / plan.BOUND_FILE).read_text())["step_ms"] > 0
    assert not (tmp_path / "results").exists()


def test_links_follow_the_last_turns_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.timing.links import BOUND_TURNS, EmulatedLinks

    made = EmulatedLinks.__new__(EmulatedLinks)
    cluster = {"dilation": "auto", "link_gbps": 10, "nodes": 2, "max_total_gbps": 5.0}
    made.config = {"cluster": cluster, "timeline": "resnet50_b32_tf32", "train": {"accumulate": 1}}
    made.shapes, made.mbit, made.set_to = True, None, []
    made.pace = deque([0.5] * BOUND_TURNS, maxlen=BOUND_TURNS)
    asked: list[float | None] = []
    monkeypatch.setattr(made, "_ask", asked.append)
    for _ in range(BOUND_TURNS):
        made.follow()
        made.pace.append(1.0)  # the machine has become slower by half
    made.follow()
    paces, dilations, rates = zip(*made.set_to, strict=True)
    assert list(rates) == asked
    assert (paces[0], paces[-1]) == (0.5, 1.0)
    assert list(paces) == sorted(paces)
    assert dilations[-1] == pytest.approx(2 * dilations[0], rel=0.01)
    assert rates[0] == pytest.approx(10_000 / dilations[0])
    made.remember(3)  # few rounds: what was measured before them is soon forgotten
    made.pace.extend([2.0] * 2)
    made.follow()
    assert (len(made.pace), made.set_to[-1][0]) == (3, 2.0)
    made.pace.extend([0.01] * BOUND_TURNS)  # more than this machine carries: unchanged, and the round says so
    made.follow()
    assert (len(made.set_to), asked[-1]) == (BOUND_TURNS + 3, rates[-1] / 2)
    assert made.set_to[-1] == made.set_to[-2]  # the pace too: what the bound has drifted from
    made.pace.extend([4.0] * BOUND_TURNS)
    made.follow()
    single = made.set_to.pop()
    made.config["train"]["accumulate"] = 4  # a step of four micro-batches, on the GPU as here
    made.follow()
    assert made.set_to.pop()[1] == pytest.approx(single[1] / 4, rel=0.01)
    del asked[-2:]
    cluster["dilation"] = 20.0  # asked for: nothing follows
    made.follow()
    assert len(asked) == BOUND_TURNS + 3
