"""What the workloads of transformers share: tokenizer and model, of a checkpoint or new. transformers is imported on use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from experiments.workloads.base import at_least, one_of
from experiments.workloads.ordering import Shuffled
from launch.errors import UserError
from launch.words import shortened


@dataclass(kw_only=True, eq=False, repr=False)
class Transformer(Shuffled):
    """Samples are sequences of tokens; biases and LayerNorm weights do not decay.

    A subclass gives `family`, as transformers calls it, and `presets`: arguments of its configuration by name.

    model:      hub name or checkpoint folder; None: random weights of `preset` and a vocabulary from the text.
    init:       pretrained | random (weights only, in the shape of `model`); None: pretrained if `model` is given.
    preset:     one of `presets`, the shape where `model` is None.
    seq_len:    tokens of a sample.
    eval_batch: samples at once in `evaluate`.
    vocab_size: pieces of a vocabulary made from the text.
    """

    sample = "sequences"
    family: ClassVar[str]
    presets: ClassVar[dict[str, dict[str, Any]]]

    model: str | None = None
    init: str | None = None
    preset: str = "base"
    seq_len: int = 128
    eval_batch: int = 64
    vocab_size: int = 2000

    def __post_init__(self) -> None:
        if self.init not in (None, "pretrained", "random"):
            raise UserError(f"workload.init={shortened(self.init)} is unknown: pretrained or random")
        if self.init == "pretrained" and self.model is None:
            raise UserError("workload.init=pretrained needs workload.model (a hub name or a folder)")
        one_of(self.presets, preset=self.preset)
        at_least(1, eval_batch=self.eval_batch)

    def check(self) -> None:
        if self.model is not None and _is_local(self.model):
            folder = Path(self.model).expanduser()
            if not folder.is_dir():
                raise UserError(f"workload.model: no folder {folder}: give a checkpoint folder or a hub name")
            if not (folder / "config.json").is_file():
                raise UserError(f"workload.model: {folder} holds no config.json, so it is not a checkpoint folder")

    def weight_files(self) -> Sequence[Path]:
        return [Path(self.model).expanduser()] if self.model is not None and _is_local(self.model) else ()

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim > 1

    def load_tokenizer(self, texts: Iterable[str]) -> None:
        """Makes `tokenizer`: the checkpoint's, or where there is none a new one."""
        if self.model is None:
            self.tokenizer = self.new_tokenizer(texts)
            return
        from transformers import AutoTokenizer

        self.tokenizer = self._load(AutoTokenizer)

    @abstractmethod
    def new_tokenizer(self, texts: Iterable[str]) -> Any:
        """A fast tokenizer whose `vocab_size` pieces come from `texts`, the same on every rank."""

    def load_model(self, auto: Any, shape: dict[str, Any], **options: Any) -> nn.Module:
        """A model of the class `auto`, in fp32. Raises UserError where it is too short for `seq_len`.

        shape:   arguments of the configuration besides those of `preset`, where `model` is None.
        options: arguments of the configuration in any case.
        """
        from transformers import AutoConfig

        if self.model is None:
            net = auto.from_config(AutoConfig.for_model(self.family, **shape, **self.presets[self.preset], **options))
        elif self.init == "random":
            net = auto.from_config(self._load(AutoConfig, **options))
        else:
            net = self._load(auto, **options)
        known = getattr(net.config, "max_position_embeddings", self.seq_len)
        if self.seq_len > known:
            raise UserError(f"workload.seq_len={self.seq_len} is longer than the model's {known} positions")
        return net.float().train()  # checkpoints may be stored in half precision

    def _load(self, loader: Any, **options: Any) -> Any:
        """`loader.from_pretrained(model)`, without network for a folder. Raises UserError when it fails."""
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model = str(self.model)
        local = _is_local(model)
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


def _is_local(model: str) -> bool:
    """Whether `model` is a path, not a hub name: such a model is never looked up on the network."""
    return model.startswith(("/", "~", ".")) or Path(model).is_dir()
