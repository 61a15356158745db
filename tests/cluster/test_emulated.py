"""The emulated cluster: what ranks find there, what is refused, and that nothing is ever left of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import link_file
from launch.emulated import launcher as emulated
from launch.emulated.launcher import EmulatedLauncher, capacity_gbps, inside, network, sandbox
from launch.errors import UserError
from launch.local import LocalLauncher
from tests.helpers import emulated_run
from tests.helpers.stub_run import make_spec, with_gpus

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("sandbox")]

RUN = Path(emulated_run.__file__)
Captured = pytest.CaptureFixture[str]


def made(**options: Any) -> EmulatedLauncher:
    return EmulatedLauncher(**{"nodes": 4, "ranks_per_node": 1, "name": "emulated", "dilation": 20, **options})


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / "run" / name).read_text())


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that gives sandboxes, with two cores."""
    monkeypatch.setattr(sandbox, "probe", lambda: (("unshare", "--net"), ""))
    monkeypatch.setattr(emulated, "cores", lambda: 2)


@pytest.fixture
def impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "probe", lambda: (None, "unshare: Operation not permitted"))
    emulated.say_once.cache_clear()


def test_capacity() -> None:
    assert [capacity_gbps(n, 2) for n in (2, 4, 8)] == [5.0, 2.5, 1.0]
    assert capacity_gbps(2, 64) == 10.0  # one node's traffic keeps at most two cores busy


@pytest.mark.parametrize(("nodes", "least"), [(2, 2), (4, 4), (8, 10)])
def test_rates_beyond_the_machine_are_refused(nodes: int, least: int, tmp_path: Path, possible: None) -> None:
    with pytest.raises(UserError, match=rf"2 cores.*for {nodes} nodes.*cluster.dilation={least} or more"):
        made(nodes=nodes, dilation=least - 0.5).check(make_spec(tmp_path))
    made(nodes=nodes, dilation=least).check(make_spec(tmp_path))
    made(nodes=nodes, dilation=1, max_total_gbps=10 * nodes).check(make_spec(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dilation": "auto"}, "cluster.dilation=20"),
        ({"nodes": 251, "dilation": 1e6}, "at most 250"),
    ],
)
def test_bad_values_are_one_line(options: dict[str, Any], said: str, tmp_path: Path, possible: None) -> None:
    with pytest.raises(UserError, match=said) as error:
        made(**options).launch(make_spec(tmp_path))
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_elsewhere_one_line_and_plain_loopback(
    tmp_path: Path, impossible: None, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(LocalLauncher, "run", lambda self, spec: ran.append(self.command(spec, 1)))
    for run in ("first", "second"):  # of a comparison
        launcher = made(dilation="auto")
        assert not launcher.shapes
        launcher.launch(make_spec(tmp_path / run))
    lines = [line for line in capsys.readouterr().out.splitlines() if "loopback" in line]
    assert len(lines) == 1
    assert "unshare: Operation not permitted" in lines[0]
    assert "127.0.0.1" in ran[0]
    assert "nsenter" not in ran[0]
    link = read(tmp_path / "second", "link.json")
    assert link.pop("note") == "not shaped: unshare: Operation not permitted"
    assert link.pop("kind") == "loopback"
    assert (link.pop("shaped"), link.pop("measured")) == (False, False)
    assert set(link.values()) == {None}
    env = launcher.environment(0)
    assert env["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert "BIRDER_NIC" not in env


def test_one_node_needs_no_network(tmp_path: Path, impossible: None, capsys: Captured) -> None:
    launcher = made(nodes=1, dilation="auto")
    launcher.check(make_spec(tmp_path))
    assert capsys.readouterr().out == ""
    assert launcher.command(make_spec(tmp_path), 0)[0] == sys.executable


def test_nothing_leads_around_the_link(possible: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, "0,1,2,3")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    env = made().environment(2)
    wanted = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_HOSTID": "node2", "CUDA_VISIBLE_DEVICES": "2"}
    wanted |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "BIRDER_NIC": "eth0", "BIRDER_NODE": "2"}
    assert {**wanted, "WANDB_MODE": "offline"}.items() <= env.items()


def test_dry_run_shows_every_command(tmp_path: Path, possible: None, capsys: Captured) -> None:
    made(dry_run=True).launch(make_spec(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("unshare --net")
    assert lines[0].endswith("/run/plan.json")
    assert sum("tbf rate 500000000bit" in line for line in lines) == 8  # both directions of 4 links
    agents = [line for line in lines if "torch.distributed.run" in line]
    assert len(agents) == 4
    assert agents[3].startswith(f"nsenter --net={network.namespace(3)} -- ")
    assert f"--rdzv-endpoint {network.address(0)}:" in agents[3]
    assert f"--local-addr {network.address(3)}" in agents[3]
    assert list(tmp_path.iterdir()) == []


def test_control_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(network, "set_cable", lambda node, state: done.append((state, node)))
    control = inside.Control(tmp_path, nodes=3, link={})
    control.poll()
    for text in ("cut 2\nmen", "d 2\ncut 3\n", "drop table\n"):
        with open(tmp_path / inside.CONTROL, "a") as file:
            file.write(text)
        control.poll()
    assert done == [("down", 2), ("up", 2)]
    assert (tmp_path / inside.CONTROL_DONE).read_text() == "cut 2\nmend 2\ncut 3: unknown\ndrop table: unknown\n"


def test_ranks_ask_for_the_rate_of_their_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shaped = []
    monkeypatch.setattr(network, "shape", lambda node, mbit: shaped.append((node, mbit)))
    monkeypatch.setattr(inside.measure, "check", lambda nodes, mbit: {"measured": True, "mbit_per_s": 0.9 * mbit})
    control = inside.Control(tmp_path, nodes=2, link=link_file.of(kind="emulated", shaped=True, link_gbps=10.0))
    (tmp_path / inside.CONTROL).write_text("rate 40000\n")
    control.poll()
    assert shaped == [(0, 40000.0), (1, 40000.0)]
    assert not (tmp_path / link_file.FILE).exists()  # nothing was measured
    with open(tmp_path / inside.CONTROL, "a") as file:
        file.write("check 500\nrate 0\nrate nan\ncheck fast\nrate\n")
    control.poll()
    assert shaped[2:] == [(0, 500.0), (1, 500.0)]
    found = json.loads((tmp_path / link_file.FILE).read_text())
    assert (found["set_mbit_per_s"], found["mbit_per_s"], found["link_gbps"]) == (500.0, 450.0, 10.0)
    said = (tmp_path / inside.CONTROL_DONE).read_text().splitlines()
    assert said == [
        "rate 40000",
        "check 500",
        "rate 0: unknown",
        "rate nan: unknown",
        "check fast: unknown",
        "rate: unknown",
    ]


def test_links_that_begin_without_a_rate(tmp_path: Path, possible: None) -> None:
    launcher = made(dilation="auto")
    with pytest.raises(UserError, match="which was not made"):
        launcher.check(make_spec(tmp_path, ""))
    launcher.late = True
    launcher.check(make_spec(tmp_path, ""))
    assert "tbf" not in launcher.preview(make_spec(tmp_path, ""))
    assert "tbf" in made().preview(make_spec(tmp_path, ""))
