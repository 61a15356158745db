"""Makes the timelines for the picture of the time to a fixed loss: `python studies/gpt2_timelines.py` (needs transformers).

GPT-2 of 124 M parameters, 8 sequences of 1,024 tokens a GPU, bf16, on an A100 and an H100, from the architecture.
Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

if not __package__:  # run as a script
    import _script  # noqa: F401

from birder.predict import find_gpu
from experiments.cells import architectures, timelines
from experiments.report.time_to_loss import FOLDER, GPUS
from experiments.runs import command


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    command.parser(__doc__).parse_args(arguments)
    work = architectures.work(architectures.Asked(model="hf:gpt2", batch=8, seq=1024, precision="bf16"))
    for gpu in GPUS:
        made = dataclasses.replace(work.timeline(find_gpu(gpu)), name=f"gpt2_{gpu}")
        print(timelines.write(made, FOLDER / f"gpt2_{gpu}.json"))
    return 0


if __name__ == "__main__":
    command.start(main)
