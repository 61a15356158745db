"""Language models: streams and hidden state of the LSTM, masking of the masked language model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from experiments.workloads.base import Shard
from experiments.workloads.files import reading
from experiments.workloads.gpt2 import GPT2
from experiments.workloads.ordering import generator
from experiments.workloads.ptb import PennTreebank
from experiments.workloads.squad_data import read_json
from experiments.workloads.wikipedia import IGNORED, Wikipedia
from launch.errors import UserError
from tests.helpers.workload_data import squad_files, text_file, text_folder


def ptb(root: Path, **options: object) -> PennTreebank:
    workload = PennTreebank(str(text_folder(root)), **{"preset": "tiny", "bptt": 10, **options})  # type: ignore[arg-type]
    workload.prepare(Shard())
    return workload


def test_columns_of_all_ranks_are_the_text(tmp_path: Path) -> None:
    workload = ptb(tmp_path)
    columns = []
    for rank in range(2):
        batches = list(workload.train_batches(Shard(rank, 2), 3, seed=0, epoch=0))
        assert [opens for _, _, opens in batches] == [True] + [False] * (len(batches) - 1)
        words = torch.cat([words for words, _, _ in batches])
        following = torch.cat([following for _, following, _ in batches])
        assert torch.equal(words[1:], following[:-1])
        columns += list(words.t())
    length = len(workload._train) // 6
    for k, column in enumerate(columns):
        assert torch.equal(column, workload._train[k * length : k * length + len(column)])


def test_end_of_sentence_and_unknown_words(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a b a\n\nb a\n")
    (tmp_path / "valid.txt").write_text("a zebra\n" * 20)
    workload = PennTreebank(str(tmp_path), preset="tiny", bptt=1, eval_columns=2)
    workload.prepare(Shard())
    assert workload.vocab_size == 4  # a, <eos>, b, <unk>: by frequency, then by spelling
    assert workload._train.tolist() == [0, 2, 0, 1, 2, 0, 1]
    assert workload.eval_set[:3].tolist() == [0, 3, 1]


def test_hidden_state_is_carried_and_restored(tmp_path: Path) -> None:
    """Losses after a resume in the middle of an epoch equal those of the uninterrupted run, bit for bit."""
    shard = Shard()

    def model_of(workload: PennTreebank) -> torch.nn.Module:
        torch.manual_seed(0)
        return workload.build_model()

    whole = ptb(tmp_path)
    model = model_of(whole)
    batches = list(whole.train_batches(shard, 4, seed=0, epoch=0))[:6]
    losses = []
    for step, batch in enumerate(batches):
        if step == 3:
            state = {key: value.clone() for key, value in whole.state_dict().items()}
        losses.append(whole.loss(model, batch).item())

    resumed = ptb(tmp_path)
    resumed.load_state_dict(state)
    rest = list(resumed.train_batches(shard, 4, seed=0, epoch=0, start=3))[:3]
    assert [resumed.loss(model_of(resumed), batch).item() for batch in rest] == losses[3:]

    forgotten = ptb(tmp_path)
    assert forgotten.loss(model_of(forgotten), rest[0]).item() != losses[3]


def test_hidden_state_is_reset_at_the_start_of_an_epoch_and_detached(tmp_path: Path) -> None:
    workload = ptb(tmp_path)
    torch.manual_seed(0)
    model = workload.build_model()
    first, second = list(workload.train_batches(Shard(), 4, seed=0, epoch=0))[:2]
    loss = workload.loss(model, first).item()
    workload.loss(model, second)
    assert not any(t.requires_grad for t in workload.state_dict().values())
    assert workload.loss(model, first).item() == loss


def test_a_hidden_state_of_another_batch_is_none(tmp_path: Path) -> None:
    """As after a resume with another train.batch_per_rank, which resume_allow_config_change allows."""
    before, after, fresh = (ptb(tmp_path) for _ in range(3))
    torch.manual_seed(0)
    model = before.build_model()
    before.loss(model, next(before.train_batches(Shard(), 4, seed=0, epoch=0)))
    after.load_state_dict(before.state_dict())
    batch = next(after.train_batches(Shard(), 3, seed=0, epoch=0, start=1))
    assert after.loss(model, batch).item() == fresh.loss(model, batch).item()


def test_evaluation_does_not_touch_the_training_state(tmp_path: Path) -> None:
    workload = ptb(tmp_path)
    torch.manual_seed(0)
    model = workload.build_model()
    workload.loss(model, next(iter(workload.train_batches(Shard(), 4, seed=0, epoch=0))))
    before = {key: value.clone() for key, value in workload.state_dict().items()}
    with torch.no_grad():
        workload.evaluate(model, Shard())
    assert all(torch.equal(value, workload.state_dict()[key]) for key, value in before.items())


def test_untrained_perplexity_is_the_vocabulary(tmp_path: Path) -> None:
    workload = ptb(tmp_path)
    model = workload.build_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # every word is equally likely
    with torch.no_grad():
        out = workload.evaluate(model, Shard())
    assert out["perplexity"] == pytest.approx(workload.vocab_size, rel=1e-4)
    assert out["loss"] == pytest.approx(math.log(workload.vocab_size), rel=1e-4)


def test_a_text_is_evaluated_as_a_whole_however_it_is_cut(tmp_path: Path) -> None:
    """The state is carried from cut to cut, and the last one may be shorter."""
    cut, whole = ptb(tmp_path, bptt=7), ptb(tmp_path, bptt=10**4)
    torch.manual_seed(0)
    model = cut.build_model().eval()
    with torch.no_grad():
        columns = len(whole.eval_set) // whole.eval_columns
        assert (columns - 1) % 7
        found = cut.evaluate(model, Shard())
        assert found == pytest.approx(whole.evaluate(model, Shard()), rel=1e-5)
        words = whole.eval_set[: columns * whole.eval_columns].view(whole.eval_columns, columns).t()
        logits, _ = model(words[:-1], whole._zeros(words))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[1:].flatten())
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_the_end_of_the_text_is_held_out(tmp_path: Path) -> None:
    whole = ptb(tmp_path)
    workload = ptb(tmp_path, held_out=200)
    assert torch.equal(workload._train, whole._train[:-200])
    assert torch.equal(workload.held_out_set, whole._train[-200:])
    model = workload.build_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        out = workload.evaluate(model, Shard())
    assert out["held_out"] == pytest.approx(workload.vocab_size, rel=1e-4)
    for count in (3, 10**6):
        with pytest.raises(UserError, match=f"workload.held_out={count} must be"):
            ptb(tmp_path, held_out=count)


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    plain, tied = ptb(tmp_path), ptb(tmp_path, tie_weights=True)
    sizes = [sum(p.numel() for p in w.build_model().parameters()) for w in (plain, tied)]
    assert sizes[0] - sizes[1] == plain.vocab_size * plain.hidden_size


def test_medium_preset_has_dropout() -> None:
    assert PennTreebank(preset="medium").dropout == 0.5
    assert PennTreebank(preset="medium", dropout=0.1).dropout == 0.1


def test_ptb_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        PennTreebank(str(tmp_path / "absent")).check()
    with pytest.raises(UserError, match=r"neither ptb\.train\.txt nor train\.txt"):
        PennTreebank(str(tmp_path)).check()
    (tmp_path / "train.txt").write_text("")
    with pytest.raises(UserError, match="is empty"):
        PennTreebank(str(tmp_path)).check()
    with pytest.raises(UserError, match="preset"):
        PennTreebank(preset="large")
    with pytest.raises(UserError, match="dropout"):
        PennTreebank(dropout=1.0)
    with pytest.raises(UserError, match="too few"):
        ptb(tmp_path / "small").steps_per_epoch(64, 20)
    with pytest.raises(UserError, match=r"data\.path"):
        PennTreebank(allow_synthetic=False).check()


@pytest.fixture(scope="module")
def wiki(tmp_path_factory: pytest.TempPathFactory) -> Wikipedia:
    file = text_file(tmp_path_factory.mktemp("wiki") / "text.txt")
    workload = Wikipedia(preset="tiny", data_path=str(file), seq_len=42, vocab_size=500)
    workload.prepare(Shard())
    return workload


def test_masking_fractions(wiki: Wikipedia) -> None:
    inputs, labels = [], []
    for epoch in range(20):
        for batch in wiki.train_batches(Shard(), 8, seed=0, epoch=epoch):
            inputs.append(batch[0])
            labels.append(batch[1])
    seen, wanted = torch.cat(inputs), torch.cat(labels)
    chosen = wanted != IGNORED
    assert set(chosen.sum(1).tolist()) == {6}  # round(0.15 * 40) in each sequence
    assert not chosen[:, 0].any()
    assert not chosen[:, -1].any()
    masked = (seen[chosen] == wiki.tokenizer.mask_token_id).float().mean().item()
    kept = (seen[chosen] == wanted[chosen]).float().mean().item()
    n = int(chosen.sum())
    assert n > 5000
    # Four standard deviations; one random token in vocab_size is the original by chance.
    assert abs(masked - 0.8) < 4 * math.sqrt(0.16 / n) + 1 / len(wiki.tokenizer)
    assert abs(kept - 0.1) < 4 * math.sqrt(0.09 / n) + 1 / len(wiki.tokenizer)


def test_unchosen_tokens_are_unchanged(wiki: Wikipedia) -> None:
    tokens = wiki._train[:10]
    inputs, labels = wiki.masked(tokens, generator("test"))
    chosen = labels != IGNORED
    assert torch.equal(inputs[~chosen], tokens.long()[~chosen])
    assert torch.equal(labels[chosen], tokens.long()[chosen])


def test_held_out_text_is_the_end_and_masked_alike_for_any_world(wiki: Wikipedia) -> None:
    parts = []
    for rank in range(2):
        workload = Wikipedia(preset="tiny", data_path=wiki.data_path, seq_len=42, vocab_size=500)
        workload.prepare(Shard(rank, 2))
        parts.append(workload.eval_set[0])
    assert len(parts[0]) + len(parts[1]) == len(wiki.eval_set[0])
    assert torch.equal(parts[0], wiki.eval_set[0][::2])
    assert torch.equal(parts[1], wiki.eval_set[0][1::2])


def test_vocabulary_from_the_text_knows_every_word(wiki: Wikipedia) -> None:
    assert wiki.tokenizer.unk_token_id not in wiki._train
    text = wiki.tokenizer.decode(wiki._train[0], skip_special_tokens=True)
    assert "was built by" in text


def test_wikipedia_bad_input(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        Wikipedia(data_path=str(tmp_path / "absent")).check()
    with pytest.raises(UserError, match=r"no \.txt file"):
        Wikipedia(data_path=str(tmp_path)).check()
    (tmp_path / "a.txt").symlink_to(tmp_path / "absent.txt")
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file"), reading(tmp_path):
        Wikipedia(data_path=str(tmp_path)).check()
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="is empty"):
        Wikipedia(data_path=str(tmp_path)).check()
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        Wikipedia(preset="tiny", data_path=str(tmp_path)).prepare(Shard())
    (tmp_path / "a.txt").write_text("too short a text")
    with pytest.raises(UserError, match="too few"):
        Wikipedia(preset="tiny", data_path=str(tmp_path)).prepare(Shard())
    for options in ({"mask_prob": 0.0}, {"seq_len": 4}, {"valid_fraction": 1.0}, {"documents": 0}, {"vocab_size": 5}):
        with pytest.raises(UserError):
            Wikipedia(**options)  # type: ignore[arg-type]


def test_a_text_in_letters_that_the_tokenizer_does_not_know(wiki: Wikipedia, tmp_path: Path) -> None:
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    wiki.tokenizer.save_pretrained(folder)
    wiki.build_model().save_pretrained(folder)
    text.write_text("\u4f60\u597d\u4e16\u754c " * 2000, encoding="utf-8")
    with pytest.raises(UserError, match="knows no word"):
        Wikipedia(model=str(folder), data_path=str(text), seq_len=42).prepare(Shard())


def test_a_byte_order_mark_is_no_word(tmp_path: Path) -> None:
    """As some editors put it at the head of a text."""
    mark = b"\xef\xbb\xbf"
    for part in ("train", "valid"):
        (tmp_path / f"{part}.txt").write_bytes(mark + b"a b a\n" * 20)
    workload = PennTreebank(str(tmp_path), preset="tiny", bptt=1, eval_columns=2)
    workload.prepare(Shard())
    assert workload.vocab_size == 4  # a, b, <eos>, <unk>
    assert GPT2(data_path=str(tmp_path / "train.txt")).lines() == ["a b a"] * 20


def test_a_byte_order_mark_in_other_data(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    question = {"id": "1", "question": "a?", "answers": [{"text": "a", "answer_start": 0}]}
    article = {"title": "t", "paragraphs": [{"context": "a b", "qas": [question]}]}
    squad = tmp_path / "train-v1.1.json"
    squad.write_bytes(mark + json.dumps({"data": [article]}).encode())
    assert len(read_json(squad)) == 1


def test_named_texts_in_their_order_and_paragraphs_of_squad(tmp_path: Path) -> None:
    squad_files(tmp_path / "squad")
    (tmp_path / "wiki").mkdir()
    (tmp_path / "wiki" / "a.txt").write_text("first\n\nsecond\n")
    names = ["wiki/a.txt", "squad/dev-v1.1.json"]
    lines = GPT2(data_path=str(tmp_path), texts=names).lines()
    assert lines[:2] == ["first", "second"]
    paragraphs = [q.context for q in read_json(tmp_path / "squad" / "dev-v1.1.json")]
    assert lines[2:] == list(dict.fromkeys(paragraphs))  # each once, however many questions it has
    made = GPT2(data_path=str(tmp_path), texts=names, preset="tiny", seq_len=16, vocab_size=400)
    made.check()
    assert made.data_name == "text of wiki, squad"
    made.prepare(Shard())
    assert made.training_samples > 10
    with pytest.raises(UserError, match=r"^data.path: no file .*b.txt, which workload.texts names"):
        GPT2(data_path=str(tmp_path), texts=["wiki/b.txt"], preset="tiny", seq_len=16).check()
