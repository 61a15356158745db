"""Counters of network interfaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.training import nic

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     {lo}       1    0    0    0     0          0         0     {lo}       1    0    0    0     0       0          0
  eth0:{rx} 5    0    0    0     0          0         0  {tx}       3    0    0    0     0       0          0
"""


def test_only_what_lies_between_resume_and_pause_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dev"
    monkeypatch.setattr(nic, "read", lambda name, read=nic.read: read(name, path))

    def now(tx: int, rx: int) -> None:
        path.write_text(DEV.format(lo=7, tx=tx, rx=rx))

    now(10**11, 50)  # counters of 64 bits, without a space after the colon where numbers are wide
    meter = nic.NicMeter("eth0")
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
    monkeypatch.delenv(nic.VARIABLE, raising=False)
    assert nic.NicMeter().total is None
    assert nic.NicMeter("no-such-interface").total is None
    assert nic.read("eth0", tmp_path / "absent") is None


def test_the_launcher_names_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nic.VARIABLE, "eth3")
    assert nic.NicMeter().interface == "eth3"


def test_bytes_that_pass_the_counters_by_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_IB_DISABLE", "NCCL_NET"):
        monkeypatch.delenv(name, raising=False)
    assert not nic.past_the_counters("nccl", tmp_path / "absent")
    assert not nic.past_the_counters("nccl", tmp_path)
    (tmp_path / "mlx5_0").touch()
    assert nic.past_the_counters("nccl", tmp_path)
    assert not nic.past_the_counters("gloo", tmp_path)
    monkeypatch.setenv("NCCL_NET", "Socket")
    assert not nic.past_the_counters("nccl", tmp_path)
    monkeypatch.delenv("NCCL_NET")
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert not nic.past_the_counters("nccl", tmp_path)
    assert nic.NicMeter("lo").total == (0, 0)
    assert nic.NicMeter("lo", blind=True).total is None
