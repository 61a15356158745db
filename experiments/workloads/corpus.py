"""Language models on plain text, from files, from the hub, or made up."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, all_sum, at_least, leave_out
from experiments.workloads.files import from_hub, read_text, text_files
from experiments.workloads.squad_data import read_json, synthetic_questions
from experiments.workloads.transformer import Transformer
from launch.errors import UserError

SYNTHETIC_PARAGRAPHS = 1500
CHUNK = 1000  # lines tokenized at once: bounds the memory that Python lists of tokens take
IGNORED = -100
"""In the place of a token that is not predicted."""


@dataclass(kw_only=True, eq=False, repr=False)
class Corpus(Transformer):
    """A language model on one long text, cut into sequences of `seq_len`. Further arguments as in `Transformer`.

    init:           random (pre-training from scratch, the default) | pretrained.
    data_path:      a text file or a folder of .txt files.
    texts:          files of that folder instead, in this order: .txt, or SQuAD's .json and .json.xz for their paragraphs,
                    each once.
    dataset:        hub data set with a column "text" used when no file is given, or "synthetic".
    dataset_config: its configuration, e.g. a language and date.
    documents:      number of leading lines of a file, or rows of a data set, to use; None: all. Every rank tokenizes
                    all of them.
    valid_fraction: share of the sequences, at the end of the text, that is evaluated on.
    held_out:       sequences before these that are held out of training as well (`held_out_set`). None or 0: none.
    """

    higher_is_better = False
    target = None

    init: str = "random"
    data_path: str | None = None
    texts: list[str] | None = None
    dataset: str = "synthetic"
    dataset_config: str | None = None
    documents: int | None = None
    valid_fraction: float = 0.05
    held_out: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(8, seq_len=self.seq_len)
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"workload.valid_fraction={self.valid_fraction} must be between 0 and 1")
        at_least(1, documents=self.documents)
        at_least(0, held_out=self.held_out)
        self.synthetic = self.data_path is None and self.dataset == "synthetic"
        if self.data_path is not None:
            folders = dict.fromkeys(Path(name).parts[0] for name in self.texts or ())
            self.data_name = f"text of {', '.join(folders) or Path(self.data_path).name}"
        else:
            name = f"{self.dataset} {self.dataset_config or ''}".strip()
            self.data_name = "synthetic sentences" if self.synthetic else name

    def check(self) -> None:
        super().check()
        if self.data_path is not None:
            text_files(self.data_path, self.texts or ())

    def data_files(self) -> Sequence[Path]:
        return text_files(self.data_path, self.texts or ()) if self.data_path is not None else ()

    def prepare(self, shard: Shard) -> None:
        lines = self.lines()
        self.load_tokenizer(lines)
        sequences = self.sequences(lines)
        count = max(1, round(len(sequences) * self.valid_fraction))
        if count >= len(sequences):
            raise UserError(
                f"{self.data_name} fills {len(sequences)} sequences of {self.seq_len} tokens, too few: give more text"
            )
        self._train, held = leave_out(sequences[:-count], self.held_out, "sequences")
        self.eval_set = self.examples(sequences[-count:])[..., shard.rank :: shard.world_size, :]
        if self.held_out:
            self.held_out_set = self.examples(held)[..., shard.rank :: shard.world_size, :]

    def lines(self) -> list[str]:
        """The text's lines that are not empty. Raises UserError."""
        if self.data_path is not None:
            files = text_files(self.data_path, self.texts or ())
            lines = [line for file in files for line in _lines(file) if line.strip()]
            if not lines:
                raise UserError(f"data.path: {self.data_path} holds only empty lines")
            return lines[: self.documents]
        if self.synthetic:
            return [q.context for q in synthetic_questions(SYNTHETIC_PARAGRAPHS, "text")]

        def read(table: Any) -> list[str]:
            return [line for text in table["text"] for line in text.splitlines() if line.strip()]

        part = "train" if self.documents is None else f"train[:{self.documents}]"
        lines = from_hub(self.dataset, self.dataset_config, split=part, read=read, instead="text with data.path=PATH")
        if not lines:
            raise UserError(f"{self.dataset} holds no text in its column 'text'")
        return lines

    @abstractmethod
    def sequences(self, lines: list[str]) -> Tensor:
        """The text as int32[N, seq_len]; the incomplete last sequence is dropped."""

    @abstractmethod
    def examples(self, sequences: Tensor) -> Tensor:
        """Sequences as the model is evaluated on them: batches for `predictions`, [..., N, seq_len]."""

    @abstractmethod
    def predictions(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Logits[M, vocab] and the tokens[M] that they are for, or IGNORED."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(*self.predictions(model, batch), ignore_index=IGNORED)

    def scores(self, model: nn.Module, samples: Tensor, shard: Shard) -> dict[str, float]:
        batches = (part.to(shard.device) for part in samples.split(self.eval_batch, dim=-2) if part.shape[-2])
        return perplexity((self.predictions(model, batch) for batch in batches), shard)


def _lines(file: Path) -> list[str]:
    if ".json" not in file.suffixes:
        return read_text(file).splitlines()
    return list(dict.fromkeys(" ".join(q.context.splitlines()) for q in read_json(file)))


def token_stream(tokenizer: Callable[[list[str]], Any], lines: list[str]) -> Tensor:
    """The tokens of all lines, one after the other: int32[N]. tokenizer: gives "input_ids" for some lines."""
    pieces: list[np.ndarray] = []
    for first in range(0, len(lines), CHUNK):
        pieces += [np.array(ids, dtype=np.int32) for ids in tokenizer(lines[first : first + CHUNK])["input_ids"]]
    return torch.from_numpy(np.concatenate(pieces))


def perplexity(predictions: Iterable[tuple[Tensor, Tensor]], shard: Shard) -> dict[str, float]:
    """The metrics of a language model. predictions: of this rank's batches, logits[N, vocab] and tokens[N] or IGNORED."""
    loss = count = 0.0
    for logits, tokens in predictions:
        loss += float(F.cross_entropy(logits.float(), tokens, ignore_index=IGNORED, reduction="sum"))
        count += float((tokens != IGNORED).sum())
    loss, count = all_sum([loss, count], shard)
    # Capped so that a diverged run writes a number, not an overflow.
    return {"perplexity": math.exp(min(loss / count, 50.0)), "loss": loss / count}
