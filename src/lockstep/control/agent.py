"""The process that starts, watches and ends the workers of one host."""

import contextlib
import select
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

from lockstep.clock import Clock
from lockstep.config import WorkerConfig, worker_environment
from lockstep.control import supervision as rules
from lockstep.control.console import Console
from lockstep.control.descendants import Descendants
from lockstep.control.explanation import explain
from lockstep.control.launcher import Launch, Launcher
from lockstep.control.member import Member, Stream
from lockstep.control.messages import MAX_PACKET, Failed, Finished, Report, Started, Stop, Waiting, decode
from lockstep.control.output import Log
from lockstep.control.script import Script
from lockstep.control.spec import JobSpec
from lockstep.events import EventLog
from lockstep.paths import RunPaths

_LEAVE_GRACE = 0.5
_LAST_FLUSH = 0.5


class CommandGone(Exception):
    """The command ended before its job."""


class Exchange(NamedTuple):
    """What the agent needs to know of the memory that its workers share.

    Attributes:
        descriptor: inherited by every worker.
        abort: makes every worker that waits there raise `PeerLostError` with the given reason.
    """

    descriptor: int
    abort: Callable[[str], None]


@dataclass
class Agent:
    """Runs one job on this host.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        pid: this process's id, which workers check.
        launcher: starts workers.
        exchange: what the workers share.
        command: socket to the command; its end means that the command has ended.
        console: the person's terminal.
        events: what happened.
        clock: for deadlines.
        descendants: every process below this one.
        state: what supervision remembers.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    launcher: Launcher
    exchange: Exchange
    command: socket.socket
    console: Console
    events: EventLog
    clock: Clock
    descendants: Descendants
    state: rules.State
    _members: dict[int, Member] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.PollSelector)
    _verdict: rules.Verdict | None = None
    _used_strategy: bool = False
    _stopped: bool = False
    _killed: bool = False

    def run(self) -> int:
        """Run the job to its end and return its exit status; no process of the job is left then."""
        try:
            self._open()
            while self._verdict is None:
                self._turn()
            status = self._conclude(self._verdict)
        except CommandGone:
            status = 128 + signal.SIGKILL
            self.events.write("finished", status=status, message="the command was killed")
        finally:
            self.descendants.end(grace=0)
            self._close()
        return status

    def _open(self) -> None:
        self.events.write("job", **(asdict(self.spec) | {"run_dir": str(self.spec.run_dir)}))
        self._selector.register(self.command, selectors.EVENT_READ, self._hear_command)
        for worker in range(self.spec.workers):
            try:
                self._start(worker)
            except OSError as error:
                self._verdict = rules.Verdict(1, f"worker {worker} cannot be started: {error}")
                return

    def _start(self, worker: int) -> None:
        spec = self.spec
        script = Script(spec.target, spec.module, spec.arguments)
        log = Log.open(self.paths.log(worker), self.console.say)
        environment = partial(self._environment, worker)
        handle = self.launcher.start(
            Launch(worker, script.command_line, environment, self.exchange.descriptor)
        )
        stdout, stderr = self.console.outlets(worker)
        streams = Stream(handle.stdout, log, stdout), Stream(handle.stderr, log, stderr)
        member = Member(worker, handle, log, streams, self.paths.stack(worker))
        self._members[worker] = member
        self._selector.register(handle.control, selectors.EVENT_READ, partial(self._hear, member))
        self._selector.register(handle.exited, selectors.EVENT_READ, partial(self._see_exit, member))
        self.events.write("started", worker=worker, pid=handle.pid)

    def _environment(self, worker: int, control: int) -> dict[str, str]:
        spec = self.spec
        config = WorkerConfig(
            worker=worker,
            workers=spec.workers,
            replicas=spec.replicas,
            seed=spec.seed,
            threads=spec.threads,
            timeout=spec.timeout,
            run_dir=self.paths.root,
            agent=self.pid,
            control=control,
            arena=self.exchange.descriptor,
        )
        devices = spec.devices[worker] if spec.devices else None
        return worker_environment(
            config,
            backend=spec.backend,
            devices=devices.visible if devices else None,
            shared=bool(devices and devices.shared),
        )

    def _turn(self) -> None:
        self._watch_output()
        deadline = self.state.deadline
        timeout = None if deadline is None else max(0.0, deadline - self.clock.now())
        for key, _ in self._selector.select(timeout):
            key.data()
        if self.state.deadline is not None and self.clock.now() >= self.state.deadline:
            self._decide(rules.TimePassed())
        owned = frozenset(member.handle.pid for member in self._members.values() if not member.exited)
        self.descendants.reap(owned)

    def _watch_output(self) -> None:
        for sink in self.console.sinks:
            self._watch(sink.descriptor, sink.pending > 0, selectors.EVENT_WRITE, sink.flush)
        for member in self._members.values():
            # Who is shown waits for a reader that is behind, as it would without Lockstep.
            wanted = not (self.console.full and self.console.shows(member.worker))
            for stream in member.streams:
                read = wanted and not stream.ended
                self._watch(stream.descriptor, read, selectors.EVENT_READ, stream.read)

    def _watch(self, descriptor: int, wanted: bool, what: int, call: Callable[[], object]) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, what, call)
        elif watched and not wanted:
            self._selector.unregister(descriptor)

    def _hear_command(self) -> None:
        packet = self._receive_from_command()
        if packet is None:
            return
        if not packet:
            raise CommandGone
        message = decode(packet)
        if isinstance(message, Stop):
            self._stopped = True
            self.events.write("stop", signal=message.signal)
            self._decide(rules.StopAsked(message.signal))

    def _receive_from_command(self) -> bytes | None:
        try:
            return self.command.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def _hear(self, member: Member) -> None:
        if not member.receive(partial(self._take, member)):
            self._watch(member.handle.control.fileno(), False, selectors.EVENT_READ, int)

    def _take(self, member: Member, packet: bytes) -> None:
        try:
            message = decode(packet)
        except ValueError as error:
            self.events.write("misunderstood", worker=member.worker, error=str(error))
            return
        worker = member.worker
        match message:
            case Started():
                member.ready = True
                self.events.write("ready", worker=worker)
            case Report(event, fields):
                self._used_strategy |= event == "strategy"
                self.events.write(event, **{**fields, "worker": worker})
            case Waiting(what, workers, seconds):
                self._decide(rules.Waits(worker, what, workers, seconds))
            case Failed(status, summary, traceback, blames):
                self.events.write("failed", worker=worker, summary=summary, traceback=traceback)
                self._decide(rules.Failed(worker, status, summary, blames))
            case Finished():
                self.events.write("done", worker=worker)

    def _see_exit(self, member: Member) -> None:
        status = member.handle.poll()
        if status is None:
            return
        member.exited = True
        self._selector.unregister(member.handle.exited)
        # What was sent before the end is heard before the end.
        for other in self._members.values():
            self._hear(other)
        for stream in member.streams:
            stream.drain()
        self.events.write("exited", worker=member.worker, status=status)
        self._decide(rules.Exited(member.worker, status))

    def _decide(self, event: rules.Event) -> None:
        decision = rules.decide(self.state, event, self.clock.now())
        if decision.actions:
            actions = [type(action).__name__ for action in decision.actions]
            self.events.write("decision", reason=decision.reason, actions=actions)
        self.state = decision.state
        for action in decision.actions:
            self._act(action)

    def _act(self, action: rules.Action) -> None:
        match action:
            case rules.Abort(reason):
                self.exchange.abort(reason)
            case rules.Signal(worker, number):
                self._members[worker].handle.send_signal(number)
            case rules.Kill(worker):
                self._killed = True
                self._members[worker].handle.send_signal(signal.SIGKILL)
            case rules.DumpStack(worker):
                self._members[worker].ask_for_stack()
            case rules.Notice(text):
                self.console.say(text)
            case rules.Finish(verdict):
                self._verdict = verdict

    def _conclude(self, verdict: rules.Verdict) -> int:
        in_peace = self.state.stage is rules.Stage.FINISHED and not self._killed
        left = self.descendants.end(grace=_LEAVE_GRACE if in_peace else 0)
        for member in self._members.values():
            for stream in member.streams:
                stream.drain()
        self.console.end_lines()
        if verdict.message:
            self.console.say(explain(verdict, self._members, self.console.shows, self._name_log))
        elif self.spec.workers > 1 and not self._used_strategy:
            count = self.spec.workers
            self.console.say(f"the script used no strategy: each of the {count} workers ran all of it, alone")
        if left:
            self.console.say(f"processes that cannot be killed are left: {', '.join(map(str, left))}")
        self.events.write("finished", status=verdict.status, message=verdict.message)
        self._flush()
        return verdict.status

    def _name_log(self, worker: int) -> str:
        return str(RunPaths(self.spec.run_dir).log(worker))

    def _flush(self) -> None:
        # A reader that has paused (a pager) gets all of it, unless the person wants the end.
        while self.console.pending:
            busy = [sink.descriptor for sink in self.console.sinks if sink.pending]
            patience = _LAST_FLUSH if self._stopped else None
            _, writable, _ = select.select([self.command], busy, [], patience)
            if not writable:
                return
            self.console.flush()

    def _close(self) -> None:
        for member in self._members.values():
            member.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            self.command.close()
