"""Will compression pay? A step's time under every method, predicted from a timeline, a link and the costs of kernels.

advice = birder.predict.advise(ddp, step)               measured in your own script
answer(count(module, loss, "bf16").timeline(find_gpu("h100")), Cluster(4, 8, Link(100)))    from the architecture
predict(timeline, Cluster(8, 8, Link(gbps=10)))         from a timeline's file
crossover(timeline, cluster)                            the link rate below which each method pays

The model is in docs/predict.md. What measures needs torch and is loaded when it is first used; the rest is plain Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from birder.predict.answers import Answer, answer
from birder.predict.cluster import NVLINK, Cluster, Link
from birder.predict.costs import Costs
from birder.predict.gpus import GPU, GPUS
from birder.predict.gpus import find as find_gpu
from birder.predict.layouts import Plan
from birder.predict.methods import DEFAULT, METHODS, Method
from birder.predict.simulation import Layout, Step, simulate
from birder.predict.table import Prediction, Row, crossover, predict, sweep
from birder.predict.timeline import Gradient, IntraNode, Timeline

if TYPE_CHECKING:
    from birder.predict.advice import Advice, advise
    from birder.predict.architecture import Work, count
    from birder.predict.measuring import Links, measure_kernels, measure_link
    from birder.predict.recording import record

_LATER = {
    "Advice": "advice",
    "advise": "advice",
    "Work": "architecture",
    "count": "architecture",
    "Links": "measuring",
    "measure_kernels": "measuring",
    "measure_link": "measuring",
    "record": "recording",
}

__all__ = [
    "DEFAULT",
    "GPU",
    "GPUS",
    "METHODS",
    "NVLINK",
    "Advice",
    "Answer",
    "Cluster",
    "Costs",
    "Gradient",
    "IntraNode",
    "Layout",
    "Link",
    "Links",
    "Method",
    "Plan",
    "Prediction",
    "Row",
    "Step",
    "Timeline",
    "Work",
    "advise",
    "answer",
    "count",
    "crossover",
    "find_gpu",
    "measure_kernels",
    "measure_link",
    "predict",
    "record",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'birder.predict' has no attribute {name!r}")
    return getattr(importlib.import_module(f"birder.predict.{_LATER[name]}"), name)
