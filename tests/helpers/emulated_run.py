"""Parts of the tests of emulated networks that run in processes of their own.

`python tests/helpers/emulated_run.py ...`: `network FILE` and `processes FILE` describe the sandbox they run in;
`launch WHAT DIR` launches 2 emulated nodes whose training is the line WHAT, in the run directory DIR/run; `SPEC` is a rank
that torchrun has started.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import process
from launch.emulated import measure, network, sandbox
from tests.helpers.waiting import until

RATE = 200.0  # Mbit/s


def skip_reason() -> str | None:
    """Why sandboxes cannot be tested here; None where they can."""
    command, reason = sandbox.probe()
    return None if command else f"no network namespaces: {reason}"


def describe(file: Path, nodes: int = 3) -> None:
    """What the sandbox's network is and does, as JSON."""
    shown: dict[str, Any] = {"interfaces": {}, "qdiscs": {}}
    for node in range(nodes):
        links = subprocess.run([*network.enter(node), "ip", "-json", "address"], capture_output=True, check=True)
        shown["interfaces"][node] = {
            link["ifname"]: [link["operstate"], *(f"{a['local']}/{a['prefixlen']}" for a in link["addr_info"])]
            for link in json.loads(links.stdout)
        }
    shown["namespaces"] = [os.stat(network.namespace(k)).st_ino for k in range(nodes)]
    shown["goodput"] = measure.goodput(nodes)
    network.shape(0, RATE / 4)
    # TCP backs off where a queue is full: single seconds on the slow link carry 60 to 95 % of its rate. The best of three.
    shown["slow node 0"] = [max(rates) for rates in zip(*(measure.goodput(nodes) for _ in range(3)), strict=True)]
    network.set_cable(1, "down")
    shown["cut"] = [_reaches(0, 1), _reaches(0, 2)]
    network.set_cable(1, "up")
    # On a loaded machine a link that comes up may lose the first packets, also those that ask for an address.
    shown["mended"] = [
        until(partial(_reaches, *pair), f"a connection of {pair}", within_s=60) for pair in ((0, 1), (1, 2))
    ]
    file.write_text(json.dumps(shown))


def _reaches(source: int, target: int) -> bool:
    with network.inside(target):
        listener = socket.create_server((network.address(target), 0))
    with listener, network.inside(source):
        try:
            socket.create_connection(listener.getsockname(), timeout=3).close()
        except OSError:
            return False
        return True


def processes(file: Path) -> None:
    """Whether process ids mean what they should, and whether orphans are collected."""
    child = subprocess.Popen(["sleep", "600"])
    # An intermediate parent ends first, so that the sandbox's first process inherits the sleeper.
    subprocess.run(["sh", "-c", "sleep 0.2 & :"], check=True)
    shown = {"alive": process.alive(child.pid)}
    child.kill()
    child.wait()
    shown["dead"] = process.alive(child.pid)
    time.sleep(1)
    states = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns/pid") == os.readlink("/proc/self/ns/pid"):
                states.append((entry / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    shown["zombies"] = states.count("Z")
    shown["reaches"] = _reaches(0, 1)
    file.write_text(json.dumps(shown))


def all_reduce(spec: Any) -> None:
    """One all-reduce of known size between nodes, and what the interface counted."""
    import torch
    import torch.distributed as dist

    from experiments.training import traffic

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tensor = torch.ones(spec.config["elements"])
    dist.all_reduce(torch.ones(1))  # connections are made by the first one
    meter = traffic.NicMeter()
    dist.barrier()
    meter.resume()
    dist.all_reduce(tensor)
    dist.barrier()  # a rank that has its result may still have bytes to send
    meter.pause()
    (spec.path / f"env{dist.get_rank()}.json").write_text(json.dumps(dict(os.environ)))
    (spec.path / f"bytes{dist.get_rank()}.json").write_text(json.dumps(meter.total))
    dist.barrier()
    dist.destroy_process_group()


def launcher(**options: Any) -> Any:
    """An emulated launcher of stub ranks, started without torchrun, which would import torch for every node."""
    from experiments.records import record
    from launch.emulated.launcher import EmulatedLauncher
    from tests.helpers import stub_run

    class Quick(EmulatedLauncher):
        worker = Path(stub_run.__file__).resolve()
        on_failure = staticmethod(record.write_failed)

        def torchrun(self, spec: Any, *, local_addr: str, **_: Any) -> list[str]:
            rank = [network.address(node) for node in range(network.MAX_NODES)].index(str(local_addr))
            world = [f"RANK={rank}", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1", f"WORLD_SIZE={self.nodes}"]
            return ["env", *world, self.python, str(self.worker), str(spec.file)]

    defaults = {"nodes": 2, "ranks_per_node": 1, "name": "emulated", "dilation": 50}
    return Quick(**{**defaults, **options})


def launch(stub: str, folder: Path) -> int:
    """Launches; returns the exit status."""
    from experiments.runs import command
    from launch.errors import UserError
    from launch.failure import RunFailed
    from tests.helpers import stub_run

    try:
        launcher().launch(stub_run.make_spec(folder, stub))
    except (UserError, RunFailed, KeyboardInterrupt, process.Stopped) as error:
        return command.report(error)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        sys.exit(launch(sys.argv[2], Path(sys.argv[3])))
    if sys.argv[1] in ("network", "processes"):
        {"network": describe, "processes": processes}[sys.argv[1]](Path(sys.argv[2]))
    else:
        from experiments.training import worker

        worker.main(sys.argv[1], all_reduce)
