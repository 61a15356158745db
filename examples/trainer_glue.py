"""Birder fine-tunes on GLUE in Hugging Face's Trainer (needs the extra `hf`).

    torchrun --nproc-per-node 2 examples/trainer_glue.py FOLDER --data GLUE \\
        --model CHECKPOINT --task sst2 --steps 200

GLUE is the benchmark's folder, with SST-2/train.tsv and SST-2/dev.tsv in it (mrpc: MRPC/). CHECKPOINT is a folder or hub name
of a pretrained model like BERT; without --model, a small BERT with random weights reads the data's words. --optimizer adamw
trains with the unchanged Trainer.

After Ctrl-C or a kill, the same command resumes from the last checkpoint in FOLDER. Rank 0 prints the accuracy on the
development set and a checksum of the parameters. An interrupted run ends with the same checksum as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _script  # noqa: F401

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from birder import Birder
from birder.integrations.transformers import BirderTrainer

TASKS = {"sst2": ("SST-2", ["sentence"], "label"), "mrpc": ("MRPC", ["#1 String", "#2 String"], "Quality")}
"""Folder, columns of the one or two sentences, column of the label, 0 or 1."""
LENGTH = 128
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
LEARNING_RATES = {"birder": 2e-4, "adamw": 5e-5}


class StopAt(TrainerCallback):
    """Ends training after a step, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.step


def read(data: Path, task: str, split: str) -> tuple[list[list[str]], list[int]]:
    """Sentences, column by column, and labels. Exits with one line where the file is not GLUE's."""
    folder, texts, label = TASKS[task]
    file = data / folder / f"{split}.tsv"
    if not file.is_file():
        sys.exit(f"error: no {folder}/{split}.tsv in {data}: give GLUE's folder with --data")
    with open(file, encoding="utf-8-sig", newline="") as lines:  # MRPC begins with a byte order mark
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or any(row.get(label) not in ("0", "1") or None in map(row.get, texts) for row in rows):
        sys.exit(f"error: {file} is not a labelled file of {folder}: it needs the columns {', '.join([*texts, label])}")
    return [[row[name] for row in rows] for name in texts], [int(row[label]) for row in rows]


def words_of(texts: Sequence[str], size: int = 5000) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the most frequent words, the same on every rank."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower()))
    known = SPECIAL + sorted(counts, key=lambda word: (-counts[word], word))[:size]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [(name, known.index(name)) for name in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    named = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=core, model_input_names=inputs, **named)


def load(model: str | None, texts: Sequence[str], seed: int) -> tuple[nn.Module, Any]:
    """Model and tokenizer; the same weights on every rank."""
    set_seed(seed)
    if model is not None:
        tokenizer = AutoTokenizer.from_pretrained(model)
        return AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).float(), tokenizer
    tokenizer = words_of(texts)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), num_labels=2, **size)), tokenizer


def tokenized(tokenizer: Any, sentences: list[list[str]], labels: list[int]) -> list[dict[str, Any]]:
    tokens = tokenizer(*sentences, truncation=True, max_length=LENGTH)
    return [{**{key: tokens[key][i] for key in tokens}, "labels": label} for i, label in enumerate(labels)]


def last_whole(folder: Path) -> str | None:
    """The newest checkpoint that was written to its end: a kill may come in the middle of one."""
    found = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return str(max(found, key=lambda path: int(path.name.partition("-")[2]))) if found else None


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(evaluated.predictions.argmax(-1) == evaluated.label_ids))}


def checksum(model: nn.Module) -> str:
    """Of the bits of all parameters."""
    total = hashlib.sha256()
    for p in model.parameters():
        total.update(p.detach().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def above_zero(text: str) -> int:
    """A number of steps or rows. The Trainer takes 0 steps for three epochs."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--data", type=Path, required=True, help="GLUE's folder")
    parser.add_argument("--task", choices=TASKS, default="sst2")
    parser.add_argument("--model", help="checkpoint folder or hub name")
    parser.add_argument("--optimizer", choices=LEARNING_RATES, default="birder")
    parser.add_argument("--lr", type=float, help=f"default: {LEARNING_RATES}")
    parser.add_argument("--steps", type=above_zero, default=200)
    parser.add_argument("--save-every", type=above_zero, default=50)
    parser.add_argument("--batch", type=above_zero, default=16, help="of each rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def run(asked: argparse.Namespace, stop: int | None = None) -> dict[str, Any]:
    """Trains to the end, or to step `stop`, and evaluates: {"accuracy": in [0, 1], "parameters": checksum}."""
    train, dev = read(asked.data, asked.task, "train"), read(asked.data, asked.task, "dev")
    model, tokenizer = load(asked.model, [text for column in train[0] for text in column], asked.seed)
    lr = LEARNING_RATES[asked.optimizer] if asked.lr is None else asked.lr
    birder = asked.optimizer == "birder"
    arguments = TrainingArguments(
        str(asked.folder),
        use_cpu=not torch.cuda.is_available(),
        max_steps=asked.steps,
        save_steps=asked.save_every,
        save_total_limit=2,
        per_device_train_batch_size=asked.batch,
        per_device_eval_batch_size=32,
        learning_rate=lr,
        warmup_steps=asked.steps // 10,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        max_grad_norm=0 if birder else 1.0,  # the Trainer's clipping would come too late for 1-bit messages
        average_tokens_across_devices=False,  # the loss is a mean over sentences
        ddp_find_unused_parameters=False,
        logging_steps=max(1, asked.steps // 10),
        report_to="none",
        disable_tqdm=True,
        seed=asked.seed,
    )
    # idle: word pieces are rare, so most rows of the embedding have no gradient in most steps.
    of_birder = {"optimizer_cls_and_kwargs": (Birder, {"lr": lr, "weight_decay": 0.01, "idle": "hold"})}
    trainer = (BirderTrainer if birder else Trainer)(
        model,
        arguments,
        train_dataset=tokenized(tokenizer, *train),
        eval_dataset=tokenized(tokenizer, *dev),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        callbacks=[StopAt(stop)] if stop else None,
        **(of_birder if birder else {}),
    )
    trainer.train(resume_from_checkpoint=last_whole(asked.folder))
    found = {"accuracy": trainer.evaluate()["eval_accuracy"], "parameters": checksum(model)}
    if trainer.is_world_process_zero():
        print(
            f"{asked.optimizer}, {asked.steps} steps: accuracy {100 * found['accuracy']:.2f} % of {len(dev[1])}, "
            f"parameters {found['parameters']}",
            flush=True,
        )
    return found


if __name__ == "__main__":
    run(parse())
