"""The first lines of every run: what its numbers are and are not, and how to get those of the full setting."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from experiments.records import labels
from experiments.records.record import ROOT
from experiments.report import published
from launch.words import count

if TYPE_CHECKING:
    from experiments.workloads.base import Workload

MAKEFILE, CONF = ROOT / "Makefile", ROOT / "conf"


def headline(resolved: dict[str, Any], workload: Workload, *, nodes_given: bool, shaped: bool = False) -> str:
    """What the numbers to come are and are not; on a second line, the command of the full setting."""
    cluster, scale, exp = resolved["cluster"], resolved["scale"]["name"], resolved["exp"]
    nodes, ranks = cluster["nodes"], cluster["ranks_per_node"]
    shape = f"{count(nodes, 'node')} of {count(ranks, 'rank')}"
    here = {"local": "Local", "emulated": "Emulated"}.get(cluster["name"])
    place = f"{here}: {shape} as processes on this machine" if here else f"Cluster {cluster['name']}: {shape}"
    if here == "Local" and nodes > 1:
        place += ", joined by loopback"
    if labels.is_virtual(resolved):
        place = f"Virtual workers: {shape}, all in one process, for accuracy and bytes, never for times"
    if shaped:
        place += f", joined by links that stand for {cluster['link_gbps']:g} Gbit/s"
    data = f"synthetic data ({workload.data_name})" if workload.synthetic else workload.data_name
    meaning = "shows step time and bytes, not accuracy" if workload.synthetic else "a short run"
    if scale == "paper":
        return f"{place}; {data}; paper scale."
    whose = "The paper's setting" if any(published.beside(exp, k) for k in ("speedup", "accuracy")) else "The full run"
    command = make_command(exp) + (f" NODES={nodes}" if nodes_given else "") + " SCALE=paper"
    if not (CONF / "exp" / f"{exp}.yaml").is_file():
        return f"{place}; {data}; {scale} scale: {meaning}."
    if "data_path" in resolved["workload"] and resolved["data"]["path"] is None:
        command += " DATA=/path/to/data"
    return f"{place}; {data}; {scale} scale: {meaning}.\n{whose}: {command}"


def make_command(exp: str) -> str:
    """How `make` runs an experiment: by a target of that name, or as `make exp EXP=NAME`."""
    listed = re.search(r"^EXPERIMENTS := (.*)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    return f"make {exp}" if listed and exp in listed[1].split() else f"make exp EXP={exp}"
