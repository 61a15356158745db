"""What the BERT workloads share: tokenizer, model, parameter groups. transformers is imported on use."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from experiments.workloads.base import at_least, one_of
from experiments.workloads.ordering import Shuffled
from launch.errors import UserError
from launch.words import shortened

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


class Text(Shuffled):
    """A workload of a transformer: samples are sequences, biases and LayerNorm weights do not decay."""

    sample = "sequences"

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim > 1


@dataclass(kw_only=True, eq=False, repr=False)
class Bert(Text):
    """A workload of BERT.

    model:      hub name or checkpoint folder; None: random weights of `preset` and a vocabulary from the text.
    init:       pretrained | random (weights only, in the shape of `model`); None: pretrained if `model` is given.
    preset:     base | large | xl | small | tiny, the shape where `model` is None.
    attention:  one of `ATTENTION`; None: as transformers chooses.
    seq_len:    tokens of a sample.
    eval_batch: samples at once in `evaluate`.
    vocab_size: pieces of a vocabulary made from the text.
    """

    model: str | None = None
    init: str | None = None
    preset: str = "base"
    attention: str | None = None
    seq_len: int = 128
    eval_batch: int = 64
    vocab_size: int = 2000

    def __post_init__(self) -> None:
        at_least(1, eval_batch=self.eval_batch)
        at_least(100, vocab_size=self.vocab_size)

    def check(self) -> None:
        check_model(self.model, self.init, self.preset, self.attention)

    def load_tokenizer(self, texts: Iterable[str]) -> None:
        """Makes `tokenizer`: a checkpoint's, or one of `word_tokenizer`. Raises UserError where there is no fast one."""
        if self.model is None:
            self.tokenizer = word_tokenizer(texts, self.vocab_size)
            return
        from transformers import AutoTokenizer

        self.tokenizer = load(AutoTokenizer, self.model, use_fast=True)
        if not self.tokenizer.is_fast:
            raise UserError(f"workload.model: {self.model} has no fast tokenizer, which answer offsets need")

    def load_model(self, auto: Any, words: int | None = None, outputs: int | None = None) -> nn.Module:
        """`load_model` of this workload. words: rows of the word embedding; None: the vocabulary's."""
        words = len(self.tokenizer) if words is None else words
        return load_model(auto, self.model, self.init, self.preset, words, self.seq_len, outputs, self.attention)


def check_model(model: str | None, init: str | None, preset: str, attention: str | None = None) -> None:
    """Raises UserError for an unknown `init`, `preset` or `attention`, or a local model folder that cannot be one."""
    if init not in (None, "pretrained", "random"):
        raise UserError(f"workload.init={shortened(init)} is unknown: pretrained or random")
    if init == "pretrained" and model is None:
        raise UserError("workload.init=pretrained needs workload.model (a hub name or a folder)")
    one_of(PRESETS, preset=preset)
    if attention is not None:
        one_of(ATTENTION, attention=attention)
    if model is not None and looks_local(model):
        folder = Path(model).expanduser()
        if not folder.is_dir():
            raise UserError(f"workload.model: no folder {folder}: give a checkpoint folder or a hub name")
        if not (folder / "config.json").is_file():
            raise UserError(f"workload.model: {folder} holds no config.json, so it is not a checkpoint folder")


def looks_local(model: str) -> bool:
    """Whether `model` is a path, not a hub name: such a model is never looked up on the network."""
    return model.startswith(("/", "~", ".")) or Path(model).is_dir()


def load(loader: Any, model: str, **options: Any) -> Any:
    """`loader.from_pretrained(model)`, without network for a folder. Raises UserError when it fails."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    local = looks_local(model)
    try:
        return loader.from_pretrained(
            str(Path(model).expanduser()) if local else model, local_files_only=local, **options
        )
    except Exception as error:  # OSError, ValueError and the hub client's own types
        where = "" if local else " from the hub (no network?)"
        raise UserError(
            f"cannot load {model}{where}: give a checkpoint folder with workload.model=/path, or workload.init=random "
            f"workload.model=null ({type(error).__name__})"
        ) from error


def word_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A fast lower-case BERT tokenizer with a vocabulary from `texts`, the same on every rank.

    Holds the special tokens, every character (alone and as ##continuation, so that nothing is unknown) and the most
    frequent words, `size` pieces in all.
    """
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(re.findall(r"\w+|[^\w\s]", text.lower()))
    characters = sorted({c for word in counts for c in word})[: max(0, (size - len(SPECIAL)) // 2)]
    words = sorted((w for w in counts if len(w) > 1), key=lambda word: (-counts[word], word))
    pieces = [*SPECIAL, *characters, *(f"##{c}" for c in characters), *words][:size]
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


def load_model(
    auto: Any,
    model: str | None,
    init: str | None,
    preset: str,
    vocab_size: int,
    positions: int,
    outputs: int | None = None,
    attention: str | None = None,
) -> nn.Module:
    """A model of the class `auto`: pretrained, or with random weights and the shape of `model` or of `preset`.

    outputs:   of a classifier, which stands on the pooler.
    attention: one of ATTENTION; None: as transformers chooses.
    """
    from transformers import AutoConfig, BertConfig

    head: dict[str, Any] = {} if outputs is None else {"num_labels": outputs}

    kernel: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if model is not None and init != "random":
        # Checkpoints may be stored in half precision; parameters here are fp32.
        net = load(auto, model, **head, **kernel).float()
    elif model is not None:
        net = auto.from_config(load(AutoConfig, model, **head), **kernel).float()
    else:
        size: dict[str, Any] = {
            "max_position_embeddings": max(512, positions),
            "vocab_size": vocab_size,
            **PRESETS[preset],
            **head,
        }
        net = auto.from_config(BertConfig(**size), **kernel).float()
    known = getattr(net.config, "max_position_embeddings", positions)
    if positions > known:
        raise UserError(f"workload.seq_len={positions} is longer than the model's {known} positions")
    # A pooler that no loss reaches would have no gradient.
    base = getattr(net, net.base_model_prefix, None)
    if outputs is None and base is not None and getattr(base, "pooler", None) is not None:
        base.pooler = None
    net.train()
    return net
