"""A script that ends between backward and `step`, where messages are still under way, ends as with torch: with code 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import birder
from tests.helpers import ROOT

SCRIPT = """
import time, torch, birder, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
optimizer = birder.Birder(model.parameters())
ddp = DistributedDataParallel(model)
birder.attach(ddp, optimizer)
for step in range(5):
    loss = ddp(torch.randn(4, 64)).square().mean()
    if step == 4 and dist.get_rank() == 1:
        time.sleep(0.1)
    optimizer.zero_grad()
    loss.backward()
    if step == 4:
        break  # the loss is small enough, or the time is over
    optimizer.step()
print("ended", flush=True)
"""


UNEQUAL = SCRIPT.replace("step == 4", "(step, dist.get_rank()) == (2, 1)")
NO_BATCH = SCRIPT.replace("    loss =", "    if dist.get_rank() == 1:\n        break\n    loss =")


def ended(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)


def test_a_script_may_end_between_backward_and_step(tmp_path: Path) -> None:
    done = ended(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ended") == 2


@pytest.mark.parametrize(("text", "step"), [(UNEQUAL, 3), (NO_BATCH, 1)], ids=["fewer", "none"])
def test_a_rank_with_fewer_batches_than_others_is_what_they_speak_of(tmp_path: Path, text: str, step: int) -> None:
    """Gloo's own words are of a connection that was closed."""
    done = ended(tmp_path, text)
    assert done.returncode != 0
    assert f"another rank has ended before step {step} was done" in done.stderr
    assert "give all ranks the same number of batches" in done.stderr


LONG = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:545] Read error [127.0.0.1]:16269: Connection reset "
    "by peer. This is typically due to a crash in the remote process, or to a network that is down; more and more of it"
)
"""What a connection that ends with data unread gives instead of "Connection closed by peer"."""


def test_gloos_long_line_is_not_quoted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = birder.Birder([torch.nn.Parameter(torch.zeros(3))])

    def lost() -> None:
        raise RuntimeError(LONG)

    monkeypatch.setattr(optimizer, "stepping", lost)
    with pytest.raises(RuntimeError, match="has ended before step 1") as said:
        optimizer.step()
    assert "Connection reset by peer" in str(said.value)
    assert "pair.cc" not in str(said.value)
    assert "typically" not in str(said.value)
    assert str(said.value.__cause__) == LONG
