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

import msgspec

from lockstep.clock import Clock
from lockstep.config import WorkerConfig, worker_environment
from lockstep.control import decisions
from lockstep.control import supervision as rules
from lockstep.control.console import Console
from lockstep.control.descendants import Descendants
from lockstep.control.explanation import explain
from lockstep.control.launcher import Launch, Launcher
from lockstep.control.member import Member, Stream
from lockstep.control.messages import (
    MAX_PACKET,
    Failed,
    Finished,
    NewView,
    Over,
    Report,
    Started,
    Stop,
    Waiting,
    decode,
)
from lockstep.control.output import Log
from lockstep.control.script import Script
from lockstep.control.spec import JobSpec
from lockstep.errors import LockstepError
from lockstep.events import EventLog
from lockstep.paths import RunPaths
from lockstep.topology import View

_LEAVE_GRACE = 0.5
_LAST_FLUSH = 0.5


class CommandGone(Exception):
    """The command ended before its job."""


class Exchange(NamedTuple):
    """What the agent needs to know of the memory that its workers share.

    Attributes:
        descriptor: inherited by every worker.
        abort: makes every worker that waits there raise `PeerLostError` with the given reason.
        close: forgets it; the workers still have it.
    """

    descriptor: int
    abort: Callable[[str], None]
    close: Callable[[], None]


@dataclass
class Agent:
    """Runs one job on this host.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        pid: this process's id, which workers check.
        launcher: starts workers.
        open_exchange: makes what the workers of a view, so many, share.
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
    open_exchange: Callable[[int], Exchange]
    command: socket.socket
    console: Console
    events: EventLog
    clock: Clock
    descendants: Descendants
    state: rules.State
    _exchange: Exchange | None = None
    _members: dict[int, Member] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.PollSelector)
    _verdict: decisions.Verdict | None = None
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
        self.events.write("job", **msgspec.to_builtins(asdict(self.spec), enc_hook=str))
        self._selector.register(self.command, selectors.EVENT_READ, self._hear_command)
        try:
            self._exchange = self.open_exchange(self.spec.workers)
        except LockstepError as error:
            self._verdict = decisions.Verdict(1, str(error))
            return
        for worker in range(self.spec.workers):
            try:
                self._start(worker, self._exchange.descriptor)
            except OSError as error:
                self._verdict = decisions.Verdict(1, f"worker {worker} cannot be started: {error}")
                return

    def _start(self, worker: int, arena: int) -> None:
        spec = self.spec
        script = Script(spec.target, spec.module, spec.arguments)
        log = Log.open(self.paths.log(worker), self.console.say)
        environment = partial(self._environment, worker, arena)
        handle = self.launcher.start(Launch(worker, script.command_line, environment, arena))
        stdout, stderr = self.console.outlets(worker)
        streams = Stream(handle.stdout, log, stdout), Stream(handle.stderr, log, stderr)
        member = Member(worker, handle, log, streams, self.paths.stack(worker))
        self._members[worker] = member
        self._selector.register(handle.control, selectors.EVENT_READ, partial(self._hear, member))
        self._selector.register(handle.exited, selectors.EVENT_READ, partial(self._see_exit, member))
        self.events.write("started", worker=worker, pid=handle.pid)

    def _environment(self, worker: int, arena: int, control: int) -> dict[str, str]:
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
            arena=arena,
            checkpoints=spec.checkpoints,
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
            self._decide(decisions.TimePassed())
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
            self._decide(decisions.StopAsked(message.signal))

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
                self.events.write(event, **{**fields, "worker": worker})
                if event == "strategy":
                    self._used_strategy = True
                    self._decide(decisions.Joined(worker))
            case Waiting(what, workers, seconds):
                self._decide(decisions.Waits(worker, what, workers, seconds))
            case Failed(status, summary, traceback, blames):
                self.events.write("failed", worker=worker, summary=summary, traceback=traceback)
                self._decide(decisions.Failed(worker, status, summary, blames))
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
        self._decide(decisions.Exited(member.worker, status))

    def _decide(self, event: decisions.Event) -> None:
        decision = rules.decide(self.state, event, self.clock.now())
        if decision.actions:
            actions = [type(action).__name__ for action in decision.actions]
            self.events.write("decision", reason=decision.reason, actions=actions)
        self.state = decision.state
        for action in decision.actions:
            self._act(action)

    def _act(self, action: decisions.Action) -> None:
        match action:
            case decisions.Abort(reason):
                self._end_view(Over(reason))
            case decisions.Renew(view, reason):
                self._renew(view, reason)
            case decisions.Signal(worker, number):
                self._members[worker].handle.send_signal(number)
            case decisions.Kill(worker):
                self._killed = True
                self._members[worker].handle.send_signal(signal.SIGKILL)
            case decisions.DumpStack(worker):
                self._members[worker].ask_for_stack()
            case decisions.Notice(text):
                self.console.say(text)
            case decisions.Finish(verdict):
                self._verdict = verdict

    def _renew(self, view: View, reason: str) -> None:
        """Give the members of `view` the memory of a new exchange, and wake them from the old one."""
        self.events.write("view", number=view.number, workers=view.workers, reason=reason)
        try:
            exchange = self.open_exchange(len(view.workers))
        except LockstepError as error:
            self._decide(decisions.Unfit(f"{reason}, but {error}"))
            return
        old, self._exchange = self._exchange, exchange
        for worker in view.workers:
            self._members[worker].tell(NewView(view.number, view.workers), exchange.descriptor)
        if old is not None:
            old.abort(reason)
            old.close()
        self.console.chief = view.chief

    def _end_view(self, over: Over) -> None:
        """Tell all workers that no view follows, and wake them."""
        for member in self._members.values():
            if not member.exited:
                member.tell(over)
        if self._exchange is not None:
            self._exchange.abort(over.reason)

    def _conclude(self, verdict: decisions.Verdict) -> int:
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
        if self._exchange is not None:
            self._exchange.close()
        self._selector.close()
        with contextlib.suppress(OSError):
            self.command.close()
