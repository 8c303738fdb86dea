"""The standby of a job: the agent of its host starts another coordinator when the first one is lost.

That coordinator is a process beside the agent, which listens at the address of `--standby`. All agents that
have lost the first one connect there, including that of its own host. From then on, everything happens as
after a restart of the first command (`takeover.py`). The store decides whether it may lead (`leadership.py`).

Agents over ssh do the same, with the key that the first command has sent them. They have no terminal, so the
output of the new coordinator is in its run folder.

The coordinator may continue the job without its own host, which may be lost according to the job's record.
The agent then joins again as the agent of a new host. So the standby outlives each part of the agent in the
job.

When the first host returns, its command joins the job with an agent, which is the standby of the standby: if
the coordinator is lost, it starts one at the address of the first host.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lockstep.checkpoint.run_upload import uploaded_beside
from lockstep.errors import ConfigError, LockstepError, NetworkError, UnfitError, with_code
from lockstep.hosts.gate import Gate
from lockstep.hosts.gathering import Stopped
from lockstep.hosts.host_listener import own_credentials
from lockstep.hosts.job_on_hosts import terminal_of
from lockstep.hosts.roster import OpenRoster
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.protocol.host import (
    ALIVE_EVERY,
    LEFT_OUT,
    MOST_QUEUED,
    SILENCE,
    BeginJob,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.child_process import command_of, connected
from lockstep.system.descendants import kill_family
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.files import open_own
from lockstep.system.notes import note
from lockstep.system.paths import RunPaths
from lockstep.system.prose import install_command
from lockstep.system.run_folder import RUNS, claim_folder, empty_folder, fresh_folder, leave_folder, run_name
from lockstep.transport.addresses import is_here, is_loopback, resolve_host, split_address
from lockstep.transport.dial import connect
from lockstep.transport.keys import JobKey
from lockstep.transport.packet_channel import PacketChannel
from lockstep.transport.stream_channel import StreamChannel

_CONNECT = 5.0
"""Seconds to connect to the standby."""
_ANSWER = 10.0
"""Seconds for a coordinator to answer: once it leads the job, it shows every second that it lives."""
_AGAIN = 30.0
"""Seconds from the start of a coordinator that could not lead the job to the next try."""
_GATHERED = 60.0
"""Seconds for the first agent to connect to the coordinator: that of its own host."""
_FAREWELL = 30.0
"""Seconds for the coordinator to end after the job, without an upload."""


@dataclass
class Standby:
    """Starts a coordinator on this host. Its agent uses it, even after it has joined the job again.

    Attributes:
        leads_at: HOST:PORT of this host at which agents also look for a coordinator; empty if there is none.
        children: process ids of the children of this process that are not workers.
        address: HOST:PORT, perhaps of another host, at which the coordinator listens; empty before the first
            job, and if the job has no standby.
        prepare: the first message to the agent; it has the key if the first command runs the agent over ssh.
        begin: the job, with the paths of this host.
        reached_at: the IP address at which other hosts reach this one.
        runs: whether a coordinator runs.
    """

    leads_at: str = ""
    children: set[int] = field(default_factory=set)
    address: str = field(default="", init=False)
    prepare: Prepare = field(init=False)
    begin: BeginJob = field(init=False)
    reached_at: str = field(default="", init=False)
    _is_here: bool | None = None
    _hidden_at: str = ""
    _process: "subprocess.Popen[bytes] | None" = None
    _channel: PacketChannel[Prepare | BeginJob | StopRequest, StopRequest] | None = None
    _due: float = field(default=0.0)

    def follow(self, prepare: Prepare, begin: BeginJob, reached_at: str) -> None:
        """From now on, be the standby of a job in which the agent takes part, perhaps not for the first time.

        Args:
            prepare: the first message to the agent.
            begin: the job, with the paths of this host.
            reached_at: the IP address at which other hosts reach this one.
        """
        if self.address and prepare.job != self.prepare.job:
            self.close()
        elif self.address and self.prepare.key and not prepare.key:
            # Only the first command sends the key. The run folder of this host is beside that command's.
            prepare = msgspec.structs.replace(prepare, key=self.prepare.key)
            spec = replace(begin.spec, run_dir=self.begin.spec.run_dir)
            begin = msgspec.structs.replace(begin, spec=spec)
        self.prepare, self.begin, self.reached_at = prepare, begin, reached_at
        self.address = begin.spec.standby and (self.leads_at or begin.spec.standby)
        self._is_here, self._hidden_at = None, ""

    @property
    def replaces_command(self) -> bool:
        """Whether nothing else takes over the job: the command of `--hosts` does not when it runs again."""
        return bool(self.address and self.prepare.folder)

    def is_here(self) -> bool:
        """Return whether other hosts reach the address on this host; its name may be unknown until later."""
        if not self.address:
            return False
        if self._is_here is None:
            try:
                family, address = resolve_host(*split_address(self.address))
                self._is_here = is_here(family, address)
            except (NetworkError, OSError):
                return False
            if is_loopback(address[0]) and not is_loopback(self.reached_at):
                # Debian gives 127.0.1.1 to the name of a host, so agents of other hosts could not connect.
                self._is_here, self._hidden_at = False, address[0]
        return self._is_here

    def lacks(self) -> str:
        """Return what this host lacks for taking over the job, or an empty string."""
        if not self.is_here() and self._hidden_at:
            return (
                f"this host cannot take the job over at {self.address}, which is {self._hidden_at} here, "
                "where no other host can connect: make the name resolve to an address of its network (see "
                "/etc/hosts)"
            )
        if not self.is_here() or importlib.util.find_spec("obstore") is not None:
            return ""
        return (
            f"this host cannot take the job over at {self.address}, because the package obstore is not "
            f"installed: {install_command('store')}"
        )

    @property
    def runs(self) -> bool:
        """Whether a coordinator runs; see the class."""
        if self._process is not None and self._process.poll() is not None:
            self._release()
        return self._process is not None

    def start(self, now: float) -> None:
        """Start a coordinator, unless one runs, or one failed to lead the job a short time ago."""
        if not self.address or self.runs or now < self._due:
            return
        self._due = now + _AGAIN
        if not self.is_here():
            return
        with connected() as (ours, theirs):
            command = command_of(__spec__.name, str(theirs.fileno()))
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        self.children.add(self._process.pid)
        self._channel = PacketChannel(ours, StopRequest)
        self._channel.send(self.prepare)
        spec = replace(self.begin.spec, standby=self.address)
        self._channel.send(msgspec.structs.replace(self.begin, spec=spec))

    def stop(self, number: int) -> None:
        """Have the coordinator stop the job because of a signal, if it runs."""
        if self.runs:
            assert self._channel is not None
            self._channel.send(StopRequest(number))

    def see_off(self) -> None:
        """Wait until the coordinator has ended the job, and has uploaded its run folder."""
        if self._process is not None:
            assert self._channel is not None
            wait_for([self._channel.fileno()], _FAREWELL)
            if isinstance(self._channel.receive(), PeerGone):
                # If it has not ended yet, the upload is in progress, which has its own limit.
                self._process.wait()
            else:
                note(f"the coordinator of this host has not ended within {_FAREWELL:g} s")

    def outlast(self, command: StopChannel) -> None:
        """Wait until the coordinator has ended, if one runs, or this process is stopped.

        Args:
            command: the channel to the process that watches this one.
        """
        while self.runs:
            assert self._channel is not None
            wait_for([self._channel.fileno(), command.fileno()])
            if command.receive() is not None:
                return
            self.see_off()

    def close(self) -> None:
        """End the coordinator; safe to call more than once."""
        if self.runs:
            assert self._process is not None
            kill_family(self._process.pid)
            self._process.returncode = 0
            self._release()

    def _release(self) -> None:
        assert self._process is not None
        assert self._channel is not None
        self.children.discard(self._process.pid)
        self._channel.close()
        self._process = self._channel = None


def continues_at(address: str) -> str:
    """Return why a command does not begin a job that a coordinator at an address leads."""
    return (
        f"the job continues at {address}, without this command: lockstep list there shows it, and a host "
        f"takes part with lockstep agent --join {address}"
    )


def is_led_at(address: str, *, encrypted: bool) -> bool:
    """Return whether a coordinator at an address leads the job, or does so within `_ANSWER`.

    A standby that is cut off also listens there while it tries to take over the job. It does not answer a
    connection without an offer.

    Raises:
        ConfigError: there is no key, or it cannot be used.
        NetworkError: the name of the host cannot be resolved.
    """
    credentials = own_credentials(address, encrypted=encrypted)
    until = time.monotonic() + _ANSWER
    try:
        connection = connect(address, Greeting(ConnectionKind.CONTROL), credentials, _CONNECT)
    except NetworkError:
        return False
    channel: StreamChannel[RemoteReport, RemoteInstruction] = StreamChannel.over(
        connection, RemoteInstruction, credentials, accepted=False, most_queued=MOST_QUEUED
    )
    with closing(channel):
        while True:
            match channel.receive():
                case None:
                    pass
                case PeerGone() | Unreadable():
                    # The agent of that host may listen there, for workers only.
                    return False
                case _:
                    return True
            if (left := until - time.monotonic()) <= 0:
                return False
            # Silent connections are closed there.
            channel.send(KeepAlive())
            wait_for([channel.fileno()], min(left, ALIVE_EVERY))


def lead(prepare: Prepare, begin: BeginJob, command: StopChannel) -> int:
    """Take over the job whose agents connect, and run it to its end; return its exit status.

    Args:
        prepare: the first message to the agent of this host.
        begin: the job, with the paths of this host, and with the address of this coordinator as its standby.
        command: closes when the agent of this host ends.

    Raises:
        ConfigError: the address or the key cannot be used.
        UnfitError: no agent has connected, or the job cannot be continued.
    """
    spec = begin.spec
    with contextlib.ExitStack() as ends:
        if prepare.key:
            spec = replace(spec, run_dir=_run_folder_with_output(spec))
            ends.callback(leave_folder, spec.run_dir)
            key = JobKey.parse(prepare.key, "the message of the agent")
            credentials = key.mint(encrypted=prepare.encrypted)
        else:
            credentials = own_credentials(spec.standby, encrypted=not spec.plain)
        console = terminal_of(spec)
        loop = ends.enter_context(EventLoop())
        roster = OpenRoster(spec.workers, waits=True, limited=False)
        gate = Gate(lambda: roster, credentials, command, console, loop)
        with closing(gate):
            gate.listen(spec.standby)
            begun = time.monotonic()

            def wait(missing: str) -> float:
                left = begun + _GATHERED - time.monotonic()
                if left <= 0:
                    raise UnfitError(f"no agent has connected to {spec.standby} within {_GATHERED:g} s")
                return left

            console.say(f"no coordinator for {SILENCE:g} s: this host takes the job over at {spec.standby}")
            gate.gather(wait)
            if not prepare.key:
                spec = replace(spec, run_dir=_run_folder(spec, console.say))
                ends.callback(leave_folder, spec.run_dir)
            with _uploaded(spec, command):
                return gate.run(spec, begins=False)


@contextlib.contextmanager
def _uploaded(spec: JobSpec, command: StopChannel) -> Iterator[None]:
    """Upload the run folder of this host to a separate place below that of the first host's folder.

    The channel to the agent closes before the rest is uploaded, and the agent waits for that (`see_off`).
    """
    if not spec.run_store:
        yield
        return
    url = f"{spec.run_store}/{run_name(socket.gethostname(), time.time())}"
    note(f"the run folder {spec.run_dir} is uploaded to {url}")
    with uploaded_beside(spec.run_dir, url), closing(command):
        yield


def _run_folder_with_output(spec: JobSpec) -> Path:
    """Return this host's locked run folder for a job over ssh. The output of this process goes there."""
    notes = list[str]()
    folder = _run_folder_beside(spec, notes.append)
    with contextlib.suppress(OSError):
        output = open_own(RunPaths(folder).output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for standard in (1, 2):
            os.dup2(output, standard)
        os.close(output)
    # Earlier, nobody would see them, because the connection of ssh is lost.
    for text in notes:
        note(text)
    return folder


def _run_folder_beside(spec: JobSpec, say: Callable[[str], None]) -> Path:
    """Return the locked run folder of this host for a job over ssh, beside that of the command.

    Each attempt to lead the job uses the same folder, which the first host does not use, even on a shared
    disk. If it cannot be used, a note names another one.
    """
    folder, notes = spec.run_dir.with_name(f"{spec.run_dir.name}-standby"), list[str]()
    try:
        return _claimed(folder)
    except (ConfigError, OSError) as error:
        folder = _run_folder(replace(spec, run_dir=folder), notes.append)
        for text in notes or [f"{error}; the run folder of this host is {folder} instead"]:
            say(text)
        return folder


def _run_folder(spec: JobSpec, say: Callable[[str], None]) -> Path:
    """Return the locked run folder of this host: the one that the user named, if it is free here.

    If it cannot be used, for example because the disk is full, the job continues with a temporary folder.

    Raises:
        ConfigError: the temporary folder cannot be used either.
    """
    name = spec.target if spec.module else Path(spec.target).stem
    try:
        return _claimed(fresh_folder(RUNS, name, time.time()) if spec.run_dir.exists() else spec.run_dir)
    except (ConfigError, OSError) as error:
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="lockstep-run-"))
            _claimed(folder)
        except (ConfigError, OSError):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"this host cannot take the job over: {error}") from None
        say(f"{error}; the run folder of this host is {folder} instead")
        return folder


def _claimed(folder: Path) -> Path:
    claim_folder(folder)
    empty_folder(RunPaths(folder).sources)
    return folder


def main(descriptor: int) -> int:
    """Coordinate the job whose agent is at the other end of the socket `descriptor`."""
    connection = socket.socket(fileno=descriptor)
    first: PacketChannel[StopRequest, Prepare | BeginJob] = PacketChannel(connection, Prepare | BeginJob)
    wait_for([first.fileno()])
    prepare = first.receive()
    wait_for([first.fileno()])
    begin = first.receive()
    if not isinstance(prepare, Prepare) or not isinstance(begin, BeginJob):
        return LEFT_OUT
    try:
        return lead(prepare, begin, PacketChannel(connection, StopRequest))
    except (LockstepError, OSError) as error:
        note(with_code(error))
        return LEFT_OUT
    except Stopped:
        return LEFT_OUT


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
