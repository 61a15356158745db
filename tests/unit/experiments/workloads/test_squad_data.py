"""Files of SQuAD: those that are read, the questions that are chosen, and what is wrong in one line."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest

from experiments.workloads.base import Shard
from experiments.workloads.squad_data import SquadQuestion, checked, find_file, read_json, synthetic_questions
from launch.errors import UserError
from tests.helpers.workload_data import squad_files
from tests.unit.experiments.workloads.test_workloads_squad import tiny


def test_file_and_xz_and_named_file_hold_the_same_questions(tmp_path: Path) -> None:
    root = squad_files(tmp_path / "a")
    packed = tmp_path / "b"
    packed.mkdir()
    for name in ("train", "dev"):
        raw = (root / f"{name}-v1.1.json").read_bytes()
        (packed / f"{name}-v1.1.json.xz").write_bytes(lzma.compress(raw))
    plain = read_json(find_file(str(root), None, "train"))
    assert len(plain) == 60
    assert plain == read_json(find_file(str(packed), None, "train"))
    assert plain == read_json(find_file(None, str(packed / "train-v1.1.json.xz"), "train"))


def test_limits_choose_the_same_questions_for_every_run(tmp_path: Path) -> None:
    root = str(squad_files(tmp_path))
    ids = []
    for _ in range(2):
        workload = tiny(data_path=root, dev_questions=5, train_questions=20)
        workload.prepare(Shard())
        ids.append([q.id for q in workload.eval_set.questions])
        assert len(set(workload._train.question.tolist())) == 20
    assert ids[0] == ids[1]
    assert len(ids[0]) == 5
    assert set(ids[0]) <= {q.id for q in read_json(find_file(root, None, "dev"))}
    halves = []
    for rank in range(2):
        workload = tiny(data_path=root, dev_questions=5)
        workload.prepare(Shard(rank, 2))
        halves += [q.id for q in workload.eval_set.questions]
    assert sorted(halves) == sorted(ids[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"data": [', "not a complete SQuAD JSON"),
        ("<html>not found</html>", "not a complete SQuAD JSON"),
        ('{"data": [}', "not valid JSON"),
        ('{"version": "1.1"}', "not in SQuAD 1.1 format: KeyError 'data'"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "not in SQuAD 1.1 format: KeyError 'qas'"),
        ('{"data": 5}', "not in SQuAD 1.1 format"),
        ('{"data": []}', "holds no question"),
    ],
)
def test_broken_json(tmp_path: Path, content: str, words: str) -> None:
    root = squad_files(tmp_path)
    (root / "train-v1.1.json").write_text(content)
    workload = tiny(data_path=str(root))

    def read() -> None:
        workload.check()
        workload.prepare(Shard())

    with pytest.raises(UserError, match=words):
        read()


def squad(**changed: object) -> str:
    """One question, with `changed` in the place of its id, question, context, text or answer_start."""
    is_ = {"id": "1", "question": "Who?", "context": "Ada did.", "text": "Ada", "answer_start": 0, **changed}
    answer = {"text": is_["text"], "answer_start": is_["answer_start"]}
    qa = {"id": is_["id"], "question": is_["question"], "answers": [answer]}
    return json.dumps({"data": [{"paragraphs": [{"context": is_["context"], "qas": [qa]}]}]})


ODD = [5, 2.5, None, True, [], {}, ["Ada did."], {"text": "Ada did."}]


@pytest.mark.parametrize("key", ["id", "question", "context", "text", "answer_start"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_value_of_the_wrong_type_is_one_line(tmp_path: Path, key: str, value: object) -> None:
    if (key, value) == ("answer_start", 5):
        value = -1
    file = tmp_path / "train-v1.1.json"
    file.write_text(squad())
    assert [q.context for q in read_json(file)] == ["Ada did."]
    file.write_text(squad(**{key: value}))
    with pytest.raises(UserError, match=rf"not in SQuAD 1.1 format: TypeError {key} is not ") as refused:
        read_json(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content",
    [
        squad(context=""),
        squad(text=""),
        '{"data": ' + "[" * 200_000,
        squad().replace('"Ada did."', "[" * 9000 + "]" * 9000),
    ],
)
def test_an_empty_or_deeply_nested_context_is_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "train-v1.1.json"
    file.write_text(content)
    with pytest.raises(
        UserError, match=r"no answer at the given offset|nested too deeply|context is not text"
    ) as refused:
        read_json(file)
    assert "\n" not in str(refused.value)


def test_answers_that_are_not_at_their_offset() -> None:
    good = synthetic_questions(200, "dev")
    bad = SquadQuestion("bad", "?", "some text", (("other", 0),))
    assert checked([*good, bad], "x") == good
    with pytest.raises(UserError, match="3 of 23 questions"):
        checked([*good[:20], bad, bad, bad], "x")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        tiny(data_path=str(tmp_path / "absent")).check()
    with pytest.raises(UserError, match=r"holds no train-v1\.1\.json"):
        tiny(data_path=str(tmp_path)).check()
    squad_files(tmp_path)
    with pytest.raises(UserError, match="train_file: no file"):
        tiny(data_path=str(tmp_path), train_file="absent.json").check()
    (tmp_path / "train-v1.1.json").rename(tmp_path / "train-part.json")
    tiny(data_path=str(tmp_path)).check()  # the only training file there is
    (tmp_path / "train-other.json").write_text("{}")
    with pytest.raises(UserError, match=r"choose one of train-other\.json, train-part\.json"):
        tiny(data_path=str(tmp_path)).check()


def test_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"data\.path=FOLDER") as caught:
        tiny(dataset="squad").prepare(Shard())
    assert "\n" not in str(caught.value)
