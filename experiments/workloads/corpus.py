"""Plain text for language models, from files, from the hub, or made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.workloads.base import Shard, all_sum, at_least
from experiments.workloads.files import from_hub, read_text, text_files
from experiments.workloads.squad_data import read_json, synthetic_questions
from launch.errors import UserError

SYNTHETIC_PARAGRAPHS = 1500
CHUNK = 1000  # lines tokenized at once: bounds the memory that Python lists of tokens take
IGNORED = -100
"""In the place of a token that is not predicted."""


def corpus_name(data_path: str | None, dataset: str, config: str | None) -> str:
    """What tables call the text."""
    if data_path is not None:
        return f"text of {Path(data_path).name}"
    return "synthetic sentences" if dataset == "synthetic" else f"{dataset} {config or ''}".strip()


def check_stream(seq_len: int, valid_fraction: float, documents: int | None) -> None:
    """Raises UserError for a length of sequences, a part to evaluate on or a number of documents that cannot be."""
    if seq_len < 8:
        raise UserError(f"workload.seq_len={seq_len} is too short: at least 8")
    if not 0 < valid_fraction < 1:
        raise UserError(f"workload.valid_fraction={valid_fraction} must be between 0 and 1")
    at_least(1, documents=documents)


def read_lines(
    data_path: str | None, dataset: str, config: str | None, documents: int | None, names: Sequence[str] = ()
) -> list[str]:
    """Non-empty lines of text, the first `documents` of them (rows, for a hub data set); None: all. Raises UserError.

    data_path: a text file or a folder of .txt files; None: `dataset`, of the hub, or "synthetic". names: files of the folder
    instead, in this order: .txt, or SQuAD's .json and .json.xz, whose paragraphs are lines, each once.
    """
    if data_path is not None:
        lines = [line for file in text_files(data_path, names) for line in _lines(file) if line.strip()]
        if not lines:
            raise UserError(f"data.path: {data_path} holds only empty lines")
        return lines[:documents]
    if dataset == "synthetic":
        return [q.context for q in synthetic_questions(SYNTHETIC_PARAGRAPHS, "text")]
    return _hub_lines(dataset, config, documents)


def _lines(file: Path) -> list[str]:
    if ".json" not in file.suffixes:
        return read_text(file).splitlines()
    return list(dict.fromkeys(" ".join(q.context.splitlines()) for q in read_json(file)))


def _hub_lines(dataset: str, config: str | None, documents: int | None) -> list[str]:
    def read(table: Any) -> list[str]:
        return [line for text in table["text"] for line in text.splitlines() if line.strip()]

    part = "train" if documents is None else f"train[:{documents}]"
    lines = from_hub(dataset, config, split=part, read=read, instead="text with data.path=PATH")
    if not lines:
        raise UserError(f"{dataset} holds no text in its column 'text'")
    return lines


def token_stream(tokenizer: Callable[[list[str]], Any], lines: list[str]) -> Tensor:
    """The tokens of all lines, one after the other: int32[N]. tokenizer: gives "input_ids" for some lines."""
    pieces: list[np.ndarray] = []
    for first in range(0, len(lines), CHUNK):
        pieces += [np.array(ids, dtype=np.int32) for ids in tokenizer(lines[first : first + CHUNK])["input_ids"]]
    return torch.from_numpy(np.concatenate(pieces))


def hold_out(sequences: Tensor, fraction: float, name: str) -> tuple[Tensor, Tensor]:
    """(to train on, held out): the last `fraction` of the sequences is held out, at least one. Raises UserError.

    sequences: [N, tokens]; name: what the error calls the text.
    """
    count = max(1, round(len(sequences) * fraction))
    if count >= len(sequences):
        raise UserError(
            f"{name} fills {len(sequences)} sequences of {sequences.shape[1]} tokens, too few: give more text"
        )
    return sequences[:-count], sequences[-count:]


def perplexity(predictions: Iterable[tuple[Tensor, Tensor]], shard: Shard) -> dict[str, float]:
    """The metrics of a language model. predictions: of this rank's batches, logits[N, vocab] and tokens[N] or IGNORED."""
    loss = count = 0.0
    for logits, tokens in predictions:
        loss += float(F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="sum"))
        count += float((tokens != IGNORED).sum())
    loss, count = all_sum([loss, count], shard)
    # Capped so that a diverged run writes a number, not an overflow.
    return {"perplexity": math.exp(min(loss / count, 50.0)), "loss": loss / count}
