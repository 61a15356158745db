"""The timelines behind the picture of the time to a fixed loss: `python -m studies.gpt2_timelines` (needs transformers).

GPT-2 of 124 M parameters, 8 sequences of 1,024 tokens a GPU, bf16, on an A100 and an H100, by the architecture.
"""

from __future__ import annotations

import dataclasses

from birder.predict import find_gpu
from experiments.cells import architectures, timelines
from experiments.cells.architectures import Asked
from experiments.report.time_to_loss import FOLDER, GPUS


def main() -> None:
    work = architectures.work(Asked(model="hf:gpt2", batch=8, seq=1024, precision="bf16"))
    for gpu in GPUS:
        made = dataclasses.replace(work.timeline(find_gpu(gpu)), name=f"gpt2_{gpu}")
        print(timelines.write(made, FOLDER / f"gpt2_{gpu}.json"))


if __name__ == "__main__":
    main()
