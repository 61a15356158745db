"""What srun starts on each node of a SLURM job: finds this node's place in the network and becomes its torchrun.

`python launch/slurm/node.py --first HOST --second HOST --port P --ranks N [--interface NAME] -- COMMAND ...`. In COMMAND
{endpoint} becomes the first node and the port, {address} this node's address, {is_host} 1 on the first node and 0 on the
others. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: import from the repository, not from this file's own folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch import environment as common
from launch import probe


def environment(
    inherited: Mapping[str, str], *, node: int, interface: str, ranks: int, backend: str = "auto"
) -> dict[str, str]:
    """Environment of this node's ranks. `inherited`: the job's own."""
    env = common.fresh(inherited, ranks)
    for name in ("BIRDER_TERMINAL", "BIRDER_NIC"):
        env.pop(name, None)
    if backend != "nccl" and 0 < len(probe.visible_gpus()) < ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""  # ranks that share a GPU would time each other, not themselves
    return env | common.of_node(node, interface)


def main(arguments: list[str]) -> None:
    """Becomes COMMAND, or ends with one line that says why this node cannot take part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", required=True, help="the node that hosts the rendezvous")
    parser.add_argument("--second", required=True, help="any other node; the first again where there is no other")
    parser.add_argument("--port", required=True, help="of the rendezvous")
    parser.add_argument("--ranks", type=int, required=True, help="ranks per node")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--interface")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    node = int(os.environ["SLURM_NODEID"])
    # A host reaches itself over loopback, and its own name may mean loopback: the first node looks at another one.
    peer = options.second if node == 0 else options.first
    try:
        found = probe.route([socket.gethostbyname(peer)], options.interface)
    except OSError as error:
        found = {"error": f"{peer}: {error.strerror or error}"}
    if "error" in found:
        sys.exit(f"error: node {node}: {found['error']}; set cluster.interface=NAME")
    env = environment(os.environ, node=node, interface=found["interface"], ranks=options.ranks, backend=options.backend)
    known = {"endpoint": f"{options.first}:{options.port}", "address": found["address"], "is_host": int(node == 0)}
    command = [_fill(argument, known) for argument in options.command]
    os.execvpe(command[0], command, env)


def _fill(argument: str, known: Mapping[str, Any]) -> str:
    for name, value in known.items():
        argument = argument.replace(f"{{{name}}}", str(value))
    return argument


if __name__ == "__main__":
    main(sys.argv[1:])
