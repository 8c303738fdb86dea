"""The process that starts, watches and ends the workers of one host."""

import contextlib
import os
import select
import selectors
import signal
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from lockstep.agent.console import Console
from lockstep.agent.failure_report import explain
from lockstep.agent.pending_starts import PendingStarts
from lockstep.agent.starter import Arrivals, Starter
from lockstep.agent.views import Views
from lockstep.agent.worker_handle import WorkerHandle
from lockstep.coordinator.admin_service import AdminService
from lockstep.coordinator.file_conflicts import FileConflicts
from lockstep.coordinator.job_summary import JobSummary
from lockstep.coordinator.provenance import provenance
from lockstep.coordinator.startup_progress import PREPARING, RUNNING, Progress, first_step
from lockstep.errors import LockstepError
from lockstep.launcher.backend import NAMES
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import (
    MAX_PACKET,
    EventReport,
    Failed,
    FileOpened,
    Finished,
    JobOver,
    JoinRequest,
    Started,
    StateReply,
    Stop,
    WaitReport,
    decode,
)
from lockstep.supervisor import events as job_events
from lockstep.supervisor.decide import decide
from lockstep.supervisor.state import Stage, State
from lockstep.system.clock import Clock
from lockstep.system.descendants import Descendants
from lockstep.system.exit_status import UNKNOWN_STATUS, unkillable, whose_lines
from lockstep.system.memory import memory_kills
from lockstep.system.paths import RunPaths
from lockstep.topology import View
from lockstep.worker.script import Script

_LEAVE_GRACE = 0.5
_LAST_FLUSH = 0.5
_DOWNLOAD_NOTICE = 20.0


class CommandGone(Exception):
    """The command ended before its job."""


@dataclass
class Agent:
    """Runs one job on this host.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        starter: brings workers to life.
        views: what the workers of a view share.
        command: socket to the command; its end means that the command has ended.
        console: the person's terminal.
        events: the bus of the run.
        clock: for deadlines.
        descendants: every process below this one.
        state: what supervision remembers.
        arrivals: where workers come that a person starts; None where nobody does.
    """

    spec: JobSpec
    paths: RunPaths
    starter: Starter
    views: Views
    command: socket.socket
    console: Console
    events: Bus
    clock: Clock
    descendants: Descendants
    state: State
    arrivals: Arrivals | None = None
    _admin: AdminService | None = None
    _happened: deque[job_events.Event] = field(default_factory=deque)
    _admin_descriptor: int | None = None
    _pending: PendingStarts | None = None
    _progress: Progress | None = None
    _members: dict[int, WorkerHandle] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.PollSelector)
    _outcome: job_events.JobOutcome | None = None
    _used_strategy: bool = False
    _writers: FileConflicts = field(default_factory=lambda: FileConflicts(Path.cwd()))
    _downloads: dict[str, float] = field(default_factory=dict)
    _tally: JobSummary = field(default_factory=JobSummary)
    _begun: float = 0.0
    _memory_kills: int = 0
    _stopped: bool = False
    _killed: bool = False

    def run(self) -> int:
        """Run the job to its end and return its exit status; no process of the job is left then."""
        try:
            self._open()
            while self._outcome is None:
                self._turn()
            status = self._conclude(self._outcome)
        except CommandGone:
            status = 128 + signal.SIGKILL
            self._publish_end(status, "the command was killed")
        finally:
            self.descendants.end(grace=0)
            self._close()
        return status

    def _open(self) -> None:
        self._begun = self.clock.now()
        self._memory_kills = memory_kills()
        asked = msgspec.to_builtins(asdict(self.spec), enc_hook=str)
        script = Script(self.spec.target, self.spec.module, self.spec.arguments)
        self.events.publish(run_events.JobStarted(**provenance(script), **asked))
        self._selector.register(self.command, selectors.EVENT_READ, self._hear_command)
        self._open_admin()
        if self.arrivals is not None:
            self.arrivals.begin(self.paths.root.name, lambda: self._decide(job_events.WorkerArrived()))
            self._selector.register(self.arrivals, selectors.EVENT_READ, self.arrivals.serve)
        workers = tuple(range(self.spec.workers))
        if self.arrivals is None:
            self._progress = Progress(workers, self.console.say, self.console.shown, self.clock.now())
        try:
            segment = self.views.open(workers)
        except LockstepError as error:
            self._outcome = job_events.JobOutcome(1, str(error))
            return
        self._pending = PendingStarts(self.starter, self._start, self._cannot_start, self._watch)
        for worker in workers:
            self._pending.ask(worker, segment)
        self._pending.serve()

    def _open_admin(self) -> None:
        pid, root = self.starter.pid, self.paths.root
        self._admin = AdminService(
            self.spec, pid, str(root), self.clock.wall(), lambda: self.state, self._decide
        )
        try:
            admin_socket = self._admin.open(root.name)
        except LockstepError as error:
            self._warn(f"remote control is unavailable: {error}")
            return
        self._admin_descriptor = admin_socket.fileno()
        self._selector.register(self._admin_descriptor, selectors.EVENT_READ, admin_socket.serve)

    def _close_admin(self) -> None:
        if self._admin_descriptor is not None:
            self._selector.unregister(self._admin_descriptor)
            self._admin_descriptor = None
        if self._admin is not None:
            self._admin.close()

    def _cannot_start(self, worker: int, segment: int | None, error: OSError) -> None:
        message = f"cannot start worker {worker}: {error}"
        if segment is not None:
            self._outcome = job_events.JobOutcome(1, message)
            return
        self._warn(message)
        self._decide(job_events.WorkerExited(worker, 1))

    def _start(self, worker: int, segment: int | None) -> None:
        taken = frozenset(
            member.slot
            for member in self._members.values()
            if not member.exited and member.worker not in self.state.leaving
        )
        member = self.starter.start(worker, taken, segment)
        self._members[worker] = member
        self._selector.register(member.handle.control, selectors.EVENT_READ, partial(self._hear, member))
        self._selector.register(member.handle.exited, selectors.EVENT_READ, partial(self._see_exit, member))
        self.events.publish(run_events.WorkerStarted(worker, member.handle.pid))

    def _turn(self) -> None:
        self._watch_output()
        waits = self._progress.due if self._progress else None
        dues = [due for due in (self.state.due, waits) if due is not None]
        timeout = max(0.0, min(dues) - self.clock.now()) if dues else None
        for key, _ in self._selector.select(timeout):
            key.data()
        if self.state.due is not None and self.clock.now() >= self.state.due:
            self._decide(job_events.DeadlinePassed())
        if self._progress is not None and self.state.stage is Stage.RUNNING:
            self._progress.serve(self.clock.now())
        else:
            self._progress = None
        owned = frozenset(member.handle.pid for member in self._members.values() if not member.exited)
        self.descendants.reap(owned)

    def _watch_output(self) -> None:
        for text in self.console.lost():
            self.events.publish(run_events.OutputLost(text))
            self.console.say(text)
        for sink in self.console.sinks:
            self._watch(sink.descriptor, sink.pending > 0, selectors.EVENT_WRITE, sink.flush)
        self.console.hurries = self._stopped or self.state.stage is Stage.SAVING
        for member in self._members.values():
            # Who is shown waits for a reader that is behind, as it would without Lockstep; not to end.
            waits = self.console.full and not self.console.hurries
            wanted = not (waits and self.console.shows(member.worker))
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
            # A script that had ended before is known to have.
            for member in self._members.values():
                self._hear(member)
            self.events.publish(run_events.StopReceived(message.signal))
            self._decide(job_events.StopRequested(message.signal))

    def _receive_from_command(self) -> bytes | None:
        try:
            return self.command.recv(MAX_PACKET, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b""

    def _hear(self, member: WorkerHandle) -> None:
        if not member.receive(partial(self._take, member)):
            self._watch(member.handle.control.fileno(), False, selectors.EVENT_READ, int)

    def _take(self, member: WorkerHandle, packet: bytes, descriptors: list[int]) -> None:
        try:
            message = decode(packet)
        except ValueError as error:
            self.events.publish(run_events.MessageMisunderstood(member.worker, str(error)))
            message = None
        if isinstance(message, StateReply):
            self._take_given(message, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        worker = member.worker
        match message:
            case Started():
                member.ready = True
                self.events.publish(run_events.WorkerReady(worker))
                self._note_progress(worker, RUNNING)
            case EventReport(event):
                self.events.publish(event, worker)
                self._take_event(worker, event)
            case JoinRequest(whole):
                self.events.publish(run_events.WorkerJoining(worker, whole))
                self._decide(job_events.JoinRequested(worker, whole))
            case WaitReport(what, workers, seconds):
                self.events.publish(run_events.WorkerWaiting(worker, what, workers, seconds))
                self._decide(job_events.WaitReported(worker, what, workers, seconds))
            case FileOpened(path, line):
                self._tell_of_file(worker, path, line)
            case Failed(status, summary, traceback, blames, prints):
                member.said = status
                if not prints:
                    member.log_only(traceback)
                self.events.publish(run_events.WorkerFailed(worker, summary, traceback))
                self._decide(job_events.ScriptFailed(worker, status, summary, blames, prints))
            case Finished(status):
                member.said = status
                self.events.publish(run_events.WorkerDone(worker, status))
                if status == 0:
                    self._decide(job_events.ScriptEnded(worker))

    def _take_event(self, worker: int, event: run_events.WorkerEvent) -> None:
        match event:
            case run_events.StrategyInstalled(backend):
                self._used_strategy = True
                self._note_progress(worker, PREPARING)
                self._tell_of_backend(worker, backend)
                self._decide(job_events.StrategyCreated(worker))
            case run_events.DistributionBegan():
                self._decide(job_events.DistributionStarted())
            case run_events.CallStarted(name) if self._admin is not None:
                self._admin.doing = name
                self._note_progress(worker, first_step(name))
            case run_events.FirstStepEnded() if self._progress is not None:
                self._progress.end()
            case run_events.CheckpointsConfigured():
                self._decide(job_events.CheckpointingStarted())
            case run_events.TimeoutSet(seconds):
                self._decide(job_events.TimeoutChanged(seconds))
            case run_events.LastStepEnded(step):
                self._decide(job_events.FinalStepEnded(step))
            case run_events.SourceChanged(path, what):
                self.console.say(f"worker {worker}: {path} {what}")
            case run_events.DownloadAwaited(file, of, seconds):
                self._tell_of_download(worker, file, of, seconds)
            case run_events.TrainingEnded(steps, model, digest) if worker == self.console.chief:
                self._tally.trained(steps, model, digest)
            case run_events.CheckpointWritten(path, step):
                self._tally.checkpoints += 1
                self.console.say(f"checkpoint {path}")
                self._decide(job_events.CheckpointKept(step))
            case run_events.CheckpointNotWritten(reason):
                self._decide(job_events.CheckpointFailed(reason))
            case run_events.TrainingResumed(where, step) if worker == self.console.chief:
                self._tally.before = step
                self.console.say(f"training resumed after {where}")

    def _note_progress(self, worker: int, what: str) -> None:
        if self._progress is not None:
            self._progress.does(worker, what)
        if self.spec.replicas == 1 and what is PREPARING:
            # Keras's own steps follow, which report nothing.
            self._progress = None

    def _tell_of_download(self, worker: int, file: str, of: str, seconds: float) -> None:
        """Say for whom a worker waits, though not for each of several workers."""
        last, now = self._downloads.get(file), self.clock.now()
        if last is None or now - last >= _DOWNLOAD_NOTICE:
            self._downloads[file] = now
            waits = f"has waited {seconds:.0f} s" if seconds >= _DOWNLOAD_NOTICE else "waits"
            self.console.say(f"worker {worker} {waits} for {of} to download {file}")

    def _tell_of_file(self, worker: int, path: str, line: str) -> None:
        """Warn of a file that several workers write."""
        if text := self._writers.opened(worker, path, line, self.state.running):
            self.events.publish(run_events.ConflictingWrite(worker, path, line))
            self.console.say(text)

    def _tell_of_backend(self, worker: int, backend: str) -> None:
        """Correct the job's first line where the script has chosen in a way that its source does not show."""
        if worker == self.console.chief and self.spec.backend in NAMES and backend in NAMES:
            own, chosen = NAMES[backend], NAMES[self.spec.backend]
            if own != chosen:
                self._warn(f"the script selects {own} itself, so it runs on {own}, not on {chosen}")

    def _take_given(self, given: StateReply, descriptors: list[int]) -> None:
        assert self.state.view is not None
        if given.view == self.state.view.number and descriptors:
            self.views.take(descriptors[0])
        else:
            for descriptor in descriptors:
                os.close(descriptor)
        self._decide(job_events.StateGiven(given.view, given.whole, given.failure))

    def _see_exit(self, member: WorkerHandle) -> None:
        status = member.handle.poll()
        if status is None:
            return
        member.exited = True
        if self._progress is not None:
            self._progress.gone(member.worker)
        self._selector.unregister(member.handle.exited)
        # What was sent before the end is heard before the end.
        for other in self._members.values():
            self._hear(other)
        for stream in member.streams:
            stream.drain()
        status = member.said if status == UNKNOWN_STATUS else status
        self.events.publish(run_events.ProcessEnded(member.worker, status))
        if status in (-signal.SIGKILL, UNKNOWN_STATUS) and self.state.stage in (Stage.RUNNING, Stage.LOOKING):
            self._look_for_memory_kill(member.worker)
        self._decide(job_events.WorkerExited(member.worker, status))

    def _look_for_memory_kill(self, worker: int) -> None:
        """Report that a worker was probably killed because memory ran out."""
        before, self._memory_kills = self._memory_kills, memory_kills()
        if self._memory_kills > before:
            self.events.publish(run_events.MemoryExhausted(worker, self._memory_kills - before))
            self.console.say(
                f"the kernel killed a process because memory ran out, probably worker {worker}: use fewer "
                "workers or smaller batches, or give the container or the machine more memory"
            )

    def _decide(self, event: job_events.Event) -> None:
        """Decide about `event`, and act; what happens in the course of that is decided afterwards."""
        self._happened.append(event)
        if len(self._happened) > 1:
            return
        while self._happened:
            decision = decide(self.state, self._happened[0], self.clock.now())
            if decision.actions:
                actions = tuple(type(action).__name__ for action in decision.actions)
                self.events.publish(run_events.DecisionMade(decision.reason, actions))
            self.state = decision.state
            for action in decision.actions:
                self._act(action)
            self._happened.popleft()
        # Last, since it takes a while: the members know by now what they are asked for.
        if self._pending is not None:
            self._pending.serve()

    def _act(self, action: job_events.Action) -> None:
        match action:
            case job_events.AbortExchange(reason):
                self.views.end(JobOver(reason), self._members)
            case job_events.StartView(view, reason):
                self._renew(view, reason)
            case job_events.StartWorker(worker) if self._pending is not None:
                self._pending.ask(worker, None)
            case job_events.AskMembers(request):
                self.views.ask(request)
            case job_events.SendPosition(worker):
                self.views.deliver(self._members[worker])
            case job_events.SignalWorker(worker, number):
                self._signal(worker, number)
            case job_events.KillWorker(worker):
                # A job may end in peace though somebody who was to join is not needed any more.
                self._killed = self._killed or worker in self.state.members
                self._signal(worker, signal.SIGKILL)
            case job_events.DumpStack(worker):
                self._members[worker].ask_for_stack()
            case job_events.ShowMessage(text):
                self.console.say(text)
            case job_events.FinishJob(outcome):
                self._outcome = outcome

    def _signal(self, worker: int, number: int) -> None:
        if self._pending is not None and self._pending.cancel(worker):
            self._decide(job_events.WorkerExited(worker, -number))
        else:
            self._members[worker].handle.send_signal(number)

    def _renew(self, view: View, reason: str) -> None:
        before = set(self.views.workers)
        for worker in sorted(before.difference(view.workers)):
            leaves = worker in self.state.leaving
            self._tally.lost += not leaves
            happened = run_events.WorkerLeft if leaves else run_events.WorkerLost
            self.events.publish(happened(worker, reason))
        for worker in sorted(set(view.workers) - before):
            self._tally.joined += 1
            self.events.publish(run_events.WorkerJoined(worker, reason))
        self.events.publish(run_events.ViewStarted(view.number, view.workers, reason))
        try:
            self.views.renew(view, reason, self._members, self.state.leaving)
        except LockstepError as error:
            self._decide(job_events.ViewFailed(f"{reason}, but {error}"))
            return
        self.console.chief = view.chief

    def _conclude(self, outcome: job_events.JobOutcome) -> int:
        self.starter.close()
        in_peace = self.state.stage is Stage.FINISHED and not self._killed
        left = self.descendants.end(grace=_LEAVE_GRACE if in_peace else 0)
        # Nobody is left: whoever waits for the end need not wait for a reader that has paused.
        self._close_admin()
        for member in self._members.values():
            for stream in member.streams:
                stream.drain()
        self.console.end_lines()
        if outcome.message:
            self.console.say(explain(outcome, self._members, self.console.shows, self._name_log))
        elif self.spec.workers > 1 and not self._used_strategy:
            what = "used no strategy and compiled no model" if self.spec.adopts else "used no strategy"
            self._warn(f"the script {what}: each of the {self.spec.workers} workers ran all of it on its own")
        elif self.spec.replicas > 1 and self._used_strategy and not self.state.distributes:
            lines = whose_lines(self.spec.workers, self.spec.replicas)
            self._warn(
                f"the script distributed nothing: {lines}; train with model.fit, or "
                "pass the replica's computation to strategy.run"
            )
        if left:
            self._warn(unkillable(left))
        seconds = self.clock.now() - self._begun
        line = self._tally.line(seconds, len(self.state.members))
        if line and outcome.status == 0:
            self.console.say(line)
        self._publish_end(outcome.status, outcome.message, outcome.workers)
        self._flush()
        return outcome.status

    def _publish_end(self, status: int, message: str, workers: tuple[int, ...] = ()) -> None:
        done = self._tally.fields(self.clock.now() - self._begun)
        self.events.publish(run_events.JobFinished(status=status, message=message, workers=workers, **done))

    def _warn(self, text: str) -> None:
        self.events.publish(run_events.WarningShown(text))
        self.console.say(text)

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
        self.views.close()
        self._close_admin()
        self._selector.close()
        with contextlib.suppress(OSError):
            self.command.close()
