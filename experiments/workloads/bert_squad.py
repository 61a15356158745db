"""Fine-tuning BERT on SQuAD 1.1: answer extraction, with the official exact match and F1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.workloads.base import Batch, Shard, all_sum, at_least, leave_out
from experiments.workloads.bert import Bert
from experiments.workloads.ordering import fixed_choice
from experiments.workloads.squad_data import (
    SquadQuestion,
    best_spans,
    em_f1_sums,
    find_file,
    read_hub,
    read_json,
    synthetic_questions,
)
from launch.errors import UserError

CHUNK = 1000  # questions tokenized at once: bounds the memory that Python lists of tokens take


@dataclass(kw_only=True, eq=False, repr=False)
class BertSquad(Bert):
    """Each question and its paragraph become windows of `seq_len` tokens; one sample is one window.

    Further arguments as in `Bert`.

    embedded_words:  with random weights of `preset`, rows of the word embedding, if more than the vocabulary has.
    data_path:       folder with train-v1.1.json and dev-v1.1.json (each may be .xz).
    train_file:      training file, absolute or inside `data_path`; likewise dev_file.
    dataset:         hub data set used when no file is given, or "synthetic".
    doc_stride:      tokens shared by consecutive windows of one paragraph.
    max_query_len:   longer questions are cut to this many tokens.
    train_questions: number of training questions, always the same ones; None: all. Likewise dev_questions.
    held_out:        training questions, the last ones, that are held out of training (`held_out_set`). None: none.
    n_best:          starts and ends considered per window.
    max_answer_len:  longest answer in tokens.
    """

    name = "bert_squad"
    metric = "f1"
    target = None  # the paper's F1 could not be found

    data_path: str | None = None
    train_file: str | None = None
    dev_file: str | None = None
    dataset: str = "squad"
    seq_len: int = 384
    doc_stride: int = 128
    max_query_len: int = 64
    train_questions: int | None = None
    dev_questions: int | None = None
    n_best: int = 20
    max_answer_len: int = 30
    eval_batch: int = 32
    embedded_words: int | None = None
    held_out: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.seq_len - self.max_query_len - 3
        if not 0 <= self.doc_stride < most:
            raise UserError(
                f"workload.doc_stride={self.doc_stride} must be at least 0 and less than seq_len - max_query_len - 3 = "
                f"{most}"
            )
        names = ("train_questions", "dev_questions", "max_query_len", "held_out", "n_best", "max_answer_len")
        at_least(1, **{name: getattr(self, name) for name in names})
        self._from_files = bool(self.data_path or self.train_file or self.dev_file)
        self.synthetic = not self._from_files and self.dataset == "synthetic"
        self.data_name = "synthetic questions" if self.synthetic else "SQuAD 1.1"
        if self.train_questions is not None and not self.synthetic:
            self.data_name += f" ({self.train_questions} training questions)"

    def check(self) -> None:
        super().check()
        if self._from_files:
            self._file("train")
            self._file("dev")

    def data_files(self) -> Sequence[Path]:
        return [self._file(split) for split in ("train", "dev") if self._from_files]

    def prepare(self, shard: Shard) -> None:
        train = self._questions("train", self.train_questions)
        dev = self._questions("dev", self.dev_questions)
        # The last articles: no text is in both.
        train, held = leave_out(train, None if self.synthetic else self.held_out, "questions")
        texts = dict.fromkeys(text for q in train for text in (q.question, q.context))
        self.load_tokenizer(texts)
        self._train = _Windows(self, train, with_offsets=False)
        # A question's windows stay on one rank, which alone can choose the best of them.
        self.eval_set = _Windows(self, dev[shard.rank :: shard.world_size], with_offsets=True)
        if held:
            self.held_out_set = _Windows(self, held[shard.rank :: shard.world_size], with_offsets=True)

    def build_model(self) -> nn.Module:
        from transformers import AutoModelForQuestionAnswering

        words = max(len(self.tokenizer), self.embedded_words or 0)
        return self.load_bert(AutoModelForQuestionAnswering, words)

    def batch(self, indices: Tensor, shard: Shard, key: tuple[int, int, int, int]) -> Batch:
        first, last = self._train.answers[indices].to(shard.device).unbind(1)
        return {**self.rows(self._train.inputs, indices, shard.device), "start_positions": first, "end_positions": last}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).loss

    def scores(self, model: nn.Module, samples: _Windows, shard: Shard) -> dict[str, float]:
        """Of the answer to each question from its best-scoring window; "" where none is possible."""
        texts = [""] * len(samples.questions)
        best = [-float("inf")] * len(texts)
        for first in range(0, len(samples), self.eval_batch):
            windows = torch.arange(first, min(first + self.eval_batch, len(samples)))
            out = model(**self.rows(samples.inputs, windows, shard.device))
            allowed = samples.offsets[windows, :, 1] > 0
            spans = best_spans(out.start_logits.cpu(), out.end_logits.cpu(), allowed, self.n_best, self.max_answer_len)
            for window, span in zip(windows.tolist(), spans, strict=True):
                question = int(samples.question[window])
                if span is not None and span.score > best[question]:
                    begin, end = samples.offsets[window, span.first, 0], samples.offsets[window, span.last, 1]
                    texts[question] = samples.questions[question].context[begin:end]
                    best[question] = span.score
        exact, f1 = em_f1_sums(texts, [[text for text, _ in q.answers] for q in samples.questions])
        exact, f1, count = all_sum([exact, f1, float(len(texts))], shard)
        return {"f1": 100 * f1 / count, "exact_match": 100 * exact / count}

    def _file(self, split: str) -> Path:
        return find_file(self.data_path, self.train_file if split == "train" else self.dev_file, split)

    def _questions(self, split: str, limit: int | None) -> list[SquadQuestion]:
        if self._from_files:
            questions = read_json(self._file(split))
        elif self.synthetic:
            questions = synthetic_questions(limit or 1000, split)
        else:
            questions = read_hub(self.dataset, "train" if split == "train" else "validation")
        return [questions[i] for i in fixed_choice(len(questions), limit, split)]


class _Windows:
    """Tokenized windows of `questions`.

    inputs:   as `Bert.stored` makes them.
    question: int64[windows]: index of the question.
    answers:  int64[windows, 2]: first and last token of the answer; (0, 0), the [CLS] token, where it lies outside.
    offsets:  int32[windows, seq_len, 2]: characters of each context token, (0, 0) elsewhere; only with `with_offsets`.
    """

    def __init__(self, workload: BertSquad, questions: list[SquadQuestion], with_offsets: bool) -> None:
        self.questions = questions
        inputs, owner, answers, offsets = [], [], [], []
        for first in range(0, len(questions), CHUNK):
            some = questions[first : first + CHUNK]
            tokens = workload.tokenizer(
                _cut([q.question for q in some], workload),
                [q.context for q in some],
                truncation="only_second",
                max_length=workload.seq_len,
                stride=workload.doc_stride,
                padding="max_length",
                return_overflowing_tokens=True,
                return_offsets_mapping=with_offsets,
            )
            inputs.append(workload.stored(tokens))
            for window, question in enumerate(tokens["overflow_to_sample_mapping"]):
                owner.append(first + question)
                answers.append(_answer_tokens(tokens, window, some[question]))
                if with_offsets:
                    # A context token has a non-empty span; everything else counts as not allowed.
                    in_context = torch.tensor([segment == 1 for segment in tokens.sequence_ids(window)])
                    spans = torch.tensor(tokens["offset_mapping"][window], dtype=torch.int32)
                    offsets.append(spans * in_context[:, None])
        self.inputs = {name: torch.cat([chunk[name] for chunk in inputs]) for name in (inputs[0] if inputs else ())}
        self.question = torch.tensor(owner)
        self.answers = torch.tensor(answers)
        self.offsets = torch.stack(offsets) if offsets else torch.empty(0)

    def __len__(self) -> int:
        return len(self.question)


def _answer_tokens(tokens: Any, window: int, question: SquadQuestion) -> tuple[int, int]:
    """First and last token of the first answer in this window, or (0, 0) when it is not wholly inside."""
    text, at = question.answers[0]
    first = tokens.char_to_token(window, at, sequence_index=1)
    last = tokens.char_to_token(window, at + len(text) - 1, sequence_index=1)
    return (0, 0) if first is None or last is None else (first, last)


def _cut(questions: list[str], workload: BertSquad) -> list[str]:
    """Questions of at most `max_query_len` tokens."""
    limit = workload.max_query_len
    tokens = workload.tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True)
    return [
        question if len(spans) <= limit else question[: spans[limit - 1][1]]
        for question, spans in zip(questions, tokens["offset_mapping"], strict=True)
    ]
