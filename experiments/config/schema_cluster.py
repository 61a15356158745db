"""Arguments of the launchers, as in the files of conf/cluster."""

from __future__ import annotations

from typing import Literal

from experiments.config.kinds import (
    Count,
    Dilation,
    Hosts,
    Name,
    Nodes,
    Options,
    Port,
    Positive,
    Ranks,
    Restarts,
    Scalar,
    Seconds,
    Switch,
    Text,
    doc,
)
from experiments.config.schema import Section


class Cluster(Section):
    name: Name = doc("how tables call it")
    nodes: Nodes = doc("number of nodes")
    ranks_per_node: Ranks = doc("ranks (GPUs) of a node")
    backend: Literal["auto", "nccl", "gloo"] = doc("auto: nccl with GPUs, gloo otherwise")
    max_restarts: Restarts = doc("restarts of all ranks by torchrun after a failure")
    heartbeat_timeout_s: Seconds = doc("seconds that a rank may answer nobody before the run ends")
    collective_timeout_s: Seconds = doc("seconds that a rank which does answer may keep the others waiting")
    dry_run: Switch = doc("true: print the commands, start nothing")


class Local(Cluster):
    device: Literal["auto", "cpu", "cuda"] = doc(
        "auto: cuda with nccl, else cpu; cuda with gloo: ranks may share a GPU"
    )


class Emulated(Cluster):
    link_gbps: Positive = doc("rate of the network that is emulated, Gbit/s per node and direction")
    dilation: Dilation = doc("the links here are set to link_gbps / dilation; auto: measured at the start")
    max_total_gbps: Positive | None = doc("what this machine can carry over all nodes; null: 4 to 5 Gbit/s per core")


class Ssh(Cluster):
    hosts: Hosts = doc("[user@]host[:port] of every node: a,b,c or a file with one per line")
    python: Text | None = doc("interpreter on the hosts; null: the path of this one")
    directory: Text | None = doc("the repository on the hosts; null: the path of this one")
    interface: Text | None = doc("network interface for gloo and NCCL; null: the one that routes to the first host")
    port: Port | None = doc("of the rendezvous on the first host; null: a free one")
    ssh_options: Options = doc("further arguments of ssh")
    env: dict[str, Scalar] | None = doc("variables of the ranks; a null value is taken from the environment here")


class Slurm(Cluster):
    partition: Text | None = doc("as sbatch knows it; null: the site's default")
    account: Text | None = doc("as sbatch knows it; null: the site's default")
    time: Count | Text | None = doc('"HH:MM:SS" or minutes; null: the site\'s default')
    constraint: Text | None = doc("as sbatch knows it; null: none")
    gpus_per_node: Count | Text | None = doc(
        "as sbatch knows it: 8, a100:8; null: one for each rank, where nodes have them"
    )
    cpus_per_node: Count | None = doc("cores for the ranks of a node; null: one for each rank")
    sbatch: dict[str, Scalar] | None = doc("any other option of sbatch: {mem: 0, exclusive: null}")
    interface: Text | None = doc("network interface of gloo and NCCL; null: the one that routes to the first node")
    wait: Switch = doc("false: submit and return; the record comes when the job ends")
    poll_s: Seconds = doc("seconds between two questions about the job")


CLUSTERS: dict[str, type[Cluster]] = {
    "launch.local.LocalLauncher": Local,
    "launch.virtual.VirtualLauncher": Local,
    "launch.emulated.launcher.EmulatedLauncher": Emulated,
    "launch.ssh.launcher.SshLauncher": Ssh,
    "launch.slurm.launcher.SlurmLauncher": Slurm,
}
