"""Checkpoints that are damaged, planted or cut short: nothing in them runs, and none is taken for whole."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from birder import checkpoint, checkpoint_files
from birder.checkpoint import Broken
from birder.checkpoint_files import rank_file
from tests.ranks import run_ranks

SOON_S = 30.0
"""Far less than the 90 s after which gloo gives a barrier up; ample for a loaded machine."""


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


def test_only_broken_ones_are_no_beginning(tmp_path: Path) -> None:
    write(0, 1, str(tmp_path), [1, 2])
    for folder in tmp_path.iterdir():
        flip(folder / checkpoint.SHARED, -1)
    with pytest.raises(Broken, match=r"step-00000002 is broken: shared.* \(and 1 more\).* remove it to begin again"):
        checkpoint.restore(tmp_path)
    assert checkpoint.latest(tmp_path) is None


def test_later_checkpoints_are_those_of_a_future_that_was_left(tmp_path: Path) -> None:
    write(0, 1, str(tmp_path), [1, 2, 3, 4])
    flip(tmp_path / "step-00000003" / checkpoint.SHARED, -1)
    flip(tmp_path / "step-00000004" / checkpoint.SHARED, -1)
    assert checkpoint.restore(tmp_path).step == 2  # type: ignore[union-attr]
    write(0, 1, str(tmp_path), [3], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


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


def replaced(tree: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    at: Any = tree
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return tree


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ["format"],
    ["step"],
    ["world_size"],
    ["files"],
    ["files", "../../evil"],
    ["files", "shared.safetensors"],
    ["files", "shared.safetensors", "size"],
    ["files", "shared.safetensors", "sha256"],
    ["files", "shared.safetensors", "more"],
    ["more"],
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    write(0, 1, str(root), [1])
    return root / "step-00000001"


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(place=st.sampled_from(PLACES), value=json_values)
def test_any_manifest_is_understood_or_refused(written: Path, place: list[str], value: Any) -> None:
    path = written / checkpoint.MANIFEST
    whole = path.read_text()
    try:
        path.write_text(json.dumps(replaced(json.loads(whole), place, value)))
        refused = pytest.raises(Broken, match=r"manifest\.json|shared\.safetensors")
        with refused if value != 1 else contextlib.suppress(Broken):
            checkpoint.load(written)
    finally:
        path.write_text(whole)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[" * 100_000, "\xff\xfe", '{"format": 1}', "NaN"])
def test_a_manifest_that_is_none(written: Path, text: str) -> None:
    path = written / checkpoint.MANIFEST
    whole = path.read_text()
    try:
        path.write_bytes(text.encode("latin1"))
        with pytest.raises(Broken, match=r"manifest\.json"):
            checkpoint.load(written)
    finally:
        path.write_text(whole)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(file=st.integers(0, 2), position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(written: Path, file: int, position: int, bit: int) -> None:
    """Or, between the manifest's words, means nothing: then what is read is what was written."""
    path = sorted(written.iterdir())[file]
    whole = path.read_bytes()
    try:
        flip(path, position, bit)
        with contextlib.suppress(Broken):
            shared, local = checkpoint.load(written)
            assert path.name == checkpoint.MANIFEST
            assert shared["x"].tolist() == [1.0] * 5
            assert local["r"].tolist() == [0, 1]
    finally:
        path.write_bytes(whole)


TREES = ["1", "[]", '{"tensor": "no such"}', '{"dict": [[1]]}', '{"dict": [[[], {"value": 1}]]}', '{"run": "x"}', "{"]
TREES += ['{"list": {"a": 1}}', '{"value": []}', '{"tensor": ["x"]}', '{"list": [' * 50_000]


@pytest.mark.parametrize("tree", [*TREES, None])
def test_a_tree_that_is_none(tmp_path: Path, tree: str | None) -> None:
    """Sealed rightly: whoever plants a file can also write its checksum."""
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(2)}, path, metadata={} if tree is None else {"tree": tree})
    with open(path, "rb") as file:
        seal = checkpoint_files._seal(file)
    with pytest.raises(Broken, match=r"x\.safetensors holds no tree of tensors"):
        checkpoint_files.read_tree(path, seal)


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tree = {
        "part": base[2:5],
        "same": base[2:5],
        "strided": base[::3],
        "parameter": torch.nn.Parameter(torch.ones(2, 3).t()),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "bf16": torch.full((3,), 1.5, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "f64": torch.tensor([1 / 3], dtype=torch.float64),
        "a/b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        "plain": [1, 2.5, "x", None, True, {"y": []}],
        3: {"k": float("inf")},
    }
    found = checkpoint_files.read_tree(tmp_path / "t", checkpoint_files.write_tree(tmp_path / "t", tree))
    assert list(found) == list(tree)

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
        return bool(a == b)

    assert same(tree, found)
    with pytest.raises(TypeError):
        checkpoint_files.write_tree(tmp_path / "t", {"x": object()})


# ---- a rank that fails while saving --------------------------------------------------------------------------------


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
    results = run_ranks(save_failing, 3, str(tmp_path), where, failing)
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


@pytest.mark.parametrize(("world", "big_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_full_disk_leaves_the_last_whole_checkpoint(small_disk: Path, world: int, big_rank: int) -> None:
    where = f" (rank {big_rank})" if world > 1 else ""
    results = [fill(0, 1, str(small_disk), 0)] if world == 1 else run_ranks(fill, world, str(small_disk), big_rank)
    for kind, message, took, _, steps in results:
        assert (kind, message) == (
            "OSError",
            f"checkpoint step-00000002 was not written: No space left on device{where}",
        )
        assert took < SOON_S
        assert steps == [1, 2]
    assert results[0][3] == ["step-00000001"]


def test_a_disk_with_room_for_all_but_the_manifest(small_disk: Path) -> None:
    """Rank 0 fails alone, in the last thing that it does."""
    write(0, 1, str(small_disk), [1])
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    with open(small_disk / "filler", "wb") as file:
        file.write(b"\0" * (free - 2 * 4096))  # tmpfs gives pages of 4 KB: two for the two files of tensors
    with pytest.raises(OSError, match="was not written: No space left on device"):
        write(0, 1, str(small_disk), [2])
    assert sorted(p.name for p in small_disk.iterdir()) == ["filler", "step-00000001"]
