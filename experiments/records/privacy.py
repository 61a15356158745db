"""Keeps what belongs to a user's machine out of records, which are made to be published: paths, hosts, users, keys."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

HIDDEN = "…"
_SECRET = {"key", "apikey", "token", "secret", "password", "passwd", "credentials"}
_PLACES = {
    *("host", "hosts", "hostname", "hostfile", "nodelist", "addr", "address", "endpoint"),
    *("ssh", "user", "username", "entity", "account"),
}
_ABSOLUTE = re.compile(
    r"""(?P<quote>['"])(?P<quoted>[/~][^'"]*)(?P=quote)|(?<![\w.:/~…-])(?P<bare>[/~][^\s'",;:=\[\]{}()]+)"""
)
_ASSIGNMENT = re.compile(r"""(?P<key>[\w.@/-]+)(?P<is>=)(?P<value>\[[^\]]*\]|\{[^{}]*\}|"[^"]*"|'[^']*'|\S+)""")
_MAPPING = re.compile(r"\{.*\}", re.DOTALL)
_ENTRY = re.compile(r"""(?P<key>[\w.@/-]+)(?P<is>["']?\s*:\s*)(?P<value>\[[^\]]*\]|"[^"]*"|'[^']*'|[^,{}]+)""")
_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def is_private(key: str) -> bool:
    """Whether a configuration key or environment variable of this name holds a secret, a host or a user."""
    words = set(re.split(r"[._\-]+", key.rpartition(".")[2].lower()))
    return bool(words & (_SECRET | _PLACES))


def clean_path(path: str, base: Path) -> str:
    """An absolute path as seen from `base` when it lies below, else "…/" and its last component.

    Of a checkpoint, which has the name of its step, also its run's: RUN/checkpoints/step-N.
    """
    pure = Path(path)
    if pure == base:
        return "."
    if pure.is_relative_to(base):
        return pure.relative_to(base).as_posix()
    kept = 3 if re.fullmatch(r"step-\d+", pure.name) and pure.parent.name == "checkpoints" else 1
    return "/".join([HIDDEN, *[part for part in pure.parts if part != "/"][-kept:]])


def clean_text(text: str, base: Path) -> str:
    """`text` (a command line, an override, an error message) without absolute paths, secrets and host names."""

    def path(match: re.Match[str]) -> str:
        quote = match["quote"] or ""
        found = match["quoted"] or match["bare"]
        # A lone slash is division or "and/or", not a place.
        return match[0] if len(found) < 2 else quote + clean_path(found, base) + quote

    def value(match: re.Match[str]) -> str:
        return f"{match['key']}{match['is']}{HIDDEN}" if is_private(match["key"]) else match[0]

    text = _LOGIN.sub(HIDDEN, _ASSIGNMENT.sub(value, text.replace("file:///", "/")))
    text = _MAPPING.sub(lambda braces: _ENTRY.sub(value, braces[0]), text)
    host = socket.gethostname()
    if len(host) > 3 and host != "localhost":
        text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", HIDDEN, text)
    return _ABSOLUTE.sub(path, text)


def clean(value: Any, base: Path) -> Any:
    """`value` (plain dicts, lists, scalars) with private keys hidden and strings cleaned."""
    if isinstance(value, dict):
        return {k: HIDDEN if v is not None and is_private(str(k)) else clean(v, base) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v, base) for v in value]
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        # A configuration value that begins like a path is one path, spaces included.
        return clean_path(value, base) if value.startswith(("/", "~")) and len(value) > 1 else clean_text(value, base)
    return value
