"""Steps on a GPU that is not there: what would be launched on it, and where the host would wait for it.

torch's FakeTensorMode runs all the code for CUDA tensors that have a shape and no content. Whatever wants a number out of
one (`.item()`, `bool(tensor)`, `.tolist()`, sizes that depend on content) cannot be done; it is noted as a wait of the host,
and answered. So is a copy to the CPU, and one to the GPU from memory that is not pinned. Triton's launches are counted
instead of made.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = torch.device("cuda", 0)
ROOT = str(Path(__file__).resolve().parents[2] / "birder")
FREE = (
    *("empty", "view", "detach", "alias", "expand", "as_strided", "split", "select", "slice", "unsqueeze", "squeeze"),
    *("t.", "transpose", "permute", "unbind", "lift", "reshape", "set_", "record_stream", "profiler", "prim"),
)
"""Operations that launch nothing."""


class FakeGpu(TorchDispatchMode):
    """launches: by name, since the last `reset`. waits: where the host waited, and for what."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: list[str] = []
        self.step = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def reset(self) -> None:
        self.launches.clear()
        self.waits.clear()

    def wait(self, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT)]
        at = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].line}" if frames else "elsewhere"
        self.waits.append(f"{what} at {at}")

    def launch(self, kernel: Any, programs: Any, *args: Any, **constants: Any) -> None:
        """In place of `birder.kernels.cuda_bits.launch`."""
        self.launches[f"triton.{kernel.__name__}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.")
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        on_gpu = [t for t in tensors if t.device.type == "cuda"]
        target = kwargs.get("device")
        if name.startswith("_local_scalar_dense"):
            if on_gpu:
                self.wait("a number")
            return 1.0 if args[0].dtype.is_floating_point else bool(1) if args[0].dtype == torch.bool else 1
        if name.startswith("_pin_memory"):
            pinned = args[0].clone()
            pinned.pinned = True
            return pinned
        if name.startswith("nonzero.") and not on_gpu:
            return torch.zeros((args[0].numel() // 2, args[0].dim()), dtype=torch.int64)
        if on_gpu and name.startswith(("nonzero.", "masked_select", "unique", "equal", "is_nonzero", "bincount")):
            self.wait(name)
            if name.startswith(("masked_select", "unique")):
                return torch.zeros(args[0].numel() // 2, dtype=args[0].dtype, device=GPU)
            if name.startswith("nonzero"):
                return torch.zeros((args[0].numel() // 2, args[0].dim()), dtype=torch.int64, device=GPU)
        indexed = on_gpu and name.startswith(("index.Tensor", "index_put"))
        if indexed and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            self.wait("a mask as an index")
            args = (args[0], [_numbers(i) for i in args[1]], *args[2:])
        moved = target is not None and tensors and tensors[0].device.type != torch.device(target).type
        if moved and (on_gpu or not getattr(tensors[0], "pinned", False)):
            self.wait("a copy to the host" if on_gpu else "a copy from pageable memory")
        crossing = name.startswith("copy_") and len({t.device.type for t in args[:2] if isinstance(t, Tensor)}) == 2
        if crossing and (args[1].numel() != 1 or args[1].dim() or args[1].device.type == "cuda"):  # else an argument
            self.wait("a copy between host and device")
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.device.type == "cuda"]
        if (on_gpu or made) and not name.startswith(FREE):
            self.launches[name] += 1
        return out

    @contextlib.contextmanager
    def running(self, monkeypatch: Any) -> Iterator[FakeGpu]:
        """Inside, tensors on `GPU` are fake, and the package's kernels for CUDA serve them."""
        # What asks for numbers, and what launches, must be there to be given what stands in for it.
        import birder.kernels.cuda_many as many
        import birder.optim.onebit
        import birder.optim.slamb  # noqa: F401
        from birder import kernels
        from birder.kernels import cuda, reference, segments

        for module in [m for n, m in sys.modules.items() if n.startswith("birder.kernels.cuda")]:
            if hasattr(module, "launch"):
                monkeypatch.setattr(module, "launch", self.launch)
        monkeypatch.setattr(kernels, "backend", lambda device: cuda if device.type == "cuda" else reference)
        AskedFor.gpu = self
        for module in [m for n, m in sys.modules.items() if n.startswith("birder") and hasattr(m, "Late")]:
            monkeypatch.setattr(module, "Late", AskedFor)

        def launches(tensors: Any, _: Any, kinds: Any, *more: Any) -> Any:
            together, rest = segments.by_order(tensors, kinds)
            return [(*key, True, [0] * len(members)) for key, members in together.items()], rest

        monkeypatch.setattr(many, "launches", launches)
        make = torch.tensor

        def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
            if device is not None and torch.device(device).type == "cuda":
                self.wait("torch.tensor on the device")
                return torch.zeros(make(data, **options).shape, dtype=make(data, **options).dtype, device=device)
            return make(data, **options)

        monkeypatch.setattr(torch, "tensor", tensor)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(stream_id=0))
        with self._fake, self:
            yield self


def _numbers(index: Tensor | None) -> Tensor | None:
    """In place of a mask, numbers of half of its elements."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return index
    return torch.zeros(index.numel() // 2, dtype=torch.int64, device=index.device)


class AskedFor:
    """In place of `birder.comm.late.Late`: asked for in an earlier step than it is read, or the host has waited."""

    gpu: FakeGpu
    value = 1

    def __init__(self, value: Tensor) -> None:
        self._numbers, self._step = value.numel(), self.gpu.step

    @property
    def there(self) -> bool:
        return self._step < self.gpu.step

    def read(self) -> list[int]:
        if not self.there:
            self.gpu.wait("a number asked for in this step")
        return [self.value] * self._numbers


class Streams:
    """`torch.cuda` for a pipeline, whose streams do nothing."""

    def Stream(self, device: Any = None, priority: int = 0) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None, device=device)

    current_stream = Stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield
