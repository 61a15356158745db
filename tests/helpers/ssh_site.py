"""Four hosts on one machine, each an sshd with a network, mount, process and host-name space of its own.

`python tests/helpers/ssh_site.py hosts FOLDER` is what the sandbox runs; `... launch REQUEST` launches stub ranks on hosts;
`... SPEC` is such a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from experiments.records import record
from experiments.runs import command
from experiments.training import worker
from launch.emulated import network, sandbox
from launch.errors import UserError
from launch.failure import RunFailed
from launch.process import Stopped
from launch.spec import RunSpec
from launch.ssh.launcher import SshLauncher
from tests.helpers import sandboxed, stub_run
from tests.helpers.waiting import until

HOSTS = 4
SSHD = shutil.which("sshd", path="/usr/sbin:/sbin:" + os.environ.get("PATH", ""))
# sshd's own folder and an account that is not locked: both in this host's private mounts.
HOST_SCRIPT = """
hostname "host$1" && mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd || exit 1
sed 's/^root:[^:]*/root:*/' /etc/shadow > "/run/shadow" && mount --bind /run/shadow /etc/shadow || exit 1
exec "$2" -D -e -f "$3/sshd_config" -o "ListenAddress=$4"
"""
BANNER = "#### authorized use only ####\n"
SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
Banner {folder}/banner
StrictModes no
UsePAM no
PidFile none
"""


def missing() -> str | None:
    """Why there can be no site here; None when there can."""
    if os.geteuid() != 0:
        return "needs root: sshd changes users"
    for tool in ("ssh", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"no {tool} here: install openssh-client"
    if SSHD is None:
        return "no sshd here: install openssh-server"
    command, reason = sandbox.probe()
    return f"no network namespaces: {reason}" if command is None else None


class Site:
    """The running hosts. Everything of theirs ends with `process`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("key", "host_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        (folder / "sshd_config").write_text(SSHD_CONFIG.format(folder=folder))
        (folder / "banner").write_text(BANNER)
        host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        self.addresses = [network.address(k) for k in range(HOSTS)]
        (folder / "known_hosts").write_text("".join(f"{a} {host_key}\n" for a in self.addresses))
        known = f"UserKnownHostsFile={folder}/known_hosts"
        self.options = ["-F", "none", "-i", str(folder / "key"), "-o", known, "-o", "IdentitiesOnly=yes"]
        inside = [sys.executable, str(Path(__file__).resolve()), "hosts", str(folder)]
        with open(folder / "log", "wb") as log:
            command = sandboxed.script("--nodes", str(HOSTS), "--", *inside)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        def answer() -> bool:
            assert self.process.poll() is None, (self.folder / "log").read_text()
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            self.net = f"/proc/{children[0]}/ns/net" if children else ""
            return bool(children) and all(self.try_on(k, "true").returncode == 0 for k in range(HOSTS))

        until(answer, (self.folder / "log").read_text, every_s=0.2)

    def enter(self) -> list[str]:
        """Put before a command, it runs in the network that reaches all hosts, and nowhere else."""
        return ["nsenter", f"--net={self.net}", "--"]

    def try_on(self, host: int, command: str) -> subprocess.CompletedProcess[str]:
        """Runs a shell command on one host, over ssh."""
        ssh = ["ssh", *self.options, "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", self.addresses[host], command]
        done = subprocess.run([*self.enter(), *ssh], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return done

    def on(self, host: int, command: str) -> str:
        """What a shell command that must succeed prints on one host."""
        done = self.try_on(host, command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def running(self, host: int) -> dict[int, str]:
        """Process id -> command line of a host's processes that are neither sshd nor this question's own."""
        question = "for p in /proc/[0-9]*; do echo ${p#/proc/} $(tr '\\0' ' ' 2>/dev/null < $p/cmdline); done"
        found = [line.partition(" ") for line in self.on(host, question).splitlines()]
        ours = ("sshd", f"bash -c {question[:20]}", f"sh -c {question[:20]}")
        return {int(pid): line for pid, _, line in found if line and not line.startswith(ours)}

    @contextmanager
    def mounted(self, mounts: dict[int, str]) -> Iterator[None]:
        """Runs the arguments of `mount` on hosts, and undoes them; the last argument is the place."""
        try:
            for host, arguments in mounts.items():
                self.on(host, f"mount {arguments}")
            yield
        finally:
            for host, arguments in mounts.items():
                self.try_on(host, f"umount -l {arguments.split()[-1]}")

    def private(self, folder: Path, hosts: int = HOSTS) -> Any:
        """Hosts see an empty folder of their own in place of `folder`."""
        return self.mounted(dict.fromkeys(range(hosts), f"-t tmpfs tmpfs {folder}"))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def request(self, folder: Path, what: str, hosts: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """What `start` takes; options: arguments of SshLauncher, and checkpoint_every."""
        options = {"hosts": hosts or self.addresses, "ssh_options": self.options, "checkpoint_every": 0, **options}
        return {"stub": what, "folder": str(folder), **options}

    def start(self, request: dict[str, Any]) -> subprocess.Popen[str]:
        """Starts a launcher."""
        command = [*self.enter(), sys.executable, str(Path(__file__).resolve()), "launch", json.dumps(request)]
        env = os.environ.copy()  # of Python's own: readline, which pytest may load, sets COLUMNS below it
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)

    def finish(self, request: dict[str, Any]) -> tuple[int, str, str]:
        """Starts a launcher and waits for its exit status, output and errors."""
        launcher = self.start(request)
        try:
            out, err = launcher.communicate()
        finally:
            launcher.kill()
        return launcher.returncode, out, err


def train(spec: RunSpec) -> None:
    """One stub rank."""
    if spec.config["stub"] == "node 3 fails":
        if os.environ["BIRDER_NODE"] == "3":
            raise ValueError("a broken thing")
        time.sleep(1)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    stub_run.train(spec)


def launch(stub: str, folder: Path, checkpoint_every: int, **options: Any) -> int:
    """Launches stub ranks on hosts as `options` say; returns the exit status."""
    spec = stub_run.make_spec(folder, stub)
    spec.config["checkpoint"] = {"every": checkpoint_every}
    try:
        launcher = SshLauncher(ranks_per_node=1, name="ssh", **options)
        spec.config["cluster"] = {"nodes": launcher.nodes, "ranks_per_node": 1, "name": "ssh"}
        launcher.worker = Path(__file__).resolve()
        launcher.on_failure = record.write_failed
        launcher.launch(spec)
    except (UserError, RunFailed, KeyboardInterrupt, Stopped) as error:
        return command.report(error)
    return 0


def _hosts(folder: str) -> None:
    """Inside the sandbox: starts every host's sshd and waits for the end."""
    private = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
    assert SSHD is not None
    hosts = []
    for k in range(HOSTS):
        script = ["sh", "-c", HOST_SCRIPT, "host", str(k), SSHD, folder, network.address(k)]
        hosts.append(subprocess.Popen([*network.enter(k), *private, *script]))
    for host in hosts:
        host.wait()


if __name__ == "__main__":
    if sys.argv[1] == "hosts":
        _hosts(sys.argv[2])
    elif sys.argv[1] == "launch":
        request = json.loads(sys.argv[2])
        sys.exit(launch(request.pop("stub"), Path(request.pop("folder")), **request))
    else:
        worker.main(sys.argv[1], train)
