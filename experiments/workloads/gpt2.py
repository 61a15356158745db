"""GPT-2 pre-training: next-token prediction on WikiText or any other text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads import bert
from experiments.workloads.base import Batch, Shard, at_least, leave_out, one_of
from experiments.workloads.corpus import check_stream, corpus_name, hold_out, perplexity, read_lines, token_stream
from experiments.workloads.files import text_files
from launch.errors import UserError
from launch.words import shortened

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
class GPT2(bert.Text):
    """The text as one stream of tokens, a line break after each line, cut into sequences of `seq_len`; one sample is one.

    model:          hub name or checkpoint folder for tokenizer and shape; None: `preset`, vocabulary from the text.
    init:           random (pre-training from scratch, the default) | pretrained.
    preset:         medium | small | mini | micro | tiny, the shape where `model` is None.
    data_path:      a text file or a folder of .txt files.
    texts:          files of that folder instead, in this order: .txt, or SQuAD's .json and .json.xz for their paragraphs.
    dataset:        hub data set with a column "text" used when no file is given, or "synthetic".
    dataset_config: its configuration.
    documents:      number of leading lines of a file, or rows of a data set, to use; None: all.
    valid_fraction: share of the sequences, at the end of the stream, that is evaluated on.
    held_out:       sequences before these to leave out of training as well; the perplexity on them is the metric
                    `held_out`, for the choice of hyper-parameters. None or 0: none.
    vocab_size:     pieces of a vocabulary made from the text (byte-level BPE); a short text gives fewer.
    """

    name = "gpt2"
    metric = "perplexity"
    higher_is_better = False
    target = None  # the paper's figure could not be found

    model: str | None = None
    init: str = "random"
    preset: str = "small"
    data_path: str | None = None
    dataset: str = "Salesforce/wikitext"
    dataset_config: str | None = "wikitext-103-raw-v1"
    seq_len: int = 1024
    documents: int | None = None
    valid_fraction: float = 0.01
    eval_batch: int = 16
    vocab_size: int = 8000
    held_out: int | None = None
    texts: list[str] | None = None

    def __post_init__(self) -> None:
        if self.init not in ("pretrained", "random"):
            raise UserError(f"workload.init={shortened(self.init)} is unknown: pretrained or random")
        one_of(PRESETS, preset=self.preset)
        check_stream(self.seq_len, self.valid_fraction, self.documents)
        positions = PRESETS[self.preset]["n_positions"]
        if self.model is None and self.seq_len > positions:
            raise UserError(f"workload.seq_len={self.seq_len}: preset {self.preset} has {positions} positions")
        at_least(0, held_out=self.held_out)
        at_least(1, eval_batch=self.eval_batch)
        if self.vocab_size < 300:
            raise UserError(
                f"workload.vocab_size={self.vocab_size} is too small: at least 300, the bytes alone are 256"
            )
        self.synthetic = self.data_path is None and self.dataset == "synthetic"
        named = self.data_path
        if named is not None and self.texts:
            named = ", ".join(dict.fromkeys(Path(name).parts[0] for name in self.texts))
        self.data_name = corpus_name(named, self.dataset, self.dataset_config)

    def check(self) -> None:
        bert.check_model(self.model, self.init, "base")
        if self.data_path is not None:
            text_files(self.data_path, self.texts or ())

    def prepare(self, shard: Shard) -> None:
        lines = read_lines(self.data_path, self.dataset, self.dataset_config, self.documents, self.texts or ())
        self.tokenizer = byte_tokenizer(lines, self.vocab_size) if self.model is None else _hub_tokenizer(self.model)
        train, valid = hold_out(self._sequences(lines), self.valid_fraction, self.data_name)
        self._train, held = leave_out(train, self.held_out, "sequences")
        self.eval_set = valid[shard.rank :: shard.world_size]
        self.held_out_set = held[shard.rank :: shard.world_size] if self.held_out else None

    def build_model(self) -> nn.Module:
        from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

        if self.model is not None and self.init == "pretrained":
            net = bert.load(AutoModelForCausalLM, self.model)
        elif self.model is not None:
            net = AutoModelForCausalLM.from_config(bert.load(AutoConfig, self.model))
        else:
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            shape: dict[str, Any] = {"vocab_size": len(self.tokenizer), **PRESETS[self.preset], **ends}
            net = AutoModelForCausalLM.from_config(GPT2Config(**shape))
        known = getattr(net.config, "max_position_embeddings", self.seq_len)
        if self.seq_len > known:
            raise UserError(f"workload.seq_len={self.seq_len} is longer than the model's {known} positions")
        return net.float().train()

    @property
    def training_samples(self) -> int:
        return len(self._train)

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        return self._train[indices].long().to(shard.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(*self._predictions(model, batch))

    def scores(self, model: nn.Module, samples: Tensor, shard: Shard) -> dict[str, float]:
        some = (part.long().to(shard.device) for part in samples.split(self.eval_batch) if len(part))
        return perplexity((self._predictions(model, part) for part in some), shard)

    @staticmethod
    def _predictions(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of all tokens but the first, and these tokens."""
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return logits.flatten(0, 1), tokens[:, 1:].flatten()

    def _sequences(self, lines: list[str]) -> Tensor:
        """int32[N, seq_len]; the incomplete last one is dropped."""
        stream = token_stream(lambda some: self.tokenizer([line + "\n" for line in some]), lines)
        return stream[: len(stream) // self.seq_len * self.seq_len].view(-1, self.seq_len)


def byte_tokenizer(lines: list[str], size: int) -> Any:
    """A byte-level BPE tokenizer as GPT-2's, its `size` pieces learned from `lines`, the same on every rank."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False, min_frequency=2
    )
    core.train_from_iterator((line + "\n" for line in lines), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=END, eos_token=END, unk_token=END)


def _hub_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = bert.load(AutoTokenizer, model)
    # Whole texts are cut here, not by the tokenizer, which would warn of their length.
    tokenizer.model_max_length = 10**9
    return tokenizer
