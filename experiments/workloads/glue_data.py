"""Examples of the GLUE tasks from the benchmark's .tsv files, from the hub, or made up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.workloads.files import existing_dir, from_hub, read_text
from experiments.workloads.ordering import generator
from experiments.workloads.squad_data import synthetic_questions
from launch.errors import UserError


@dataclass(frozen=True)
class Task:
    """One task.

    folder:  in the benchmark's archive.
    texts:   columns of the one or two sentences in the .tsv files; with `header` names, else numbers.
    label:   column of the label.
    classes: labels in the files, in the hub's order; empty: a score from 0 to 5.
    metrics: the first is the task's own.
    hub:     columns of the sentences on the hub.
    dev:     name of the development set's file, and of the hub's split.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    metrics: tuple[str, ...]
    hub: tuple[str, ...]
    header: bool = True
    dev: tuple[str, str] = ("dev.tsv", "validation")


_PAIR = ("sentence1", "sentence2")
_BINARY, _ENTAILED = ("0", "1"), ("entailment", "not_entailment")
TASKS = {
    "cola": Task("CoLA", ("3",), "1", _BINARY, ("matthews", "accuracy"), ("sentence",), header=False),
    "sst2": Task("SST-2", ("sentence",), "label", _BINARY, ("accuracy",), ("sentence",)),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), "Quality", _BINARY, ("accuracy", "f1"), _PAIR),
    "stsb": Task("STS-B", _PAIR, "score", (), ("pearson", "spearman"), _PAIR),
    "qqp": Task(
        *("QQP", ("question1", "question2"), "is_duplicate", _BINARY, ("accuracy", "f1"), ("question1", "question2"))
    ),
    "mnli": Task(
        *("MNLI", _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), ("accuracy",)),
        hub=("premise", "hypothesis"),
        dev=("dev_matched.tsv", "validation_matched"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), "label", _ENTAILED, ("accuracy",), ("question", "sentence")),
    "rte": Task("RTE", _PAIR, "label", _ENTAILED, ("accuracy",), _PAIR),
    "wnli": Task("WNLI", _PAIR, "label", _BINARY, ("accuracy",), _PAIR),
}


@dataclass(frozen=True)
class Example:
    """One or two sentences and their label: the number of a class, or a score."""

    texts: tuple[str, ...]
    label: float


def find_file(root: str, task: Task, split: str) -> Path:
    """The file of `split` (train | dev) below GLUE's folder `root`. Raises UserError when it is missing."""
    name = "train.tsv" if split == "train" else task.dev[0]
    file = existing_dir(root, f"expected {task.folder}/{name} in it") / task.folder / name
    if not file.is_file():
        raise UserError(f"data.path: no {task.folder}/{name} in {root}: unpack GLUE's {task.folder}.zip there")
    return file


def read_tsv(file: Path, task: Task) -> list[Example]:
    """Examples of a file. Rows that cannot be read are dropped; raises UserError when they are more than 1 %."""
    rows = [line.split("\t") for line in read_text(file).split("\n") if line.strip()]
    names = [name.strip() for name in rows.pop(0)] if task.header and rows else [str(i) for i in range(4)]
    wanted = (*task.texts, task.label)
    if absent := [name for name in wanted if name not in names]:
        raise UserError(f"{file} has no column '{absent[0]}', so it is not a labelled file of {task.folder}")
    columns = [names.index(name) for name in wanted]
    examples = []
    for row in rows:
        if len(row) > max(columns) and (label := _label(row[columns[-1]].strip(), task)) is not None:
            examples.append(Example(tuple(row[c].strip() for c in columns[:-1]), label))
    if not rows:
        raise UserError(f"{file} holds no row")
    if len(examples) < max(1, 0.99 * len(rows)):
        raise UserError(f"{file}: {len(rows) - len(examples)} of {len(rows)} rows are not {task.folder}'s")
    return examples


def read_hub(dataset: str, name: str, split: str) -> list[Example]:
    """Examples of a hub data set with GLUE's columns. Raises UserError when the hub cannot be reached."""
    task = TASKS[name]

    def read(table: Any) -> list[Example]:
        return [Example(tuple(row[c] for c in task.hub), float(row["label"])) for row in table]

    instead = f"GLUE's folder with data.path=FOLDER ({task.folder}/train.tsv in it)"
    return from_hub(dataset, name, split="train" if split == "train" else task.dev[1], read=read, instead=instead)


def synthetic_examples(count: int, task: Task, split: str) -> list[Example]:
    """Made-up sentences with labels drawn at random."""
    stream = generator("synthetic examples", task.folder, split)
    labels = torch.randint(len(task.classes) or 6, (count,), generator=stream).tolist()
    sentences = [q.context.split(". ")[: len(task.texts)] for q in synthetic_questions(count, split)]
    return [Example(tuple(texts), float(label)) for texts, label in zip(sentences, labels, strict=True)]


def _label(text: str, task: Task) -> float | None:
    if task.classes:
        return float(task.classes.index(text)) if text in task.classes else None
    try:
        score = float(text)
    except ValueError:
        return None
    return score if math.isfinite(score) else None
