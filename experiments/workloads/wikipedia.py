"""Masked-language-model pre-training of BERT on Wikipedia or any other text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads import bert, weights
from experiments.workloads.base import Batch, Shard, one_of
from experiments.workloads.corpus import (
    IGNORED,
    check_stream,
    corpus_name,
    hold_out,
    perplexity,
    read_lines,
    token_stream,
)
from experiments.workloads.files import text_files
from experiments.workloads.ordering import generator
from launch.errors import UserError


@dataclass(kw_only=True, eq=False, repr=False)
class Wikipedia(bert.Bert):
    """The text as one stream of word pieces, cut into sequences of `seq_len` with [CLS] and [SEP]; one sample is one.

    In each sequence `mask_prob` of the tokens are predicted: 80 % of them appear as [MASK], 10 % as a random token,
    10 % unchanged, drawn again in every epoch. No next-sentence prediction. Further arguments as in `bert.Bert`.

    init:           random (pre-training from scratch, the default) | pretrained.
    weights:        directory of a run, or of one of its checkpoints, whose parameters the model begins with: a phase that
                    continues another with longer sequences, say. Where ranks kept different models their mean is taken.
    metric:         perplexity | loss: which of the two tables show.
    data_path:      a text file or a folder of .txt files.
    dataset:        hub data set with a column "text" used when no file is given, or "synthetic".
    dataset_config: its configuration, e.g. a language and date.
    documents:      number of leading documents (lines of a file, rows of a data set) to use; None: all. Every rank
                    tokenizes all of them.
    valid_fraction: share of the sequences, at the end of the stream, that is held out.
    """

    name = "wikipedia"
    higher_is_better = False
    target = None

    init: str = "random"
    data_path: str | None = None
    dataset: str = "wikimedia/wikipedia"
    dataset_config: str | None = "20231101.en"
    mask_prob: float = 0.15
    documents: int | None = None
    valid_fraction: float = 0.05
    vocab_size: int = 8000
    weights: str | None = None
    metric: str = "perplexity"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("perplexity", "loss"), metric=self.metric)
        check_stream(self.seq_len, self.valid_fraction, self.documents)
        if not 0 < self.mask_prob < 1:
            raise UserError(f"workload.mask_prob={self.mask_prob} must be between 0 and 1")
        self.synthetic = self.data_path is None and self.dataset == "synthetic"
        self.data_name = corpus_name(self.data_path, self.dataset, self.dataset_config)

    def check(self) -> None:
        super().check()
        if self.weights is not None:
            weights.find(self.weights)
        if self.data_path is not None:
            text_files(self.data_path)

    def prepare(self, shard: Shard) -> None:
        lines = read_lines(self.data_path, self.dataset, self.dataset_config, self.documents)
        self.load_tokenizer(lines)
        if self.tokenizer.mask_token_id is None:
            raise UserError(f"workload.model: {self.model} has no mask token, so it is not a masked language model")
        self._special = torch.tensor(sorted(self.tokenizer.all_special_ids))
        self._train, held_out = hold_out(self._sequences(lines), self.valid_fraction, self.data_name)
        # Masked once, the same for every number of ranks.
        inputs, labels = self.masked(held_out, generator("validation mask"))
        self.eval_set = (inputs[shard.rank :: shard.world_size], labels[shard.rank :: shard.world_size])

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForMaskedLM

        net = self.load_model(AutoModelForMaskedLM)
        return net if self.weights is None else weights.put(net, self.weights)

    @property
    def training_samples(self) -> int:
        return len(self._train)

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        inputs, labels = self.masked(self._train[indices], generator("mask", *key))
        return {"input_ids": inputs.to(shard.device), "labels": labels.to(shard.device)}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def scores(self, model: nn.Module, samples: tuple[Tensor, Tensor], shard: Shard) -> dict[str, float]:
        def predictions() -> Iterator[tuple[Tensor, Tensor]]:
            for first in range(0, len(samples[0]), self.eval_batch):
                inputs, labels = (part[first : first + self.eval_batch].to(shard.device) for part in samples)
                yield model(input_ids=inputs).logits.flatten(0, 1), labels.flatten()

        return perplexity(predictions(), shard)

    def masked(self, sequences: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
        """int32[N, seq_len] -> what the model sees and what it must predict, both int64[N, seq_len].

        The number of predicted tokens per sequence is fixed, max(1, round(mask_prob * words)), so that no batch is
        without any.
        """
        tokens = sequences.long()
        size = tokens.shape
        score = torch.rand(size, generator=stream).masked_fill(torch.isin(tokens, self._special), 2.0)
        count = max(1, round(self.mask_prob * (self.seq_len - 2)))
        chosen = torch.zeros(size, dtype=torch.bool).scatter_(1, score.topk(count, dim=1, largest=False).indices, True)
        chosen &= score < 2.0
        labels = tokens.masked_fill(~chosen, IGNORED)
        dice = torch.rand(size, generator=stream)
        random_tokens = torch.randint(len(self.tokenizer), size, generator=stream)
        inputs = torch.where(chosen & (dice < 0.8), torch.tensor(self.tokenizer.mask_token_id), tokens)
        inputs = torch.where(chosen & (dice >= 0.8) & (dice < 0.9), random_tokens, inputs)
        return inputs, labels

    def _sequences(self, lines: list[str]) -> Tensor:
        """int32[N, seq_len]: [CLS] seq_len - 2 pieces [SEP]; the incomplete last one is dropped."""
        stream = token_stream(lambda some: self.tokenizer(some, add_special_tokens=False), lines)
        body = self.seq_len - 2
        count = len(stream) // body
        out = torch.empty((count, self.seq_len), dtype=torch.int32)
        out[:, 0], out[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        out[:, 1:-1] = stream[: count * body].view(count, body)
        return out
