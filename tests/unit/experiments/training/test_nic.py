"""Counters of network interfaces."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from experiments.training import traffic

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
