"""The picture of which method wins at which link rate. No torch."""

from __future__ import annotations

import textwrap
from typing import Any

from birder.predict.table import NEAR
from experiments.cells import timelines
from experiments.report import crossover, figure
from experiments.report.prediction_plots import CLAIMS, COLOURS, MARK, NODES, plain, rate_axis, tints


def picture() -> bytes:
    """A PNG: speedups over fp32 DDP on 8 nodes of 8 GPUs, a panel for each model, a line for each method."""
    drawn: list[Any] = []
    gains = []
    with figure.styled():
        made = figure.blank(10, 4.0)
        grid = made.subplots(1, 2, sharey=True)
        for axes, (name, (label, _)) in zip(grid, CLAIMS.items(), strict=True):
            t = timelines.load(name)
            found = crossover.over_rates(t, NODES)
            methods = [row.method for row in found[0].rows if row.name != "fp32"]
            for method, tint in zip(methods, tints([m.name for m in methods]), strict=True):
                y = [round(p.speedup(method.name)[0], 3) for p in found]
                look: dict[str, Any] = {"linestyle": ":"} if method.name == "none" else {"marker": "o", "markersize": 3}
                look |= {"linewidth": 4} if method.name == "onebit_adam" else {}  # Birder lies upon it
                axes.plot(crossover.GBPS, y, color=tint, label=method.label, **look)
                drawn.append([name, method.name, y])
            axes.axhline(1, color=COLOURS["fp32"], linewidth=0.8)
            rate_axis(axes, crossover.GBPS)
            axes.set_yscale("log")
            plain(axes.yaxis)
            axes.grid(visible=True)
            axes.set_title(
                f"{label}, batch {t.batch_per_gpu}; fastest:\n{textwrap.fill(crossover.sentence(found), 52)}",
                loc="left",
            )
            drawn.append(crossover.ranges(found))
            gains.append(f"{max(found[0].speedup(m.name)[0] for m in methods if m.name != 'none'):.1f}x ({label})")
        grid[0].set_ylabel("times as fast as DDP in fp32")
        figure.key(made, grid[0], 3)
        slowest = f"{crossover.GBPS[0]:g} Gbit/s"
        point = f"The slower the link, the more compression wins: at {slowest} {' and '.join(gains)}"
        setting = (
            f"{NODES} nodes of {crossover.RANKS_PER_NODE} A100, TF32, {crossover.LATENCY_US:g} µs a message. Predicted, not "
            f"measured on GPUs; says nothing of accuracy. DDP bf16 stands where no method gains {NEAR:.0%} over it."
        )
        figure.head(made, point, setting)
        return figure.png(made, drawn, MARK)
