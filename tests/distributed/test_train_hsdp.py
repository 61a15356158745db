"""Runs of the harness with comm.topology=hsdp: the losses of hierarchical DDP, resumed bit for bit, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.errors import UserError
from tests.distributed.test_train import BREAK, make_spec, train
from tests.helpers.ranks import fresh_world

NODES, LOCAL = 2, 2
WORLD = [f"cluster.nodes={NODES}", f"cluster.ranks_per_node={LOCAL}", "optimizer=birder", "seed=3"]


def run(folder: Path, name: str, topology: str, stop: int = 0) -> list[str]:
    spec = make_spec(folder, name, *WORLD, f"comm.topology={topology}")
    spec.save()
    return fresh_world(train, NODES * LOCAL, spec, stop, grouped=False, ranks_per_node=LOCAL)


def records(folder: Path) -> dict[str, dict]:
    found = [json.loads(p.read_text()) for p in (folder / "results" / "records").glob("*.json")]
    return {r["config"]["run_name"]: r for r in found}


@pytest.mark.slow
def test_hsdp_has_the_losses_of_hierarchical_ddp_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    run(tmp_path, "ddp", "hierarchical")
    straight = run(tmp_path, "straight", "hsdp")
    assert run(tmp_path, "broken", "hsdp", BREAK) == ["interrupted"] * NODES * LOCAL
    assert run(tmp_path, "broken", "hsdp") == straight
    assert len(set(straight)) == NODES * LOCAL  # every rank keeps its own shards
    found = records(tmp_path)
    assert {found[name]["method"] for name in found} == {"Birder hierarchical", "Birder hsdp"}
    for name in ("straight", "broken"):
        assert found[name]["metric"]["value"] == found["ddp"]["metric"]["value"]
        losses = [(tmp_path / "results" / found[n]["curve"]).read_text().split() for n in (name, "ddp")]
        assert [row.split(",")[0::2] for row in losses[0]] == [row.split(",")[0::2] for row in losses[1]]
    sent = [found[name]["bytes_per_step"]["payload_inter"] for name in ("straight", "ddp")]
    assert 0 < sent[0] < sent[1]  # which coordinates have had a gradient, each shard's ranks tell each other alone


def test_hsdp_with_fp16_or_in_a_method_on_whole_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no GradScaler"):
        make_spec(tmp_path, "half", *WORLD, "comm.topology=hsdp", "train.precision=fp16")
    spec = make_spec(tmp_path, "cser", *WORLD, "comm.topology=hsdp", "optimizer=cser")
    with pytest.raises(RuntimeError, match=r"comm\.topology=hsdp: CSER works on whole parameters"):
        fresh_world(train, NODES * LOCAL, spec, 0, grouped=False, ranks_per_node=LOCAL)
