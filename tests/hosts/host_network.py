"""Hosts of a job on one machine: each is a network namespace with an own `sshd`, and own folders.

A host has an address, a name (node1, node2 ...) that all hosts resolve, and an own copy of everything that
lies in the folder `here`, which has the same path on all hosts: the home folder, the folder for temporary
files, and the working folder. Only the interpreter and the cache of compiled code belong to the machine.
"""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "mount")
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_ENTER = 'mount --bind "$1" "$2" && mount --bind "$3" /etc/hosts && cd "$2/work" && shift 3 && exec "$@"'
_SWEEP = """
cat > /dev/null
for name in "$@"; do
    [ "$name" = "$1" ] && continue
    while pids=$(ip netns pids "$name") && [ -n "$pids" ]; do kill -9 $pids; sleep 0.01; done
    ip netns del "$name"
done
rm -rf "$1"
"""
"""Waits until its input closes, which also happens when the process of the tests is killed."""
_LOOK_EVERY = 0.02
_LISTENS = "0A"
_SSH = 22


class Unavailable(Exception):
    """This machine cannot have such hosts, for the reason that the message says."""


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: that every host resolves.
        address: its IP address.
        namespace: its network namespace.
        folder: what the host sees as `here`.
        here: a path that is the same on all hosts, but leads to a folder of its own on each.
        keys: the file of the keys that its `sshd` accepts.
    """

    name: str
    address: str
    namespace: str
    folder: Path
    here: Path
    keys: Path
    _public_key: str
    _started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def work(self) -> Path:
        """The working folder, as the tests see it."""
        return self.folder / "work"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the host."""
        return {
            "HOME": str(self.here / "home"),
            "TMPDIR": str(self.here / "tmp"),
            "XDG_CACHE_HOME": str(self.here / "cache"),
        }

    def accept_key(self, **variables: str) -> None:
        """Let `sshd` accept the key of the tests, with more variables for what it starts."""
        # An agent over ssh has the source of these tests.
        paths = [path for path in (variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")) if path]
        if paths:
            variables["PYTHONPATH"] = ":".join(paths)
        options = "".join(f'environment="{name}={value}",' for name, value in variables.items())
        self.keys.write_text(f"{options.rstrip(',')} {self._public_key}".lstrip())

    def refuse_key(self) -> None:
        """Let `sshd` accept no key."""
        self.keys.write_text("")

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs a command on this host, in the working folder."""
        entering = ("sh", "-c", _ENTER, "sh", str(self.folder), str(self.here))
        names = str(self.here.parent / "names")
        return ["ip", "netns", "exec", self.namespace, *entering, names, *arguments]

    def start(self, *arguments: str, **variables: str) -> "Running":
        """Start a command in the working folder, with variables on top of those of this process."""
        wrapper = f"{self.here.parent / 'bin'}:{_PATH}"
        environment = {**os.environ, "PATH": wrapper, **self.variables, **variables}
        number = len(list(self.folder.glob("*.out")))
        out, err = self.folder / f"{number}.out", self.folder / f"{number}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                self.command(*arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        self._started.append(process)
        return Running(self, process, out, err)

    def lockstep(self, *arguments: str, **variables: str) -> "Running":
        """Start the command `lockstep`."""
        return self.start(sys.executable, "-m", "lockstep", *arguments, **variables)

    def cut(self) -> None:
        """Take the network away."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")

    def reconnect(self) -> None:
        """Give the network back."""
        _ip("-n", self.namespace, "neigh", "flush", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def slow(self) -> None:
        """Let the host send a megabyte per second, until `hasten`."""
        limit = ["tbf", "rate", "8mbit", "burst", "128kb", "latency", "400ms"]
        self._shape("replace", "dev", "eth0", "root", *limit)

    def hasten(self) -> None:
        """Let the host send at full speed."""
        self._shape("replace", "dev", "eth0", "root", "noqueue")

    def _shape(self, *arguments: str) -> None:
        command = ["tc", "-n", self.namespace, "qdisc", *arguments]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": _PATH})

    def break_connections(self) -> None:
        """Break the connections between the workers of this host and those of others; both ends live."""
        chosen = ["state", "established", f"( sport != :{_SSH} and dport != :{_SSH} )"]
        command = ["ip", "netns", "exec", self.namespace, "ss", "--kill", "--tcp", *chosen]
        subprocess.run(command, check=True, capture_output=True, env={"PATH": _PATH})

    def part_from(self, other: "Host") -> None:
        """Lose everything that this host sends to another one."""
        nowhere = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _ip("-n", self.namespace, "neigh", "replace", other.address, *nowhere)

    def processes(self) -> dict[int, str]:
        """The command lines of all processes on this host but the `sshd` that waits for connections."""
        own, found = (Path("/run/netns") / self.namespace).stat().st_ino, {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if (entry / "ns/net").stat().st_ino == own:
                    text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = text.strip()
        return {pid: text for pid, text in found.items() if "sshd: " not in text or "[listener]" not in text}

    def matching(self, text: str) -> list[int]:
        """Ids of the processes with a text in the command line."""
        return sorted(pid for pid, line in self.processes().items() if text in line)

    def listening(self) -> list[int]:
        """The ports at which Lockstep listens on this host, for other hosts."""
        pid = next(iter(self.processes()))
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        ports = {int(row[1].partition(":")[2], 16) for row in rows if row[3] == _LISTENS}
        return sorted(ports - {_SSH})

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of this host."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def left(self) -> list[str]:
        """What remains of a job: processes, and temporary files of Lockstep."""
        files = [str(path.relative_to(self.folder)) for path in (self.folder / "tmp").glob("lockstep*")]
        return [f"{pid}: {line}" for pid, line in self.processes().items()] + files

    def remove_abandoned(self) -> None:
        """Remove folders of agents that were killed with the processes that watch them."""
        for folder in (self.folder / "tmp").glob("lockstep-agent-*"):
            # An agent that ends just now removes its own.
            shutil.rmtree(folder, ignore_errors=True)

    def reset(self) -> None:
        """End all processes, and empty the folders."""
        while self.processes():
            self.signal_all(signal.SIGKILL)
            time.sleep(_LOOK_EVERY)
        while self._started:
            self._started.pop().wait()
        self.reconnect()
        self.hasten()
        self.accept_key()
        for path in self.folder.iterdir():
            if path.name == "cache":
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name in ("home", "tmp", "work"):
            (self.folder / name).mkdir()


@dataclass
class Running:
    """A command on a host.

    Attributes:
        host: where it runs.
        process: the command.
    """

    host: Host
    process: "subprocess.Popen[bytes]"
    _out: Path
    _err: Path

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._err.read_text(errors="replace")

    def end(self, patience: float = 600.0) -> int:
        """Wait for its end; return the exit status."""
        return self.process.wait(patience)

    def wait_until(self, holds: Callable[[], object], patience: float = 600.0) -> None:
        """Wait until something holds, while the command runs."""
        deadline = time.monotonic() + patience
        while not holds():
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.out}{self.err}"
            assert time.monotonic() < deadline, f"not in time: {self.out}{self.err}"
            time.sleep(_LOOK_EVERY)


@dataclass
class HostNetwork:
    """Hosts that reach one another, until it is closed."""

    hosts: tuple[Host, ...]
    folder: Path
    _servers: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    _sweeper: "subprocess.Popen[bytes] | None" = None

    @classmethod
    def open(cls, count: int, cache: Path) -> "HostNetwork":
        """Make the hosts.

        Args:
            count: how many.
            cache: a folder with compiled code, for all hosts.

        Raises:
            Unavailable: this machine cannot have them.
        """
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
        if missing:
            raise Unavailable(f"{' and '.join(missing)} not installed")
        # A path of its own for each process of the tests, so their names do not collide.
        folder = Path(tempfile.mkdtemp(prefix="lockstep-hosts-", dir="/tmp"))
        prefix = f"lockstep-{os.getpid()}"
        namespaces = [f"{prefix}-{number}" for number in range(count + 1)]
        sweeping = ("sh", "-c", _SWEEP, "sh", str(folder), *namespaces)
        sweeper = subprocess.Popen(
            sweeping, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        network = cls((), folder, _sweeper=sweeper)
        try:
            network._open(namespaces, cache)
        except BaseException:
            network.close()
            raise
        return network

    def _open(self, namespaces: Sequence[str], cache: Path) -> None:
        switch, *others = namespaces
        try:
            _ip("netns", "add", switch)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"no network namespaces: {error.stderr.strip()}") from None
        folder, here = self.folder, self.folder / "here"
        for made in (here, folder / "bin", Path("/run/sshd")):
            made.mkdir(exist_ok=True)
        self._generate("host")
        self._generate("user")
        addresses = [f"10.119.0.{number}" for number, _ in enumerate(others, 1)]
        names = [f"node{number}" for number, _ in enumerate(others, 1)]
        pairs = list(zip(addresses, names, strict=True))
        (folder / "names").write_text(
            "".join(f"{address} {name}\n" for address, name in [("127.0.0.1", "localhost"), *pairs])
        )
        host_key = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"{name},{address} {host_key}" for address, name in pairs))
        (folder / "ssh").write_text(
            f"IdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\n"
            "GlobalKnownHostsFile none\nStrictHostKeyChecking yes\nUser root\n"
        )
        program = shlex.join([str(shutil.which("ssh", path=_PATH)), "-F", str(folder / "ssh")])
        (folder / "bin/ssh").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (folder / "bin/ssh").chmod(0o700)
        _batch("link add switch type bridge", "link set switch up", namespace=switch)
        for number, (namespace, (address, name)) in enumerate(zip(others, pairs, strict=True), 1):
            _ip("netns", "add", namespace)
            _batch(
                f"link add port{number} type veth peer name eth0 netns {namespace}",
                f"link set port{number} master switch up",
                namespace=switch,
            )
            _batch(
                f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up", namespace=namespace
            )
            own = folder / name
            own.mkdir()
            (own / "cache").symlink_to(cache)
            keys = folder / f"{name}.keys"
            host = Host(name, address, namespace, own, here, keys, (folder / "user.pub").read_text())
            host.reset()
            self.hosts += (host,)
            self._serve(host)
        for host in self.hosts:
            self._await(folder / f"{host.name}.pid")

    def _generate(self, name: str) -> None:
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self.folder / name)]
        subprocess.run(command, check=True, capture_output=True)

    def _serve(self, host: Host) -> None:
        settings = {
            "ListenAddress": host.address,
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": host.keys,
            "PidFile": self.folder / f"{host.name}.pid",
            "PermitRootLogin": "yes",
            "PermitUserEnvironment": "yes",
            "SetEnv": " ".join(f"{name}={value}" for name, value in host.variables.items()),
            "StrictModes": "no",
            "UseDNS": "no",
            "UsePAM": "no",
        }
        path = self.folder / f"{host.name}.sshd"
        path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        server = str(shutil.which("sshd", path=_PATH))
        command = host.command(server, "-D", "-f", str(path), "-E", f"{path}.log")
        self._servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env={"PATH": _PATH}))

    def _await(self, path: Path) -> None:
        deadline = time.monotonic() + 60.0
        while not path.exists():
            ended = [server.poll() for server in self._servers]
            if any(status is not None for status in ended) or time.monotonic() > deadline:
                logs = "".join(log.read_text() for log in sorted(self.folder.glob("*.sshd.log")))
                raise Unavailable(f"sshd does not start: {logs}")
            time.sleep(0.005)

    def reset(self) -> None:
        """End all processes on all hosts, and empty their folders."""
        for host in self.hosts:
            host.reset()

    def left(self, patience: float) -> dict[str, list[str]]:
        """What remains on each host after `patience` seconds at most."""
        deadline = time.monotonic() + patience
        while (left := {host.name: found for host in self.hosts if (found := host.left())}) and (
            time.monotonic() < deadline
        ):
            time.sleep(_LOOK_EVERY)
        return left

    def close(self) -> None:
        """Remove everything."""
        assert self._sweeper is not None
        self._sweeper.communicate(timeout=60.0)
        for server in self._servers:
            server.wait(60.0)

    def __enter__(self) -> "HostNetwork":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ip(*arguments: str) -> None:
    command = ["ip", *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": _PATH})


def _batch(*lines: str, namespace: str) -> None:
    text = "".join(f"{line}\n" for line in lines)
    command = ["ip", "-n", namespace, "-batch", "-"]
    subprocess.run(command, input=text, check=True, capture_output=True, text=True, env={"PATH": _PATH})
