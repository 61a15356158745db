"""Pictures can be read: a title that says something, units, at most six series, nothing on top of anything else.

The published records are drawn, and must give the tables and pictures that are kept; sizes of texts are those that matplotlib
lays out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from birder.predict import Cluster, Link, sweep
from experiments import tables as cli
from experiments.cells import suite, timelines
from experiments.predict import SHOWN, SWEEPS
from experiments.records.record import PUBLISHED, ROOT, read_all
from experiments.report import (
    accuracy_page,
    figure,
    plots,
    prediction_plots,
    replay_page,
    replayed,
    tables,
)
from studies import predicted

UNITS = re.compile(r"\b(ms|Gbit/s|kB|nats|nats per token|GPUs|nodes|step|points|times as fast)\b|%")
CURVES = 10
"""Pictures of loss curves whose layout is looked at."""
SLACK = 1.0
"""Pixels by which boxes may meet: a text's box is a little larger than its ink."""


@dataclass
class Rendered:
    """What is made of the published records: the pictures, those that are laid out, and the names of files that differ from
    those kept."""

    pictures: dict[str, Figure]
    placed: dict[str, Figure]
    wrong: list[str]


def published(folder: Path) -> Path:
    """A copy of the published records as they are committed; where that is not known, the folder itself."""
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "results/published"], capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    return folder / "results" / "published" if listed.stdout else PUBLISHED


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rendered]:
    """Everything is made once, and laid out; of the many loss curves only those with the most text. The look of the pictures
    stays, as ticks are placed by it."""
    kept: dict[bytes, Figure] = {}
    files: dict[str, bytes] = {}
    png, render = figure.png, tables.render

    def keep(made: Figure, *about: Any) -> bytes:
        content = png(made, *about)
        kept[content] = made
        return content

    def note(*given: Any) -> dict[str, bytes]:
        files.update(render(*given))
        return files

    folder = tmp_path_factory.mktemp("pictures")
    results = published(folder)
    with pytest.MonkeyPatch.context() as patch, figure.undrawn():
        patch.setattr(figure, "png", keep)
        patch.setattr(tables, "render", note)
        wrong = cli.check(results)
        found = {name: content for name, content in files.items() if name.endswith(".png")}
        for name in suite.names():
            found[name] = replay_page.plot(replayed.load(suite.load(name), PUBLISHED), "")
        found["crossover"] = predicted.crossovers()
        found["glance"] = plots.accuracies(accuracy_page.studies(read_all(PUBLISHED))) or b""
        found["paper"] = predicted.draw_paper(folder / "paper", grid=6).read_bytes()
        t = timelines.load("bert_base_b12_tf32")
        for over, values in SWEEPS.items():
            swept = sweep(t, Cluster(8, 8, Link(10.0, 20.0)), over, values, SHOWN)
            found[over] = prediction_plots.draw_sweep(swept, over, folder / over).read_bytes()
    pictures = {name: kept[content] for name, content in found.items()}
    curves = sorted((name for name in pictures if name.endswith("_curve.png")), key=lambda n: said(pictures[n]))
    placed = {name: made for name, made in pictures.items() if name not in curves[:-CURVES]}
    with figure.styled():
        for made in placed.values():
            figure.lay_out(made)
            made.draw_without_rendering()
        yield Rendered(pictures, placed, wrong)


def said(made: Figure) -> int:
    """How much text there is in a picture's titles and legends."""
    texts = [*made.texts, *(text for legend in legends(made) for text in legend.get_texts())]
    return sum(len(text.get_text()) for text in texts)


@pytest.fixture
def pictures(rendered: Rendered) -> dict[str, Figure]:
    return rendered.pictures


@pytest.mark.slow
@pytest.mark.long
def test_committed_tables_and_pictures_are_those_of_the_committed_records(rendered: Rendered) -> None:
    assert rendered.wrong == []


def tick_labels(axis: Axis) -> list[Text]:
    """Those that are drawn: matplotlib keeps others, without a place."""
    return [t for tick in axis._update_ticks() for t in (tick.label1, tick.label2)]  # type: ignore[attr-defined]


def shown(made: Figure) -> list[Text]:
    """Every text that a reader sees."""
    axes = made.findobj(Axis)
    ticks = {
        id(t) for axis in axes for tick in (*axis.majorTicks, *axis.minorTicks) for t in (tick.label1, tick.label2)
    }
    found = [t for t in made.findobj(Text) if id(t) not in ticks]
    found += [t for axis in axes for t in tick_labels(axis)]
    return [t for t in found if t.get_visible() and t.get_text().strip()]


def box(artist: Any) -> Bbox:
    return artist.get_window_extent()


def overlap(a: Bbox, b: Bbox) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > SLACK and min(a.y1, b.y1) - max(a.y0, b.y0) > SLACK


def legends(made: Figure) -> Iterator[Any]:
    yield from made.legends
    yield from (legend for axes in made.axes if (legend := axes.get_legend()) is not None)


@pytest.mark.slow
def test_every_kind_of_picture_is_looked_at(pictures: dict[str, Figure]) -> None:
    kinds = ("_step_time.png", "_curve.png", "_bytes.png")
    assert all(any(name.endswith(kind) for name in pictures) for kind in kinds)
    assert {"paper", "bench", "crossover", "glance", "nodes", "gbps"} <= set(pictures)


@pytest.mark.slow
def test_texts_overlap_nothing_and_are_whole(rendered: Rendered) -> None:
    wrong = []
    for name, made in rendered.placed.items():
        boxes = [(t.get_text(), box(t)) for t in shown(made)]
        wrong += [(name, a, b) for (a, x), (b, y) in combinations(boxes, 2) if overlap(x, y)]
        for text, b in boxes:
            whole = b.x0 > -SLACK and b.y0 > -SLACK and b.x1 < made.bbox.x1 + SLACK and b.y1 < made.bbox.y1 + SLACK
            wrong += [] if whole else [(name, text, "beyond the edge")]
    assert wrong == []


@pytest.mark.slow
def test_legends_cover_no_panel(rendered: Rendered) -> None:
    for name, made in rendered.placed.items():
        for legend in legends(made):
            assert not [axes for axes in made.axes if overlap(box(legend), axes.bbox)], name


@pytest.mark.slow
def test_a_panel_has_at_most_six_series_and_each_a_look_of_its_own(pictures: dict[str, Figure]) -> None:
    for name, made in pictures.items():
        for legend in legends(made):
            assert len(legend.get_texts()) <= figure.SERIES, name
        for axes in made.axes:
            lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
            assert len(lines) <= figure.SERIES, name
            looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines]
            assert len(set(looks)) == len(looks), name


@pytest.mark.slow
def test_titles_say_something_and_the_setting_stands_below(pictures: dict[str, Figure]) -> None:
    for name, made in pictures.items():
        title = made.get_suptitle()
        assert len(title) > 25, name
        assert re.search(r"\d|red lines", title), (name, title)  # the point is a number, or where to look
        assert made.texts, name
        assert any("not measured" in t.get_text() for t in made.texts) or name not in (
            "paper_speedup",
            "bench",
            "crossover",
        )


@pytest.mark.slow
def test_axes_have_units(pictures: dict[str, Figure]) -> None:
    for name, made in pictures.items():
        for axes in made.findobj(Axes):
            for axis in (axes.xaxis, axes.yaxis):
                if any(is_number(t.get_text()) for t in tick_labels(axis) if t.get_visible()):
                    assert UNITS.search(axis.get_label_text()), (name, axis.get_label_text())


def is_number(text: str) -> bool:
    return re.fullmatch(r"\$?[-−+\\mathdefault{}^\d.×]+\$?", text) is not None


def test_what_the_rules_would_find_is_found() -> None:
    """The rules themselves: a label upon another, one beyond the edge."""
    made = figure.blank(4, 3)
    axes = made.add_subplot()
    axes.plot([0, 1], [0, 1])
    for place in (0.5, 0.52):
        axes.text(place, 0.5, "label")
    made.text(0.95, 0.5, "a long label beyond the edge")
    made.draw_without_rendering()
    boxes = {i: box(t) for i, t in enumerate(shown(made)) if "label" in t.get_text()}
    assert any(overlap(a, b) for a, b in combinations(boxes.values(), 2))
    assert any(b.x1 > made.bbox.x1 for b in boxes.values())


def test_groups_are_even_and_in_order() -> None:
    assert [list(g) for g in figure.groups(range(7), 5)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert [len(g) for g in figure.groups(range(18), 5)] == [4, 5, 5, 4]
    assert figure.groups([], 5) == []
    every = ["SGDM fp32", "Birder", "SLAMB", "CSER", "EF-SGD", "local SGD"]
    assert len(set(figure.distinct(every))) == 6
    assert figure.distinct(["Birder"]) == [figure.COLOURS["Birder"]]


def test_the_published_crossovers_are_the_predictors() -> None:
    path = Path(PUBLISHED) / "plots" / "predict_crossover.png"
    assert figure.digest(path.read_bytes()) == figure.digest(predicted.crossovers())
