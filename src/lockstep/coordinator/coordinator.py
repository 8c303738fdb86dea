"""The coordinator of a job keeps the state of supervision, and has its decisions carried out.

It receives the reports of agents and the signals of the command, sends instructions to agents and publishes
events. `Narrator` tells the user about them, `HostWatch` exchanges heartbeats with other hosts, and
`Requests` answers other terminals.
"""

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from lockstep.coordinator.admin_socket import AdminSocket, take_name
from lockstep.coordinator.host_agent import HostAgent, RemoteOutput
from lockstep.coordinator.host_watch import HostWatch
from lockstep.coordinator.job_record import HostRecord, JobRecord, encode_record, without_excess
from lockstep.coordinator.narrator import Narrator
from lockstep.coordinator.provenance import provenance
from lockstep.coordinator.requests import Requests
from lockstep.errors import CheckpointError, LockstepError, SupersededError, UnfitError
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.protocol.admin import ScaleRequest, StackReply, Status, StopChannel, StopRequest
from lockstep.protocol.channel import PeerGone, Unreadable
from lockstep.protocol.host import (
    LEFT_OUT,
    AllReported,
    AskMembers,
    DumpStack,
    EndHost,
    ExitReport,
    HostEnded,
    HostReport,
    HostRetires,
    Instruction,
    KeepAlive,
    KeepRecord,
    KillWorker,
    LoadReport,
    OutputWritten,
    PauseOutput,
    ReportAll,
    SendPosition,
    SendState,
    ShowNote,
    SignalWorker,
    StartFailed,
    StartView,
    StartWorker,
    ViewRefused,
    WorkerSaid,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import (
    AbortExchange,
    EventReport,
    FailureReport,
    FileOpened,
    HostMembers,
    LastLineAwaited,
    RelayedMessage,
    ViewBroken,
)
from lockstep.supervisor import actions
from lockstep.supervisor import events as job_events
from lockstep.supervisor.decide import decide
from lockstep.supervisor.state import Stage, State
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.exit_status import signal_name
from lockstep.system.paths import RunPaths
from lockstep.system.prose import name_workers
from lockstep.worker.script import Script

_LEAVE_GRACE = 0.5
_LAST_FLUSH = 0.5
_REPORT_PATIENCE = 5.0
"""Seconds that the agent has for `AllReported`; a stop does not wait longer for it."""
_MOST_OWED = 256 * 1024
_OWED_FOR = 0.1
"""Output that is not acknowledged, in bytes and seconds: it appears twice if the coordinator is lost then."""
HOLDERS = 8
"""The number of agents that keep the record: the first ones that live."""
_RECORD_PACE = 2e-6
"""Seconds per byte of a record until the next one: 4 ms for a few hosts, 0.3 s for 500.

A view goes to each host. So the more hosts, the more losses and joins share a view.
"""
_REPORTS_PER_TURN = 64
"""The number of reports of one agent that one turn of the loop takes: workers may print without end."""
_END_PATIENCE = 20.0
"""Seconds beyond the grace that the agent has to end all processes; it kills them for 5 seconds."""


_UNRECORDED = (KeepAlive, OutputWritten, LoadReport, StackReply)
"""Reports that the record of the job does not depend on."""


ShowLife = Callable[[], StopRequest | None]
"""Shows that a coordinator lives while it waits; returns a stop that another terminal has requested."""


class CommandGone(Exception):
    """The command has ended before the job."""


@dataclass
class Coordinator:
    """Coordinates one job.

    Attributes:
        spec: the job.
        paths: the paths of the run, absolute.
        pid: process id of the command, which other terminals show.
        agents: the agents of all hosts of the job, including lost hosts. The index of a host never changes.
        command: the channel to the command; it closes when the command ends.
        loop: the loop that serves this coordinator.
        console: shows notes to the user.
        events: publishes the events of the run.
        clock: for deadlines.
        state: the state of supervision.
        before_loss: called before a closed connection counts as the loss of its host; may raise SystemExit.
        when_lost: called with the index of each host that is lost.
        keep: called with each record of the job, before agents get the instructions that follow from it.
        announce: called with each view before agents get it, with a function to call every second meanwhile,
            which returns a stop that another terminal has requested, and with the seconds left to a job that
            the user has stopped, otherwise infinity. If it raises CheckpointError, this coordinator must no
            longer lead the job. If it returns the user's request to stop the job, this request cannot wait
            for the view.
        notifies: whether the agents of other hosts show the notes of this process.
        term: the term of this coordinator; a coordinator that takes over a job has a higher term.
        record: the record of the job that this coordinator takes over; None for a new job.
        requests: the socket to which other terminals connect, or why they cannot; None for a socket with the
            name of the run folder.
    """

    spec: JobSpec
    paths: RunPaths
    pid: int
    agents: list[HostAgent]
    command: StopChannel
    loop: EventLoop
    console: Console
    events: Bus
    clock: Clock
    state: State
    before_loss: Callable[[], None] = lambda: None
    when_lost: Callable[[int], None] = lambda host: None
    keep: Callable[[KeepRecord], None] = lambda record: None
    announce: Callable[[StartView, ShowLife, float], StopRequest | None] | None = None
    notifies: bool = False
    term: int = 1
    record: JobRecord | None = None
    requests: AdminSocket | UnfitError | None = None
    _serial: int = 0
    _changed: bool = True
    _owing: list[HostAgent] = field(default_factory=list)
    _queue: dict[HostAgent, None] = field(default_factory=dict)
    _record_due: float = 0.0
    _view: StartView = field(default_factory=lambda: StartView(0, ()))
    _stops: deque[tuple[StopRequest, float]] = field(default_factory=deque)
    _outcome: actions.JobOutcome | None = None
    _output: RemoteOutput = field(init=False)
    _narrator: Narrator = field(init=False)
    _watch: HostWatch = field(init=False)
    _requests: Requests = field(init=False)
    _too_large: bool = False
    _stopped: bool = False
    _stops_taken: int = 0
    _killed: bool = False
    _pauses: bool = False

    def __post_init__(self) -> None:
        self._output = RemoteOutput(self.console, self.paths)
        for agent in self.agents:
            self._take_in(agent)
        self._narrator = Narrator(
            spec=self.spec,
            paths=self.paths,
            console=self.console,
            events=self.events,
            clock=self.clock,
            state=lambda: self.state,
            record=self.record,
        )
        self._watch = HostWatch(self.agents, self.clock, self.state.limits.silence)
        self._requests = Requests(
            loop=self.loop,
            state=lambda: self.state,
            decide=self._decide,
            pass_on=lambda request: self._tell(request.worker, request),
            status=self._status,
        )

    def _take_in(self, agent: HostAgent) -> None:
        agent.queue = self._queue
        if self.notifies and agent.remote:
            self.console.readers.append(lambda text: agent.send(ShowNote(text)))

    def run(self) -> int:
        """Run the job to its end and return its exit status.

        The caller closes the agent in its process, which ends all processes if the job has not ended by
        itself: after an exception, or when the command has ended.
        """
        try:
            self._open()
            self._commit()
            while self._outcome is None:
                self._turn()
                self._commit()
            return self._conclude(self._outcome)
        except CommandGone:
            status = 128 + signal.SIGKILL
            # Otherwise, agents of other hosts would wait for another coordinator.
            self._tell_all(EndHost(0.0, status=status))
            self._narrator.record_end(status, "the command was killed")
            return status
        except CheckpointError as error:
            self._narrator.record_end(LEFT_OUT, str(error))
            raise
        finally:
            self._requests.close()
            self.command.close()
            for agent in self.agents:
                agent.channel.close()
            self._output.close()

    def _tell_all(self, instruction: Instruction) -> None:
        for agent in self.agents:
            agent.send(instruction)

    def _tell(self, worker: int, instruction: Instruction) -> None:
        """Send an instruction to the agent of a worker's host."""
        self.agents[self.state.workers[worker].host].send(instruction)

    def _open(self) -> None:
        self.loop.before_each_wait(self._watch_console)
        self.loop.watch(self.command.fileno(), self._hear_command)
        for host, agent in enumerate(self.agents):
            self._watch.begin(agent)
            if agent.ended is None:
                self.loop.watch(agent.channel.fileno(), partial(self._hear_agent, host))
        self._take_requests()
        if self.record is None:
            self._begin_job()
        else:
            self._take_over(self.record)

    def _begin_job(self) -> None:
        script = Script(self.spec.target, self.spec.module, self.spec.arguments)
        self.events.publish(run_events.JobStarted(**provenance(script), job=self.spec.recorded()))
        workers = tuple(range(self.spec.workers))
        self._send_view(self.state.start_view())
        if self._outcome is not None:
            # The user has stopped it meanwhile.
            return
        for worker in workers:
            self._tell(worker, StartWorker(worker))

    def _take_over(self, record: JobRecord) -> None:
        """Continue a job whose coordinator was lost; its agents have the instructions of the record."""
        self._view = record.view
        self.console.chief = self.state.view.chief
        self.events.publish(run_events.CoordinatorStarted(self.term, os.getpid()))
        self._stops_taken, self._stopped = record.stops, record.stops > 0
        self._outcome = record.outcome
        self._drop_output()
        # The terminal of the last coordinator may have been slow. Lines that it had not shown are lost.
        self._tell_all(PauseOutput(()))

    def _commit(self) -> None:
        """Let agents keep the record of the job, then send the instructions that follow from it."""
        now = self.clock.now()
        due = [
            agent for agent in self._owing if agent.owed > _MOST_OWED or now - agent.acknowledged > _OWED_FOR
        ]
        if self._queue and now < self._record_due and self._outcome is None:
            # One record is enough for all decisions up to this point.
            return
        if self._queue or self._outcome is not None or (due and self._changed):
            self._keep_record()
        for agent in self._queue:
            agent.flush()
        self._queue.clear()
        for agent in due:
            agent.acknowledge(now)
        if due:
            self._owing = [agent for agent in self._owing if agent.owed]

    def _keep_record(self) -> None:
        agents = self._watch.live
        if not agents:
            return
        self._serial += 1
        self._changed = False
        record = encode_record(self._recorded())
        self._record_due = self.clock.now() + len(record) * _RECORD_PACE
        made = KeepRecord(self.term, self._serial, record)
        self.keep(made)
        sent = without_excess(made)
        if sent.record != record and not self._too_large:
            self._too_large = True
            self._narrator.warn(
                f"at present, the record of the job is too large for other hosts to keep ({len(record):,} "
                "bytes): if the host of the coordinator is lost now, the job cannot be taken over"
            )
        for agent in agents[:HOLDERS]:
            agent.send(sent)

    def _recorded(self) -> JobRecord:
        return JobRecord(
            spec=self.spec,
            state=self.state,
            hosts=tuple(
                HostRecord(
                    name=agent.name,
                    peer=agent.peer,
                    lost=agent.ended is not None,
                    received=agent.received,
                    sent=agent.sent,
                    outbox=tuple(agent.outbox),
                )
                for agent in self.agents
            ),
            view=self._view,
            tally=self._narrator.run.totals,
            remaining=self._narrator.run.remaining,
            doing=self._narrator.doing,
            chief_writes=self._narrator.chief_writes,
            used_strategy=self._narrator.used_strategy,
            stops=self._stops_taken,
            outcome=self._outcome,
            at=self.clock.now(),
            begun=self._narrator.begun,
            since=self._narrator.since,
        )

    def _turn(self) -> None:
        stop = self._stops[0][1] + _REPORT_PATIENCE if self._stops else None
        sends = self._record_due if self._queue else None
        times = (self.state.due, self._narrator.due, stop, sends, self._watch.due)
        dues = [due for due in times if due is not None]
        self.loop.turn(max(0.0, min(dues) - self.clock.now()) if dues else None)
        # The turn may have received the report of the first stop.
        if self._stops and self.clock.now() >= self._stops[0][1] + _REPORT_PATIENCE:
            self._stop()
        if self.state.due is not None and self.clock.now() >= self.state.due:
            self._decide(job_events.DeadlinePassed())
        if self._watch.due is not None and self.clock.now() >= self._watch.due:
            self._keep_hosts()
        self._narrator.serve()

    # Decisions.

    def _decide(self, event: job_events.Event) -> None:
        if self._outcome is not None and isinstance(event, run_events.StopRequested):
            # The job is already ending, perhaps because of this stop, which did not wait for a view.
            return
        now, was_elastic = self.clock.now(), self.state.elastic
        decision = decide(self.state, event, now)
        if decision.actions:
            actions = tuple(type(action).__name__ for action in decision.actions)
            self.events.publish(run_events.DecisionMade(decision.reason, actions))
        for host in sorted(decision.state.lost_hosts - self.state.lost_hosts):
            self._give_up(host)
            if host not in self.state.retiring and self.state.stage is not Stage.FINISHED:
                self.events.publish(run_events.HostLost(self.state.names[host], decision.reason))
        for host in sorted(decision.state.retiring - self.state.retiring):
            self.events.publish(run_events.HostRetired(decision.state.names[host], decision.reason))
        wanted = decision.state.size.wanted
        is_requested = isinstance(event, HostRetires | ScaleRequest)
        if wanted < self.state.size.wanted and self.state.active and not is_requested:
            self.events.publish(run_events.WorkerNotReplaced(wanted, decision.reason))
        self._changed = self._changed or decision.state != self.state
        self.state = decision.state
        if self.state.elastic and not was_elastic:
            # From now on the job survives the loss of this host, so agents get the record without delay.
            self._watch.hasten()
        for action in decision.actions:
            self._act(action)
        self._drop_output()

    def _act(self, action: actions.Action) -> None:
        match action:
            case AbortExchange() | AskMembers():
                self._tell_all(action)
            case StartView() if self._outcome is None:
                self._start_view(action)
            case SendState(host):
                self.agents[host].send(action)
            case StartWorker() | SendPosition() | SignalWorker() | DumpStack():
                self._tell(action.worker, action)
            case KillWorker(worker):
                # Killing a joiner that is no longer needed does not make the end of the job abnormal.
                self._killed = self._killed or worker in self.state.members
                self._tell(worker, action)
            case actions.ShowMessage(text, logs):
                self._narrator.say(text, logs)
            case actions.TellSuccess():
                self._narrator.tell_success()
                self._tell_all(AbortExchange("the job has finished"))
            case actions.FinishJob(outcome):
                if outcome.out_of_reach and self.announce is not None:
                    raise SupersededError(
                        f"{outcome.message} within reach; another host may continue this job, so this "
                        "coordinator ends"
                    )
                self._outcome = outcome

    def _start_view(self, view: StartView) -> None:
        before, leaving = set(self._view.workers), set(view.leaving)
        for worker in sorted(before.difference(view.workers)):
            leaves = worker in leaving
            happened = run_events.WorkerLeft if leaves else run_events.WorkerLost
            self.events.publish(happened(worker, view.reason))
        for worker in sorted(set(view.workers) - before):
            self.events.publish(run_events.WorkerJoined(worker, view.reason))
        self.events.publish(run_events.ViewStarted(view.number, view.workers, view.reason))
        old = self._view.hosts[0]
        self._send_view(view)
        self._narrator.tell_of_moved_files(old, self._view.hosts[0])

    def _send_view(self, view: StartView) -> None:
        if self._view.number > 1 and not self._view.state:
            # Hosts that are lost together cost one view, unless the last one had admitted joiners.
            for agent in self.agents:
                agent.withdraw(self._view)
        hosts = tuple(self._addressed(members) for members in view.hosts)
        self._view = msgspec.structs.replace(view, hosts=hosts, term=self.term)
        self.console.chief = self.state.view.chief
        shutdown, left = self.state.shutdown, math.inf
        if shutdown.stage is Stage.SAVING and shutdown.deadline is not None:
            left = shutdown.deadline - self.clock.now()
        elif self._stops:
            left = self.state.limits.save - self._first_stop().waited
        stop = None if self.announce is None else self.announce(self._view, self._show_life, max(0.0, left))
        if stop is None:
            self._tell_all(self._view)
            return
        number = self._stops[0][0].signal if self._stops else stop.signal
        outcome = shutdown.outcome or actions.JobOutcome(
            128 + number, f"stopped by {signal_name(number)}", stopped=True
        )
        is_first = view.number == self.spec.view.number
        missing = "no step was computed" if is_first else "no checkpoint of the last steps"
        text = f"{outcome.message}; {missing}, because the object store did not answer"
        self._stopped, self._outcome = True, replace(outcome, message=text)

    def _show_life(self) -> StopRequest | None:
        """Tell other hosts and terminals that this process is alive while it cannot make decisions.

        Returns:
            A stop that another terminal has requested since the last call.
        """
        for agent in self._watch.live:
            agent.channel.send(KeepAlive(0, agent.alive))
        return self._requests.serve_in_wait()

    def _addressed(self, members: HostMembers) -> HostMembers:
        agent = self.agents[members.host]
        where = () if agent.peer is None else (agent.name, *agent.peer)
        return HostMembers(members.host, members.workers, *where)

    def _drop_output(self) -> None:
        """Drop output that waits for a slow terminal when the user wants the job to end."""
        self.console.drops = self._stopped or self.state.stage is Stage.SAVING

    def _watch_console(self) -> None:
        for text in self.console.lost():
            self.events.publish(run_events.OutputLost(text))
            self.console.say(text)
        for sink in self.console.sinks:
            self.loop.watch_if(sink.pending > 0, sink.descriptor, sink.flush, writes=True)
        pauses = self.console.full and not self.console.drops
        if not (pauses or self._pauses):
            return
        self._pauses = pauses
        shown = [worker for worker in self.state.running if self.console.shows(worker)] if pauses else []
        for host, agent in enumerate(self.agents):
            paused = tuple(worker for worker in shown if self.state.workers[worker].host == host)
            if agent.remote and paused != agent.paused:
                agent.paused = paused
                agent.send(PauseOutput(paused))

    def _keep_hosts(self) -> None:
        """Tell the agents of other hosts that this process is alive, and give up silent agents."""
        now = self.clock.now()
        self._watch.serve(self._keep_changes)
        before: State | None = None
        # There is one decision for each lost host, as if they were lost one after the other.
        while self.state != before and self.state.silent(heard := self._watch.heard(), now):
            before = self.state
            self._decide(job_events.HostsHeard(heard))

    def _keep_changes(self) -> None:
        if self._changed:
            self._keep_record()

    def _see_gone(self, host: int, how: str) -> None:
        if self.agents[host].remote:
            self._decide(job_events.HostGone(host, how))
        else:
            self._give_up(host)
            self._outcome = self._outcome or actions.JobOutcome(1, "the agent of this host has ended")

    def _give_up(self, host: int) -> None:
        """Close the connection to the agent of a lost host."""
        agent = self.agents[host]
        self.loop.unwatch(agent.channel.fileno())
        agent.channel.close()
        agent.ended, agent.has_reported = HostEnded(), True
        self.when_lost(host)

    @property
    def is_over(self) -> bool:
        """Whether the end of the job is decided, so that no host can join."""
        return self._outcome is not None or not self.state.active

    def stop_for_terminal(self, stop: StopRequest) -> None:
        """Take the first stop that another terminal requested during a wait for `announce`."""
        self._requests.answer(stop)

    def add_host(self, agent: HostAgent, workers: int, cores: int) -> None:
        """From now on, let a host take part. Its agent already knows the job.

        Args:
            agent: the agent of the host.
            workers: the number of workers that it should have.
            cores: number of its cores.
        """
        host = len(self.agents)
        self.agents.append(agent)
        self._take_in(agent)
        self._watch.begin(agent)
        self.loop.watch(agent.channel.fileno(), partial(self._hear_agent, host))
        agent.send(self._view)
        joined = run_events.HostJoined(agent.name, workers, cores)
        self.events.publish(joined)
        self._decide(joined)

    # Messages of the command and of other terminals.

    def _hear_command(self) -> None:
        match self.command.receive():
            case PeerGone():
                raise CommandGone
            case StopRequest() as stop:
                self._stopped = True
                self._drop_output()
                # A script that has already ended must count as ended: workers' messages come first.
                self._stops.append((stop, self.clock.now()))
                self._request_reports()

    def _request_reports(self) -> None:
        for agent in self.agents:
            if agent.ended is None:
                agent.has_reported = False
                agent.send(ReportAll())

    def _first_stop(self) -> StopRequest:
        """Return the first stop that is not yet decided, with its present age."""
        stop, since = self._stops[0]
        return stop.after(self.clock.now() - since)

    def _stop(self) -> None:
        stop = self._first_stop()
        self._stops.popleft()
        self._stops_taken += 1
        self._changed = True
        requested = run_events.StopRequested(stop.signal, round(stop.waited, 3))
        self.events.publish(requested)
        self._decide(requested)

    def _take_requests(self) -> None:
        if self.spec.checks:
            # This does not apply to requests: commands without a name are for the only running job.
            return
        try:
            if isinstance(self.requests, UnfitError):
                raise self.requests
            name = self.paths.root.name
            self._requests.open(self.requests or AdminSocket.over(take_name(name), self._requests.answer))
        except LockstepError as error:
            self._narrator.warn(f"remote control is unavailable: {error}")

    def _status(self, name: str) -> Status:
        state = self.state
        return Status(
            job=name,
            script=self.spec.target,
            pid=self.pid,
            run_dir=str(self.paths.root),
            since=self._narrator.since,
            replicas=self.spec.replicas,
            workers=tuple(worker for worker in state.members if worker in state.present),
            joining=state.joiners,
            wanted=state.size.wanted,
            where=self._narrator.doing,
            went=self._narrator.how_it_goes(),
        )

    # Reports of agents.

    def _hear_agent(self, host: int) -> None:
        agent = self.agents[host]
        for _ in range(_REPORTS_PER_TURN):
            if agent.ended is not None or (report := agent.receive()) is None:
                return
            agent.heard = self.clock.now()
            self._take(host, report)

    def _take(self, host: int, report: HostReport | Unreadable | PeerGone) -> None:
        agent = self.agents[host]
        self._changed = self._changed or not isinstance(report, _UNRECORDED)
        match report:
            case KeepAlive():
                pass
            case LoadReport(load):
                self.events.publish(load)
            case StackReply():
                self._requests.answer_stack(report)
            case OutputWritten(worker, descriptor, data):
                agent.wrote = self.clock.now()
                self._output.write(worker, descriptor, data)
                if agent not in self._owing:
                    self._owing.append(agent)
                agent.owed += len(data)
            case WorkerSaid(worker, message):
                self._take_message(worker, message)
            case EventReport(event):
                self.events.publish(event)
            case StartFailed():
                if report.joins:
                    self._narrator.warn(report.message)
                self._decide(report)
            case ExitReport():
                self._take_exit(report)
            case ViewRefused():
                self._take_refused_view(report)
            case AllReported():
                agent.has_reported = True
                # Otherwise the deadline has passed, and the stop is decided.
                if self._stops and all(other.has_reported for other in self.agents):
                    self._stop()
            case HostEnded():
                agent.ended = report
            case Unreadable(error):
                self._see_gone(host, f"sent an invalid message: {error}")
            case PeerGone():
                self.before_loss()
                self._see_gone(host, "was lost: the connection to its agent is closed")
            case _ if isinstance(report, job_events.Event):
                self._decide(report)

    def _take_refused_view(self, refused: ViewRefused) -> None:
        if refused.view == self.spec.view.number:
            self._outcome = actions.JobOutcome(1, refused.reason)
        else:
            self._decide(ViewRefused(refused.view, f"{self._view.reason}, but {refused.reason}"))

    def _take_exit(self, exited: ExitReport) -> None:
        event, worker = exited.event, exited.event.worker
        if exited.stack and self.agents[self.state.workers[worker].host].remote:
            self._output.log_only(worker, exited.stack)
        self.events.publish(event)
        if exited.memory_kills and self.state.active:
            self.events.publish(run_events.MemoryExhausted(worker, exited.memory_kills))
        self._decide(event)

    def _hosts_of(self, workers: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the hosts of workers; none if the job has one host."""
        return tuple(filter(None, (self.agents[host].name for host in self.state.hosts_of(workers))))

    def _take_message(self, worker: int, message: RelayedMessage) -> None:
        match message:
            case EventReport(event):
                if isinstance(event, run_events.VerificationFailed):
                    event = msgspec.structs.replace(event, hosts=self._hosts_of(event.workers))
                is_fact = isinstance(event, run_events.HostFact | run_events.WorkerFact)
                self.events.publish(event, None if is_fact else worker)
                if isinstance(event, job_events.Event):
                    self._decide(event)
            case ViewBroken() | LastLineAwaited():
                self._decide(message)
            case FileOpened():
                self._narrator.tell_of_file(worker, message)
            case FailureReport(event, prints=prints):
                self.events.publish(event)
                if not prints and self.agents[self.state.workers[worker].host].remote:
                    self._output.log_only(worker, event.traceback)
                self._decide(message)

    # The end.

    def _conclude(self, outcome: actions.JobOutcome) -> int:
        normal = self.state.stage is Stage.FINISHED and not self._killed
        where = self._places(outcome.workers) if outcome.message else ""
        told = replace(outcome, message=f"{outcome.message}{where}")
        self._narrator.announce(told)
        ended = self._end_hosts(EndHost(_LEAVE_GRACE if normal else 0.0, outcome.workers, outcome.status))
        # No process is left, so `lockstep stop` need not wait until a slow terminal has shown the output.
        self._requests.close()
        names = (agent.name for agent in self.agents)
        self._narrator.conclude(told, list(zip(names, ended, strict=True)))
        self._narrator.record_end(outcome.status, outcome.message, outcome.workers)
        self._flush()
        return outcome.status

    def _places(self, workers: Sequence[int]) -> str:
        """Return " (worker 1 on node2)" for workers that ended a job over hosts."""
        names = {worker: self.agents[self.state.workers[worker].host].name for worker in workers}
        hosts = {name: [w for w in workers if names[w] == name] for name in names.values() if name}
        places = [f"{name_workers(there)} on {name}" for name, there in hosts.items()]
        return f" ({', '.join(places)})" if places else ""

    def _end_hosts(self, end: EndHost) -> tuple[HostEnded, ...]:
        self._tell_all(end)
        begun, patience = self.clock.now(), end.grace + _END_PATIENCE
        while late := [agent for agent in self.agents if agent.ended is None]:
            # A slow connection may still deliver output before the last report.
            left = {agent.name: max(begun, agent.wrote) + patience - self.clock.now() for agent in late}
            self.loop.turn(max(0.0, min(left.values())))
            for agent in late:
                if left[agent.name] <= 0:
                    where = f" on {agent.name}" if agent.name else ""
                    self._narrator.warn(f"the agent{where} has not ended all processes within {patience:g} s")
                    agent.ended = HostEnded()
        return tuple(agent.ended for agent in self.agents if agent.ended is not None)

    def _flush(self) -> None:
        # A paused reader, such as a pager, gets all output, unless the user has stopped the job.
        while self.console.pending:
            busy = [sink.descriptor for sink in self.console.sinks if sink.pending]
            patience = _LAST_FLUSH if self._stopped else None
            ready = wait_for([self.command.fileno()], patience, writable=busy)
            if ready.isdisjoint(busy):
                return
            self.console.flush()
