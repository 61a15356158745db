"""Communication-efficient data-parallel training for PyTorch DDP.

optimizer = Birder(model.parameters(), lr=1e-3)
ddp = DistributedDataParallel(model)
attach(ddp, optimizer)

Names are loaded when they are first used, so that what needs no torch (`birder.predict` with a timeline's file) does not
wait for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from birder.comm import Topology
    from birder.hooks.attachment import Attachment
    from birder.hooks.block_scaled import BlockScaled, block_scaled_hook
    from birder.hooks.ddp import attach
    from birder.hooks.virtual import VirtualRanks
    from birder.optim import *

__version__ = "0.1.0"


def _refuse_a_mixed_folder() -> None:
    """Raises ImportError where the unrelated PyPI package of the same import name was installed into this one's folder."""
    try:
        other = importlib.metadata.distribution("birder")
    except importlib.metadata.PackageNotFoundError:
        return
    if Path(str(other.locate_file("birder"))).resolve() == Path(__file__).resolve().parent:
        raise ImportError(
            "the PyPI package 'birder' is another project, and has been installed into the folder of this one, birder-repro: "
            "run pip uninstall birder birder-repro, then install birder-repro again"
        )


_refuse_a_mixed_folder()

__all__ = [
    "CSER",
    "EF21SGDM",
    "EFSGD",
    "LAMB",
    "SGDM",
    "SLAMB",
    "AdamW",
    "Attachment",
    "BertAdam",
    "Birder",
    "BlockScaled",
    "BucketOptimizer",
    "DeepSpeedZeroOneAdam",
    "EfficientAdam",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLAMB",
    "Plan",
    "QSparseLocalSGD",
    "SLAMBv1",
    "SLAMBv2",
    "SigmaDeltaAdam",
    "SparseLoCo",
    "Topology",
    "VirtualRanks",
    "ZeroOneAdam",
    "attach",
    "block_scaled_hook",
    "overall_ratio",
]
_ROOMS = {
    "Attachment": "birder.hooks.attachment",
    "attach": "birder.hooks.ddp",
    "BlockScaled": "birder.hooks.block_scaled",
    "block_scaled_hook": "birder.hooks.block_scaled",
    "Topology": "birder.comm",
    "VirtualRanks": "birder.hooks.virtual",
}
"""Where a name stands that is not one of the optimizers'."""
_MOVED = {
    "elastic": "checkpoint.elastic",
    "fsdp_state": "checkpoint.shards",
    "optimizers": "optim",
}
"""Modules by the names that they had."""


def __getattr__(name: str) -> Any:
    if name in _MOVED:
        warnings.warn(f"birder.{name} is birder.{_MOVED[name]} now", FutureWarning, stacklevel=2)
        return importlib.import_module(f"birder.{_MOVED[name]}")
    if name not in __all__:
        if name.startswith("_") or importlib.util.find_spec(f"birder.{name}") is None:
            raise AttributeError(f"module 'birder' has no attribute {name!r}")
        return importlib.import_module(f"birder.{name}")
    value = getattr(importlib.import_module(_ROOMS.get(name, "birder.optim")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
