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
from birder.predict.layouts import TrainingPlan
from birder.predict.methods import DEFAULT, METHODS, MethodSpec
from birder.predict.simulation import Layout, Step, simulate
from birder.predict.table import PredictedRow, Prediction, crossover, predict, sweep
from birder.predict.timeline import Gradient, IntraNode, Timeline

if TYPE_CHECKING:
    from birder.predict.advice import Advice, advise
    from birder.predict.architecture import Work, count
    from birder.predict.measuring import Links, measure_kernels, measure_link
    from birder.predict.recording import record

_LATER = {
    "advice": ("Advice", "advise"),
    "architecture": ("Work", "count"),
    "measuring": ("Links", "measure_kernels", "measure_link"),
    "recording": ("record",),
}
"""Names by the module that has them."""


def __getattr__(name: str) -> Any:
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"birder.predict.{module}"), name)
    raise AttributeError(f"module 'birder.predict' has no attribute {name!r}")
