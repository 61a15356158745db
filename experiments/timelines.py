"""Timelines of results/timelines: when each gradient of a model is ready on a GPU (experiments/cells/timelines.py).

    python experiments/timelines.py list
    python experiments/timelines.py make --model resnet50 --batch 32 \\
        --precision tf32 --samples-per-s 938 --gpu X --source "..."
    python experiments/timelines.py record --model resnet50 --batch 32 \\
        --precision amp

`make` spreads a published rate over the parameters by the backward work of each layer (experiments/cells/timeline_tools.py).
`record` measures a timeline on this machine's GPU, or on its CPU if there is none.
Exit status: 0 success; 2 bad input.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    import _script  # noqa: F401

from experiments.cells import timelines
from experiments.runs import command


@command.report_errors
def main(arguments: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("list", help="the timelines there are")
    make = commands.add_parser("make", help="from a published rate")
    make.add_argument("--samples-per-s", "--images-per-s", type=float, required=True, help="published, of one GPU")
    make.add_argument("--source", required=True, help="where the rate was published")
    make.add_argument("--gpu", required=True, help="e.g. A100-80GB")
    record = commands.add_parser("record", help="measured on this machine")
    record.add_argument("--steps", type=int, default=20)
    record.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    for one in (make, record):
        one.add_argument("--model", required=True, help="resnet50, bert_base or tiny")
        one.add_argument("--batch", type=int, required=True, help="samples per GPU")
        one.add_argument("--precision", choices=("fp32", "tf32", "amp"), required=True)
        one.add_argument("--gpus-per-node", type=int, default=8)
        one.add_argument("--name", help="default: model, batch, precision (and the GPU for recorded ones)")
        one.add_argument("--note", default="")
        one.add_argument("--out", type=Path, help="file to write; default: results/timelines/NAME.json")
    options = parser.parse_args(arguments)
    if options.what == "list":
        for name in timelines.names():
            t = timelines.load(name)
            size = f"{t.elements / 1e6:.1f} M parameters"
            print(f"{name:24} {t.gpu}, batch {t.batch_per_gpu}: {t.step_ms:.1f} ms, {size}")
        return 0
    from experiments.cells import timeline_tools

    made = timeline_tools.make(options) if options.what == "make" else timeline_tools.record(options)
    path = timelines.write(made, options.out or timelines.FOLDER / f"{made.name}.json")
    print(f"{path}: forward {made.forward_ms:.2f} ms, step {made.step_ms:.2f} ms, {len(made.gradients)} gradients")
    return 0


if __name__ == "__main__":
    command.start(main)
