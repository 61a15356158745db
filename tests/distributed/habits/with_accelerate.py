"""Accelerate's prepare, in the place of what a script wraps itself."""

from __future__ import annotations

from tests.distributed.habits.script import Script


def accelerate(script: Script) -> None:
    """The optimizer and the wrapped model from accelerator.prepare, attached."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    from birder.integrations.accelerate import attach

    AcceleratorState._reset_state(True)
    options = DistributedDataParallelKwargs(**({"bucket_cap_mb": 1} | script.ddp_options))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    model, opt = script.model, script.make_optimizer(script.trained())
    script.ddp, script.opt = accelerator.prepare(model, opt)
    script.accelerator = accelerator
    if not script.method.torch:
        script.attachment = attach(accelerator, script.ddp, script.opt, unit_mb=0.002, **script.way.options)
