"""Tiny data sets and tiny workloads for the tests. Real file formats, made-up content."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.workloads.base import Workload
from experiments.workloads.bert_squad import BertSquad
from experiments.workloads.cifar10 import Cifar10
from experiments.workloads.cifar100 import Cifar100
from experiments.workloads.digits import Digits
from experiments.workloads.fashion_mnist import FashionMNIST
from experiments.workloads.glue import Glue
from experiments.workloads.glue_data import TASKS
from experiments.workloads.gpt2 import GPT2
from experiments.workloads.image_folder import ImageFolder
from experiments.workloads.ptb import PennTreebank
from experiments.workloads.resnet18 import ResNet18
from experiments.workloads.resnet50 import ResNet50
from experiments.workloads.squad_data import synthetic_questions
from experiments.workloads.swin import Swin
from experiments.workloads.wikipedia import Wikipedia

rng = np.random.default_rng


def image_folder(root: Path, side: int = 40, train: int = 8, val: int = 3, classes: int = 2) -> Path:
    """PNG images in <root>/{train,val}/class<k>/."""
    from PIL import Image

    for split, count in (("train", train), ("val", val)):
        for k in range(classes):
            folder = root / split / f"class{k}"
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng(1000 * k + i).integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def fashion_mnist(root: Path, train: int = 64, test: int = 20) -> Path:
    """The four idx files, unpacked."""
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", train), ("t10k", test)):
        images = rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = rng(count).integers(0, 10, count, dtype=np.uint8)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return root


def squad_files(root: Path, train: int = 60, dev: int = 15) -> Path:
    """train-v1.1.json and dev-v1.1.json in the official format."""
    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("dev", dev)):
        paragraphs = [
            {
                "context": q.context,
                "qas": [
                    {
                        "id": q.id,
                        "question": q.question,
                        "answers": [{"text": text, "answer_start": at} for text, at in q.answers],
                    }
                ],
            }
            for q in synthetic_questions(count, split)
        ]
        document = {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}
        (root / f"{split}-v1.1.json").write_text(json.dumps(document))
    return root


def text_folder(root: Path, words: int = 3000) -> Path:
    """train.txt and valid.txt: lines of ten words out of fifty."""
    root.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", words), ("valid", words // 4)):
        stream = [f"w{i}" for i in rng(count).integers(0, 50, count)]
        lines = [" ".join(stream[i : i + 10]) for i in range(0, count, 10)]
        (root / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return root


def text_file(path: Path) -> Path:
    """A file of sentences."""
    path.write_text("\n".join(q.context for q in synthetic_questions(120, "file")))
    return path


def glue_folder(root: Path, train: int = 30, dev: int = 11) -> Path:
    """GLUE's folder with each task's own columns, labels and quirks (MRPC's byte order mark, CoLA without a header)."""
    for task in TASKS.values():
        (root / task.folder).mkdir(parents=True)
        labels = task.classes or ("0.000", "2.500", "5.000")
        names = ["id", *task.texts, task.label] if task.header else []
        for name, count in (("train.tsv", train), (task.dev[0], dev)):
            rows = ["\t".join(names)] if names else []
            for i, q in enumerate(synthetic_questions(count, task.folder + name)):
                label = labels[i % len(labels)]
                texts = q.context.split(". ")[: len(task.texts)]
                rows.append("\t".join([str(i), *texts, label] if task.header else ["gj04", label, "", texts[0]]))
            mark = "\ufeff" if task.folder == "MRPC" else ""
            (root / task.folder / name).write_text(mark + "\n".join(rows) + "\n", encoding="utf-8")
    return root


def workloads(root: Path) -> dict[str, Callable[[], Workload]]:
    """Makers of one tiny instance of each workload with each kind of data, by a name for test ids."""
    small_squad: dict[str, Any] = {"preset": "tiny", "seq_len": 96, "doc_stride": 24, "max_query_len": 24}
    return {
        "resnet50-synthetic": lambda: ResNet50(image_size=32, synthetic_images=24),
        "resnet50-folder": lambda: ResNet50(str(_once(image_folder, root / "images")), image_size=32, eval_batch=4),
        "cifar100-synthetic": lambda: Cifar100(augment="crop_flip"),
        "fashion_mnist-files": lambda: FashionMNIST(str(_once(fashion_mnist, root / "fashion")), augment="flip"),
        "digits": lambda: Digits(train_images=100),
        "image_folder": lambda: ImageFolder(
            str(_once(image_folder, root / "small")), image_size=16, augment="crop_flip"
        ),
        "ptb-synthetic": lambda: PennTreebank(preset="tiny"),
        "ptb-files": lambda: PennTreebank(str(_once(text_folder, root / "text")), preset="tiny", bptt=10),
        "bert_squad-synthetic": lambda: BertSquad(
            dataset="synthetic", train_questions=40, dev_questions=5, **small_squad
        ),
        "bert_squad-files": lambda: BertSquad(data_path=str(_once(squad_files, root / "squad")), **small_squad),
        "wikipedia-file": lambda: Wikipedia(
            preset="tiny", data_path=str(_once(text_file, root / "wiki.txt")), seq_len=32, vocab_size=500
        ),
        "cifar10-synthetic": lambda: Cifar10(model="resnet8", augment="crop_flip"),
        "resnet18-synthetic": lambda: ResNet18(image_size=32, synthetic_images=24),
        "swin-synthetic": lambda: Swin(preset="tiny", image_size=32, synthetic_images=24),
        "swin-folder": lambda: Swin(
            str(_once(image_folder, root / "images")), preset="tiny", image_size=32, eval_batch=4
        ),
        "gpt2-file": lambda: GPT2(
            preset="tiny", data_path=str(_once(text_file, root / "wiki.txt")), seq_len=32, vocab_size=400
        ),
        "glue-synthetic": lambda: Glue(
            "rte", preset="tiny", dataset="synthetic", train_examples=40, dev_examples=5, seq_len=32
        ),
        "glue-files": lambda: Glue("mrpc", preset="tiny", data_path=str(_once(glue_folder, root / "glue")), seq_len=48),
        "glue-scores": lambda: Glue(
            "stsb", preset="tiny", data_path=str(_once(glue_folder, root / "glue")), seq_len=48
        ),
    }


def _once(make: Callable[[Path], Path], path: Path) -> Path:
    return path if path.exists() else make(path)


def tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in a fixed order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, dict):
        return [t for key in sorted(batch, key=str) for t in tensors(batch[key])]
    if isinstance(batch, tuple | list):
        return [t for part in batch for t in tensors(part)]
    return []


def same(a: Any, b: Any) -> bool:
    """Whether two batches are equal, bit for bit."""
    first, second = tensors(a), tensors(b)
    return len(first) == len(second) and all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def cifar100_files(root: Path, count: int = 20) -> Path:
    """cifar-100-python/{train,test,meta} as torchvision unpickles them (hashes will not match)."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        data = {"data": rng(0).integers(0, 256, (count, 3072), dtype=np.uint8), "fine_labels": [0] * count}
        (folder / split).write_bytes(pickle.dumps(data))
    return root
