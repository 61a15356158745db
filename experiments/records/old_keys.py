"""Configuration keys that have been renamed: the one table of old and new names, and what reads the old ones.

Command lines, files of conf/ and run directories with old names go on working, with one warning; records keep the names they
were written with, and are read under the new ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

RENAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "turns": ("timing", {}),
    "turns.mode": ("timing.mode", {"turns": "interleaved", "runs": "sequential"}),
    "turns.rounds": ("timing.rounds", {}),
    "turns.rounds_anew": ("timing.rounds_when_rebuilding", {}),
    "turns.steps": ("timing.steps", {}),
    "train.bf16_products": ("train.bf16_matmul", {}),
    "comm.bucket_mb": ("comm.bucket_cap_mb", {}),
    "cluster.silence_s": ("cluster.heartbeat_timeout_s", {}),
    "cluster.timeout_s": ("cluster.collective_timeout_s", {}),
    "resume_with": ("resume_allow_config_change", {"unchanged": False, "changed": True}),
    "resume_rule": ("resume_resize", {"same": "never", "mean": "average"}),
}
"""Old key: its new name, and new names of its values."""
CHANGED = "resume_changed"
"""Key of a resolved configuration, and so of its record: [[key, then, now], ...], what a resumed run was changed in."""


def renamed(key: str, value: Any) -> tuple[str, Any]:
    """A dotted key and its value under the names of now."""
    if key not in RENAMED:
        return key, value
    new, values = RENAMED[key]
    return new, values.get(value, value) if isinstance(value, str) else value


def override(text: str) -> str:
    """An override of the command line, such as "turns.mode=runs", under the names of now."""
    sign = text[: len(text) - len(text.lstrip("+~"))]
    key, equals, value = text.removeprefix(sign).partition("=")
    if key not in RENAMED:
        return text
    new, now = renamed(key, value)
    return f"{sign}{new}{equals}{str(now).lower() if isinstance(now, bool) else now}"


def overrides(texts: Iterable[str]) -> tuple[list[str], list[str]]:
    """All overrides of a command line under the names of now, and for each that was renamed "old is now new"."""
    given = list(texts)
    now = [override(text) for text in given]
    return now, [f"{old} is now {new}" for old, new in zip(given, now, strict=True) if old != new]


def config(section: dict[str, Any], prefix: str = "", typed: Collection[str] = ()) -> dict[str, Any]:
    """A configuration, nested plain dicts, under the names of now. Where it holds both names of a key, the old one counts:
    conf/config.yaml has all the new ones, and a file that has an old one means it.

    A renamed key stays in its section, or moves with it: no key changes its level.
    typed: new names that were given on the command line, which count more than a file.
    """
    found: dict[str, Any] = {}
    old: dict[str, Any] = {}
    for key, value in section.items():
        place = f"{prefix}{key}"
        inner = config(value, f"{place}.", typed) if isinstance(value, dict) else value
        if place == CHANGED and isinstance(value, list):
            inner = [[renamed(str(name), None)[0], *rest] for name, *rest in value]
        name, inner = renamed(place, inner)
        if name == place:
            found[key] = inner
        elif isinstance(value, dict) or name not in typed:
            old[name.rpartition(".")[2]] = inner
    for name, value in old.items():
        there = found.get(name)
        found[name] = {**there, **value} if isinstance(value, dict) and isinstance(there, dict) else value
    return found


def names(section: dict[str, Any], prefix: str = "") -> list[str]:
    """The old keys that a configuration holds, dotted."""
    found = []
    for key, value in section.items():
        place = f"{prefix}{key}"
        inner = names(value, f"{place}.") if isinstance(value, dict) else []
        found += inner or ([place] if place in RENAMED else [])
    return found
