"""TensorBoard: event files in the run's folder. Imported late, never fatal."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.records import privacy
from experiments.tracking.tracked import About, Cell, TrackedRun
from launch.words import program, typed_path

SERVICE = "TensorBoard"


def begin(about: About) -> TrackedRun:
    """The run, or one that records nothing where TensorBoard is not installed. Raises what TensorBoard raises."""
    if importlib.util.find_spec("tensorboard") is None:
        return TrackedRun(f"{SERVICE}: nothing is recorded (not installed: pip install tensorboard)")
    return TensorBoardRun(about)


class TensorBoardRun(TrackedRun):
    """Scalars by step; tables and the configuration as text; pictures. Groups are folders: `--logdir` shows all below."""

    service = SERVICE

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = about.folder / "tensorboard"
        super().__init__(f"{SERVICE}: {program('tensorboard')} --logdir {typed_path(folder.resolve())}")
        self._step = about.start
        self._writer = SummaryWriter(str(folder), purge_step=about.start + 1)  # also where a run begins again
        config = yaml.safe_dump(privacy.clean(dict(about.config), Path.cwd()), sort_keys=False)
        self._writer.add_text("config", textwrap.indent(config, "    "), about.start)  # verbatim
        self._writer.flush()
        self.active = True

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a process that is killed takes the rest with it

    def _table(self, name: str, columns: list[str], rows: list[list[Cell]]) -> None:
        lines = [columns, ["---"] * len(columns), *[["" if c is None else str(c) for c in row] for row in rows]]
        text = "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines)
        self._writer.add_text(name, text, self._step)

    def _image(self, name: str, png: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(png) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), self._step, dataformats="HWC")

    def _finish(self, summary: Mapping[str, Any], exit_code: int) -> None:
        for name, value in summary.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"summary/{name}", value, self._step)
        self._writer.close()
