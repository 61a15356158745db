"""Which configurations go on with a run, and what its record then says."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.config import compose, same_run
from experiments.records import record
from launch.errors import UserError


def test_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    at = ["+exp=digits", f"output_dir={tmp_path}", "run_name=mine"]
    first = compose.make_spec(compose.compose(at))
    first.save()
    with pytest.raises(UserError, match="holds a run already"):
        compose.make_spec(compose.compose(at))
    again = compose.make_spec(compose.compose([*at, "resume=auto"]))
    assert (again.id, again.run_dir) == (first.id, first.run_dir)
    for other, words in (("cluster.nodes=3", "world size 2, this is 3"), ("optimizer=sgdm", "birder.SGDM")):
        with pytest.raises(UserError, match=words):
            compose.make_spec(compose.compose([*at, "resume=auto", other]))


def test_checkpoints_without_their_spec_are_a_run_too(tmp_path: Path) -> None:
    """A new run would save between them, and resume from the old one's last."""
    at = ["+exp=digits", f"output_dir={tmp_path}", "run_name=mine"]
    (tmp_path / "digits/mine/checkpoints/step-00000010").mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run already"):
        compose.make_spec(compose.compose(at))
    assert compose.make_spec(compose.compose([*at, "resume=auto"])).path == tmp_path / "digits/mine"


@pytest.fixture
def begun(tmp_path: Path) -> list[str]:
    """Overrides of a run that has a checkpoint."""
    at = ["+exp=digits", "scale=quick", f"output_dir={tmp_path}", "run_name=mine"]
    spec = compose.make_spec(compose.compose(at))
    spec.save()
    (spec.path / "checkpoints/step-00000010").mkdir(parents=True)
    return [*at, "resume=auto"]


OTHER_RESULTS = ["seed=7", "train.batch_per_rank=4", "train.precision=bf16", "train.max_steps=3", "optimizer.lr=0.5"]
OTHER_RESULTS += [
    "comm.bucket_cap_mb=1",
    "train.lr_schedule.name=cosine",
    "comm.topology=hierarchical",
    "train.accumulate=2",
]


@pytest.mark.parametrize("other", OTHER_RESULTS)
def test_a_resumed_run_that_would_be_another_one_is_refused(begun: list[str], other: str) -> None:
    key, _, value = other.partition("=")
    with pytest.raises(UserError) as refused:
        compose.make_spec(compose.compose([*begun, other]))
    message = str(refused.value)
    assert f": {key} was " in message
    assert f"now it is {value}" in message.replace("'", "")
    assert "resume_allow_config_change=true" in message
    assert "\n" not in message
    assert len(message) < 300


def test_a_change_that_is_wanted_stands_in_the_configuration_for_good(begun: list[str]) -> None:
    changed = compose.make_spec(compose.compose([*begun, "seed=7", "resume_allow_config_change=true"]))
    assert changed.config["resume_changed"] == [["seed", 0, 7]]
    changed.save()
    later = compose.make_spec(compose.compose([*begun, "seed=7"]))
    assert later.config["resume_changed"] == [["seed", 0, 7]]
    assert later.config["resume_allow_config_change"] is True
    later.save()
    again = compose.make_spec(
        compose.compose([*begun, "seed=7", "optimizer.lr=0.5", "resume_allow_config_change=true"])
    )
    assert [c[0] for c in again.config["resume_changed"]] == ["seed", "optimizer.lr"]


@pytest.mark.parametrize(
    "free", ["wandb=disabled", "checkpoint.every=7", "train.eval_every=3", "train.timing_warmup=1"]
)
def test_what_changes_no_result_may_change(begun: list[str], free: str) -> None:
    assert "resume_changed" not in compose.make_spec(compose.compose([*begun, free])).config


def test_a_run_that_is_older_than_a_key_is_gone_on_with(begun: list[str]) -> None:
    then = compose.resolve(compose.compose(begun))
    del then["train"]["bf16_matmul"]
    now = compose.resolve(compose.compose(begun))
    assert same_run.differences(then, now) == []
    now["train"]["bf16_matmul"] = "fp32"
    assert same_run.differences(then, now) == [["train.bf16_matmul", "native", "fp32"]]


def test_a_record_is_not_written_over_by_another_run(tmp_path: Path) -> None:
    """A run that ended well has no checkpoint, and the command that would resume it asks for something else."""
    at = ["+exp=digits", f"output_dir={tmp_path}", f"results_dir={tmp_path}/results", "run_name=mine"]
    spec = compose.make_spec(compose.compose(at))
    spec.save()
    record.write(record.failed(spec, "it was interrupted"), tmp_path / "results")
    assert compose.make_spec(compose.compose([*at, "resume=auto", "seed=7"])).id == spec.id
    record.write(record.from_spec(spec), tmp_path / "results")
    assert compose.make_spec(compose.compose([*at, "resume=auto"])).id == spec.id
    for allowed in ("false", "true"):  # nothing of it could be continued
        with pytest.raises(UserError, match=r"seed was 0, now it is 7: set it as it was, or choose another run_name"):
            compose.make_spec(compose.compose([*at, "resume=auto", "seed=7", f"resume_allow_config_change={allowed}"]))


def test_without_a_checkpoint_nothing_is_gone_on_with(tmp_path: Path) -> None:
    at = ["+exp=digits", f"output_dir={tmp_path}", "run_name=mine"]
    compose.make_spec(compose.compose(at)).save()
    assert compose.make_spec(compose.compose([*at, "resume=auto", "seed=7"])).config["seed"] == 7


def test_a_run_is_not_resumed_with_other_data_of_the_same_name(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        (tmp_path / f"{split}.txt").write_text("a text")
    at = ["+exp=ptb", f"data.path={tmp_path}", f"output_dir={tmp_path}", "run_name=mine", "resume=auto"]
    spec = compose.make_spec(compose.compose(at))
    spec.save()
    (spec.path / "checkpoints/step-00000010").mkdir(parents=True)
    assert compose.make_spec(compose.compose(at)).id == spec.id
    (tmp_path / "train.txt").write_text("another text")
    with pytest.raises(UserError, match=r"the files at data\.path are others than it began with"):
        compose.make_spec(compose.compose(at))
    then, now = compose.resolve(compose.compose(at)), compose.resolve(compose.compose(at))
    now["data"]["files"] = "0" * 16
    assert same_run.differences(then, now) == []  # a run that is older than the key
