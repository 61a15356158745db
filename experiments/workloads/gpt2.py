"""GPT-2 pre-training: next-token prediction on WikiText or any other text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, at_least
from experiments.workloads.corpus import Corpus, token_stream
from launch.errors import UserError

END = "<|endoftext|>"
# preset: arguments of GPT2Config. medium, small: Radford et al., 2019; with 50,257 tokens 354,823,168 and 124,439,808
# parameters
PRESETS: dict[str, dict[str, Any]] = {
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024},
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "mini": {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256},
    "micro": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256},
}


@dataclass(kw_only=True, eq=False, repr=False)
class GPT2(Corpus):
    """The text as one stream of tokens, a line break after each line; one sample is one sequence.

    Further arguments as in `Corpus`.

    preset:     medium | small | mini | micro | tiny.
    vocab_size: pieces of a vocabulary made from the text (byte-level BPE); a short text gives fewer.
    """

    name = "gpt2"
    metric = "perplexity"  # the paper's figure could not be found
    family = "gpt2"
    presets = PRESETS

    preset: str = "small"
    dataset: str = "Salesforce/wikitext"
    dataset_config: str | None = "wikitext-103-raw-v1"
    seq_len: int = 1024
    valid_fraction: float = 0.01
    eval_batch: int = 16
    vocab_size: int = 8000

    def __post_init__(self) -> None:
        super().__post_init__()
        positions = PRESETS[self.preset]["n_positions"]
        if self.model is None and self.seq_len > positions:
            raise UserError(f"workload.seq_len={self.seq_len}: preset {self.preset} has {positions} positions")
        at_least(300, vocab_size=self.vocab_size)  # the bytes alone are 256

    def load_tokenizer(self, texts: Iterable[str]) -> None:
        super().load_tokenizer(texts)
        # Whole texts are cut here, not by the tokenizer, which would warn of their length.
        self.tokenizer.model_max_length = 10**9

    def new_tokenizer(self, texts: Iterable[str]) -> Any:
        """A byte-level BPE tokenizer as GPT-2's."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        core = Tokenizer(models.BPE())
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            min_frequency=2,
        )
        core.train_from_iterator((line + "\n" for line in texts), trainer)
        return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=END, eos_token=END, unk_token=END)

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        shape = {"vocab_size": len(self.tokenizer), "bos_token_id": 0, "eos_token_id": 0}
        return self.load_model(AutoModelForCausalLM, shape)

    def sequences(self, lines: list[str]) -> Tensor:
        stream = token_stream(lambda some: self.tokenizer([line + "\n" for line in some]), lines)
        return stream[: len(stream) // self.seq_len * self.seq_len].view(-1, self.seq_len)

    def examples(self, sequences: Tensor) -> Tensor:
        return sequences

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        return self._train[indices].to(shard.device)

    def predictions(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Of all tokens but the first."""
        tokens = batch.long()
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.flatten(0, 1), tokens[:, 1:].flatten()
