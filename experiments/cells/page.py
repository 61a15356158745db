"""How a suite is reported, as data: the `report` of its YAML (experiments/report/replay_page.py makes the page). No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from experiments.config.data_files import Data


class Section(Data):
    """A part of the page (experiments/report/replay_sections.py). terminal: shown there too. columns: heading -> quantity."""

    kind: Literal[
        "summary", "reproduced", "fastest", "plot", "check", "predicted", "times", "memory", "details", "kernels"
    ]
    heading: str = ""
    note: str = ""
    terminal: bool = False
    timelines: bool = False
    by_place: bool = False
    columns: dict[str, str] = Field(default_factory=dict)


class Plot(Data):
    kind: Literal["lines", "dots"]
    file: str
    alt: str
    title: str


class Report(Data):
    """honesty: what the numbers are not; a clause falls away where nothing is known of what it names in {}.

    ratios:       method -> heading of the speedups over it; one that begins with "of" is a percentage.
    node_columns: numbers of nodes that have a column even when nothing was measured there.
    ours:         the method that verdicts are about.
    """

    title: str
    made_by: str
    plot: Plot
    summary: str
    honesty: tuple[str, ...]
    about: str
    ratios: dict[str, str]
    ours: str
    sections: tuple[Section, ...]
    node_columns: tuple[int, ...] = ()
