"""`Costs`: what encoding, serving and applying cost on a device. Imports no torch.

A kernel that moves B bytes for each of n elements takes

    (1) t = call + n B s

with `call` for starting it, and s in ns per byte, the inverse of the bandwidth that it reaches. B is that of docs/kernels.md.
Where s is not measured (`measure_kernels`), it is that of the device's memory: `Costs.of_bandwidth`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from birder.predict import gpus

BYTES: dict[str, Callable[[int], float]] = {
    # 1-bit kernels of birder/kernels; n is the number of workers
    "encode": lambda n: 20.125,
    "reduce_bits": lambda n: (n + 1) / 8,
    "owned": lambda n: (1 + 1 / n) / 8,
    "assemble": lambda n: (1 + 1 / n) / 8,
    "modulate_adam": lambda n: 32.125,
    "serve_sigma": lambda n: (n + 1) / 8 + 8,
    "settle": lambda n: 16 / n,
    "apply_bits": lambda n: 8.125,
    "add_momentum": lambda n: 16.0,
    "add_message": lambda n: 12.0,
    "split_signs": lambda n: 8.125,
    "add_average": lambda n: n / 8 + 8,
    "write_signs": lambda n: 4.125,
    "move_adam": lambda n: 16.0,
    # plain passes over fp32 tensors
    "copy": lambda n: 8.0,
    "cast": lambda n: 6.0,  # to 16 bits, divided by the number of ranks
    "widen": lambda n: 6.0,
    "screen": lambda n: 8.0,  # of a gradient for NaN and inf, where taking it does not do so by itself
    "scale": lambda n: 8.0,
    "sgdm": lambda n: 32.0,  # m = beta m;  m = m + g;  x = x - lr m
    "adam": lambda n: 72.0,  # torch's five passes over m, v and x
    "lamb": lambda n: 100.0,  # the same, two norms and one more pass
    "eager": lambda n: 12.0,  # one pass a = f(a, b)
    "unpack_rows": lambda n: 60.0 * n,  # five eager passes over the bits of all workers
    # PowerSGD: two products with the gradient, the error and its subtraction; the selection of uncompressed tensors
    "low_rank": lambda n: 40.0,
}
"""Bytes moved per element."""

EXCHANGES = {4: "all_reduce_fp32", 2: "all_reduce_half", 0: "pairwise"}
"""Kinds of exchange by the bytes of a number that is added up on the way; 0: nothing is."""

REACHED = 0.7
"""Share of a GPU's memory bandwidth that element-wise kernels are assumed to reach."""
LAUNCH_US = 8.0
"""Assumed time to start a kernel on a GPU, Python included."""
HOST_US = (24.0, 9.0)
"""Assumed time in which the host starts a kernel of forward, from Python, and of backward, from C++. Forward: BERT-Base takes
6 ms for 64 tokens and for 256 (huggingface.co/transformers/v4.8.0/benchmarks.html), and has 249 kernels. Backward: so
much less as on a CPU with a model that is too narrow to be anything but the host's work. What a compiler has made starts in
`LAUNCH_US`."""


@dataclass(frozen=True)
class Costs:
    """ns_per_byte: by kernel; "" is for kernels that are not named. call_us: to start one.
    sending_ns: per byte that a rank sends, what an exchange itself costs the cores on which its model
    computes (`EXCHANGES`); one that is not there costs them nothing, as on a GPU. source: where it is from."""

    ns_per_byte: Mapping[str, float] = field(default_factory=lambda: {"": 0.0})
    call_us: float = 0.0
    source: str = "free"
    sending_ns: Mapping[str, float] = field(default_factory=dict)

    def ms(self, kernel: str, elements: float, workers: int = 1) -> float:
        """(1), in ms. Raises KeyError for a kernel that is not in `BYTES`."""
        rate = self.ns_per_byte.get(kernel, self.ns_per_byte.get("", 0.0))
        return self.call_us / 1e3 + elements * BYTES[kernel](workers) * rate / 1e6

    def all_ms(self, kernels: Sequence[str], elements: float, workers: int = 1) -> float:
        """Several kernels, one after the other."""
        return sum(self.ms(kernel, elements, workers) for kernel in kernels)

    def sending_ms(self, exchange: str, nbytes: float) -> float:
        """What an exchange of `EXCHANGES` in which a rank sends so many bytes costs its cores, in ms."""
        return nbytes * self.sending_ns.get(exchange, 0.0) / 1e6

    def times(self, factor: float) -> Costs:
        """`factor` times as much."""
        rates, sending = ({k: v * factor for k, v in part.items()} for part in (self.ns_per_byte, self.sending_ns))
        return Costs(rates, self.call_us * factor, self.source, sending)

    @staticmethod
    def of_bandwidth(gb_per_s: float, call_us: float = LAUNCH_US, source: str | None = None) -> Costs:
        """Every kernel at this rate. Raises ValueError for a rate <= 0."""
        if not gb_per_s > 0:
            raise ValueError(f"a bandwidth must be positive, got {gb_per_s:g} GB/s")
        return Costs({"": 1 / gb_per_s}, call_us, source=source or f"{gb_per_s:g} GB/s, an assumption")

    @staticmethod
    def of_gpu(name: str) -> Costs:
        """Of a GPU of gpus.py: `REACHED` of its memory's bandwidth. Raises ValueError for another name."""
        try:
            gpu = gpus.find(name)
        except ValueError as error:
            raise ValueError(f"no memory bandwidth known of {name!r}: {error}") from None
        rate = REACHED * gpu.gb_per_s
        text = (
            f"{name.lower()}: {100 * REACHED:g} % of {gpu.gb_per_s:g} GB/s, {LAUNCH_US:g} µs to start a kernel; assumed"
        )
        return Costs.of_bandwidth(rate, source=text)
