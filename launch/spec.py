"""`RunSpec`: one run, fully resolved, as plain data. Composed once in the launcher, read by every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launch.files import write_whole


@dataclass(frozen=True)
class RunSpec:
    """A frozen description of one run.

    id:        unique name of the run, safe as a file name; the record is `<results_dir>/records/<id>.json`.
    group:     name shared by the runs of one comparison (same machine, one after the other), or None.
    exp:       experiment name (file in conf/exp), or "custom".
    command:   the command line that the user typed.
    overrides: Hydra overrides of this run, in order.
    config:    the composed configuration, resolved to plain dicts, lists and scalars.
    run_dir:   folder of this run: spec.yaml, logs/, errors/, checkpoints/, curve.csv.
    """

    id: str
    group: str | None
    exp: str
    command: str
    overrides: list[str]
    config: dict[str, Any]
    run_dir: str

    @property
    def nodes(self) -> int:
        return int(self.config["cluster"]["nodes"])

    @property
    def ranks_per_node(self) -> int:
        return int(self.config["cluster"]["ranks_per_node"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def path(self) -> Path:
        return Path(self.run_dir)

    @property
    def file(self) -> Path:
        """Where `save` writes to; every start of the run does."""
        return self.path / "spec.yaml"

    def save(self) -> Path:
        """Writes `<run_dir>/spec.yaml`, whole or not at all, and returns its path."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.file, yaml.safe_dump(dataclasses.asdict(self), sort_keys=False))
        return self.file

    @staticmethod
    def load(path: str | Path) -> RunSpec:
        """Reads what `save` wrote."""
        return RunSpec(**yaml.safe_load(Path(path).read_text()))
