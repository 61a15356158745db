"""Questions of SQuAD 1.1 from JSON files, from the hub, or made up."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.workloads.files import existing_dir, from_hub
from experiments.workloads.ordering import generator
from launch.errors import UserError, refused

XZ_MAGIC = b"\xfd7zXZ\x00"


@dataclass(frozen=True)
class SquadQuestion:
    """One question on one paragraph. `answers`: (text, offset of its first character in `context`), at least one."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]


def find_file(folder: str | None, given: str | None, split: str) -> Path:
    """The file of `split` (train | dev): `given` (absolute or inside `folder`), else the one in `folder`.

    Raises UserError when it is missing, ambiguous, or plainly not JSON.
    """
    root = existing_dir(folder, "expected train-v1.1.json and dev-v1.1.json in it") if folder else Path()
    if given:
        file = root / Path(given).expanduser()
        if not file.is_file():
            raise UserError(f"workload.{split}_file: no file {file}")
    else:
        found = [root / f"{split}-v1.1.json{end}" for end in ("", ".xz")]
        found = [f for f in found if f.is_file()][:1] or sorted(root.glob(f"{split}*.json*"))
        if len(found) != 1:
            names = ", ".join(f.name for f in found)
            raise UserError(
                f"data.path: {root} holds no {split}-v1.1.json"
                + (f": choose one of {names} with workload.{split}_file" if names else "")
            )
        file = found[0]
    _check_ends(file)
    return file


def _check_ends(file: Path) -> None:
    """A cheap look at both ends of a file: a truncated download shows without parsing all of it."""
    with file.open("rb") as stream:
        head = stream.read(64)
        stream.seek(max(0, file.stat().st_size - 64))
        tail = stream.read()
    if file.suffix == ".xz":
        good = head.startswith(XZ_MAGIC) and tail.endswith(b"YZ")
    else:
        good = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{") and tail.rstrip().endswith(b"}")
    if not good:
        raise UserError(f"{file} is not a complete SQuAD JSON file (a truncated or wrong download?)")


def read_json(file: Path) -> list[SquadQuestion]:
    """Questions of a file in the official SQuAD 1.1 format, plain or .xz. Raises UserError when it is broken."""
    try:
        raw = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
        document = json.loads(raw)
    except RecursionError as error:
        raise UserError(f"{file} is not in SQuAD 1.1 format: it is nested too deeply") from error
    except (ValueError, lzma.LZMAError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    try:
        questions = [
            SquadQuestion(
                _text(qa, "id"),
                _text(qa, "question").strip(),
                _text(paragraph, "context"),
                tuple((_text(a, "text"), _offset(a)) for a in qa["answers"]),
            )
            for article in document["data"]
            for paragraph in article["paragraphs"]
            for qa in paragraph["qas"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is not in SQuAD 1.1 format: {type(error).__name__} {str(error)[:100]}") from error
    return checked(questions, str(file))


def _text(holder: Any, key: str) -> str:
    if not isinstance(holder[key], str):
        raise TypeError(f"{key} is not text but {type(holder[key]).__name__}")
    return str(holder[key])


def _offset(answer: Any) -> int:
    at = answer["answer_start"]
    if not isinstance(at, int) or isinstance(at, bool) or at < 0:
        raise TypeError("answer_start is not a whole number of at least 0")
    return at


def read_hub(dataset: str, split: str) -> list[SquadQuestion]:
    """Questions of a hub data set with SQuAD's columns. Raises UserError when the hub cannot be reached."""
    instead = "local files with data.path=FOLDER (train-v1.1.json, dev-v1.1.json)"
    table: Any = from_hub(dataset, split=split, read=lambda table: table, instead=instead)
    with refused(f"{dataset} has not SQuAD's columns (id, question, context, answers)", KeyError, TypeError):
        questions = [
            SquadQuestion(
                row["id"],
                row["question"].strip(),
                row["context"],
                tuple(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
            )
            for row in table
        ]
    return checked(questions, dataset)


def checked(questions: list[SquadQuestion], source: str) -> list[SquadQuestion]:
    """`questions` whose answers stand at their offsets. Raises UserError when more than 1 % do not, or none is left."""
    good = [
        q
        for q in questions
        if q.answers and all(text and q.context[at : at + len(text)] == text for text, at in q.answers)
    ]
    if not questions:
        raise UserError(f"{source} holds no question")
    if len(good) < max(1, 0.99 * len(questions)):
        raise UserError(
            f"{source}: {len(questions) - len(good)} of {len(questions)} questions have no answer at the given offset"
        )
    return good


def synthetic_questions(count: int, split: str) -> list[SquadQuestion]:
    """Made-up paragraphs of a few facts, each asked for one of them; the answer is a name or a year."""
    stream = generator("synthetic questions", split)

    def pick(items: list[str]) -> str:
        return items[int(torch.randint(len(items), (1,), generator=stream))]

    things = ["bridge", "castle", "library", "harbour", "theatre", "railway", "garden", "market", "tower", "canal"]
    places = ["Alda", "Brevik", "Corvo", "Dunmore", "Elsin", "Farow", "Gant", "Holm", "Istra", "Jarna"]
    people = ["Ada Moor", "Ben Holt", "Cara Lind", "Dov Marsh", "Eva Roth", "Finn Oake", "Gail Pike", "Hugo Stern"]
    questions = []
    for number in range(count):
        facts = []
        for _ in range(5):
            thing, place, person = pick(things), pick(places), pick(people)
            year = str(1500 + int(torch.randint(500, (1,), generator=stream)))
            facts.append((thing, place, person, year))
        text = [f"The {t} of {p} was built by {who} in {y}." for t, p, who, y in facts]
        asked = int(torch.randint(len(facts), (1,), generator=stream))
        thing, place, person, year = facts[asked]
        wants_year = bool(torch.randint(2, (1,), generator=stream))
        before = sum(len(sentence) + 1 for sentence in text[:asked])
        answer = year if wants_year else person
        questions.append(
            SquadQuestion(
                id=f"{split}-{number}",
                question=f"{'When was' if wants_year else 'Who built'} the {thing} of {place}"
                + (" built?" if wants_year else "?"),
                context=" ".join(text),
                answers=((answer, before + text[asked].index(answer)),),
            )
        )
    return questions


# ---- from start and end logits to answer texts, and the official exact match and F1 -----------------------------------


@dataclass(frozen=True)
class AnswerSpan:
    """An answer inside one window: first and last token, and start logit + end logit."""

    first: int
    last: int
    score: float


def best_spans(
    start_logits: Tensor, end_logits: Tensor, allowed: Tensor, n_best: int, max_answer_len: int
) -> list[AnswerSpan | None]:
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
    spans: list[AnswerSpan | None] = []
    for i, (score, position) in enumerate(zip(best.tolist(), where.tolist(), strict=True)):
        row, column = divmod(position, n_best)
        spans.append(None if score == -torch.inf else AnswerSpan(int(firsts[i, row]), int(lasts[i, column]), score))
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
