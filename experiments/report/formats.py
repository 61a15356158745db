"""Numbers as people read them. `None` is an em dash: a number that no record holds is never guessed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

DASH = "—"


def number(value: float | None) -> str:
    """Three significant digits, without exponent: 0.123, 1.23, 12.3, 123, 1234."""
    if value is None or not math.isfinite(value):
        return DASH
    # Rounded first: 9.997 has three digits as 10.0.
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:.{digits}f}"


def times(value: float | None) -> str:
    """A factor: 1.85x."""
    return DASH if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share between 0 and 1 as a percentage."""
    return DASH if value is None else f"{100 * value:.0f} %"


def size(value: float | None) -> str:
    """Bytes in decimal units: 102 MB."""
    if value is None:
        return DASH
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.5 or unit == "GB":
            break
    return f"{number(value)} {unit}"


def fraction(value: float | None) -> str:
    """A share as a fraction of one: 1/31.8; above one as a factor."""
    if value is None or value <= 0:
        return DASH
    if abs(value - 1) < 0.005:
        return "1"
    return times(value) if value > 1 else f"1/{number(1 / value)}"


def mean_sd(mean: float | None, sd: float | None) -> str:
    """Mean ± sample standard deviation; the mean alone when there is no spread to speak of (one run)."""
    if mean is None or not math.isfinite(mean):
        return DASH
    digits = 4 if abs(mean) < 1.5 else 2  # fractions; percentages and perplexities
    return f"{mean:.{digits}f}" if sd is None or math.isnan(sd) else f"{mean:.{digits}f} ± {sd:.{digits}f}"


METRICS = {
    "top1": ("top-1 accuracy, %", " points"),
    "accuracy": ("accuracy, %", " points"),
    "f1": ("F1, %", " points"),
    "exact_match": ("exact match, %", " points"),
    "matthews": ("Matthews correlation, %", " points"),
    "loss": ("validation loss, nats", " nats"),
    "perplexity": ("perplexity, exp(nats per token)", ""),
}
"""What a workload's metric is called on an axis, with its unit, and what stands behind a difference."""


def metric_axis(name: str) -> str:
    """A metric and its unit; a metric that is not known by its own name alone."""
    return METRICS.get(name, (name, ""))[0]


def metric_unit(name: str) -> str:
    """What stands behind a difference in a metric."""
    return METRICS.get(name, ("", ""))[1]


def metric_gap(name: str, value: float | None, relative: bool = False) -> str:
    """A difference in the metric in the field's terms: +0.31 points, -12.5 %."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{100 * value:+.1f} %" if relative else f"{value:+.2f}{metric_unit(name)}"


def numbered(names: Iterable[str]) -> list[str]:
    """Names, of which those that come again have their number: a, b, a-2."""
    counts: Counter[str] = Counter()
    found = []
    for name in names:
        counts[name] += 1
        found.append(f"{name}-{counts[name]}" if counts[name] > 1 else name)
    return found


TASKS = {
    "scikit-learn digits": "digits",
    "image folder tinyimagenet32_c100": "images of 100 classes",
    "text of wikitext-2": "language model",
}
"""What data are called, where not by their own names."""


def task(data: str) -> str:
    """The name of a task, from that of its data."""
    name = data.partition(" (")[0]
    return TASKS.get(name, name)
