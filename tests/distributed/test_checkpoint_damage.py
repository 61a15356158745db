"""Checkpoints that are damaged, planted or cut short: nothing in them runs, and none is taken for whole."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from birder import checkpoint
from birder.checkpoint import Broken
from birder.checkpoint import files as checkpoint_files
from birder.checkpoint.files import rank_file
from tests.helpers.ranks import run_ranks

SOON_S = 150.0
"""Far less than the 300 s after which gloo gives a barrier up; ample for a loaded machine."""


def write(rank: int, world: int, root: str, steps: list[int], keep: int = 9) -> None:
    for step in steps:
        shared = {"x": torch.full((5,), float(step))}
        checkpoint.save(root, step, shared, {"r": torch.tensor([rank, step]), "t": [1, {"a": 2}]}, keep)


def restore(rank: int, world: int, root: str) -> tuple:
    found = checkpoint.restore(root)
    assert found is not None
    assert found.local["r"].tolist() == [rank, found.step]
    return found.step, found.folder.name, float(found.shared["x"][0]), found.passed_over


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1 << bit
    path.write_bytes(content)


def damage(newest: Path, what: str, rank: int) -> None:
    mine = newest / rank_file(rank)
    if what == "unfinished":
        newest.rename(newest.with_suffix(".tmp"))
    elif what == "truncated":
        os.truncate(mine, mine.stat().st_size - 1)
    elif what == "missing":
        mine.unlink()
    elif what == "no manifest":
        (newest / checkpoint.MANIFEST).unlink()
    elif what == "flipped bit":
        flip(mine, -3)
    elif what == "another step's":
        shutil.copy(newest.parent / "step-00000001" / mine.name, mine)
    elif what == "another step's manifest":
        shutil.copy(newest.parent / "step-00000001" / checkpoint.MANIFEST, newest)
    elif what == "another rank's":
        shutil.copy(newest / rank_file(1 - rank), mine)
    elif what == "a folder":
        mine.unlink()
        mine.mkdir()


SAID = {
    "unfinished": "",
    "truncated": "rank00001.safetensors has [0-9]+ bytes instead of [0-9]+",
    "missing": "rank00001.safetensors: No such file or directory",
    "no manifest": "manifest.json: No such file or directory",
    "flipped bit": "rank00001.safetensors is not what was written",
    "another step's": "rank00001.safetensors is not what was written",
    "another step's manifest": "manifest.json is that of step 1",
    "another rank's": "rank00001.safetensors is not what was written",
    "a folder": "rank00001.safetensors: Is a directory",
}


def restore_all(rank: int, world: int, roots: list[str]) -> list[tuple]:
    return [restore(rank, world, root) for root in roots]


def test_all_ranks_fall_back_together_when_one_file_is_broken(tmp_path: Path) -> None:
    run_ranks(write, 2, str(tmp_path / "whole"), [1, 2])
    for what in SAID:
        shutil.copytree(tmp_path / "whole", tmp_path / what)
        damage(tmp_path / what / "step-00000002", what, rank=1)
    first, second = run_ranks(restore_all, 2, [str(tmp_path / what) for what in SAID])
    assert first == second
    for (what, said), found in zip(SAID.items(), first, strict=True):
        assert found[:3] == (1, "step-00000001", 1.0), what
        lines = found[3]
        assert len(lines) == bool(said)
        for line in lines:
            assert re.search("checkpoint step-00000002 is broken: " + said, line)
            assert len(line) < 300
        assert checkpoint.latest(tmp_path / what) == (1, tmp_path / what / "step-00000001")
        resized = checkpoint.restore(tmp_path / what, any_world=True)  # one rank, which needs the other's file too
        assert resized is not None
        assert resized.step == 1, what


def test_only_broken_ones_are_no_beginning(tmp_path: Path) -> None:
    write(0, 1, str(tmp_path), [1, 2])
    for folder in tmp_path.iterdir():
        flip(folder / checkpoint.SHARED, -1)
    with pytest.raises(Broken, match=r"step-00000002 is broken: shared.* \(and 1 more\).* remove it to begin again"):
        checkpoint.restore(tmp_path)
    assert checkpoint.latest(tmp_path) is None


@pytest.mark.parametrize("any_world", [False, True])
def test_a_manifest_of_no_rank_at_all_is_broken(tmp_path: Path, any_world: bool) -> None:
    write(0, 1, str(tmp_path), [1, 2])
    path = tmp_path / "step-00000002" / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    shared = {checkpoint.SHARED: manifest["files"][checkpoint.SHARED]}
    path.write_text(json.dumps(manifest | {"world_size": 0, "files": shared}))
    assert checkpoint.restore(tmp_path, any_world).step == 1  # type: ignore[union-attr]


def test_later_checkpoints_are_those_of_a_future_that_was_left(tmp_path: Path) -> None:
    write(0, 1, str(tmp_path), [1, 2, 3, 4])
    flip(tmp_path / "step-00000003" / checkpoint.SHARED, -1)
    flip(tmp_path / "step-00000004" / checkpoint.SHARED, -1)
    assert checkpoint.restore(tmp_path).step == 2  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="keep must be a whole number of at least 1"):
        write(0, 1, str(tmp_path), [3], keep=0)
    write(0, 1, str(tmp_path), [3], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_step_that_is_no_whole_number_leaves_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    write(0, 1, str(tmp_path), [3, 4])
    for arguments in ({"step": -1}, {"step": True}, {"step": 7.0}, {"step": "7"}, {"step": 5, "keep": 1.5}):
        with pytest.raises(ValueError, match="must be a whole number"):
            checkpoint.save(tmp_path, shared={}, local={}, **arguments)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    for step in (np.int64(5), torch.tensor(6)):
        checkpoint.save(tmp_path, step, {}, {})
        assert checkpoint.restore(tmp_path).step == int(step)  # type: ignore[union-attr]


# ---- nothing in a checkpoint runs ----------------------------------------------------------------------------------


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def planted(mark: Path, how: str) -> bytes:
    if how == "pickle":
        return pickle.dumps(Payload(mark))
    torch.save({"x": Payload(mark)}, mark.with_suffix(".pt"))
    return mark.with_suffix(".pt").read_bytes()


@pytest.mark.parametrize("sealed", [False, True], ids=["manifest as it was", "manifest of the planted file"])
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_planted_payload_is_not_executed(tmp_path: Path, how: str, sealed: bool) -> None:
    """In every file in turn, in files that no checkpoint has, and under the names that older formats had."""
    mark, root = tmp_path / "executed", tmp_path / "checkpoints"
    pickle.loads(planted(mark, "pickle"))
    assert mark.exists()  # the payload is a live one
    mark.rmdir()
    write(0, 1, str(root), [1])
    whole = {p.name: p.read_bytes() for p in (root / "step-00000001").iterdir()}
    for name in [*whole, ".metadata", "__0_0.distcp", "data.pkl"]:
        folder = root / "step-00000002"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        manifest = json.loads(whole[checkpoint.MANIFEST]) | {"step": 2}
        content = {**whole, checkpoint.MANIFEST: json.dumps(manifest).encode(), name: planted(mark, how)}
        if sealed and name in manifest["files"]:
            (tmp_path / "x").write_bytes(content[name])
            with open(tmp_path / "x", "rb") as file:
                seal = checkpoint_files._seal(file)
            manifest["files"][name] = {"size": seal.size, "sha256": seal.sha256}
            content[checkpoint.MANIFEST] = json.dumps(manifest).encode()
        for file_name, text in content.items():
            (folder / file_name).write_bytes(text)
        found = checkpoint.restore(root)
        assert found is not None
        assert found.step == (1 if name in whole else 2)
        checkpoint.latest(root)
        with contextlib.suppress(Broken):
            checkpoint.load(folder)
        assert not mark.exists()
