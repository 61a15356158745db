"""SQuAD: file format, windows, answer extraction, metric."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experiments.workloads import bert
from experiments.workloads.base import Shard
from experiments.workloads.bert_squad import BertSquad
from experiments.workloads.glue import Glue
from experiments.workloads.squad_data import best_spans, em_f1_sums
from experiments.workloads.wikipedia import Wikipedia
from launch.errors import UserError
from tests.helpers.workload_data import squad_files

SAME_LOSS = 1e-5  # relative; fp32 sums in another order


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0, 1.0),  # case, punctuation, article
        ("in  1889", ["1889"], 0.0, 2 / 3),  # precision 1/2, recall 1
        ("red green blue", ["green blue white black"], 0.0, 4 / 7),  # precision 2/3, recall 1/2
        ("Paris", ["London", "Paris, France", "paris"], 1.0, 1.0),  # the best of several
        ("Paris", ["London", "Paris France"], 0.0, 2 / 3),
        ("go go go", ["go go"], 0.0, 4 / 5),  # words count as often as they occur
        ("", ["something"], 0.0, 0.0),
        ("Saint-Denis", ["Saint Denis"], 0.0, 0.0),  # a hyphen joins words when it is stripped
    ],
)
def test_metric_known_answers(prediction: str, answers: list[str], exact: float, f1: float) -> None:
    assert em_f1_sums([prediction], [answers]) == pytest.approx((exact, f1), abs=1e-6)


def test_metric_sums_over_questions() -> None:
    exact, f1 = em_f1_sums(["a cat", "in 1889", "x"], [["cat"], ["1889"], ["y"]])
    assert (exact, f1) == pytest.approx((1.0, 1 + 2 / 3), abs=1e-5)
    assert em_f1_sums([], []) == (0.0, 0.0)


def test_best_span_is_ordered_inside_the_context_and_short() -> None:
    start = torch.tensor([[9.0, 1.0, 5.0, 0.0, 4.0, 0.0]])
    end = torch.tensor([[9.0, 7.0, 0.0, 3.0, 1.0, 6.0]])
    allowed = torch.tensor([[False, True, True, True, True, True]])
    # Token 0 is forbidden; 2..5 scores 11 with length 4; with 3 tokens at most, 4..5 scores 10; with 1 token, 1..1 scores 8.
    for longest, expected in ((4, (2, 5, 11.0)), (3, (4, 5, 10.0)), (1, (1, 1, 8.0))):
        (span,) = best_spans(start, end, allowed, 20, longest)
        assert span is not None
        assert (span.first, span.last, span.score) == expected
    assert best_spans(start, end, torch.zeros_like(allowed), 20, 30) == [None]


def tiny(**options: object) -> BertSquad:
    defaults = {"preset": "tiny", "seq_len": 64, "doc_stride": 16, "max_query_len": 16, "dataset": "synthetic"}
    return BertSquad(**{**defaults, **options})  # type: ignore[arg-type]


def test_windows_cover_the_answers_and_offsets_lead_back_to_the_text(tmp_path: Path) -> None:
    workload = tiny(data_path=str(squad_files(tmp_path)))
    workload.prepare(Shard())
    windows, questions = workload.eval_set, workload.eval_set.questions
    assert len(windows) > len(questions), "paragraphs should need more than one window"
    found = set()
    for i in range(len(windows)):
        question = questions[int(windows.question[i])]
        first, last = windows.answers[i]
        if last:
            begin, end = windows.offsets[i, first, 0], windows.offsets[i, last, 1]
            assert question.context[begin:end] == question.answers[0][0]
            found.add(question.id)
    assert found == {q.id for q in questions}


def test_perfect_logits_score_100(tmp_path: Path) -> None:
    """A model that points at the answer where the window holds it, and is undecided elsewhere."""
    workload = tiny(data_path=str(squad_files(tmp_path)))
    shard = Shard()
    workload.prepare(shard)

    class Oracle(torch.nn.Module):
        row = 0

        def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> object:
            answers = workload.eval_set.answers[self.row : self.row + len(input_ids)]
            self.row += len(input_ids)
            logits = [torch.zeros(input_ids.shape).scatter_(1, answers[:, k : k + 1], 5.0) for k in (0, 1)]
            return type("Out", (), {"start_logits": logits[0], "end_logits": logits[1]})()

    assert workload.evaluate(Oracle(), shard) == {"f1": pytest.approx(100), "exact_match": pytest.approx(100)}


def test_the_last_questions_are_held_out(tmp_path: Path) -> None:
    folder = str(squad_files(tmp_path))
    whole, workload = tiny(data_path=folder), tiny(data_path=folder, held_out=3)
    for made in (whole, workload):
        made.prepare(Shard())
    assert len(workload.held_out_set.questions) == 3
    assert len(workload._train) < len(whole._train)
    with torch.no_grad():
        found = workload.evaluate(workload.build_model().eval(), Shard())
    assert set(found) == {"f1", "exact_match", "held_out"}
    with pytest.raises(UserError, match="leaves nothing of"):
        tiny(data_path=folder, held_out=10**6).prepare(Shard())


def test_long_questions_are_cut(tmp_path: Path) -> None:
    root = squad_files(tmp_path)
    document = json.loads((root / "train-v1.1.json").read_text())
    document["data"][0]["paragraphs"][0]["qas"][0]["question"] = "who built the bridge " * 30
    (root / "train-v1.1.json").write_text(json.dumps(document))
    workload = tiny(data_path=str(root))
    workload.prepare(Shard())
    inputs = workload._train.inputs
    first_segment = inputs["attention_mask"] - inputs["token_type_ids"]
    assert int(first_segment.sum(1).max()) <= 16 + 2  # [CLS], question, [SEP]


def test_model_folder_is_checked_without_network(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        tiny(model=str(tmp_path / "absent")).check()
    with pytest.raises(UserError, match=r"no config\.json"):
        tiny(model=str(tmp_path)).check()
    (tmp_path / "config.json").write_text("{}")
    workload = tiny(model=str(tmp_path))
    workload.check()
    with pytest.raises(UserError, match=r"workload\.model=/path"):
        workload.prepare(Shard())


@pytest.mark.parametrize(
    "options",
    [
        {"doc_stride": 60},
        {"doc_stride": -1},
        {"train_questions": 0},
        {"n_best": 0},
        {"preset": "huge"},
        {"init": "wrong"},
        {"init": "pretrained"},
    ],
)
def test_arguments_out_of_range(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        tiny(**options).check()


def test_local_checkpoint_round_trip(tmp_path: Path) -> None:
    """A checkpoint folder with model and tokenizer is enough; its weights and its vocabulary are used."""
    source = tiny(train_questions=30, dev_questions=5)
    source.prepare(Shard())
    torch.manual_seed(0)
    model = source.build_model()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    source.tokenizer.save_pretrained(tmp_path)
    loaded = tiny(model=str(tmp_path), train_questions=30, dev_questions=5)
    loaded.check()
    loaded.prepare(Shard())
    assert loaded.tokenizer.get_vocab() == source.tokenizer.get_vocab()
    assert torch.equal(loaded._train.inputs["input_ids"], source._train.inputs["input_ids"])
    again = loaded.build_model().state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    fresh = tiny(model=str(tmp_path), init="random", train_questions=30, dev_questions=5)
    fresh.prepare(Shard())
    torch.manual_seed(1)
    assert any(not torch.equal(value, again[name]) for name, value in fresh.build_model().state_dict().items())


def test_loss_falls() -> None:
    workload = tiny(train_questions=60, dev_questions=5)
    shard = Shard()
    workload.prepare(shard)
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for epoch in range(3):
        for batch in workload.train_batches(shard, 16, seed=0, epoch=epoch):
            loss = workload.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("way", ["preset", "pretrained", "random"])
def test_attention_as_asked_for(tmp_path: Path, way: str) -> None:
    """Both ways of computing attention, however the model is made, say the same where nothing is dropped."""
    source = tiny(train_questions=30, dev_questions=5)
    source.prepare(Shard())
    made: dict[str, object] = {}
    if way != "preset":
        source.build_model().save_pretrained(tmp_path)  # type: ignore[operator]
        source.tokenizer.save_pretrained(tmp_path)
        made = {"model": str(tmp_path), "init": way}
    losses = []
    for attention in bert.ATTENTION:
        workload = tiny(train_questions=30, dev_questions=5, attention=attention, **made)
        workload.check()
        workload.prepare(Shard())
        torch.manual_seed(0)
        model = workload.build_model().eval()
        assert model.config._attn_implementation == attention  # type: ignore[union-attr]
        batch = next(iter(workload.train_batches(Shard(), 4, seed=0, epoch=0)))
        losses.append(workload.loss(model, batch).item())
    assert losses[0] == pytest.approx(losses[1], rel=SAME_LOSS)


@pytest.mark.parametrize("kind", [BertSquad, Glue, Wikipedia])
def test_every_bert_workload_knows_attention(kind: type) -> None:
    workload = kind(preset="tiny", dataset="synthetic", seq_len=256, attention="eager")
    workload.check()
    workload.prepare(Shard())
    assert workload.build_model().config._attn_implementation == "eager"
    with pytest.raises(UserError, match=r"workload\.attention=flash is unknown: one of sdpa, eager"):
        kind(preset="tiny", dataset="synthetic", attention="flash").check()
