"""Lists of hosts, as users write them: `a,b,c`, a YAML list, or a file with one host per line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UserError, refused

_HOST = re.compile(
    r"(?:(?P<user>[\w.][\w.-]*)@)?(?P<name>\w[\w.-]*|\[[0-9A-Fa-f:.]+(?:%\w+)?\])(?::(?P<port>\d{1,5}))?"
)


@dataclass(frozen=True)
class Host:
    """One host as ssh reaches it. `user` and `port` are None where ssh's own configuration decides."""

    name: str
    user: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def destination(self) -> str:
        """What ssh takes: "name" or "user@name"."""
        return f"{self.user}@{self.name}" if self.user else self.name


def parse(hosts: str | Sequence[str]) -> list[Host]:
    """The hosts of a list, of a string `a,b,c`, or of a file; every host is [user@]name[:port].

    In a file: one host per line, the rest of a line from # on is a comment. Raises UserError.
    """
    if isinstance(hosts, str):
        if (text := _read(hosts)) is not None:
            items = [line.partition("#")[0] for line in text.splitlines()]
        elif "/" in hosts:
            raise UserError(f"no host file at {hosts}: cluster.hosts is a,b,c or a file with one host per line")
        else:
            items = re.split(r"[,\s]+", hosts)
    else:
        items = [str(item) for item in hosts]
    found = [_host(item.strip()) for item in items if item.strip()]
    if not found:
        raise UserError("cluster.hosts names no host: set cluster.hosts=a,b,c or the path of a file")
    machines = [(h.name.lower(), h.port or 22) for h in found]
    if twice := [h for h, machine in zip(found, machines, strict=True) if machines.count(machine) > 1]:
        raise UserError(f"cluster.hosts names {twice[0]} twice: one node per host, cluster.ranks_per_node ranks on it")
    return found


def _read(hosts: str) -> str | None:
    """The content of the file `hosts`, or None where there is no such file. Raises UserError for one that cannot be read."""
    try:
        path = Path(hosts).expanduser()
        if not path.is_file():
            return None
    except (OSError, RuntimeError):  # a list that is too long for the name of a file; ~ of a user that there is not
        return None
    with refused(f"cannot read the host file {hosts}", OSError, ValueError):
        return path.read_text(encoding="utf-8-sig")


def _host(text: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None:
        raise UserError(f"cluster.hosts: '{text}' is not a host: write name, user@name or user@name:port")
    return Host(match["name"].strip("[]"), match["user"], int(match["port"]) if match["port"] else None)
