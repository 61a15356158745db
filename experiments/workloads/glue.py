"""Fine-tuning BERT on a task of GLUE: classification of sentences or pairs of sentences, or their similarity."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, all_sum, at_least, leave_out, one_of
from experiments.workloads.bert import Bert
from experiments.workloads.glue_data import TASKS, Example, find_file, read_hub, read_tsv, synthetic_examples
from experiments.workloads.ordering import fixed_choice


@dataclass(kw_only=True, eq=False, repr=False)
class Glue(Bert):
    """One sample is one sentence, or one pair, padded or cut to `seq_len` tokens. Evaluated on the development set.

    Further arguments as in `Bert`.

    task:           cola | sst2 | mrpc | stsb | qqp | mnli (matched) | qnli | rte | wnli.
    data_path:      GLUE's folder: <data_path>/MRPC/train.tsv and so on.
    dataset:        hub data set used where no folder is given, or "synthetic".
    train_examples: number of training examples, always the same ones; None: all. Likewise dev_examples.
    held_out:       of these, the last ones, that are held out of training (`held_out_set`). None: none.
    """

    name = "glue"
    target = None  # the paper's scores could not be found

    task: str = field(default="mrpc", kw_only=False)
    data_path: str | None = None
    dataset: str = "nyu-mll/glue"
    train_examples: int | None = None
    dev_examples: int | None = None
    held_out: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(TASKS, task=self.task)
        at_least(8, seq_len=self.seq_len)
        at_least(1, train_examples=self.train_examples, dev_examples=self.dev_examples, held_out=self.held_out)
        self.about = TASKS[self.task]
        self.metric = self.about.metrics[0]
        self.synthetic = self.data_path is None and self.dataset == "synthetic"
        self.data_name = (
            f"synthetic sentences like {self.about.folder}" if self.synthetic else f"GLUE {self.about.folder}"
        )

    def check(self) -> None:
        super().check()
        if self.data_path is not None:
            find_file(self.data_path, self.about, "train")
            find_file(self.data_path, self.about, "dev")

    def data_files(self) -> Sequence[Path]:
        root = self.data_path
        return [find_file(root, self.about, split) for split in ("train", "dev") if root is not None]

    def prepare(self, shard: Shard) -> None:
        train = self._examples("train", self.train_examples)
        dev = self._examples("dev", self.dev_examples)
        texts = dict.fromkeys(text for example in train for text in example.texts)
        self.load_tokenizer(texts)
        if self.held_out and not self.synthetic:
            train, held = leave_out(train, self.held_out, "examples")
            self.held_out_set = self._tokenized(held)
        self._train, self.eval_set = self._tokenized(train), self._tokenized(dev)

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        return self.load_bert(AutoModelForSequenceClassification, outputs=len(self.about.classes) or 1)

    @property
    def training_samples(self) -> int:
        return len(self._train["labels"])

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        return self.rows(self._train, indices, shard.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = dict(batch)
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return F.cross_entropy(logits, labels.long()) if self.about.classes else F.mse_loss(logits[:, 0], labels)

    def scores(self, model: nn.Module, samples: dict[str, Tensor], shard: Shard) -> dict[str, float]:
        labels = samples["labels"]
        mine = torch.arange(len(labels))[shard.rank :: shard.world_size]
        # Correlations are not sums over ranks: every rank gets all answers, each from the rank that has it.
        answers = torch.zeros(len(labels), dtype=torch.float64)
        for some in mine.split(self.eval_batch) if len(mine) else ():  # with more ranks than examples some have none
            inputs = self.rows(samples, some, shard.device)
            inputs.pop("labels")
            logits = model(**inputs).logits.float().cpu()
            answers[some] = (logits.argmax(1) if self.about.classes else logits[:, 0]).double()
        answers = torch.tensor(all_sum(answers.tolist(), shard), dtype=torch.float64)
        return {name: 100 * METRICS[name](answers, labels.double()) for name in self.about.metrics}

    def _examples(self, split: str, limit: int | None) -> list[Example]:
        if self.data_path is not None:
            examples = read_tsv(find_file(self.data_path, self.about, split), self.about)
        elif self.synthetic:
            examples = synthetic_examples(limit or 1000, self.about, split)
        else:
            examples = read_hub(self.dataset, self.task, split)
        return [examples[i] for i in fixed_choice(len(examples), limit, split)]

    def _tokenized(self, examples: list[Example]) -> dict[str, Tensor]:
        """`stored`, and "labels" as float32[examples]."""
        columns = [list(texts) for texts in zip(*(example.texts for example in examples), strict=True)]
        tokens = self.tokenizer(*columns, truncation=True, max_length=self.seq_len, padding="max_length")
        return {**self.stored(tokens), "labels": torch.tensor([example.label for example in examples])}


def _score(name: str, answers: Tensor, labels: Tensor) -> float:
    """By the function of torchmetrics with that name; 0 where it is not a number, as where all answers are the same."""
    from torchmetrics import functional
    from torchmetrics.functional import classification

    if name.startswith("binary_"):
        return float(getattr(classification, name)(answers.long(), labels.long()))
    return float(getattr(functional, name)(answers, labels).nan_to_num())


def _matthews(answers: Tensor, labels: Tensor) -> float:
    """0 where one side is all of one class, as in GLUE's own script: torchmetrics has a small number in its place."""
    alike = any(len(side.unique()) < 2 for side in (answers, labels))
    return 0.0 if alike else _score("binary_matthews_corrcoef", answers, labels)


METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "accuracy": lambda answers, labels: float((answers == labels).double().mean()),
    "f1": functools.partial(_score, "binary_f1_score"),
    "matthews": _matthews,
    "pearson": functools.partial(_score, "pearson_corrcoef"),
    "spearman": functools.partial(_score, "spearman_corrcoef"),
}
