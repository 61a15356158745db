"""GLUE: the files of every task, what the model sees, the metrics."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from experiments.workloads import glue
from experiments.workloads.base import Shard
from experiments.workloads.glue import Glue
from experiments.workloads.glue_data import TASKS, find_file, read_tsv
from launch.errors import UserError
from tests.helpers.workload_data import glue_folder


@pytest.fixture(scope="module")
def glue_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return glue_folder(tmp_path_factory.mktemp("glue") / "data")


@pytest.mark.parametrize("name", TASKS)
def test_glue_reads_every_task(glue_root: Path, name: str) -> None:
    task = TASKS[name]
    examples = read_tsv(find_file(str(glue_root), task, "dev"), task)
    assert len(examples) == 11
    assert {len(e.texts) for e in examples} == {len(task.texts)}
    labels = [e.label for e in examples[:3]]
    assert labels == ([0, 2.5, 5] if not task.classes else [0, 1, 2] if len(task.classes) == 3 else [0, 1, 0])
    assert all(e.texts[0].startswith("The ") for e in examples)
    Glue(name, data_path=str(glue_root)).check()


def test_glue_pairs_and_single_sentences_become_inputs(glue_root: Path) -> None:
    single, pair = (Glue(t, preset="tiny", data_path=str(glue_root), seq_len=40) for t in ("cola", "rte"))
    for workload in (single, pair):
        workload.prepare(Shard())
        ids, mask = workload._train["input_ids"], workload._train["attention_mask"]
        assert ids.shape == (30, 40)
        assert bool((ids[mask == 0] == workload.tokenizer.pad_token_id).all())
        assert bool((ids[:, 0] == workload.tokenizer.cls_token_id).all())
    assert int(single._train["token_type_ids"].max()) == 0
    assert int(pair._train["token_type_ids"].max()) == 1


def test_held_out_examples_are_not_trained_on_and_have_the_tasks_metric(glue_root: Path) -> None:
    whole, less = (Glue("mrpc", preset="tiny", data_path=str(glue_root), seq_len=40, held_out=n) for n in (None, 11))
    for workload in (whole, less):
        workload.prepare(Shard())
    for key, values in whole._train.items():
        assert torch.equal(torch.cat([less._train[key], less.held_out_set[key]]), values)
    assert less.training_samples == whole.training_samples - 11

    class Yes(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> object:
            return type("Out", (), {"logits": torch.tensor([[0.0, 1.0]]).expand(len(inputs["input_ids"]), 2)})

    dev = read_tsv(find_file(str(glue_root), TASKS["mrpc"], "dev"), TASKS["mrpc"])
    expected = 100 * sum(example.label for example in dev) / len(dev)
    assert whole.evaluate(Yes(), Shard()) == {
        "accuracy": pytest.approx(expected),
        "f1": pytest.approx(2 * expected / (1 + expected / 100)),
    }
    assert less.evaluate(Yes(), Shard())["held_out"] == pytest.approx(100 * float(less.held_out_set["labels"].mean()))
    with pytest.raises(UserError, match="held_out=30 leaves nothing of 30"):
        Glue("mrpc", preset="tiny", data_path=str(glue_root), held_out=30).prepare(Shard())


def test_ranks_without_an_example_evaluate_as_the_others(glue_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Glue("rte", preset="tiny", data_path=str(glue_root), seq_len=40, dev_examples=2)
    workload.prepare(Shard())
    torch.manual_seed(0)
    model = workload.build_model().eval()
    parts: list[list[float]] = []
    with torch.no_grad():
        alone = workload.evaluate(model, Shard())
        monkeypatch.setattr(glue, "all_sum", lambda values, shard: parts.append(values) or values)
        for rank in range(4):
            workload.evaluate(model, Shard(rank, 4))
        monkeypatch.setattr(glue, "all_sum", lambda values, shard: [sum(of) for of in zip(*parts, strict=True)])
        assert workload.evaluate(model, Shard()) == alone


def test_glue_scores_are_regressed(glue_root: Path) -> None:
    workload = Glue("stsb", preset="tiny", data_path=str(glue_root), seq_len=40)
    workload.prepare(Shard())
    batch = next(iter(workload.train_batches(Shard(), 4, seed=0, epoch=0)))

    class Says(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> object:
            return type("Out", (), {"logits": torch.full((len(inputs["input_ids"]), 1), 2.5)})

    expected = float(((batch["labels"] - 2.5) ** 2).mean())
    assert workload.loss(Says(), batch).item() == pytest.approx(expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same = workload.evaluate(Says(), Shard())
    assert same == {"pearson": 0.0, "spearman": 0.0}  # all answers alike: not a number


def test_glue_metrics_equal_those_of_other_packages() -> None:
    from scipy import stats
    from sklearn import metrics

    answers, labels = torch.randint(2, (2, 300), generator=torch.Generator().manual_seed(0)).double()
    labels[:200] = answers[:200]
    assert glue.METRICS["f1"](answers, labels) == pytest.approx(metrics.f1_score(labels, answers))
    assert glue.METRICS["matthews"](answers, labels) == pytest.approx(metrics.matthews_corrcoef(labels, answers))
    assert glue.METRICS["accuracy"](answers, labels) == pytest.approx(metrics.accuracy_score(labels, answers))
    yes = torch.ones_like(labels)
    for one, other in ((yes, labels), (1 - yes, labels), (answers, yes), (yes, yes)):
        assert glue.METRICS["matthews"](one, other) == 0  # sklearn's, which GLUE's own script takes
    scores = torch.rand(300, generator=torch.Generator().manual_seed(1)).double()
    ranked = (scores * 5).round()  # ties
    assert glue.METRICS["pearson"](scores, ranked) == pytest.approx(stats.pearsonr(scores, ranked)[0])
    assert glue.METRICS["spearman"](scores, ranked) == pytest.approx(stats.spearmanr(scores, ranked)[0])


def test_glue_bad_input(glue_root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="one of cola, sst2"):
        Glue("copa")
    with pytest.raises(UserError, match="train_examples=0"):
        Glue(train_examples=0)
    with pytest.raises(UserError, match=r"no RTE/train\.tsv"):
        Glue("rte", data_path=str(tmp_path)).check()
    (tmp_path / "RTE").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / "RTE" / name).write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    with pytest.raises(UserError, match="no column 'label'"):
        read_tsv(tmp_path / "RTE" / "dev.tsv", TASKS["rte"])
    (tmp_path / "RTE" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tperhaps\n")
    with pytest.raises(UserError, match=r"1 of 1 rows are not RTE's"):
        read_tsv(tmp_path / "RTE" / "dev.tsv", TASKS["rte"])
    (tmp_path / "RTE" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(UserError, match=r"dev\.tsv holds no row"):
        read_tsv(tmp_path / "RTE" / "dev.tsv", TASKS["rte"])
    (tmp_path / "scores.tsv").write_text("sentence1\tsentence2\tscore\na\tb\tnan\n")  # as pandas writes what is missing
    with pytest.raises(UserError, match=r"1 of 1 rows are not STS-B's"):
        read_tsv(tmp_path / "scores.tsv", TASKS["stsb"])
