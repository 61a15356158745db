"""Weights of a finished run as those that another one begins with: the second phase of a pre-training, fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from birder import checkpoint
from birder.checkpoint.files import SHARED, Manifest, rank_file, write_manifest, write_tree
from experiments.workloads import weights
from experiments.workloads.base import Shard
from experiments.workloads.bert_squad import BertSquad
from experiments.workloads.glue import Glue
from experiments.workloads.wikipedia import Wikipedia
from launch.errors import UserError


def net(seed: int, head: str = "cls") -> torch.nn.ModuleDict:
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({"bert": torch.nn.Linear(4, 3), head: torch.nn.Linear(3, 2 if head == "cls" else 5)})


def parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def apart(folder: Path, models: list[torch.nn.Module]) -> Path:
    """A checkpoint of ranks that each kept a model of their own."""
    folder.mkdir(parents=True)
    files = {
        rank_file(i): write_tree(folder / rank_file(i), {"parameters": parameters(m)}) for i, m in enumerate(models)
    }
    files[SHARED] = write_tree(folder / SHARED, {})
    write_manifest(folder, Manifest(20, len(models), files))
    return folder


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    for step, seed in ((10, 1), (20, 2)):
        checkpoint.save(tmp_path / "run" / "checkpoints", step, {"parameters": parameters(net(seed))}, {})
    wanted = parameters(net(2))
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000020"):
        made = parameters(weights.put(net(3), str(place)))
        assert all(torch.equal(made[name], wanted[name]) for name in wanted)
    older = parameters(weights.put(net(3), str(tmp_path / "run" / "checkpoints" / "step-00000010")))
    assert torch.equal(older["bert.weight"], parameters(net(1))["bert.weight"])


def test_models_of_their_own_are_averaged(tmp_path: Path) -> None:
    models = [net(seed) for seed in (1, 2, 3)]
    found = weights.read(str(apart(tmp_path / "checkpoints" / "step-00000020", models)))
    for name in found:
        mean = sum(parameters(m)[name].double() for m in models) / 3
        assert torch.equal(found[name], mean.float())


def test_another_head_is_left_as_it_is(tmp_path: Path) -> None:
    place = str(apart(tmp_path / "step-00000020", [net(1)]))
    made = weights.put(net(3, "qa_outputs"), place, ("cls.", "qa_outputs."))
    assert torch.equal(made["bert"].weight, net(1)["bert"].weight)
    assert torch.equal(made["qa_outputs"].weight, net(3, "qa_outputs")["qa_outputs"].weight)


def test_every_bert_workload_begins_with_a_pre_trained_encoder(tmp_path: Path) -> None:
    tiny: Any = {"preset": "tiny", "dataset": "synthetic", "seq_len": 96, "vocab_size": 300}
    torch.manual_seed(1)
    before = Wikipedia(**tiny)
    before.prepare(Shard())
    trained = before.build_model()
    place = str(apart(tmp_path / "step-00000020", [trained]))
    for kind, more in ((Glue, {}), (BertSquad, {"doc_stride": 24, "max_query_len": 24}), (Wikipedia, {})):
        workload = kind(**tiny, **more, weights=place)
        workload.check()
        workload.tokenizer = before.tokenizer  # a checkpoint's vocabulary belongs to it
        made, wanted = parameters(workload.build_model()), parameters(trained)
        assert all(torch.equal(made[name], wanted[name]) for name in wanted if name.startswith("bert."))
        with pytest.raises(UserError, match="is not a run with a whole checkpoint"):
            kind(**tiny, **more, weights=str(tmp_path / "absent")).check()


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    place = str(apart(tmp_path / "step-00000020", [net(1)]))
    with pytest.raises(UserError, match=r"is of another model: cls\.bias, cls\.weight, qa_outputs\.bias"):
        weights.put(net(3, "qa_outputs"), place)
    with pytest.raises(UserError, match="is not a run with a whole checkpoint: give its directory"):
        weights.find(str(tmp_path / "absent"))
    (tmp_path / "step-00000020" / rank_file(0)).write_bytes(b"torn")
    with pytest.raises(UserError, match="step-00000020 is broken"):
        weights.read(place)


def test_shards_of_a_model_are_said_to_be_some(tmp_path: Path) -> None:
    """With comm.topology=hsdp every rank keeps its rows alone; of few rows some ranks have none."""
    for widths in ((2, 2), (1, 0)):
        shards = [torch.nn.Linear(4, width, bias=False) for width in widths]
        place = str(apart(tmp_path / str(widths[0]) / "step-00000020", shards))
        with pytest.raises(UserError, match=r"kept shards \(comm.topology=hsdp\): weight|kept no whole models"):
            weights.put(torch.nn.Linear(4, sum(widths), bias=False), place)
