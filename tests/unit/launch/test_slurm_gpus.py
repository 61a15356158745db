"""Which GPUs a SLURM job asks for where nobody says: the nodes decide, not the machine it is submitted from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from experiments.config import compose
from launch.errors import UserError
from launch.slurm import job
from launch.slurm.launcher import SlurmLauncher
from tests.helpers.stub_run import make_spec


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch):
    """Makes SLURM list these generic resources; None: nobody answers."""

    def set_to(resources: str | None) -> None:
        def ask(command: list[str], timeout_s: float = 0) -> str:
            if resources is None:
                raise job.NoController("down")
            return resources

        monkeypatch.setattr(job, "ask", ask)
        job.gpus.cache_clear()

    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    yield set_to
    job.gpus.cache_clear()


@pytest.mark.parametrize(
    ("resources", "partition", "gpus"),
    [
        ("main*|gpu:a100:8(S:0-1)\n", None, 8),
        ("main*|gpu:8\n", None, 8),
        ("main*|gpu:a100:4(S:0),gpu:h100:2(S:1),nvme:9\n", None, 6),
        ("main*|gpu:4\nmain*|gpu:8\nother|(null)\n", None, 4),
        ("main|(null)\n", "main", 0),
        ("main|gpumem:80\n", "main", 0),
        ("main|gpu:4\n", None, None),  # no default partition
        (None, None, None),
    ],
)
def test_what_slurm_lists(listed, resources: str | None, partition: str | None, gpus: int | None) -> None:
    listed(resources)
    assert job.gpus(partition) == gpus


def script(tmp_path: Path, scale: str, **options: object) -> str:
    spec = make_spec(tmp_path)
    spec = dataclasses.replace(spec, config={**spec.config, "scale": {"name": scale}})
    return SlurmLauncher(nodes=2, ranks_per_node=4, name="slurm", **options).script(spec)


@pytest.mark.parametrize(
    ("resources", "scale", "options", "asked"),
    [
        ("main*|gpu:4\n", "paper", {}, True),
        ("main*|gpu:4\n", "quick", {}, True),
        ("main*|gpu:2\n", "quick", {}, False),
        ("main*|(null)\n", "quick", {}, False),
        (None, "paper", {}, True),
        (None, "quick", {}, False),
        ("main*|gpu:4\n", "paper", {"backend": "gloo"}, False),
        ("main*|(null)\n", "paper", {"backend": "nccl"}, True),
    ],
)
def test_a_job_asks_for_the_gpus_of_its_nodes(listed, tmp_path: Path, resources, scale, options, asked: bool) -> None:
    listed(resources)
    assert ("#SBATCH --gpus-per-node=4" in script(tmp_path, scale, **options)) is asked


@pytest.mark.parametrize("resources", ["main*|gpu:2\n", "main*|(null)\n"])
def test_the_papers_scale_without_enough_gpus_is_refused(listed, tmp_path: Path, resources: str) -> None:
    listed(resources)
    with pytest.raises(UserError, match=r"needs 4 GPUs on a node, and SLURM lists \d"):
        script(tmp_path, "paper")


@pytest.mark.parametrize(
    ("resources", "here", "more", "scale"),
    [
        ("main*|gpu:8\n", [], [], "paper"),  # a login node has none itself
        ("main*|(null)\n", ["0"], [], "quick"),  # or has some, unlike the nodes
        (None, [], ["cluster.backend=nccl"], "paper"),
        ("main*|gpu:8\n", [], ["cluster.backend=gloo"], "quick"),
        (None, [], ["cluster.gpus_per_node=8"], "paper"),
    ],
)
def test_the_nodes_decide_the_scale(listed, tmp_path: Path, monkeypatch, resources, here, more, scale: str) -> None:
    listed(resources)
    monkeypatch.setattr("launch.probe.visible_gpus", lambda: here)
    composed = compose.compose(["+exp=resnet50", "cluster=slurm", f"data.path={tmp_path}", *more])
    assert composed.config.scale.name == scale
