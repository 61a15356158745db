"""Birder in Hugging Face's Trainer (needs the extra `hf`).

    torchrun --nproc-per-node 2 examples/transformers_trainer.py FOLDER

A small BERT learns which of two kinds of words is more frequent in made-up sentences. A second call resumes from the last
checkpoint in FOLDER. Prints the Trainer's progress and its evaluation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _script  # noqa: F401

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from birder import Birder
from birder.integrations.transformers import BirderTrainer

SENTENCES, WORDS, LENGTH = 256, 20, 12


def sentences() -> list[dict[str, Any]]:
    rows = torch.randint(1, WORDS, (SENTENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    more = (rows < 6).sum(1) > (rows > 14).sum(1)
    return [{"input_ids": row.tolist(), "labels": int(label)} for row, label in zip(rows, more, strict=True)]


class StopAt(TrainerCallback):
    """Ends training after a step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def trainer(
    folder: Path, steps: int, stop: int | None = None, method: Any = (Birder, {"lr": 1e-3}), **arguments: Any
) -> BirderTrainer:
    """A Trainer of `steps` steps, saved in the middle and at the end. stop: it ends after this step already."""
    set_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **size))
    settings = {
        "use_cpu": True,  # leave it out where there are GPUs
        "max_steps": steps,
        "save_steps": steps // 2,
        "per_device_train_batch_size": 8,
        "average_tokens_across_devices": False,  # the loss is a mean over sentences
        "max_grad_norm": 0,  # the Trainer's clipping would come too late; the optimizer clips by itself
        "logging_steps": max(1, steps // 4),
        "report_to": "none",
        "disable_tqdm": True,
    }
    return BirderTrainer(
        model,
        TrainingArguments(str(folder), **(settings | arguments)),
        train_dataset=sentences(),
        eval_dataset=sentences()[:32],
        optimizer_cls_and_kwargs=method,
        callbacks=[StopAt(stop)] if stop else None,
    )


def main(folder: Path) -> None:
    run = trainer(folder, 100)
    run.train(resume_from_checkpoint=folder.is_dir() and get_last_checkpoint(str(folder)) is not None)
    print(run.evaluate())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "trainer_checkpoints"))
