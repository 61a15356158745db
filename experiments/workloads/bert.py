"""What the BERT workloads share: tokenizer, model, inputs. transformers is imported on use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from birder.checkpoint import MANIFEST
from experiments.workloads import weights
from experiments.workloads.base import at_least, one_of
from experiments.workloads.transformer import Transformer
from launch.errors import UserError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# preset: BertConfig of a model with random weights
PRESETS: dict[str, dict[str, Any]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    # SLAMB's BERT-XL of 2.8 B parameters, whose shape was not found: 2.76 B
    "xl": {"hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 40, "intermediate_size": 10240},
    # BERT-Small of Turc et al. 2019, "Well-Read Students Learn Better"
    "small": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256},
}
ATTENTION = ("sdpa", "eager")
"""How transformers computes attention: torch's own kernel, or matrix products, softmax and dropout one after the other.

torch's kernel for CPUs knows no dropout: where a model drops attention weights, `sdpa` takes a path that multiplies bf16 in
fp32, and a step of a small model takes 1.7 times as long as with `eager`.
"""


@dataclass(kw_only=True, eq=False, repr=False)
class Bert(Transformer):
    """A workload of BERT. Further arguments as in `Transformer`.

    preset:    base | large | xl | small | tiny.
    attention: one of `ATTENTION`; None: as transformers chooses.
    weights:   directory of a run, or of one of its checkpoints, whose parameters the model begins with: pre-training before
               fine-tuning, or before a phase with longer sequences. Where ranks kept different models their mean is taken.
    """

    family = "bert"
    presets = PRESETS
    heads: ClassVar[tuple[str, ...]] = ("cls.", "qa_outputs.", "classifier.", "bert.pooler.")
    """Beginnings of the parameters' names that the run of `weights` need not share."""

    attention: str | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(100, vocab_size=self.vocab_size)
        if self.attention is not None:
            one_of(ATTENTION, attention=self.attention)

    def check(self) -> None:
        super().check()
        if self.weights is not None:
            weights.find(self.weights)

    def weight_files(self) -> Sequence[Path]:
        of_run = () if self.weights is None else (weights.find(self.weights) / MANIFEST,)
        return *super().weight_files(), *of_run

    def load_tokenizer(self, texts: Iterable[str]) -> None:
        super().load_tokenizer(texts)
        if not self.tokenizer.is_fast:
            raise UserError(f"workload.model: {self.model} has no fast tokenizer, which answer offsets need")

    def new_tokenizer(self, texts: Iterable[str]) -> Any:
        """A lower-case one.

        Holds the special tokens, every character (alone and as ##continuation, so that nothing is unknown) and the most
        frequent words.
        """
        from tokenizers import Tokenizer, normalizers, pre_tokenizers
        from tokenizers.models import WordPiece
        from tokenizers.processors import TemplateProcessing
        from transformers import PreTrainedTokenizerFast

        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(re.findall(r"\w+|[^\w\s]", text.lower()))
        characters = sorted({c for word in counts for c in word})[: max(0, (self.vocab_size - len(SPECIAL)) // 2)]
        words = sorted((w for w in counts if len(w) > 1), key=lambda word: (-counts[word], word))
        pieces = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *words][: self.vocab_size]
        vocab = {piece: i for i, piece in enumerate(pieces)}
        core = Tokenizer(WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
        core.normalizer = normalizers.BertNormalizer(lowercase=True)
        core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        core.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=core,
            unk_token="[UNK]",
            pad_token="[PAD]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )

    def load_bert(self, auto: Any, words: int | None = None, outputs: int | None = None) -> nn.Module:
        """A model of the class `auto`.

        words:   rows of the word embedding of a new model; None: the vocabulary's.
        outputs: of a classifier, which stands on the pooler.
        """
        shape = {
            "max_position_embeddings": max(512, self.seq_len),
            "vocab_size": len(self.tokenizer) if words is None else words,
        }
        options = {"num_labels": outputs, "attn_implementation": self.attention}
        net = self.load_model(auto, shape, **{key: value for key, value in options.items() if value is not None})
        # A pooler that no loss reaches would have no gradient.
        base = getattr(net, str(net.base_model_prefix), None)
        if outputs is None and base is not None and getattr(base, "pooler", None) is not None:
            base.pooler = None
        return net if self.weights is None else weights.put(net, self.weights, self.heads)

    def stored(self, tokens: Any) -> dict[str, Tensor]:
        """The model's inputs of what the tokenizer returned, in memory: int32[N, seq_len], masks and segments int8."""
        names = self.tokenizer.model_input_names
        return {n: torch.tensor(tokens[n], dtype=torch.int32 if n == "input_ids" else torch.int8) for n in names}

    @staticmethod
    def rows(stored: dict[str, Tensor], indices: Tensor, device: torch.device) -> dict[str, Tensor]:
        """These rows on the device; whole numbers as int64, which models take."""
        some = {name: values[indices].to(device) for name, values in stored.items()}
        return {name: values if values.is_floating_point() else values.long() for name, values in some.items()}
