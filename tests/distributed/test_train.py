"""Runs of the harness, from specification to record: interrupted and resumed, failing, recorded."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import birder
from birder import checkpoint
from experiments.config import schedules
from experiments.config.schema import LrSchedule
from experiments.config.validate import check_section
from experiments.training import loop, method
from experiments.training.resume import Checkpoints
from experiments.workloads.base import Shard
from experiments.workloads.digits import Digits
from launch.errors import UserError
from launch.local import free_port
from launch.spec import RunSpec
from tests.helpers import runs, wandb_file
from tests.helpers.ordinary import LOCAL
from tests.helpers.ranks import fresh_world, run_ranks
from tests.helpers.tiers import slow, slow_unless

STEPS, BREAK = 12, 8


def make_spec(folder: Path, name: str, *overrides: str) -> RunSpec:
    """A short run on scikit-learn's digits, 3 ranks by default."""
    given = ["cluster.nodes=3", f"train.max_steps={STEPS}", "checkpoint.every=5", "resume=auto", f"run_name={name}"]
    return runs.digits(folder, *given, *overrides)


class Interrupted(Exception):
    pass


def train(rank: int, world: int, spec: RunSpec, stop: int) -> str:
    """Trains; raises at step `stop` (0: never). Returns a digest of everything in the last checkpoint."""
    from experiments.training import loop as training

    if stop:
        log = training.Tracker.log

        def log_until(self, step: int, **values) -> None:
            if step == stop:
                raise Interrupted
            log(self, step, **values)

        training.Tracker.log = log_until
    began, said = checkpoint.latest(spec.path / "checkpoints"), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            training.train(spec)
    except Interrupted:
        return "interrupted"
    if began is not None:
        assert (f"resumed from step {began[0]}\n" in said.getvalue()) == (rank == 0)
    step, folder = checkpoint.latest(spec.path / "checkpoints") or (0, Path())
    assert step == STEPS
    digest = hashlib.sha256()
    _add(digest, checkpoint.read(folder, rank, world))
    return digest.hexdigest()


def _add(digest, tree) -> None:
    if isinstance(tree, torch.Tensor):
        digest.update(tree.numpy().tobytes())
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            digest.update(str(key).encode())
            _add(digest, tree[key])
    elif isinstance(tree, list | tuple):
        for part in tree:
            _add(digest, part)
    else:
        digest.update(repr(tree).encode())


OPTIMIZERS = {
    "sgdm": [],
    "onebit_adam": ["optimizer.warmup_steps=4", "train.accumulate=2"],
    "birder": [],
}


@pytest.mark.parametrize("optimizer", slow_unless(lambda name: name == "onebit_adam", OPTIMIZERS))
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, optimizer):
    options = [f"optimizer={optimizer}", *OPTIMIZERS[optimizer]]
    straight = fresh_world(train, 3, make_spec(tmp_path, "straight", *options), 0, grouped=False)
    assert len(straight) == 3
    broken = make_spec(tmp_path, "broken", *options)
    broken.save()
    assert fresh_world(train, 3, broken, BREAK, grouped=False) == ["interrupted"] * 3
    found = checkpoint.latest(broken.path / "checkpoints")
    assert found is not None
    assert found[0] == 5
    resumed = fresh_world(train, 3, make_spec(tmp_path, "broken", *options), 0, grouped=False)
    assert resumed == straight
    records = [json.loads(p.read_text()) for p in (tmp_path / "results" / "records").glob("*.json")]
    assert len(records) == 2
    for field in ("metric", "bytes_per_step", "collectives_per_step", "rounds_per_step"):
        assert records[0][field] == records[1][field]
    assert records[0]["collectives_per_step"] > 0
    curves = [(tmp_path / "results" / r["curve"]).read_text().split() for r in records]
    losses = [[row.split(",")[0::2] for row in rows] for rows in curves]
    assert losses[0] == losses[1]  # step and loss of every row: those after the checkpoint were dropped and came again


@pytest.mark.parametrize("every", [5, 0])
def test_a_run_that_has_ended_keeps_its_record(tmp_path, every):
    """The command that resumes, given once more: nothing is left to do, what was measured stays. With no checkpoint too."""
    two, found = ["optimizer=sgdm", "cluster.nodes=2", f"checkpoint.every={every}"], []
    for group in ("first", "again"):
        spec = replace(make_spec(tmp_path, "r", *two), group=group)
        spec.save()
        fresh_world(runs.train, 2, spec, grouped=False)
        record = record_of(tmp_path)
        assert record["group"] == group  # so that a comparison finds it
        found.append({k: v for k, v in record.items() if k != "group"})
    assert found[0] == found[1]
    assert found[0]["timing"]["steps"] > 0


def test_the_end_of_a_run_is_recorded_where_it_was_trained_on(tmp_path):
    """It was killed after its last checkpoint: the record is still that of the fewer steps that it had at first."""
    one = ["optimizer=sgdm", "cluster.nodes=1"]
    for _ in range(2):
        spec = make_spec(tmp_path, "r", *one)
        spec.save()
        fresh_world(runs.train, 1, spec, grouped=False)
        found = record_of(tmp_path)
        assert found["steps"] == STEPS
        (tmp_path / "results" / "records" / f"{spec.id}.json").write_text(json.dumps({**found, "steps": 5}))


def test_a_resumed_run_of_another_world_size_is_refused(tmp_path):
    make_spec(tmp_path, "r").save()
    with pytest.raises(UserError, match=r"cannot resume .* world size 3, this is 2"):
        make_spec(tmp_path, "r", "cluster.nodes=2")


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    make_spec(tmp_path, "r").save()
    fresh_world(runs.train, 3, make_spec(tmp_path, "r"), grouped=False, ranks_per_node=1)
    other = ["cluster.nodes=2", "train.max_steps=15"]
    with pytest.raises(UserError, match=r"train.max_steps was 12"):  # which resume_resize does not ask for
        make_spec(tmp_path, "r", *other, "resume_resize=average")
    smaller = make_spec(tmp_path, "r", *other, "resume_resize=average", "resume_allow_config_change=true")
    fresh_world(runs.train, 2, smaller, grouped=False, ranks_per_node=1)
    record = record_of(tmp_path)
    assert [change[0] for change in record["config"]["resume_changed"]] == ["cluster.nodes", "train.max_steps"]
    rows = (tmp_path / "results" / record["curve"]).read_text().split()
    assert [int(row.split(",")[0]) for row in rows[1:]] == list(range(1, 16))


def test_a_run_that_ends_before_its_checkpoint_is_refused(tmp_path):
    """And one that is changed in a way that was asked for says so in its record."""
    two = ["optimizer=sgdm", "cluster.nodes=2"]
    spec = make_spec(tmp_path, "r", *two)
    spec.save()
    fresh_world(runs.train, 2, spec, grouped=False)
    with pytest.raises(UserError, match=r"train.max_steps was 12, now it is 4: "):
        make_spec(tmp_path, "r", *two, "train.max_steps=4")
    shorter = make_spec(tmp_path, "r", *two, "train.max_steps=4", "resume_allow_config_change=true")
    with pytest.raises(RuntimeError, match=r"UserError: this run ends at step 4, and .*step-00000012 is of step 12"):
        fresh_world(runs.train, 2, shorter, grouped=False)
    wild = [*two, "train.max_steps=15", "optimizer.momentum=0.5"]
    fresh_world(runs.train, 2, make_spec(tmp_path, "r", *wild, "resume_allow_config_change=true"), grouped=False)
    changed = [["optimizer.momentum", 0.9, 0.5], ["train.max_steps", 12, 15]]
    assert record_of(tmp_path)["config"]["resume_changed"] == changed
    kept = checkpoint.restore(spec.path / "checkpoints", any_world=True).local["optimizer"]["param_groups"]
    assert [group["momentum"] for group in kept] == [0.5]  # what was asked for, not what was saved


def record_of(folder: Path) -> dict:
    (path,) = (folder / "results" / "records").glob("*.json")
    return json.loads(path.read_text())


def test_the_record_counts_what_was_sent(tmp_path):
    spec = make_spec(tmp_path, "r", "optimizer=sgdm", "checkpoint.every=0", "train.accumulate=2")
    fresh_world(runs.train, 3, spec, grouped=False, ranks_per_node=1)
    record = record_of(tmp_path)
    assert record["status"] == "completed"
    assert record["timing"]["steps"] == STEPS - 3
    assert record["timing"]["p10_ms"] <= record["timing"]["median_ms"] <= record["timing"]["p90_ms"]
    sent = record["bytes_per_step"]
    # Of 3 ranks, 2 passes of 8 images each.
    assert record["timing"]["samples_per_s"] == pytest.approx(
        1000 * 3 * 2 * 8 / record["timing"]["median_ms"], rel=1e-3
    )
    # One node a rank: all of it crosses the network, 2 (n-1)/n of the fp32 gradient.
    state = record["state_bytes_per_rank"]  # momentum alone: the fp32 gradient's size, but for padding
    assert sent["payload_intra"] == 0
    assert sent["payload_inter"] == pytest.approx(2 * 2 / 3 * state, rel=0.02)
    assert record["metric"]["name"] == "top1"
    assert record["data"] == {"name": record["data"]["name"], "synthetic": False}


class Accumulating(torch.nn.Linear):
    """Notes in which passes gradients are sent."""

    sends, sent = True, ()

    def forward(self, rows):
        self.sent += (self.sends,)
        return super().forward(rows)

    @contextlib.contextmanager
    def no_sync(self):
        self.sends = False
        yield
        self.sends = True


def test_micro_batches_have_the_loss_and_the_gradient_of_one_batch():
    torch.manual_seed(0)
    model, parts = Accumulating(3, 2), list(torch.randn(4, 5, 3))
    workload = SimpleNamespace(loss=lambda model, batch: model(batch).square().mean())
    settings = {"accumulate": 4, "precision": "fp32", "bf16_matmul": "native"}
    loss = method.forward_backward(workload, model, iter(parts), settings, torch.device("cpu"))
    assert model.sent == (False, False, False, True)
    whole = torch.nn.functional.linear(torch.cat(parts), model.weight, model.bias).square().mean()
    expected = torch.autograd.grad(whole, [model.weight, model.bias])
    assert float(loss) == pytest.approx(float(whole.detach()), rel=1e-5)
    assert torch.allclose(model.weight.grad, expected[0], rtol=1e-5)
    assert torch.allclose(model.bias.grad, expected[1], rtol=1e-5)


class Seven:
    """Seven batches in an epoch, which say where they are from."""

    def steps_per_epoch(self, world_size, batch_per_rank):
        return 7

    def train_batches(self, shard, batch_per_rank, *, seed, epoch, start=0):
        for number in range(start, 7):
            yield seed, epoch, number


def test_an_epoch_is_as_many_whole_steps_as_its_batches_make():
    """Of two passes each: three of seven batches. The last one is left over, also after a resume."""
    config = {"seed": 5, "train": {"accumulate": 2, "batch_per_rank": 1, "epochs": 3, "max_steps": None}}
    length = method.Length(config, Seven(), 1)
    assert (length.epoch, length.total, length.short_of) == (3, 9, None)
    straight = [(5, epoch, number) for epoch in range(3) for number in range(6)]
    for done in range(length.total):
        stream = method.batches(config, Seven(), Shard(), length, 2 * done)
        assert list(itertools.islice(stream, 18 - 2 * done)) == straight[2 * done :]
    config["train"]["max_steps"] = 10
    length = method.Length(config, Seven(), 1)
    assert (length.total, length.short_of) == (9, 10)
    config["train"]["max_steps"] = 4
    assert method.Length(config, Seven(), 1).total == 4


def test_the_seed_decides_which_model_a_run_begins_with(tmp_path):
    made = [make_spec(tmp_path, name, f"seed={seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    first, again, other = ([*method.begin(spec, Shard(), 1)[2].parameters()] for spec in made)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_each_step_of_a_run_has_the_rate_of_its_number(tmp_path, monkeypatch):
    """Linear from 1 in the first step to 1/12 in the last."""
    rates = {}
    monkeypatch.setattr(loop.Tracker, "log", lambda self, step, **values: rates.update({step: values["lr"]}))
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    given = ["cluster.nodes=1", "optimizer=sgdm", "optimizer.lr=0.24", "train.lr_schedule.name=linear"]
    loop.train(make_spec(tmp_path, "r", *given, "checkpoint.every=0", "resume=never"))
    assert rates == pytest.approx({step: 0.02 * (STEPS - step + 1) for step in range(1, STEPS + 1)})


def attached(**optimizer):
    """A method of a run of 40 steps, not attached to anything."""
    made = method.AttachedMethod.__new__(method.AttachedMethod)
    made.config = {"optimizer": {"weight_decay": 0.5, **optimizer}}
    made.settings = {"max_grad_norm": None, "lr_schedule": {"name": "linear", "warmup": 0.1, "final": 0.0}}
    made.length, made._seed = SimpleNamespace(total=40, epoch=10), 0
    made.ddp, made.workload = SimpleNamespace(module=torch.nn.Linear(2, 2)), Digits()
    return made


def test_what_is_a_fraction_is_one_of_the_steps_of_the_run():
    for given, steps in ((0.25, 10), (0.001, 1), (7, 7)):
        made = attached(_target_="birder.OneBitAdam", lr=0.1, warmup_steps=given).make_optimizer()
        assert made.warmup_steps == steps
    doubling = {"lr": 0.1, "warmup_steps": 0.05, "local_doubling": 0.5}
    made = attached(_target_="birder.ZeroOneAdam", **doubling).make_optimizer()
    assert (made.warmup_steps, made.local_doubling) == (2, 20)


def test_each_group_has_its_own_rate_times_the_schedule():
    made = attached(_target_="birder.SGDM", lr=0.1)
    made.optimizer, made.base_lrs = SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": 0.4}]), [0.1, 0.4]
    for step, factor in ((1, 1 / 4), (4, 1.0), (5, 1.0), (23, 1 / 2), (40, 1 / 36)):
        made.set_lr(step)
        assert [g["lr"] for g in made.optimizer.param_groups] == pytest.approx([0.1 * factor, 0.4 * factor])
    assert made.lr == made.optimizer.param_groups[0]["lr"]


def keeper(folder, nodes=1):
    """A training that has statistics, a loss scale and a state of its workload, and its checkpoints."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = birder.SGDM(model.parameters(), lr=0.1)
    state = {"text": torch.zeros(2)}
    workload = SimpleNamespace(state_dict=lambda: dict(state), load_state_dict=state.update)
    scaler = torch.amp.GradScaler("cpu")
    made = SimpleNamespace(ddp=SimpleNamespace(module=model), optimizer=optimizer, workload=workload, scaler=scaler)
    made.state = state
    return made, Checkpoints(folder, 2, made, nodes)


def test_a_checkpoint_puts_back_all_that_the_next_step_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    first, saves = keeper(tmp_path)
    first.scaler.scale(first.ddp.module(torch.randn(5, 3)).square().sum()).backward()
    first.scaler.step(first.optimizer)
    first.scaler.update(512.0)
    first.state["text"] = torch.ones(2)
    torch.manual_seed(7)
    saves.save(1, {"steps": 3})
    drawn = torch.rand(4)

    again, reads = keeper(tmp_path)
    torch.manual_seed(8)
    assert reads.apply(reads.find()) == {"steps": 3}
    assert torch.equal(torch.rand(4), drawn)
    assert again.scaler.get_scale() == 512.0
    assert torch.equal(again.state["text"], torch.ones(2))
    theirs, mine = first.ddp.module.state_dict(), again.ddp.module.state_dict()
    assert {name for name in theirs if not torch.equal(theirs[name], mine[name])} == set()
    assert float(mine["1.num_batches_tracked"]) == 1
    _, elsewhere = keeper(tmp_path, nodes=2)  # where bytes within and between nodes are others
    assert elsewhere.apply(elsewhere.find()) is None
    kept = [[o.state_dict()["state"]] for o in (first.optimizer, again.optimizer)]
    digests = [hashlib.sha256() for _ in kept]
    for digest, state in zip(digests, kept, strict=True):
        _add(digest, state)
    assert digests[0].digest() == digests[1].digest()


def evaluated(rank: int, world: int) -> dict:
    """An evaluation on ranks whose models and statistics differ, and what it has left."""
    from experiments.training.loop import _Run

    model = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.BatchNorm1d(1))
    optimizer = LOCAL["QSparse"](model.parameters())
    ddp = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    attachment = birder.attach(ddp, optimizer)
    with torch.no_grad():
        model[0].weight.fill_(float(rank))
        model[1].running_mean.fill_(5.0 + rank)

    def evaluate(module: torch.nn.Module, shard: Shard) -> dict:
        torch.rand(3)
        weight, mean = float(module[0].weight.mean()), float(module[1].running_mean)
        return {"weight": weight, "mean": mean, "training": module.training, "grad": torch.is_grad_enabled()}

    run = _Run.__new__(_Run)
    run.ddp, run.shard, run.method = ddp, Shard(rank, world), optimizer
    run.workload = SimpleNamespace(evaluate=evaluate)
    before = torch.get_rng_state()
    ddp.train()
    run._evaluate()
    attachment.close()
    left = {"own": float(model[0].weight.mean()), "trains": model.training}
    return {**run.metrics, **left, "drawn": not torch.equal(torch.get_rng_state(), before)}


def test_what_is_evaluated_is_the_mean_of_the_ranks_models_with_the_first_ranks_statistics():
    same = {"weight": 0.5, "mean": 5.0, "training": False, "grad": False, "trains": True, "drawn": False}
    assert run_ranks(evaluated, 2) == [{**same, "own": 0.0}, {**same, "own": 1.0}]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, precision):
    given = [f"train.precision={precision}", "train.max_steps=40", "optimizer=sgdm", "optimizer.lr=1e6"]
    spec = make_spec(tmp_path, "r", "checkpoint.every=0", *given)
    with pytest.raises(RuntimeError, match=r"the loss is (nan|inf) at step \d+: lower optimizer.lr"):
        fresh_world(runs.train, 1, spec, grouped=False)
    assert not (tmp_path / "results" / "records").exists()


def train_into_nan(rank: int, world: int, spec: RunSpec) -> None:
    """Every loss is a number, and no gradient is: that of sqrt at 0 is inf."""
    from experiments.workloads.digits import Digits

    loss = Digits.loss
    Digits.loss = lambda self, model, batch: (
        loss(self, model, batch) + (0 * sum(p.sum() for p in model.parameters())).sqrt()
    )
    runs.train(rank, world, spec)


def test_a_last_update_that_leaves_no_numbers_ends_the_run_too(tmp_path):
    """No loss follows that would show it, and a model of NaN has an accuracy: that of the first class."""
    given = ["cluster.nodes=1", "train.max_steps=1", "optimizer=sgdm", "checkpoint.every=0"]
    with pytest.raises(RuntimeError, match=r"Diverged: the loss is nan from here on.*: lower optimizer.lr"):
        fresh_world(train_into_nan, 1, make_spec(tmp_path, "r", *given), grouped=False)
    assert not (tmp_path / "results" / "records").exists()


def train_unrecorded(rank: int, world: int, spec: RunSpec) -> None:
    def write(*_: object) -> None:
        raise UserError("could not write the record: No space left on device")

    loop.record.write = write
    with contextlib.suppress(UserError):
        runs.train(rank, world, spec)


@pytest.mark.slow
def test_a_run_without_its_record_has_failed_in_wandb_too(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    given = ["cluster.nodes=1", "train.max_steps=2", "checkpoint.every=0", "wandb=offline"]
    fresh_world(train_unrecorded, 1, make_spec(tmp_path, "r", *given), grouped=False)
    (folder,) = tmp_path.rglob("offline-run-*")
    run = wandb_file.read(folder)
    assert (run.exit_code, len(run.history)) == (1, 2)


@pytest.mark.parametrize("precision", [slow("bf16"), "fp16"])
def test_half_precision_trains(tmp_path, precision):
    spec = make_spec(tmp_path, "r", f"train.precision={precision}", "checkpoint.every=0", "optimizer=birder")
    fresh_world(runs.train, 2, spec, grouped=False)
    assert record_of(tmp_path)["status"] == "completed"


def test_schedules():
    def check(schedule: dict) -> None:  # before a run starts
        check_section(LrSchedule, schedule, "train.lr_schedule")
        schedules.check_keys(schedule)

    def at(schedule: dict, step: int) -> float:
        return schedules.factor(schedule, step, 100, 10)

    assert at({"name": "constant"}, 50) == 1
    linear = {"name": "linear", "warmup": 0.1, "final": 0.0}
    assert [at(linear, s) for s in (1, 10, 11, 100)] == pytest.approx([0.1, 1.0, 1.0, 1 / 90])
    steps = {"name": "step", "milestones": [3, 6], "gamma": 0.1}
    assert [at(steps, s) for s in (1, 30, 31, 61)] == pytest.approx([1, 1, 0.1, 0.01])
    for wrong in ({"name": "cyclic"}, {"name": "linear", "milestones": [1]}, {"name": "constant", "warmup": 1.0}):
        with pytest.raises(UserError):
            check(wrong)
