"""By how much this machine computes slower than the GPU whose cluster is emulated."""

from __future__ import annotations

from dataclasses import dataclass

from birder.predict.timeline import Timeline

LEAST = 1.0
"""A machine that is faster than the target emulates it without dilation."""


@dataclass(frozen=True)
class Calibration:
    """What was measured. Times in ms per optimizer step."""

    here_ms: float
    timeline: Timeline

    @property
    def dilation(self) -> float:
        """Three significant digits: what tables print is what was set, and runs of one comparison share it exactly."""
        return float(f"{max(LEAST, self.here_ms / self.timeline.step_ms):.3g}")

    def __str__(self) -> str:
        return (
            f"Time dilation {self.dilation:g}: forward and backward take {self.here_ms:.0f} ms here, "
            f"{self.timeline.step_ms:.3g} ms on {self.timeline.gpu} (timeline {self.timeline.name})"
        )
