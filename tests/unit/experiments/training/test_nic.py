"""Counters of network interfaces."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from experiments.training import traffic
from experiments.workloads.base import Shard

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     {lo}       1    0    0    0     0          0         0     {lo}       1    0    0    0     0       0          0
  eth0:{rx} 5    0    0    0     0          0         0  {tx}       3    0    0    0     0       0          0
"""


def test_only_what_lies_between_resume_and_pause_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net" / "dev"
    path.parent.mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    def now(tx: int, rx: int) -> None:
        path.write_text(DEV.format(lo=7, tx=tx, rx=rx))

    now(10**11, 50)  # counters of 64 bits, without a space after the colon where numbers are wide
    meter = traffic.NicMeter("eth0")
    meter.pause()
    assert meter.total == (0, 0)
    meter.resume()
    now(10**11 + 5, 51)
    meter.pause()
    now(10**11 + 1000, 1000)  # an evaluation
    meter.resume()
    now(10**11 + 1002, 1003)
    meter.pause()
    assert meter.total == (7, 4)


def test_what_cannot_be_read_is_not_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(traffic.VARIABLE, raising=False)
    assert traffic.NicMeter().total is None
    assert traffic.NicMeter("no-such-interface").total is None
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "absent"))
    assert traffic.read_counters("eth0") is None


def test_the_launcher_names_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(traffic.VARIABLE, "eth3")
    assert traffic.NicMeter().interface == "eth3"


def test_bytes_that_pass_the_counters_by_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_DISABLE", "NCCL_NET"):
        monkeypatch.delenv(name, raising=False)
    assert not traffic.past_the_counters("nccl", tmp_path / "absent")
    assert not traffic.past_the_counters("nccl", tmp_path)
    (tmp_path / "mlx5_0").touch()
    assert traffic.past_the_counters("nccl", tmp_path)
    assert not traffic.past_the_counters("gloo", tmp_path)
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert not traffic.past_the_counters("nccl", tmp_path)
    monkeypatch.delenv("NCCL_NET")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert not traffic.past_the_counters("nccl", tmp_path)
    assert traffic.NicMeter("lo").total == (0, 0)
    assert traffic.NicMeter("lo", blind=True).total is None


def test_the_interface_of_a_node_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks in four steps: each of the four has read its node's counters."""
    said: list[list[float]] = []

    def all_sum(values: list[float], shard: Shard) -> list[float]:
        said.append(values)
        return [sum(of) for of in zip(*said, strict=True)]

    monkeypatch.setattr(traffic, "all_sum", all_sum)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))
        found = traffic.per_step((10, 20), (800, 400), 2, 4, Shard(rank, 4))
    assert found == {
        "payload_intra": 4 * 10 / 2 / 4,
        "payload_inter": 4 * 20 / 2 / 4,
        "nic_tx": 2 * 800 / 2 / 4,
        "nic_rx": 2 * 400 / 2 / 4,
    }
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "nic_tx" not in traffic.per_step((10, 20), None, 2, 4, Shard(0, 4))  # of one node it is not known
