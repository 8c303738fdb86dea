"""The coordinator of a job: holds what supervision remembers, and has its decisions carried out.

It hears the agent of the job's host, the command and other terminals; it tells the agent what to do, and the
person and the event log what happens.
"""

import select
import signal
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from lockstep.coordinator.admin_socket import AdminSocket
from lockstep.coordinator.file_conflicts import FileConflicts
from lockstep.coordinator.job_report import JobSummary, explain
from lockstep.coordinator.provenance import provenance
from lockstep.coordinator.startup_progress import PREPARING, RUNNING, Progress, first_step
from lockstep.errors import LockstepError
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.protocol.admin import Order, Refused, Reply, ScaleRequest, Status, StatusRequest, StopRequest
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    AllReported,
    BeginView,
    DeliverPosition,
    EndExchange,
    EndHost,
    HostEnded,
    HostReport,
    Instruction,
    LeaveNotice,
    NotUnderstood,
    ProcessArrived,
    ProcessExited,
    ProcessStarted,
    ReportAll,
    SignalProcess,
    StartCancelled,
    StartFailed,
    StartProcess,
    StateHeld,
    Stop,
    TakeStack,
    TerminalLost,
    ViewRefused,
    WorkerSaid,
)
from lockstep.protocol.job_spec import BACKEND_NAMES, JobSpec
from lockstep.protocol.worker import (
    EventReport,
    Failed,
    FileOpened,
    Finished,
    JoinRequest,
    RelayedMessage,
    Started,
    WaitReport,
)
from lockstep.supervisor import events as job_events
from lockstep.supervisor.decide import decide, refusal
from lockstep.supervisor.state import Stage, State
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.system.exit_status import unkillable, whose_lines
from lockstep.system.paths import RunPaths
from lockstep.topology import View
from lockstep.worker.script import Script

_LEAVE_GRACE = 0.5
_LAST_FLUSH = 0.5
_DOWNLOAD_NOTICE = 20.0


class CommandGone(Exception):
    """The command ended before its job."""


@dataclass
class Coordinator:
    """Coordinates one job.

    Attributes:
        spec: the job.
        paths: of the run, absolute.
        pid: process id that other terminals are told.
        agent: the channel to the agent of the job's host.
        command: the channel to the command; its end means that the command has ended.
        loop: serves this coordinator.
        console: the person's terminal.
        events: hears what happens.
        clock: for deadlines.
        state: what supervision remembers.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    agent: Channel[Instruction, HostReport]
    command: Channel[Stop, Stop]
    loop: EventLoop
    console: Console
    events: Bus
    clock: Clock
    state: State
    _admin: AdminSocket | None = None
    _admin_descriptor: int | None = None
    _view: BeginView = field(default_factory=lambda: BeginView(0, ()))
    _stops: deque[int] = field(default_factory=deque)
    _outcome: job_events.JobOutcome | None = None
    _ended: HostEnded | None = None
    _doing: str = ""
    _progress: Progress | None = None
    _used_strategy: bool = False
    _writers: FileConflicts = field(default_factory=lambda: FileConflicts(Path.cwd()))
    _downloads: dict[str, float] = field(default_factory=dict)
    _tally: JobSummary = field(default_factory=JobSummary)
    _begun: float = 0.0
    _since: float = 0.0
    _stopped: bool = False
    _killed: bool = False

    def run(self) -> int:
        """Run the job to its end and return its exit status.

        After an exception, or when the command is gone, the agent still has to be closed.
        """
        try:
            self._open()
            while self._outcome is None:
                self._turn()
            return self._conclude(self._outcome)
        except CommandGone:
            status = 128 + signal.SIGKILL
            self._publish_end(status, "the command was killed")
            return status
        finally:
            self._close_admin()
            self.command.close()
            self.agent.close()

    def _open(self) -> None:
        self._begun, self._since = self.clock.now(), self.clock.wall()
        asked = msgspec.to_builtins(asdict(self.spec), enc_hook=str)
        script = Script(self.spec.target, self.spec.module, self.spec.arguments)
        self.events.publish(run_events.JobStarted(**provenance(script), **asked))
        self.loop.watch(self.command.fileno(), self._hear_command)
        self.loop.watch(self.agent.fileno(), self._hear_agent)
        self._open_admin()
        workers = tuple(range(self.spec.workers))
        if not self.state.size.by_hand:
            self._progress = Progress(workers, self.console.say, self.console.shown, self._begun)
        self._view = BeginView(self.spec.view.number, workers)
        self.agent.send(self._view)
        for worker in workers:
            self.agent.send(StartProcess(worker))

    def _turn(self) -> None:
        waits = self._progress.due if self._progress else None
        dues = [due for due in (self.state.due, waits) if due is not None]
        self.loop.turn(max(0.0, min(dues) - self.clock.now()) if dues else None)
        if self.state.due is not None and self.clock.now() >= self.state.due:
            self._decide(job_events.DeadlinePassed())
        if self._progress is not None and self.state.stage is Stage.RUNNING:
            self._progress.serve(self.clock.now())
        else:
            self._progress = None

    # Decisions.

    def _decide(self, event: job_events.Event) -> None:
        decision = decide(self.state, event, self.clock.now())
        if decision.actions:
            actions = tuple(type(action).__name__ for action in decision.actions)
            self.events.publish(run_events.DecisionMade(decision.reason, actions))
        self.state = decision.state
        for action in decision.actions:
            self._act(action)
        self._set_hurry()

    def _act(self, action: job_events.Action) -> None:
        match action:
            case job_events.AbortExchange(reason):
                self.agent.send(EndExchange(reason))
            case job_events.StartView(view, reason):
                self._begin_view(view, reason)
            case job_events.StartWorker(worker):
                self.agent.send(StartProcess(worker, joins=True, yielding=tuple(self.state.leaving)))
            case job_events.AskMembers(request):
                self.agent.send(LeaveNotice(request))
            case job_events.SendPosition(worker):
                self.agent.send(DeliverPosition(worker))
            case job_events.SignalWorker(worker, number):
                self.agent.send(SignalProcess(worker, number))
            case job_events.KillWorker(worker):
                # A job may end in peace though somebody who was to join is not needed any more.
                self._killed = self._killed or worker in self.state.members
                self.agent.send(SignalProcess(worker, signal.SIGKILL))
            case job_events.DumpStack(worker):
                self.agent.send(TakeStack(worker))
            case job_events.ShowMessage(text):
                self.console.say(text)
            case job_events.FinishJob(outcome):
                self._outcome = outcome

    def _begin_view(self, view: View, reason: str) -> None:
        before, leaving = set(self._view.workers), self.state.leaving
        for worker in sorted(before.difference(view.workers)):
            leaves = worker in leaving
            self._tally.lost += not leaves
            happened = run_events.WorkerLeft if leaves else run_events.WorkerLost
            self.events.publish(happened(worker, reason))
        for worker in sorted(set(view.workers) - before):
            self._tally.joined += 1
            self.events.publish(run_events.WorkerJoined(worker, reason))
        self.events.publish(run_events.ViewStarted(view.number, view.workers, reason))
        self._view = BeginView(view.number, view.workers, reason, tuple(leaving))
        self.agent.send(self._view)
        self.console.chief = view.chief

    def _set_hurry(self) -> None:
        self.console.hurries = self._stopped or self.state.stage is Stage.SAVING

    # What the command and other terminals say.

    def _hear_command(self) -> None:
        match self.command.receive():
            case PeerGone():
                raise CommandGone
            case Stop(number):
                self._stopped = True
                self._set_hurry()
                # A script that had ended before is known to have: workers are heard first.
                self._stops.append(number)
                self.agent.send(ReportAll())

    def _stop(self) -> None:
        number = self._stops.popleft()
        self.events.publish(run_events.StopReceived(number))
        self._decide(job_events.StopRequested(number))

    def _open_admin(self) -> None:
        try:
            self._admin = AdminSocket.open(self.paths.root.name, self._answer)
        except LockstepError as error:
            self._warn(f"remote control is unavailable: {error}")
            return
        self._admin_descriptor = self._admin.fileno()
        self.loop.watch(self._admin_descriptor, self._admin.serve)

    def _close_admin(self) -> None:
        if self._admin is not None and self._admin_descriptor is not None:
            self.loop.unwatch(self._admin_descriptor)
            self._admin_descriptor = None
            self._admin.close()

    def _answer(self, order: Order) -> Reply:
        match order:
            case ScaleRequest(workers):
                if reason := refusal(self.state, workers):
                    return Refused(reason)
                self._decide(job_events.ScaleRequested(workers))
            case StopRequest() if self.state.active:
                self._decide(job_events.StopRequested(signal.SIGTERM))
            case StopRequest() | StatusRequest():
                # The same order once more must not cut short how the job ends.
                pass
        return self._status()

    def _status(self) -> Status:
        assert self._admin is not None
        state = self.state
        return Status(
            job=self._admin.name,
            script=self.spec.target,
            pid=self.pid,
            run_dir=str(self.paths.root),
            since=self._since,
            replicas=self.spec.replicas,
            workers=tuple(worker for worker in state.members if worker in state.present),
            joining=state.joiners,
            wanted=state.size.wanted,
            where=self._doing,
        )

    # What the agent says.

    def _hear_agent(self) -> None:
        while self._ended is None and (report := self.agent.receive()) is not None:
            self._take(report)

    def _take(self, report: HostReport | Unreadable | PeerGone) -> None:
        match report:
            case WorkerSaid(worker, message):
                self._take_message(worker, message)
            case ProcessStarted(worker, pid):
                self.events.publish(run_events.WorkerStarted(worker, pid))
            case StartFailed(worker, joins, why):
                self._take_failed_start(worker, joins, why)
            case StartCancelled(worker, number):
                self._decide(job_events.WorkerExited(worker, -number))
            case ProcessArrived():
                self._decide(job_events.WorkerArrived())
            case NotUnderstood(worker, error):
                self.events.publish(run_events.MessageMisunderstood(worker, error))
            case StateHeld(view, whole, failure):
                self._decide(job_events.StateGiven(view, whole, failure))
            case ProcessExited():
                self._take_exit(report)
            case ViewRefused(number, why):
                self._take_refused_view(number, why)
            case TerminalLost(why):
                self.events.publish(run_events.OutputLost(why))
                self.console.say(why)
            case AllReported():
                self._stop()
            case HostEnded():
                self._ended = report
            case PeerGone() | Unreadable():
                self._ended = HostEnded()
                self._outcome = self._outcome or job_events.JobOutcome(1, "the agent of this host has ended")

    def _take_failed_start(self, worker: int, joins: bool, why: str) -> None:
        message = f"cannot start worker {worker}: {why}"
        if joins:
            self._warn(message)
            self._decide(job_events.WorkerExited(worker, 1))
        else:
            self._outcome = job_events.JobOutcome(1, message)

    def _take_refused_view(self, number: int, why: str) -> None:
        if number == self.spec.view.number:
            self._outcome = job_events.JobOutcome(1, why)
        elif number == self._view.number:
            self._decide(job_events.ViewFailed(f"{self._view.reason}, but {why}"))

    def _take_exit(self, exited: ProcessExited) -> None:
        worker, status = exited.worker, exited.status
        if self._progress is not None:
            self._progress.gone(worker)
        self.events.publish(run_events.ProcessEnded(worker, status))
        if exited.memory_kills and self.state.active:
            self.events.publish(run_events.MemoryExhausted(worker, exited.memory_kills))
            self.console.say(
                f"the kernel killed a process because memory ran out, probably worker {worker}: use fewer "
                "workers or smaller batches, or give the container or the machine more memory"
            )
        self._decide(job_events.WorkerExited(worker, status))

    def _take_message(self, worker: int, message: RelayedMessage) -> None:
        match message:
            case Started():
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
                self.events.publish(run_events.WorkerFailed(worker, summary, traceback))
                self._decide(job_events.ScriptFailed(worker, status, summary, blames, prints))
            case Finished(status):
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
            case run_events.CallStarted(name):
                self._doing = name
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
        if worker == self.console.chief and self.spec.backend in BACKEND_NAMES and backend in BACKEND_NAMES:
            own, chosen = BACKEND_NAMES[backend], BACKEND_NAMES[self.spec.backend]
            if own != chosen:
                self._warn(f"the script selects {own} itself, so it runs on {own}, not on {chosen}")

    # The end.

    def _conclude(self, outcome: job_events.JobOutcome) -> int:
        in_peace = self.state.stage is Stage.FINISHED and not self._killed
        self.agent.send(EndHost(_LEAVE_GRACE if in_peace else 0.0, outcome.workers))
        while self._ended is None:
            self.loop.turn(None)
        # Nobody is left: a terminal that waits for the end need not wait for a reader that has paused.
        self._close_admin()
        self.console.end_lines()
        if outcome.message:
            self.console.say(explain(outcome, self._ended.evidence, self.console.shows, self._name_log))
        elif self.spec.workers > 1 and not self._used_strategy:
            what = "used no strategy and compiled no model" if self.spec.adopts else "used no strategy"
            self._warn(f"the script {what}: each of the {self.spec.workers} workers ran all of it on its own")
        elif self.spec.replicas > 1 and self._used_strategy and not self.state.distributes:
            lines = whose_lines(self.spec.workers, self.spec.replicas)
            self._warn(
                f"the script distributed nothing: {lines}; train with model.fit, or "
                "pass the replica's computation to strategy.run"
            )
        if self._ended.left:
            self._warn(unkillable(self._ended.left))
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
            _, writable, _ = select.select([self.command.fileno()], busy, [], patience)
            if not writable:
                return
            self.console.flush()
