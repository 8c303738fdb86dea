"""The agent of a host starts, watches and ends its workers, as the coordinator of the job instructs.

It makes no decisions about the job. Only the messages of `protocol.host` connect it to the coordinator.

An engine may start another coordinator elsewhere while this host is cut off. The host must stop before that,
or it could continue the old view with its own workers. `JobSpec.hold` is the number of seconds after which it
stops. Only an engine sets it. A call of the exchange ends on a host only within that time of a `KeepAlive`
that the coordinator has answered. After that the host pauses, until the coordinator or the next one answers,
the view ends, or `--timeout` has passed.

* The time counts from when the agent sent the `KeepAlive`, by the clock of its host, which the answer
  repeats. The arrival of a message proves less: it may have waited behind a broken connection, or for an
  agent that was stopped.
* The agent writes the time until which calls may end into the control segment. Each member reads it before
  its last arrival in a call (`Barrier.await_permission`). So a call ends for all members of a host or for
  none, even if the time runs out between their arrivals. Members pause while their agent is stopped. The end
  of a view wakes them.
* Only an answer prolongs the time. A new view inherits the time of the view before it, and a coordinator that
  takes over must first receive a message from the host.

The agent reports the end of a worker after everything that the worker sent. Before a stop signal takes
effect, the coordinator requests all messages of workers (`ReportAll`), so a script that finished before the
signal counts as finished. `EndHost` ends everything on the host, and `HostEnded` returns the log and the
stack that the final note shows.
"""

import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lockstep.agent.held_states import HeldStates
from lockstep.agent.host_load import LoadMeter
from lockstep.agent.lane_connections import HostNetwork
from lockstep.agent.starter import Arrivals, NoGpuLeft, Starter
from lockstep.agent.worker_handle import StackDump, WorkerHandle
from lockstep.agent.worker_output import WorkerOutput
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.errors import LockstepError
from lockstep.observability.events import (
    GpuLost,
    MessageMisunderstood,
    ScriptEnded,
    WorkerConnectedLate,
    WorkerExited,
    WorkerReady,
    WorkerStarted,
)
from lockstep.protocol.admin import StackReply, StackRequest
from lockstep.protocol.channel import Attachment, Channel, PeerGone, Unreadable
from lockstep.protocol.greeting import Greeting
from lockstep.protocol.host import (
    LEFT_OUT,
    AllReported,
    AskMembers,
    DumpStack,
    EndHost,
    ExitReport,
    HostEnded,
    HostReport,
    Instruction,
    KeepAlive,
    KillWorker,
    LoadReport,
    PauseOutput,
    PositionMissed,
    ReportAll,
    SendPosition,
    SendState,
    ShowNote,
    SignalWorker,
    StartCancelled,
    StartFailed,
    StartView,
    StartWorker,
    StateArrived,
    StateMoving,
    ViewRefused,
    WorkerArrived,
    WorkerSaid,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import (
    AbortExchange,
    AnswersAt,
    Endpoint,
    EnterView,
    EventReport,
    FailureReport,
    Leave,
    NetworkEndpoint,
    PeerConnected,
    Position,
    SharedMemoryEndpoint,
    StateGiven,
    StateSource,
    ViewBroken,
    Welcome,
)
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.descendants import Descendants
from lockstep.system.event_loop import EventLoop
from lockstep.system.exit_status import UNKNOWN_STATUS
from lockstep.system.memory import memory_kills
from lockstep.system.notes import note
from lockstep.system.prose import os_error

_LOOK_EVERY = 0.02
"""Seconds between two looks at a stack that a worker writes."""


@dataclass
class Agent:
    """Runs the workers of one job on this host; `loop` serves it as soon as it exists.

    Attributes:
        spec: the job.
        coordinator: the channel to the job's coordinator.
        loop: serves this agent.
        starter: starts workers.
        open_exchange: opens the exchange of a view for the number of its members on this host.
        pool: the memory for partials and totals.
        state_pool: the memory for the state that workers divide; None if they do not.
        output: receives the output of workers.
        descendants: the processes of the job on this host.
        meter: measures the load of this host and its workers.
        host: the index of this host in the job.
        name: the name of this host; empty if the job has one host.
        network: how workers reach those of other hosts; None if the job has one host.
        arrivals: where workers that a user starts by hand arrive; None if none can.
        late: whether this host joins a running job.
        say: shows a note of the coordinator to the users of this host.
        clock: for deadlines.
        status: the exit status of the job, if `ended`.
        ended: whether all processes of the job on this host have ended, and nothing follows.
    """

    spec: JobSpec
    coordinator: Channel[HostReport, Instruction]
    loop: EventLoop
    starter: Starter
    open_exchange: Callable[[int], ControlSegment]
    pool: Attachment
    output: WorkerOutput
    descendants: Descendants
    meter: LoadMeter
    host: int = 0
    name: str = ""
    network: HostNetwork | None = None
    arrivals: Arrivals | None = None
    state_pool: Attachment | None = None
    late: bool = False
    say: Callable[[str], None] = note
    clock: Clock = field(default_factory=SystemClock)
    status: int = field(default=1, init=False)
    ended: bool = field(default=False, init=False)
    _workers: dict[int, WorkerHandle] = field(default_factory=dict)
    _pending_starts: dict[int, StartWorker] = field(default_factory=dict)
    _waits_at: int | None = None
    _broken_view: int = 0
    _view: StartView = field(default_factory=lambda: StartView(0, ()))
    _exchange: ControlSegment | None = None
    _control: Attachment = field(default_factory=Attachment.missing)
    _stacks: list[StackDump] = field(default_factory=list)
    _permitted: float = field(init=False)
    _connected: list[tuple[int, PeerConnected]] = field(default_factory=list)
    _states: HeldStates = field(init=False)
    _memory_kills: tuple[int, int] = field(init=False)
    _lost_gpus: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # With a hold, calls wait for the first answer too.
        self._memory_kills = (memory_kills(),) * 2
        self._permitted = math.inf if self.spec.hold is None else 0.0
        self._states = HeldStates(self.host, self.network, self.loop, self._tell_of_moving)
        if self.network is not None:
            self.network.connections.pass_questions = self._pass_questions
        self.loop.before_each_wait(self._watch_output)
        self.loop.before_each_wait(self._reap)
        self.loop.before_each_wait(self._measure)
        self.loop.before_each_wait(self._watch_stacks)
        self.loop.watch(self.coordinator.fileno(), self._obey)
        if self.arrivals is not None:
            self.arrivals.begin(self.spec.name, lambda: self._tell(WorkerArrived(self.host)), late=self.late)
            self.loop.watch(self.arrivals.fileno(), self.arrivals.serve)

    def close(self) -> None:
        """End every process of the job on this host at once, and release everything."""
        self.descendants.end(grace=0)
        for worker in self._workers.values():
            worker.close()
        if self._exchange is not None:
            self._exchange.close()
        self._states.close()
        self.meter.close()
        self.coordinator.close()

    def pauses(self, now: float) -> bool:
        """Return whether calls wait for the coordinator, which has answered before, but not recently."""
        return 0.0 < self._permitted < now

    @property
    def lacks_workers(self) -> bool:
        """Whether this host knows that a worker of the view is lost while the others wait for it."""
        return 0 < self._broken_view == self._view.number or any(
            worker.exited and worker.said != 0 and worker.worker in self._view.workers
            for worker in self._workers.values()
        )

    def _tell(self, report: HostReport) -> bool:
        return self.coordinator.send(report)

    def _obey(self) -> None:
        while (instruction := self.coordinator.receive()) is not None:
            match instruction:
                case StartView():
                    self._start_view(instruction)
                case StartWorker(worker):
                    self._pending_starts[worker] = instruction
                case SendState(source=source):
                    self._states.fetch(source, partial(self._tell_of_state, source.view))
                case PauseOutput(workers):
                    self.output.paused = frozenset(workers)
                case AskMembers(notice) if self._exchange is not None:
                    self._exchange.post_notice(notice)
                case SendPosition(worker, source):
                    self._states.fetch(source, partial(self._deliver_position, worker, source), lasts=True)
                case SignalWorker(worker, number):
                    self._signal(worker, number)
                case KillWorker(worker):
                    self._signal(worker, signal.SIGKILL)
                case DumpStack(worker):
                    self._workers[worker].ask_for_stack()
                case StackRequest(worker):
                    self._show_stack(worker)
                case AbortExchange():
                    self._abort_exchange(instruction)
                case KeepAlive(sent=sent) if sent:
                    self._take_answer(sent)
                case ShowNote(text):
                    self.say(text)
                case ReportAll():
                    self._hear_all()
                    self._tell(AllReported())
                case EndHost():
                    # The coordinator may close the channel as soon as it has the answer.
                    self.loop.unwatch(self.coordinator.fileno())
                    self._end(instruction)
                    return
                case PeerGone():
                    self.loop.unwatch(self.coordinator.fileno())
                    self.say("the connection to the coordinator is closed, so the job ends on this host")
                    self._end(EndHost(0.0, status=LEFT_OUT))
                    return
        # This comes last because it may block. The members already have their messages.
        self._start_pending()

    def _take_answer(self, sent: float) -> None:
        """Note that the coordinator has received the `KeepAlive` that this host sent at `sent`.

        The hold counts from then, not from the arrival of the answer, which may have been delayed for long
        while another coordinator began.
        """
        if self.spec.hold is not None:
            self._permitted = max(self._permitted, sent + self.spec.hold)
            if self._exchange is not None:
                self._exchange.permit(self._permitted)

    # Starting.

    def _start_pending(self) -> None:
        """Start workers in the order of the instructions, each as soon as the starter is ready."""
        if self._waits_at is not None:
            self.loop.unwatch(self._waits_at)
            self._waits_at = None
        while self._pending_starts:
            start = next(iter(self._pending_starts.values()))
            try:
                self._waits_at = self.starter.prepare()
                if self._waits_at is not None:
                    self.loop.watch(self._waits_at, self._start_pending)
                    return
                del self._pending_starts[start.worker]
                self._start(start)
            except OSError as error:
                self._pending_starts.pop(start.worker, None)
                recurs = isinstance(error, NoGpuLeft)
                self._tell(StartFailed(start.worker, start.joins, os_error(error), recurs))

    def _start(self, start: StartWorker) -> None:
        running = [worker for worker in self._workers.values() if not worker.exited]
        others = [worker for worker in running if worker.worker not in start.yielding]
        yielding = [worker for worker in running if worker.worker in start.yielding]
        if start.joins:
            self._look_at_gpus()
        worker = self.starter.start(start.worker, others, joins=start.joins, yielding=yielding)
        self._workers[start.worker] = worker
        network = self.network
        job, credentials = (network.job, network.credentials) if network else (b"", None)
        worker.channel.send(Welcome(self.pool, self.spec.settings, job, credentials, self.state_pool))
        if start.worker in self._view.workers:
            self._let_in(worker)
        self.loop.watch(worker.channel.fileno(), partial(self._hear, worker))
        self.loop.watch(worker.handle.exited, partial(self._see_exit, worker))
        self._tell(EventReport(WorkerStarted(start.worker, worker.handle.pid)))

    def _look_at_gpus(self) -> dict[str, str]:
        """Report GPUs that have become unusable; return why, by name."""
        faults = self.starter.faults()
        for gpu in faults.keys() - self._lost_gpus:
            self._tell(EventReport(GpuLost(self.name, gpu, faults[gpu])))
        self._lost_gpus |= faults.keys()
        return faults

    def _signal(self, worker: int, number: int) -> None:
        if self._pending_starts.pop(worker, None) is not None:
            self._tell(StartCancelled(worker, number))
        elif worker in self._workers:
            self._workers[worker].killed |= number == signal.SIGKILL
            self._workers[worker].handle.send_signal(number)

    # Views.

    def _start_view(self, view: StartView) -> None:
        here = next((host.workers for host in view.hosts if host.host == self.host), ())
        try:
            exchange = self.open_exchange(len(here)) if here else None
            control = Attachment.missing() if exchange is None else Attachment.copy_of(exchange.fd)
        except (LockstepError, OSError) as error:
            self._tell(ViewRefused(view.number, str(error)))
            return
        if exchange is not None:
            exchange.permit(self._permitted)
            # This precedes the members' entry: they may finish training before the next instruction arrives.
            exchange.post_notice(view.notice)
        before, old = self._view.workers, self._exchange
        self._view, self._exchange, self._control = view, exchange, control
        self._connected = []
        for worker in here:
            if worker in self._workers:
                self._let_in(self._workers[worker], joins=worker not in before)
        self._states.begin_view(view.term, view.number)
        if self.network is not None:
            self.network.enter(self.network.job, view.term, view.number, self._tell_of_late_connection)
            self.network.connections.begin(view.number, self._pass_connection)
        for worker in view.leaving:
            if worker in before and worker in self._workers:
                self._workers[worker].channel.send(Leave())
        if old is not None:
            old.abort(view.reason)
            old.close()

    def _tell_of_late_connection(self, address: str, view: int) -> None:
        self._tell(EventReport(WorkerConnectedLate(self.name, address, view)))

    def _let_in(self, worker: WorkerHandle, *, joins: bool = False) -> None:
        view, control = self._view, self._control
        hosts = tuple(host.workers for host in view.hosts)
        endpoint: Endpoint = SharedMemoryEndpoint(control)
        if view.networked:
            here = next(at for at, host in enumerate(view.hosts) if host.host == self.host)
            endpoint = NetworkEndpoint(control, view.term, view.hosts, here)
        state = self._states.find(view.state) if joins else None
        worker.channel.send(EnterView(view.number, hosts, endpoint, state))
        for receiver, connected in self._connected:
            if receiver == worker.worker:
                worker.channel.send(connected)
        self._connected = [waiting for waiting in self._connected if waiting[0] != worker.worker]

    def _pass_connection(self, greeting: Greeting, connection: socket.socket) -> str | None:
        """Give a connection to the worker of its lane, when that worker is in the view."""
        if greeting.receiver != self.host:
            return "its greeting is a copy of one for another host"
        sender = next((host for host in self._view.hosts if host.host == greeting.host), None)
        here = next((host.workers for host in self._view.hosts if host.host == self.host), ())
        if sender is None or sender.incarnation != greeting.incarnation or greeting.lane >= len(here):
            return "its host has no such lane in the view"
        receiver = here[greeting.lane]
        connected = PeerConnected(greeting.view, greeting.host, Attachment(connection.detach()))
        if receiver in self._workers:
            self._workers[receiver].channel.send(connected)
        else:
            self._connected.append((receiver, connected))
        return None

    def _pass_questions(self, greeting: Greeting, connection: socket.socket) -> str | None:
        """Give a connection to the worker that answers the questions that arrive over it."""
        worker = self._workers.get(greeting.lane)
        if greeting.receiver != self.host:
            return "its greeting is a copy of one for another host"
        if worker is None:
            return f"worker {greeting.lane} does not run on this host"
        # The worker may have announced its address only just before the other worker learned of it.
        self._hear(worker)
        try:
            with connection, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as passing:
                passing.setblocking(False)
                passing.connect(worker.entrance)
                socket.send_fds(passing, [b"\0"], [connection.fileno()])
        except OSError:
            return f"worker {greeting.lane} answers no questions"
        return None

    def _abort_exchange(self, abort: AbortExchange) -> None:
        for worker in self._workers.values():
            if not worker.exited:
                worker.channel.send(abort)
        if self._exchange is not None:
            self._exchange.abort(abort.reason)

    # Messages, output and ends of workers.

    def _hear_all(self) -> None:
        for worker in self._workers.values():
            self._hear(worker)

    def _hear(self, worker: WorkerHandle) -> None:
        while (message := worker.channel.receive()) is not None:
            match message:
                case PeerGone():
                    self.loop.unwatch(worker.channel.fileno())
                    return
                case Unreadable(error):
                    self._tell(EventReport(MessageMisunderstood(worker.worker, error)))
                case StateGiven():
                    self._take_state(message)
                case AnswersAt(entrance):
                    worker.entrance = entrance
                case _:
                    self._note(worker, message)
                    self._tell(WorkerSaid(worker.worker, message))

    def _note(self, worker: WorkerHandle, message: object) -> None:
        match message:
            case EventReport(WorkerReady()):
                worker.ready = True
            case ViewBroken(view=view):
                self._broken_view = view
            case EventReport(ScriptEnded(status=status)):
                worker.said = status
            case FailureReport():
                worker.said = message.status
                if not message.prints:
                    worker.log_only(message.event.traceback)

    def _take_state(self, report: StateGiven) -> None:
        """Hold a state, and report where it is."""
        state, failure, source = report.state, report.failure, None
        if state is not None and state.is_missing:
            failure = "the agent has too many open files to take the state"
        elif state is not None and report.view == self._view.number:
            here = next(host for host in self._view.hosts if host.host == self.host)
            size = os.fstat(state.descriptor).st_size
            number = self._states.hold(state)
            source = StateSource(report.view, number, size, self.host, here.address, here.port)
        elif state is not None:
            failure = f"view {report.view} has ended"
            self._states.release(state)
        self._tell(StateGiven(report.view, report.whole, failure, source=source))

    def _tell_of_state(self, view: int, outcome: Attachment | str) -> None:
        failure = f"{self.name} has not received the state: {outcome}" if isinstance(outcome, str) else ""
        self._tell(StateArrived(self.host, view, failure))

    def _tell_of_moving(self, source: StateSource, received: int, seconds: float) -> None:
        self._tell(StateMoving(self.host, source.view, received, source.size, seconds))

    def _deliver_position(self, worker: int, source: StateSource, outcome: Attachment | str) -> None:
        if isinstance(outcome, str):
            failure = f"{self.name} has not received the position: {outcome}"
            self._tell(PositionMissed(worker, source.view, failure))
        else:
            self._workers[worker].channel.send(Position(outcome))

    def _see_exit(self, worker: WorkerHandle) -> None:
        status = worker.handle.poll()
        if status is None:
            return
        worker.exited = True
        self.loop.unwatch(worker.handle.exited)
        # The coordinator gets messages before the exit of their sender.
        self._hear_all()
        for stream in worker.streams:
            stream.drain()
        if status == UNKNOWN_STATUS:
            status = worker.said
        kills, cause = 0, ""
        if status in (-signal.SIGKILL, UNKNOWN_STATUS) and not worker.killed:
            kills = self._recent_memory_kills()
            cause = "by the kernel, because memory ran out" if kills and status != UNKNOWN_STATUS else ""
        elif status and worker.gpus and not worker.killed:
            faults = self._look_at_gpus()
            cause = " and ".join(faults[gpu] for gpu in worker.gpus if gpu in faults)
        stack = worker.described_stack()
        worker.log_only(stack)
        self._tell(ExitReport(WorkerExited(worker.worker, status, cause), kills, stack))

    def _recent_memory_kills(self) -> int:
        """Return the number of processes that the kernel recently killed for lack of memory."""
        now = memory_kills()
        kills = now - self._memory_kills[0]
        # One of them is the worker whose end was noticed; the ends of others may follow.
        self._memory_kills = now - max(kills - 1, 0), now
        return kills

    def _watch_output(self) -> None:
        for worker in self._workers.values():
            wanted = worker.streams and not self.output.waits(worker.worker)
            for stream in worker.streams:
                self.loop.watch_if(bool(wanted) and not stream.ended, stream.descriptor, stream.read)

    def _reap(self) -> None:
        self.descendants.reap(
            frozenset(worker.handle.pid for worker in self._workers.values() if not worker.exited)
        )

    def _show_stack(self, worker: int) -> None:
        dump: StackDump | str = "it does not run on this host"
        if worker in self._workers:
            dump = self._workers[worker].begin_stack(self.clock.now())
        if isinstance(dump, str):
            self._tell(StackReply(worker, (), dump))
        else:
            self._stacks.append(dump)

    def _watch_stacks(self) -> float | None:
        """Report complete stacks; return the seconds until others may be complete."""
        now, waiting = self.clock.now(), []
        for dump in self._stacks:
            if (taken := dump.look(now)) is None:
                waiting.append(dump)
            else:
                self._tell(taken)
        self._stacks = waiting
        return _LOOK_EVERY if waiting else None

    def _measure(self) -> float | None:
        """Report the load if due; return the seconds until the next report."""
        if self.ended:
            return None
        living = {worker.worker: worker.handle.pid for worker in self._workers.values() if not worker.exited}
        if (load := self.meter.measure(living)) is not None:
            # The kernel may have killed a worker whose end is not yet noticed.
            self._memory_kills = self._memory_kills[1], memory_kills()
            self._tell(LoadReport(load))
        return self.meter.left()

    # The end.

    def _end(self, end: EndHost) -> None:
        self._pending_starts.clear()
        self._start_pending()
        self.starter.close()
        for worker in self._workers.values():
            self.loop.unwatch(worker.handle.exited)
            self.loop.unwatch(worker.channel.fileno())
        # This reaps workers too, so that their exit statuses are lost.
        left = self.descendants.end(end.grace)
        for worker in self._workers.values():
            for stream in worker.streams:
                stream.drain()
        workers = [self._workers[worker] for worker in end.evidence if worker in self._workers]
        evidence = tuple(worker.evidence() for worker in workers)
        # Evidence that does not fit into a message is omitted.
        if not self._tell(HostEnded(left, evidence)):
            self._tell(HostEnded(left))
        self.status, self.ended = end.status, True
