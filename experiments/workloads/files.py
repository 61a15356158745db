"""Checks of data folders that need no heavy import, shared by the workloads."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launch.errors import UserError

Read = TypeVar("Read")
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"}
SIZES, HEAD = 8, 4096
"""Of a folder's files, evenly spread, the sizes of so many and a few more count, and so many first bytes of the first one:
ImageNet has more than a million."""


def fingerprint(paths: Iterable[Path]) -> str:
    """What tells apart two data sets of one name, and is the same of a copy elsewhere: from the names of all files in these
    folders, or of these files, and some sizes and bytes. Hidden ones do not count. Raises OSError."""
    found = hashlib.sha256()

    def look(folder: str | Path, inside: str, names: Iterable[str]) -> None:
        files = sorted(name for name in names if not name.startswith("."))
        sizes = [os.stat(os.path.join(folder, name)).st_size for name in files[:: max(1, len(files) // SIZES)]]
        found.update(repr((inside, files, sizes)).encode())
        if files:
            with open(os.path.join(folder, files[0]), "rb") as first:
                found.update(first.read(HEAD))

    for path in paths:
        if path.is_file():
            look(path.parent, "", [path.name])
        for folder, folders, names in os.walk(path, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            look(folder, os.path.join(path.name, os.path.relpath(folder, path)), names)
    return found.hexdigest()[:16]


def ends_fingerprint(paths: Iterable[Path]) -> str:
    """What tells apart weights of one shape, which differ in bytes alone: names, sizes, and both ends of all files in these
    folders, or of these files. Raises OSError."""
    found = hashlib.sha256()
    for path in paths:
        for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
            size = file.stat().st_size
            with file.open("rb") as content:
                found.update(repr((file.name, size, content.read(HEAD))).encode())
                content.seek(max(0, size - HEAD))
                found.update(content.read())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def reading(data_path: str | Path | None) -> Iterator[None]:
    """What the system says of a file at `data_path`, or in it, as UserError."""
    try:
        yield
    except OSError as error:
        root = None if data_path is None else Path(data_path).expanduser()
        if root is None or error.filename is None or not Path(error.filename).is_relative_to(root):
            raise
        raise UserError(f"data.path: cannot read {error.filename}: {error.strerror}") from error


def existing_dir(path: str | Path, what: str) -> Path:
    """`path` as a Path. Raises UserError when it is not a folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.path: no folder {folder}: {what}")
    return folder


def image_folders(path: str | Path) -> tuple[Path, Path]:
    """`<path>/train` and `<path>/val` (or `test`), after checking that both hold images of the same classes.

    Raises UserError.
    """
    root = existing_dir(path, "expected train/<class>/*.jpg and val/<class>/*.jpg in it")
    train = root / "train"
    held_out = next((folder for folder in (root / "val", root / "test") if folder.is_dir()), root / "val")
    if odd := sorted(set(_classes(train)) ^ set(_classes(held_out))):
        raise UserError(f"data.path: train and val of {root} do not have the same classes (first difference: {odd[0]})")
    return train, held_out


def _classes(folder: Path) -> list[str]:
    """Names of the class folders of an image folder. Raises UserError when one holds no image or none is there."""
    if not folder.is_dir():
        raise UserError(f"data.path: no folder {folder}: images lie in <data.path>/train/<class>/ and /val/<class>/")
    classes = sorted(p.name for p in folder.iterdir() if p.is_dir())
    if not classes:
        raise UserError(f"data.path: {folder} is empty: expected one folder of images per class")
    for name in classes:
        if not any(p.suffix.lower() in IMAGE_SUFFIXES for p in (folder / name).rglob("*")):
            raise UserError(f"data.path: {folder / name} holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return classes


def text_files(path: str | Path, names: Sequence[str] = ()) -> list[Path]:
    """`path` itself when it is a file, else the .txt files in it, sorted, or those of `names`. Raises UserError for none."""
    source = Path(path).expanduser()
    if names:
        files = [source / name for name in names]
        if absent := [f for f in files if not f.is_file()]:
            raise UserError(f"data.path: no file {absent[0]}, which workload.texts names")
    elif source.is_file():
        files = [source]
    elif source.is_dir():
        files = sorted(source.glob("*.txt"))
    else:
        raise UserError(f"data.path: {source} does not exist: give a text file or a folder of .txt files")
    if not files:
        raise UserError(f"data.path: {source} holds no .txt file")
    if all(f.stat().st_size == 0 for f in files):
        raise UserError(f"data.path: the text in {source} is empty")
    return files


def read_text(file: Path) -> str:
    """Text of `file`, without a byte-order mark at its head. Raises UserError when it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"data.path: {file} is not UTF-8 text (byte {error.start})") from error


def from_hub(dataset: str, *name: str | None, split: str, read: Callable[[Any], Read], instead: str) -> Read:
    """What `read` makes of a data set of the hub. Raises UserError where it cannot be had; instead: what to give then."""
    import datasets

    datasets.disable_progress_bars()
    try:
        return read(datasets.load_dataset(dataset, *name, split=split))
    except UserError:
        raise
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise UserError(
            f"cannot load {dataset} from the hub ({type(error).__name__}): give {instead}, or workload.dataset=synthetic"
        ) from error


def no_synthetic(what: str) -> UserError:
    """The error for a run at paper scale that has no data."""
    return UserError(
        f"no data: give data.path=... ({what}), or scale=quick, or workload.allow_synthetic=true to measure time only"
    )
