"""How every picture here looks: its point as the title, its setting below that, colours by method, one file format. No torch.

A panel holds at most `SERIES` series; more go into small multiples. Legends stand outside of the panels.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, TypeVar

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from experiments.report.metrics import Estimate

MARK = "Made by make tables"
DPI = 110
CHARACTER = 0.06
"""Inches of a character at size 8."""
SERIES = 6
"""As many colours and markers as a reader keeps apart."""
TITLE, SETTING = 11.0, 8.5
"""Sizes of the two texts above the panels, points."""
EM, BOLD_EM = 0.56, 0.62
"""Mean width of a character of DejaVu Sans, in its size, and of its bold face."""
LOOK: dict[str, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
}
# These methods have the same colour in every picture.
COLOURS = {
    "SGDM fp32": "#4477aa",
    "SGDM bf16": "#66ccee",
    "BertAdam fp32": "#225588",
    "BertAdam bf16": "#99ddff",
    "AdamW fp32": "#225588",
    "AdamW bf16": "#99ddff",
    "1-bit Adam": "#ccbb44",
    "Birder": "#ee6677",
    "Birder hierarchical": "#aa3377",
    "no communication": "#bbbbbb",
}
OTHERS = ("#228833", "#ee8866", "#44bb99", "#997700", "#882255", "#77aadd")
# Of what is sent, where rows are named and colours only tell kinds apart.
WIRES = {"fp32": "#4477aa", "bf16": "#66ccee", "fp16": "#66ccee", "none": "#bbbbbb"}
COMPRESSED = "#ee6677"

T = TypeVar("T")


def styled() -> AbstractContextManager[None]:
    """Within it pictures look as they do here, whatever a user's matplotlibrc says."""
    return style.context(["default", LOOK])


def blank(width: float, height: float) -> Figure:
    """An empty figure of so many inches, without its title."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def head(figure: Figure, point: str, setting: str = "") -> None:
    """Adds room above the panels, with the point of the figure as its title and the setting in smaller letters."""
    width, height = figure.get_size_inches()
    title = textwrap.wrap(point, int(0.97 * width * 72 / (TITLE * BOLD_EM)), break_on_hyphens=False)
    below = textwrap.wrap(setting, int(0.97 * width * 72 / (SETTING * EM)), break_on_hyphens=False)
    line, small = 1.35 * TITLE / 72, 1.4 * SETTING / 72
    room = 0.12 + line * len(title) + small * len(below)
    figure.set_size_inches(width, height + room)
    whole = height + room
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0, 1, height / whole))  # type: ignore[call-arg]
    left = 0.08 / width
    top = figure.suptitle("\n".join(title), x=left, y=1 - 0.06 / whole, ha="left", va="top", fontsize=TITLE)
    top.set_fontweight("bold")
    top.set_in_layout(False)
    if below:
        at = 1 - (0.06 + line * len(title)) / whole
        figure.text(left, at, "\n".join(below), ha="left", va="top", fontsize=SETTING, color="#555555", linespacing=1.2)


def key(figure: Figure, columns: int) -> None:
    """One legend for all panels below them, of what any of them shows."""
    shown: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(handles=list(shown.values()), loc="outside lower center", ncols=columns)


def interval(
    axes: Axes, x: float, y: float, of: Estimate, tint: str, *, dot: float = 0.0, upright: bool = False
) -> None:
    """The interval of a value, across or upright, where it has one. dot: size of the value's mark; 0: it is drawn already."""
    value = y if upright else x
    low, high = (value, value) if of.low is None or of.high is None else (of.low, of.high)
    reach: dict[str, Any] = {"yerr" if upright else "xerr": [[max(0.0, value - low)], [max(0.0, high - value)]]}
    mark: dict[str, Any] = {"fmt": "o" if dot else "none", "markersize": dot}
    if dot or low < high:
        axes.errorbar(x, y, **reach, **mark, color=tint, ecolor=tint, capsize=2, elinewidth=1)


def plain(axis: Axis) -> None:
    """1, 2, 5, 10, 20, ... on a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:.10g}"))
    axis.set_minor_formatter(NullFormatter())


def groups(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """The items in order, in as few groups of at most `size` as there must be, of about the same length."""
    count = math.ceil(len(items) / size)
    cuts = [round(i * len(items) / count) for i in range(count + 1)] if count else [0]
    return [items[a:b] for a, b in pairwise(cuts)]


def distinct(methods: Sequence[str]) -> list[str]:
    """A colour for each of at most `SERIES` methods of one panel, all different."""
    taken: list[str] = []
    for method in methods:
        mine = [c for c in (COLOURS.get(method), *OTHERS) if c and c not in taken]
        taken.append(mine[0])
    return taken


def digest(png: bytes) -> bytes:
    """The digest of what a plot shows, as `png` writes it; of any other file, its bytes."""
    found = re.search(rb"Made by [^,]+, data ([0-9a-f]{64})", png)
    return found[1] if found else png


def lay_out(figure: Figure) -> None:
    """Places everything."""
    engine = figure.get_layout_engine()
    assert engine is not None
    for _ in range(2):  # the first layout moves ticks, whose widths the second one then knows
        engine.execute(figure)
    figure.set_layout_engine("none")  # savefig would draw everything once more for a third


_undrawn: ContextVar[bool] = ContextVar("undrawn", default=False)


@contextmanager
def undrawn() -> Iterator[None]:
    """Within it `png` gives the description alone, which is all that `digest` reads: drawing is most of the work."""
    token = _undrawn.set(True)
    try:
        yield
    finally:
        _undrawn.reset(token)


def png(figure: Figure, data: object, mark: str = MARK) -> bytes:
    """The file of a figure; its description is the mark and a digest of the data that it shows and of what it says."""
    # Versions of matplotlib draw different pixels; the digest lets --check compare what is shown.
    shown = [data, figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    described = f"{mark}, data {hashlib.sha256(repr(shown).encode()).hexdigest()}"
    if _undrawn.get():
        return described.encode()
    lay_out(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None, "Description": described})
    return buffer.getvalue()
