"""Masked-language-model pre-training of BERT on Wikipedia or any other text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, one_of
from experiments.workloads.bert import Bert
from experiments.workloads.corpus import IGNORED, Corpus, token_stream
from experiments.workloads.ordering import generator
from launch.errors import UserError


@dataclass(kw_only=True, eq=False, repr=False)
class Wikipedia(Corpus, Bert):
    """The text as one stream of word pieces, in each sequence between [CLS] and [SEP]; one sample is one sequence.

    In each sequence `mask_prob` of the tokens are predicted: 80 % of them appear as [MASK], 10 % as a random token,
    10 % unchanged, drawn again in every epoch. No next-sentence prediction. Further arguments as in `Corpus` and `Bert`.

    metric: perplexity | loss: which of the two tables show.
    """

    name = "wikipedia"
    heads = ()  # it begins with a run of this workload

    dataset: str = "wikimedia/wikipedia"
    dataset_config: str | None = "20231101.en"
    mask_prob: float = 0.15
    vocab_size: int = 8000
    metric: str = "perplexity"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("perplexity", "loss"), metric=self.metric)
        if not 0 < self.mask_prob < 1:
            raise UserError(f"workload.mask_prob={self.mask_prob} must be between 0 and 1")

    def load_tokenizer(self, texts: Iterable[str]) -> None:
        super().load_tokenizer(texts)
        if self.tokenizer.mask_token_id is None:
            raise UserError(f"workload.model: {self.model} has no mask token, so it is not a masked language model")
        self._special = torch.tensor(sorted(self.tokenizer.all_special_ids))

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForMaskedLM

        return self.load_bert(AutoModelForMaskedLM)

    def sequences(self, lines: list[str]) -> Tensor:
        """[CLS] seq_len - 2 pieces [SEP] each."""
        stream = token_stream(lambda some: self.tokenizer(some, add_special_tokens=False), lines)
        body = self.seq_len - 2
        count = len(stream) // body
        out = torch.empty((count, self.seq_len), dtype=torch.int32)
        out[:, 0], out[:, -1] = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        out[:, 1:-1] = stream[: count * body].view(count, body)
        return out

    def examples(self, sequences: Tensor) -> Tensor:
        """Masked once, the same for every number of ranks."""
        masked = self.masked(sequences, generator("validation mask"))
        if (masked[1] == IGNORED).all():
            raise UserError(
                f"workload.model: the tokenizer of {self.model} knows no word at the end of {self.data_name}: give a model "
                "of the text's language"
            )
        return masked

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        return self.masked(self._train[indices], generator("mask", *key)).to(shard.device)

    def predictions(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        return model(input_ids=inputs).logits.flatten(0, 1), labels.flatten()

    def masked(self, sequences: Tensor, stream: torch.Generator) -> Tensor:
        """int32[N, seq_len] -> int64[2, N, seq_len]: what the model sees, and what it must predict or IGNORED.

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
        return torch.stack([inputs, labels])
