"""Checkpoints that cannot be written: a rank that fails, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from birder import checkpoint
from tests.distributed.test_checkpoint_damage import SOON_S, restore, write
from tests.helpers.ranks import fresh_world


def save_failing(rank: int, world: int, root: str, where: str, failing: int) -> tuple[str, str, float, list[str]]:
    """Checkpoint 1 goes well, 2 fails on rank `failing` alone, 3 goes well."""
    write(rank, world, root, [1])
    real = {name: getattr(checkpoint, name) for name in ("write_tree", "write_manifest")}
    if rank == failing:

        def fail(*args: Any) -> None:
            raise {"write_tree": CheckpointException("torn", {}), "write_manifest": OSError(5, "Input/output error")}[
                where
            ]

        setattr(checkpoint, where, fail)
    began, said = time.monotonic(), ("", "")
    try:
        write(rank, world, root, [2])
    except Exception as e:
        said = type(e).__name__, str(e)
    took = time.monotonic() - began
    for name, function in real.items():
        setattr(checkpoint, name, function)
    left = sorted(p.name for p in Path(root).iterdir())
    write(rank, world, root, [3])
    return *said, took, left


@pytest.mark.parametrize(("where", "failing"), [("write_tree", 0), ("write_tree", 2), ("write_manifest", 0)])
def test_a_failure_of_one_rank_is_one_of_all(tmp_path: Path, where: str, failing: int) -> None:
    results = fresh_world(save_failing, 3, str(tmp_path), where, failing)
    cause = "CheckpointException: " if where == "write_tree" else "Input/output error"
    for kind, message, took, _ in results:
        assert kind == ("RuntimeError" if where == "write_tree" else "OSError")
        assert message.startswith(f"checkpoint step-00000002 was not written: {cause}")
        assert message.endswith(f"(rank {failing})")
        assert took < SOON_S
    assert results[0][3] == ["step-00000001"]
    assert checkpoint.latest(tmp_path) == (3, tmp_path / "step-00000003")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(rank: int, world: int, root: str, big_rank: int) -> tuple[str, str, float, list[str], list[int]]:
    write(rank, world, root, [1])
    began = time.monotonic()
    try:
        checkpoint.save(root, 2, {"x": torch.zeros(3)}, {"r": torch.zeros(300_000 if rank == big_rank else 10)})
    except OSError as e:
        said = type(e).__name__, str(e), time.monotonic() - began
    left = sorted(p.name for p in Path(root).iterdir())
    steps = [restore(rank, world, root)[0]]
    write(rank, world, root, [2])  # space was given back
    return *said, left, [*steps, restore(rank, world, root)[0]]


@pytest.mark.xdist_group("sandbox")  # whose tests compare what is mounted before and after
@pytest.mark.parametrize(("world", "big_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_full_disk_leaves_the_last_whole_checkpoint(small_disk: Path, world: int, big_rank: int) -> None:
    # While the large file fills the disk rank 0's small ones may find no room either, and the first that failed is named.
    named = {""} if world == 1 else {f" (rank {rank})" for rank in (0, big_rank)}
    results = [fill(0, 1, str(small_disk), 0)] if world == 1 else fresh_world(fill, world, str(small_disk), big_rank)
    for kind, message, took, _, steps in results:
        assert kind == "OSError"
        assert message in {
            f"checkpoint step-00000002 was not written: No space left on device{where}" for where in named
        }
        assert message == results[0][1]
        assert took < SOON_S
        assert steps == [1, 2]
    assert results[0][3] == ["step-00000001"]


@pytest.mark.xdist_group("sandbox")
def test_a_disk_with_room_for_all_but_the_manifest(small_disk: Path) -> None:
    """Rank 0 fails alone, in the last thing that it does."""
    write(0, 1, str(small_disk), [1])
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    with open(small_disk / "filler", "wb") as file:
        file.write(b"\0" * (free - 2 * 4096))  # tmpfs gives pages of 4 KB: two for the two files of tensors
    with pytest.raises(OSError, match="was not written: No space left on device"):
        write(0, 1, str(small_disk), [2])
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "step-00000001"]


def test_a_file_of_which_a_part_alone_is_there_makes_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another node's may look to rank 0 for a while."""
    written = checkpoint.write_tree

    def cut(path: Path, tree: Any) -> Any:
        seal = written(path, tree)
        os.truncate(path, seal.size - 1)
        return seal

    write(0, 1, str(tmp_path), [1])
    monkeypatch.setattr(checkpoint, "write_tree", cut)
    with pytest.raises(RuntimeError, match="all ranks must write to one shared folder"):
        write(0, 1, str(tmp_path), [2])
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000001"]
