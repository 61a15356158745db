"""Time dilation: what is measured, when, and what it does to a configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from experiments.cells.timelines import load
from experiments.config import compose
from experiments.records import record
from experiments.timing import calibrate, plan
from launch import lock
from launch.emulated import launcher as emulated
from launch.emulated.launcher import EmulatedLauncher
from launch.errors import UserError

RESNET = ["+exp=resnet50", "cluster=emulated", "scale=quick"]


@pytest.fixture(autouse=True)
def shaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "why_not", lambda: None)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched; everywhere the bound "takes" 700 ms a step."""
    specs: list[Any] = []

    def launch(self: EmulatedLauncher, spec: Any) -> None:
        assert self.late  # links without a rate: it follows from what is measured
        assert self.worker == plan.WORKER
        specs.append(spec)
        record.write_file(spec.path / plan.BOUND_FILE, b'{"step_ms": 700.0}', "measurement")

    monkeypatch.setattr(EmulatedLauncher, "launch", launch)
    return specs


def test_one_measurement_for_all_variants(seen: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    made = [compose.compose([*RESNET, f"optimizer={name}"]) for name in ("birder", "sgdm")]
    calibrate.settle(made)
    (spec,) = seen
    assert spec.config["variants"] == []  # the bound alone: nothing sent, nothing updated
    assert spec.config["cluster"]["_target_"] == "launch.emulated.launcher.EmulatedLauncher"  # on the nodes of the runs
    assert spec.config["cluster"]["nodes"] == 4
    assert not Path(spec.run_dir).parent.exists()
    expected = float(f"{700 / load('resnet50_b32_tf32').step_ms:.3g}")
    assert [compose.resolve(m)["cluster"]["dilation"] for m in made] == [expected, expected]
    assert capsys.readouterr().out.startswith(f"Time dilation {expected:g}: forward and backward take 700 ms")
    calibrate.settle(made)  # a number stays
    assert len(seen) == 1


def test_a_step_of_several_micro_batches_is_one_of_several_on_the_gpu(seen: list[Any]) -> None:
    one, four = (compose.compose([*RESNET, f"train.accumulate={n}"]) for n in (1, 4))
    for made in (one, four):
        calibrate.settle([made])
    dilations = [compose.resolve(made)["cluster"]["dilation"] for made in (one, four)]
    assert dilations[1] == pytest.approx(dilations[0] / 4, rel=0.01)


def test_a_faster_machine_is_not_slowed_down() -> None:
    timeline = load("resnet50_b32_tf32")
    assert calibrate.Calibration(timeline.step_ms / 3, timeline).dilation == 1.0


def test_nothing_to_measure(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one = compose.compose([*RESNET, "cluster.nodes=1"])
    given = compose.compose([*RESNET, "cluster.dilation=7"])
    preview = compose.compose([*RESNET, "cluster.dry_run=true"])
    local = compose.compose([*RESNET[:1], "cluster=local"])
    for made in (one, given, preview, local):
        calibrate.settle([made])
    assert one.config.cluster.dilation == 1
    assert given.config.cluster.dilation == 7
    assert preview.config.cluster.dilation == calibrate.SHOWN
    assert "dilation" not in local.config.cluster
    monkeypatch.setattr(emulated, "why_not", lambda: "no namespaces here")
    refused = compose.compose(RESNET)
    calibrate.settle([refused])
    assert refused.config.cluster.dilation == 1
    assert seen == []


def test_without_a_timeline_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"timeline=NAME or cluster\.dilation=20"):
        calibrate.settle([compose.compose(["+exp=digits", "cluster=emulated"])])


def test_what_killed_calibrations_left_is_removed(tmp_path: Path) -> None:
    old, running, new = (tmp_path / f"calibration-{name}" for name in ("old", "running", "new"))
    for folder in (old, running, new, tmp_path / "other"):
        (folder / "run").mkdir(parents=True)
        (folder / "run" / lock.LOCK).touch()
    (tmp_path / "calibration-link").symlink_to(tmp_path / "other")
    with lock.held(running / "run"):
        for folder in (old, running, tmp_path / "other"):
            os.utime(folder, (0, 0))
        calibrate._sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "calibration-link",
        "calibration-new",
        "calibration-running",
        "other",
    ]


def test_a_folder_of_the_user_that_is_called_calibration_is_kept(tmp_path: Path) -> None:
    images = tmp_path / "calibration-images"
    (images / "run").mkdir(parents=True)
    (images / "run" / "1.png").touch()
    os.utime(images, (0, 0))
    calibrate._sweep(tmp_path)
    assert (images / "run" / "1.png").exists()
