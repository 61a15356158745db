"""From start and end logits to answer texts, and the official exact match and F1 of SQuAD 1.1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """An answer inside one window: first and last token, and start logit + end logit."""

    first: int
    last: int
    score: float


def best_spans(
    start_logits: Tensor, end_logits: Tensor, allowed: Tensor, n_best: int, max_answer_len: int
) -> list[Span | None]:
    """The best span of each window, or None where none is possible.

    start_logits, end_logits: float[windows, tokens]. allowed: bool[windows, tokens], True for the context's tokens.
    Pairs the `n_best` best starts with the `n_best` best ends and keeps those with first <= last that are at most
    `max_answer_len` tokens long.
    """
    n_best = min(n_best, start_logits.shape[1])
    never = torch.finfo(torch.float32).min
    starts, firsts = start_logits.float().masked_fill(~allowed, never).topk(n_best, dim=1)
    ends, lasts = end_logits.float().masked_fill(~allowed, never).topk(n_best, dim=1)
    length = lasts[:, None, :] - firsts[:, :, None] + 1
    fits = (length >= 1) & (length <= max_answer_len)
    # Fewer than n_best allowed tokens: topk fills up with masked ones.
    fits &= (starts > never)[:, :, None] & (ends > never)[:, None, :]
    scores = (starts[:, :, None] + ends[:, None, :]).masked_fill(~fits, -torch.inf).flatten(1)
    best, where = scores.max(dim=1)
    spans: list[Span | None] = []
    for i, (score, position) in enumerate(zip(best.tolist(), where.tolist(), strict=True)):
        row, column = divmod(position, n_best)
        spans.append(None if score == -torch.inf else Span(int(firsts[i, row]), int(lasts[i, column]), score))
    return spans


def em_f1_sums(predictions: list[str], answers: list[list[str]]) -> tuple[float, float]:
    """Sums over questions of exact match and F1, each 0..1 per question, the best over a question's answers.

    torchmetrics implements the official script: lower case, no punctuation, no articles, single spaces.
    """
    if not predictions:
        return 0.0, 0.0
    from torchmetrics.functional.text import squad

    scores = squad(
        [{"prediction_text": text, "id": str(i)} for i, text in enumerate(predictions)],
        [
            {"answers": {"answer_start": [0] * len(texts), "text": texts}, "id": str(i)}
            for i, texts in enumerate(answers)
        ],
    )
    count = len(predictions)
    return float(scores["exact_match"]) * count / 100, float(scores["f1"]) * count / 100
