"""Word-level language model with an LSTM: Penn Treebank, or any text split into train, valid and test files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, Workload, at_least, one_of
from experiments.workloads.corpus import perplexity
from experiments.workloads.files import existing_dir, no_synthetic, read_text
from experiments.workloads.ordering import generator
from launch.errors import UserError

# preset: (hidden size, dropout), both with two layers (Zaremba et al., 2014)
PRESETS = {"tiny": (64, 0.0), "small": (200, 0.0), "medium": (650, 0.5)}
EOS, UNKNOWN = "<eos>", "<unk>"

Hidden = tuple[Tensor, Tensor]


@dataclass(eq=False, repr=False)
class PennTreebank(Workload):
    """Next-word prediction on one long stream of words; one sample is one token.

    The training stream is cut into world_size * batch_per_rank columns of equal length; rank r reads columns
    [r * batch_per_rank, (r + 1) * batch_per_rank), `bptt` words at a time, and carries the LSTM's hidden state from
    batch to batch. The order is that of the text, so batches do not depend on the seed.

    data_path:       folder with ptb.train.txt and ptb.valid.txt (or train.txt and valid.txt); None: synthetic text.
    preset:          tiny | small | medium.
    dropout:         overrides the preset's.
    bptt:            length of a batch in words, through which gradients flow.
    tie_weights:     the output layer shares the embedding's weights.
    unigram_bias:    the output bias starts at the logarithm of each word's frequency in the training text instead of 0.
                     Where it starts at 0, methods whose steps have a fixed size learn these frequencies through the
                     hidden state faster than through the bias, and drive the LSTM's gates into saturation on the way.
    held_out:        words at the end of the training text that are held out of it (`held_out_set`). None or 0: none.
    eval_columns:    columns of the validation stream; fixes the result for any number of ranks.
    allow_synthetic: False makes a missing `data_path` an error.
    """

    name = "ptb"
    metric = "perplexity"
    higher_is_better = False
    target = None
    sample = "tokens"

    data_path: str | None = None
    preset: str = "medium"
    dropout: float | None = None
    bptt: int = 35
    tie_weights: bool = False
    unigram_bias: bool = True
    eval_columns: int = 16
    allow_synthetic: bool = True
    held_out: int | None = None

    def __post_init__(self) -> None:
        one_of(PRESETS, preset=self.preset)
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise UserError(f"workload.dropout={self.dropout} must be in [0, 1)")
        at_least(1, bptt=self.bptt, eval_columns=self.eval_columns)
        at_least(0, held_out=self.held_out)
        self.hidden_size, usual = PRESETS[self.preset]
        self.dropout = usual if self.dropout is None else self.dropout
        self.synthetic = self.data_path is None
        self.data_name = "synthetic Markov text" if self.data_path is None else f"text of {Path(self.data_path).name}"
        self._hidden: Hidden | None = None

    def check(self) -> None:
        if self.data_path is None:
            if not self.allow_synthetic:
                raise no_synthetic("a folder with ptb.train.txt and ptb.valid.txt")
            return
        for split in ("train", "valid"):
            self._file(split)

    def data_files(self) -> Sequence[Path]:
        return [self._file(split) for split in ("train", "valid") if self.data_path is not None]

    def prepare(self, shard: Shard) -> None:
        if self.data_path is None:
            self._train, self.eval_set, self.vocab_size = _markov_text()
            return
        train_words = _words(self._file("train"))
        # Most frequent first, ties by spelling: the same numbers on every rank.
        counts = Counter(train_words)
        words = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        if UNKNOWN not in counts:
            words.append(UNKNOWN)
        ids = {word: i for i, word in enumerate(words)}
        unknown = ids[UNKNOWN]
        self.vocab_size = len(ids)
        self._train = torch.tensor([ids[word] for word in train_words])
        self.eval_set = torch.tensor([ids.get(word, unknown) for word in _words(self._file("valid"))])
        if len(self.eval_set) < 2 * self.eval_columns:
            raise UserError(f"data.path: {self._file('valid')} has fewer than {2 * self.eval_columns} words")
        if self.vocab_size == 10_000 and len(self._train) == 929_589:
            self.data_name = "Penn Treebank"
        if self.held_out:
            if self.held_out < 2 * self.eval_columns or self.held_out >= len(self._train):
                raise UserError(
                    f"workload.held_out={self.held_out} must be {2 * self.eval_columns} or more, and less than the "
                    f"{len(self._train)} words of the training text"
                )
            self._train, self.held_out_set = self._train[: -self.held_out], self._train[-self.held_out :]

    def build_model(self) -> nn.Module:
        model = LSTMModel(self.vocab_size, self.hidden_size, self.dropout or 0.0, self.tie_weights)
        if self.unigram_bias:
            counts = torch.bincount(self._train, minlength=self.vocab_size).double().clamp_(min=1.0)
            with torch.no_grad():
                model.output.bias.copy_((counts / counts.sum()).log())
        return model

    def steps_per_epoch(self, world_size: int, batch_per_rank: int) -> int:
        # The last word of a column has no successor.
        steps = (len(self._train) // (world_size * batch_per_rank) - 1) // self.bptt
        if steps < 1:
            raise UserError(
                f"{self.data_name} has {len(self._train)} training words, too few for {world_size} ranks with "
                f"{batch_per_rank} columns of {self.bptt} words: lower train.batch_per_rank or workload.bptt"
            )
        return steps

    def train_batches(
        self, shard: Shard, batch_per_rank: int, *, seed: int, epoch: int, start: int = 0
    ) -> Iterator[Batch]:
        """Yields (words[bptt, B], next words[bptt, B], whether it opens the stream)."""
        steps = self.steps_per_epoch(shard.world_size, batch_per_rank)
        columns = _columns(self._train, shard.world_size * batch_per_rank)
        mine = columns[:, shard.rank * batch_per_rank : (shard.rank + 1) * batch_per_rank].to(shard.device)
        for step in range(start, steps):
            first = step * self.bptt
            yield mine[first : first + self.bptt], mine[first + 1 : first + 1 + self.bptt], step == 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        words, following, opens = batch
        hidden = None if opens else self._hidden
        if hidden is None or hidden[0].shape[1] != words.shape[1]:  # resumed with another batch: a fresh start
            hidden = self._zeros(words)
        logits, (h, c) = model(words, hidden)
        # float(): under autocast the state may come back in half precision, the next call wants fp32.
        self._hidden = (h.detach().float(), c.detach().float())
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    def scores(self, model: nn.Module, samples: Tensor, shard: Shard) -> dict[str, float]:
        columns = _columns(samples, self.eval_columns)[:, shard.rank :: shard.world_size].to(shard.device)
        return perplexity(self._predictions(model, columns), shard)

    def _predictions(self, model: nn.Module, columns: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        if not columns.shape[1]:  # with more ranks than columns some have nothing to do
            return
        hidden = self._zeros(columns)
        for first in range(0, len(columns) - 1, self.bptt):
            following = columns[first + 1 : first + 1 + self.bptt]
            logits, (h, c) = model(columns[first : first + len(following)], hidden)
            hidden = (h.float(), c.float())
            yield logits.flatten(0, 1), following.flatten()

    def _zeros(self, words: Tensor) -> Hidden:
        """The state at the begin of a stream. words: [T, columns]."""
        zeros = torch.zeros(LSTMModel.LAYERS, words.shape[1], self.hidden_size, device=words.device)
        return zeros, zeros.clone()

    def samples(self, batch_per_rank: int) -> int:
        return batch_per_rank * self.bptt

    def state_dict(self) -> dict[str, Any]:
        return {} if self._hidden is None else {"h": self._hidden[0], "c": self._hidden[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._hidden = (state["h"], state["c"]) if state else None

    def _file(self, split: str) -> Path:
        root = existing_dir(str(self.data_path), "expected ptb.train.txt and ptb.valid.txt in it")
        for name in (f"ptb.{split}.txt", f"{split}.txt"):
            if (root / name).is_file():
                if not (root / name).stat().st_size:
                    raise UserError(f"data.path: {root / name} is empty")
                return root / name
        raise UserError(f"data.path: neither ptb.{split}.txt nor {split}.txt in {root}")


class LSTMModel(nn.Module):
    """Embedding, two LSTM layers, linear output. words[T, B] and the state -> logits[T, B, vocab] and the state."""

    LAYERS = 2

    def __init__(self, vocab_size: int, hidden_size: int, dropout: float, tie_weights: bool) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, self.LAYERS, dropout=dropout)
        self.output = nn.Linear(hidden_size, vocab_size)
        for parameter in (*self.lstm.parameters(), *self.output.parameters()):
            nn.init.uniform_(parameter, -0.05, 0.05)
        # The embedding keeps torch's N(0, 1): steps of a fixed size would soon drown smaller rows of rare words in noise.
        nn.init.zeros_(self.output.bias)
        if tie_weights:  # as an output layer, so that logits start small
            self.embedding.weight = self.output.weight

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        out, hidden = self.lstm(self.drop(self.embedding(words)), hidden)
        return self.output(self.drop(out)), hidden


def _columns(stream: Tensor, count: int) -> Tensor:
    """stream[N] -> [N // count, count]: `count` contiguous pieces side by side; the remainder is dropped."""
    length = len(stream) // count
    return stream[: length * count].view(count, length).t().contiguous()


def _words(file: Path) -> list[str]:
    """Words of a text file, with <eos> at each line's end."""
    return [word for line in read_text(file).splitlines() if line.strip() for word in [*line.split(), EOS]]


def _markov_text() -> tuple[Tensor, Tensor, int]:
    """Training and validation stream in which each word has four possible successors, and the vocabulary's size."""
    stream, vocab, length = generator("markov text"), 1000, 60_000
    successors = torch.randint(vocab, (vocab, 4), generator=stream).tolist()
    choices = torch.randint(4, (length,), generator=stream).tolist()
    words = [0]
    for choice in choices[1:]:
        words.append(successors[words[-1]][choice])
    text = torch.tensor(words)
    return text[: length * 9 // 10], text[length * 9 // 10 :], vocab
