"""The agent of a host: starts, watches and ends its workers, as the coordinator of the job instructs.

It decides nothing about the job. Only the messages of `protocol.host` connect it to the coordinator. In one
process, both write to one console: the agent the output of workers, the coordinator notes.
"""

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from lockstep.agent.exchange import HostExchange, OpenExchange
from lockstep.agent.starter import Arrivals, Starter
from lockstep.agent.worker_handle import WorkerHandle
from lockstep.errors import LockstepError
from lockstep.observability.console import Console
from lockstep.protocol.channel import Attachment, Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    AllReported,
    BeginView,
    DeliverPosition,
    DropOutput,
    EndExchange,
    EndHost,
    HostEnded,
    HostReport,
    Instruction,
    NotUnderstood,
    PostNotice,
    ProcessArrived,
    ProcessExited,
    ProcessStarted,
    ReportAll,
    SignalProcess,
    StartCancelled,
    StartFailed,
    StartProcess,
    StateHeld,
    TakeStack,
    TerminalLost,
    ViewRefused,
    WorkerSaid,
)
from lockstep.protocol.worker import (
    Failed,
    Finished,
    JobOver,
    Leave,
    NewView,
    Position,
    Started,
    StateReply,
    Welcome,
)
from lockstep.system.descendants import Descendants
from lockstep.system.event_loop import EventLoop
from lockstep.system.exit_status import UNKNOWN_STATUS
from lockstep.system.memory import memory_kills


@dataclass
class Agent:
    """Runs the workers of one job on this host; `loop` serves it as soon as it exists.

    Attributes:
        job: the job's name.
        coordinator: the channel to the job's coordinator.
        loop: serves this agent.
        starter: starts workers.
        open_exchange: opens the exchange of a view.
        pool: the memory for partials and totals.
        console: shows the output of workers.
        descendants: the processes of the job on this host.
        arrivals: where workers that a user starts by hand arrive; None if none can.
    """

    job: str
    coordinator: Channel[HostReport, Instruction]
    loop: EventLoop
    starter: Starter
    open_exchange: OpenExchange
    pool: Attachment
    console: Console
    descendants: Descendants
    arrivals: Arrivals | None = None
    _workers: dict[int, WorkerHandle] = field(default_factory=dict)
    _asked: dict[int, StartProcess] = field(default_factory=dict)
    _waits_at: int | None = None
    _view: BeginView = field(default_factory=lambda: BeginView(0, ()))
    _exchange: HostExchange | None = None
    _state: Attachment | None = None
    _memory_kills: int = field(default_factory=lambda: memory_kills())

    def __post_init__(self) -> None:
        self.loop.before_each_wait(self._watch_output)
        self.loop.before_each_wait(self._reap)
        self.loop.watch(self.coordinator.fileno(), self._obey)
        if self.arrivals is not None:
            self.arrivals.begin(self.job, self._tell_of_arrival)
            self.loop.watch(self.arrivals.fileno(), self.arrivals.serve)

    def close(self) -> None:
        """End every process of the job on this host at once, and release everything."""
        self.descendants.end(grace=0)
        for worker in self._workers.values():
            worker.close()
        if self._exchange is not None:
            self._exchange.close()
        self.coordinator.close()

    def _tell(self, report: HostReport) -> bool:
        return self.coordinator.send(report)

    def _tell_of_arrival(self) -> None:
        self._tell(ProcessArrived())

    def _obey(self) -> None:
        while (instruction := self.coordinator.receive()) is not None:
            match instruction:
                case BeginView():
                    self._begin_view(instruction)
                case StartProcess(worker):
                    self._asked[worker] = instruction
                case PostNotice(notice) if self._exchange is not None:
                    self._exchange.post_notice(notice)
                case DropOutput(drops):
                    self.console.drops = drops
                case DeliverPosition(worker) if self._state is not None:
                    self._workers[worker].channel.send(Position(self._state))
                case SignalProcess(worker, number):
                    self._signal(worker, number)
                case TakeStack(worker):
                    self._workers[worker].ask_for_stack()
                case EndExchange(reason):
                    self._end_exchange(reason)
                case ReportAll():
                    self._hear_all()
                    self._tell(AllReported())
                case EndHost():
                    self._end(instruction)
                case PeerGone():
                    self.loop.unwatch(self.coordinator.fileno())
                    self._end(EndHost(0.0))
                    return
        # Last, because it may block: the members already have their messages.
        self._start_asked()

    # Starting.

    def _start_asked(self) -> None:
        """Start workers in the order of the instructions, each as soon as the starter is ready."""
        if self._waits_at is not None:
            self.loop.unwatch(self._waits_at)
            self._waits_at = None
        while self._asked:
            start = next(iter(self._asked.values()))
            try:
                self._waits_at = self.starter.prepare()
                if self._waits_at is not None:
                    self.loop.watch(self._waits_at, self._start_asked)
                    return
                del self._asked[start.worker]
                self._start(start)
            except OSError as error:
                self._asked.pop(start.worker, None)
                self._tell(StartFailed(start.worker, start.joins, str(error)))

    def _start(self, start: StartProcess) -> None:
        taken = frozenset(
            worker.slot
            for worker in self._workers.values()
            if not worker.exited and worker.worker not in start.yielding
        )
        worker = self.starter.start(start.worker, taken, joins=start.joins)
        self._workers[start.worker] = worker
        worker.channel.send(Welcome(self.pool))
        if start.worker in self._view.workers:
            self._let_in(worker)
        self.loop.watch(worker.channel.fileno(), partial(self._hear, worker))
        self.loop.watch(worker.handle.exited, partial(self._see_exit, worker))
        self._tell(ProcessStarted(start.worker, worker.handle.pid))

    def _signal(self, worker: int, number: int) -> None:
        if self._asked.pop(worker, None) is not None:
            self._tell(StartCancelled(worker, number))
        elif worker in self._workers:
            self._workers[worker].handle.send_signal(number)

    # Views.

    def _begin_view(self, view: BeginView) -> None:
        try:
            exchange = self.open_exchange(len(view.workers))
        except (LockstepError, OSError) as error:
            self._tell(ViewRefused(view.number, str(error)))
            return
        (before, old), state = (self._view.workers, self._exchange), self._state
        self._view, self._exchange, self._state = view, exchange, None
        self.console.chief = view.workers[0]
        for worker in view.workers:
            if worker in self._workers:
                self._let_in(self._workers[worker], None if worker in before else state)
        for worker in view.leaving:
            if worker in before and worker in self._workers:
                self._workers[worker].channel.send(Leave())
        if old is not None:
            old.abort(view.reason)
            old.close()

    def _let_in(self, worker: WorkerHandle, state: Attachment | None = None) -> None:
        assert self._exchange is not None
        worker.channel.send(NewView(self._view.number, self._view.workers, self._exchange.endpoint, state))

    def _end_exchange(self, reason: str) -> None:
        for worker in self._workers.values():
            if not worker.exited:
                worker.channel.send(JobOver(reason))
        if self._exchange is not None:
            self._exchange.abort(reason)

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
                    self._tell(NotUnderstood(worker.worker, error))
                case StateReply():
                    self._take_state(message)
                case _:
                    self._note(worker, message)
                    self._tell(WorkerSaid(worker.worker, message))

    def _note(self, worker: WorkerHandle, message: object) -> None:
        match message:
            case Started():
                worker.ready = True
            case Finished(status):
                worker.said = status
            case Failed(status):
                worker.said = status
                if not message.prints:
                    worker.log_only(message.traceback)

    def _take_state(self, reply: StateReply) -> None:
        failure = reply.failure
        if reply.state is not None and reply.state.is_missing:
            failure = "the agent has too many open files to take the state"
        elif reply.view == self._view.number:
            self._state = reply.state
        self._tell(StateHeld(reply.view, reply.whole, failure))

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
        kills = self._new_memory_kills() if status in (-signal.SIGKILL, UNKNOWN_STATUS) else 0
        self._tell(ProcessExited(worker.worker, status, kills))

    def _new_memory_kills(self) -> int:
        before, self._memory_kills = self._memory_kills, memory_kills()
        return self._memory_kills - before

    def _watch_output(self) -> None:
        for text in self.console.lost():
            self._tell(TerminalLost(text))
        for sink in self.console.sinks:
            self._watch_if(sink.pending > 0, sink.descriptor, sink.flush, writes=True)
        # A worker whose output is shown waits for a slow terminal, as it would without Lockstep.
        waits = self.console.full and not self.console.drops
        for worker in self._workers.values():
            wanted = not (waits and self.console.shows(worker.worker))
            for stream in worker.streams:
                self._watch_if(wanted and not stream.ended, stream.descriptor, stream.read)

    def _watch_if(
        self, wanted: bool, descriptor: int, call: Callable[[], object], *, writes: bool = False
    ) -> None:
        if wanted:
            self.loop.watch(descriptor, call, writes=writes)
        else:
            self.loop.unwatch(descriptor)

    def _reap(self) -> None:
        self.descendants.reap(
            frozenset(worker.handle.pid for worker in self._workers.values() if not worker.exited)
        )

    # The end.

    def _end(self, end: EndHost) -> None:
        self._asked.clear()
        self._start_asked()
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
        # Evidence that does not fit into a message is left out.
        if not self._tell(HostEnded(left, evidence)):
            self._tell(HostEnded(left))
