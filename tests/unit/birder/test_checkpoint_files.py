"""Files of checkpoints: any manifest, any flipped bit, any tree of values is understood or refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birder import checkpoint
from birder.checkpoint import Broken
from birder.checkpoint import files as checkpoint_files
from tests.distributed.test_checkpoint_damage import flip, write


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


@settings(max_examples=300)
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


@settings(max_examples=300)
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
    with pytest.raises(TypeError, match="a/0 has a key of type tuple, checkpoints hold numbers and strings as keys"):
        checkpoint_files.write_tree(tmp_path / "t", {"a": [{(0, 1): 3}]})  # written, it could not be read again
