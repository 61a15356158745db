"""A SLURM site of its own on this machine: munged, slurmctld and four slurmd, in a process namespace that ends with it.

Nothing of a SLURM or munge that this machine may really run is used: configuration, key, sockets, ports and spool
directories are the site's, and its commands find it through SLURM_CONF.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from launch import process
from launch.local import free_port
from tests.helpers.waiting import until

NODES = 4
# slurmd and slurmctld are daemons of the namespace's first process, a shell that collects what they leave.
_DAEMONS = """
mkdir -p {dir}/state {dir}/log
munged --foreground --force --num-threads=2 --key-file={dir}/munge.key --socket={dir}/munge.sock \\
  --pid-file={dir}/munge.pid --log-file={dir}/log/munge.log --seed-file={dir}/munge.seed &
until [ -S {dir}/munge.sock ]; do sleep 0.1; done
slurmctld -D -f {dir}/slurm.conf > {dir}/log/slurmctld.out 2>&1 &
for k in {numbers}; do
  mkdir -p {dir}/spool/node$k
  slurmd -D -N node$k -f {dir}/slurm.conf > {dir}/log/node$k.out 2>&1 &
done
wait
"""
_CONFIG = """
ClusterName=birder-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={dir}/munge.sock
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=2,sched_interval=2
FirstJobId={first_job}
ReturnToService=2
KillWait=5
# On a busy machine everything takes long. For the same reason credentials live as long as SLURM lets them: with 10 s, jobs
# whose second node came late ended with "Job credential expired".
BatchStartTimeout=300
UnkillableStepTimeout=300
MessageTimeout=60
SlurmdTimeout=300
TCPTimeout=30
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=60 OverSubscribe=YES:4
PartitionName=small Nodes=node0 MaxTime=60
"""


def why_not() -> str | None:
    """Why no site can be made here, or None."""
    missing = [c for c in ("slurmctld", "slurmd", "munged", "srun", "unshare") if shutil.which(c) is None]
    if missing:
        return f"no {missing[0]} here (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    made = subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True)
    return "no process namespaces here" if made.returncode else None


class Site:
    """A running site. `env`: what commands need to reach it; `dir`: its files."""

    def __init__(self, folder: Path, daemons: subprocess.Popen) -> None:
        self.dir = folder
        self.daemons = daemons
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """Runs a SLURM command; its output. Raises CalledProcessError."""
        env = {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    def requeue(self, job: str) -> None:
        """Requeues a running job. It starts again in two seconds, not once all that its first life was given has expired."""
        self.call("scontrol", "requeue", job)
        until(lambda: self.call("squeue", "--noheader", "--format=%T", f"--jobs={job}") == "PENDING", self.logs)
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def tasks(self) -> list[str]:
        """Command lines of all processes that jobs have started here and that still run."""
        daemons = {"munged", "slurmctld", "slurmd", "slurmscriptd"}
        found = []
        for pid in process.descendants(self.daemons.pid)[1:]:  # the first is the shell that has started the daemons
            line = process.of_proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            program = Path(line.removeprefix(": ").partition(" ")[0]).name
            if line and program not in daemons and process.alive(pid):
                found.append(line)
        return found

    def logs(self) -> str:
        """The ends of the daemons' logs, for the message of a failed test."""
        shown = []
        for path in sorted((self.dir / "log").glob("*")):
            shown += [f"== {path.name}", *path.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(shown)


@contextmanager
def site() -> Iterator[Site]:
    """Starts a site, waits until its nodes are idle, and ends all of it."""
    with ExitStack() as stack:
        # A socket's path has about 100 characters at most, so no folder deep below pytest's.
        folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        ports: list[int] = []
        while len(ports) <= NODES:
            ports += {free_port()} - set(ports)
        nodes = "\n".join(
            f"NodeName=node{k} NodeHostName={socket.gethostname()} NodeAddr=127.0.0.1 Port={ports[k]} CPUs=2 State=UNKNOWN"
            for k in range(NODES)
        )
        config = _CONFIG.format(
            dir=folder, host=socket.gethostname(), controller=ports[NODES], nodes=nodes,
            first_job=random.randrange(1000, 60_000),
        )  # fmt: skip
        (folder / "slurm.conf").write_text(config)
        numbers = " ".join(map(str, range(NODES)))
        # The first process of a namespace takes all others with it when it ends, and it ends with this one.
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command += ["bash", "-c", _DAEMONS.format(dir=folder, numbers=numbers)]
        daemons = process.start(command, dict(os.environ), folder / "site.log")
        stack.callback(end, daemons)
        made = Site(folder, daemons)
        wait_until_idle(made)
        yield made


def wait_until_idle(made: Site) -> None:
    """Waits until every node is free for jobs."""

    def idle() -> bool:
        with suppress(subprocess.CalledProcessError):
            states = made.call("sinfo", "--noheader", "--Node", "--partition=main", "--format=%t")
            return states.split() == ["idle"] * NODES
        return False

    until(idle, made.logs, every_s=0.3)


def end(daemons: subprocess.Popen) -> None:
    """Ends the namespace and so every process in it; returns when they are gone."""
    inside = process.descendants(daemons.pid)
    daemons.kill()
    daemons.wait()
    until(lambda: not any(map(process.alive, inside)), "the site has ended")
