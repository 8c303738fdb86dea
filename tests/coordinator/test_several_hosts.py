"""The coordinator with the fake agents of two hosts, the second of which is another machine."""

import itertools
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from agent_reports import exited, said, script_ended

from lockstep.coordinator import host_watch, job_record
from lockstep.coordinator.admin_client import call_job
from lockstep.coordinator.coordinator import Coordinator, ShowLife
from lockstep.coordinator.host_agent import HostAgent
from lockstep.coordinator.job_record import HostRecord, JobRecord, decode_record
from lockstep.errors import SupersededError
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.events import (
    HostLost,
    HostRetired,
    JobFinished,
    JoinRequested,
    ScriptFailed,
    StrategyInstalled,
    TrainingResumed,
    WorkerConnectedLate,
)
from lockstep.protocol.admin import (
    AdminRequest,
    Refused,
    Reply,
    ScaleRequest,
    StackRequest,
    Status,
    StatusRequest,
    StopRequest,
)
from lockstep.protocol.host import (
    SILENCE,
    AllReported,
    EndHost,
    HostEnded,
    HostReport,
    HostRetires,
    HostStopped,
    Instruction,
    KeepAlive,
    KeepRecord,
    KillWorker,
    OutputWritten,
    PauseOutput,
    PeerAddress,
    PositionMissed,
    ReportAll,
    SendPosition,
    SendState,
    ShowNote,
    SignalWorker,
    StartView,
    StartWorker,
    StateArrived,
    WorkerEvidence,
    WorkerSaid,
)
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.protocol.worker import EventReport, FailureReport, HostMembers, StateGiven, StateSource
from lockstep.supervisor.actions import JobOutcome
from lockstep.supervisor.state import JobSize, Phase, Stage, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel

Reaction = Callable[[int, Instruction], "list[HostReport]"]
HOSTS = (JobHost("node1", 2), JobHost("node2", 1))
PEERS = (PeerAddress("10.0.0.1", 4001, 11), PeerAddress("10.0.0.2", 4002, 12))
FIRST = (HostMembers(0, (0, 1), "node1", *PEERS[0]), HostMembers(1, (2,), "node2", *PEERS[1]))

FINISHING: list[HostReport] = [
    report for worker in (0, 1) for report in (script_ended(worker), exited(worker, 0))
]
"""The reports of the first host if its workers succeed."""


@dataclass
class Job:
    """A coordinator of three workers on two hosts."""

    folder: Path
    loop: EventLoop
    reacts: Reaction
    clock: SystemClock = field(default_factory=SystemClock)
    instructions: list[tuple[int, Instruction]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = []
        agents = []
        for host, peer in enumerate(PEERS):
            own, agent = LocalChannel.pair()
            self.ends.append(agent)
            agents.append(HostAgent(own, HOSTS[host].name, peer, remote=host == 1))
            self.loop.watch(agent.fileno(), lambda host=host: self._receive(host))  # type: ignore[misc]
        self.command, command = LocalChannel.pair()
        self.out = (self.folder / "out").open("wb", 0)
        self.err = (self.folder / "err").open("wb", 0)
        spec = JobSpec(target="a.py", workers=3, replicas=4, threads=1, run_dir=self.folder, hosts=HOSTS)
        limits = TimeLimits(abort=0.01, term=0.01, kill=0.01)
        self.coordinator = Coordinator(
            spec,
            RunPaths(self.folder),
            os.getpid(),
            agents,
            command,
            self.loop,
            Console(Sink(self.out.fileno()), Sink(self.err.fileno()), "all", 0),
            Bus(self.clock, complain=pytest.fail),
            self.clock,
            State.of(spec.view, limits, JobSize.of(3, 1, 5), names=("node1", "node2")),
        )

    def _receive(self, host: int) -> None:
        while isinstance(instruction := self.ends[host].receive(), Instruction):
            if not isinstance(instruction, KeepAlive | KeepRecord):
                self.instructions.append((host, instruction))
            for report in self.reacts(host, instruction):
                self.ends[host].send(report)

    def notes(self) -> str:
        return (self.folder / "err").read_text()

    def to(self, host: int) -> list[Instruction]:
        return [instruction for at, instruction in self.instructions if at == host]


def well(host: int, instruction: Instruction) -> list[HostReport]:
    """The reports of agents whose workers train and succeed."""
    match instruction:
        case StartWorker(worker):
            return [script_ended(worker), exited(worker, 0)]
        case SignalWorker(worker, number):
            return [exited(worker, -number)]
        case KillWorker(worker):
            return [exited(worker, -signal.SIGKILL)]
        case ReportAll():
            return [AllReported()]
        case EndHost():
            return [HostEnded()]
    return []


def given(view: int, notice: int, size: int) -> StateGiven:
    """The report of the first host that the chief has given the position, 1, or the state, 2."""
    source = StateSource(view, notice, size, 0, *PEERS[0][:2])
    return StateGiven(view, whole=notice == 2, source=source)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[Reaction], Job]]:
    with EventLoop() as loop:
        made: list[Job] = []

        def job(reacts: Reaction) -> Job:
            made.append(Job(tmp_path, loop, reacts))
            return made[-1]

        yield job
        for each in made:
            for end in (*each.ends, each.command, each.out, each.err):
                end.close()


def test_each_host_starts_its_own_workers_in_one_view(make: Callable[[Reaction], Job]) -> None:
    job = make(well)
    assert job.coordinator.run() == 0
    assert job.to(0) == [StartView(1, FIRST), StartWorker(0), StartWorker(1), EndHost(0.5)]
    assert job.to(1) == [StartView(1, FIRST), StartWorker(2), EndHost(0.5)]


def test_a_view_is_announced_before_agents_hear_of_it(make: Callable[[Reaction], Job]) -> None:
    """With a standby, they hear nothing from a coordinator that does not lead the job any more."""
    job = make(well)

    def announce(view: StartView, show_life: Callable[[], None], limit: float) -> None:
        assert (view, limit) == (StartView(1, FIRST), math.inf)
        show_life()
        raise SupersededError("another one leads")

    job.coordinator.announce = announce
    with pytest.raises(SupersededError, match="another one leads"):
        job.coordinator.run()
    job._receive(0)
    job._receive(1)
    assert job.instructions == []


@pytest.mark.parametrize("stage", [Stage.RUNNING, Stage.SAVING])
def test_a_job_that_is_stopped_before_its_next_view_ends(
    make: Callable[[Reaction], Job], stage: Stage
) -> None:
    """A user does not wait for an object store that does not answer."""
    limits: list[float] = []

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            state = job.coordinator.state
            job.coordinator.state = replace(
                state,
                elastic=True,
                keeps=True,
                shutdown=replace(
                    state.shutdown,
                    stage=stage,
                    deadline=None if stage is Stage.RUNNING else job.clock.now() + 20.0,
                    outcome=None if stage is Stage.RUNNING else JobOutcome(143, "stopped by SIGTERM"),
                ),
            )
            return [exited(2, -9)]
        if isinstance(instruction, EndHost):
            # The stop of another terminal, or a repeated one, arrives after the decision on the view.
            job.coordinator.stop_for_terminal(StopRequest())
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    def announce(view: StartView, show_life: Callable[[], None], limit: float) -> StopRequest | None:
        limits.append(limit)
        return StopRequest(signal.SIGINT) if view.number > 1 else None

    job = make(react)
    job.coordinator.announce = announce
    assert job.coordinator.run() == (130 if stage is Stage.RUNNING else 143)
    name = "SIGINT" if stage is Stage.RUNNING else "SIGTERM"
    assert f"stopped by {name}; no checkpoint of the last steps, because the object store" in job.notes()
    assert "waiting up to" not in job.notes()
    first, second = limits
    assert first == math.inf
    assert second == math.inf if stage is Stage.RUNNING else 0.0 < second <= 20.0
    for host in (0, 1):
        assert job.to(host)[-1] == EndHost(0.0, (), 130 if stage is Stage.RUNNING else 143)
        assert [each.number for each in job.to(host) if isinstance(each, StartView)] == [1]


def test_a_view_after_a_stop_has_the_rest_of_the_grace_period(make: Callable[[Reaction], Job]) -> None:
    """A host is lost before the stop is decided. The view waits no longer for the store than the user."""
    limits: list[float] = []

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            job.coordinator.state = replace(job.coordinator.state, elastic=True)
            job.command.send(StopRequest(signal.SIGINT, 19.0))
        if isinstance(instruction, ReportAll):
            return [exited(2, -9)] if host == 1 else []
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    def announce(view: StartView, show_life: Callable[[], None], limit: float) -> StopRequest | None:
        limits.append(limit)
        return StopRequest() if view.number > 1 else None

    job = make(react)
    job.coordinator.announce = announce
    assert job.coordinator.run() == 130
    assert "stopped by SIGINT; no checkpoint of the last steps" in job.notes()
    assert 0.0 <= limits[1] <= 1.0


def test_another_terminal_is_answered_while_a_view_waits(make: Callable[[Reaction], Job]) -> None:
    """A stop is for the caller of the function, which decides when; nothing else can be decided."""
    replies = list[Reply | None]()
    stops = list[StopRequest | None]()
    job = make(well)

    def ask(request: AdminRequest) -> None:
        replies.append(call_job(job.folder.name, request, 60.0))

    def announce(view: StartView, show_life: ShowLife, limit: float) -> StopRequest | None:
        requests = StatusRequest(), ScaleRequest(1), StackRequest(0), StopRequest(), StatusRequest()
        for number, request in enumerate(requests):
            asks = threading.Thread(target=ask, args=(request,))
            asks.start()
            while asks.is_alive():
                asks.join(0.01)
                stops.append(show_life())
            assert len(replies) == number + 1
        return None

    job.coordinator.announce = announce
    assert job.coordinator.run() == 0
    assert [type(reply) for reply in replies] == [Status, Refused, Refused, Status, Status]
    assert [stop for stop in stops if stop is not None] == [StopRequest()]


def test_a_job_that_is_stopped_before_its_first_view_starts_no_worker(
    make: Callable[[Reaction], Job],
) -> None:
    job = make(well)
    job.coordinator.announce = lambda view, show_life, limit: StopRequest(signal.SIGINT)
    assert job.coordinator.run() == 130
    assert "stopped by SIGINT; no step was computed, because the object store did not answer" in job.notes()
    for host in (0, 1):
        assert job.to(host) == [EndHost(0.0, (), 130)]


def test_output_of_another_host_is_logged_and_shown(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            event = ScriptFailed(2, "KeyError: 'x'", "the traceback\n")
            failed = FailureReport(event, 1, False, prints=False)
            written = [OutputWritten(2, 1, b"a\nb"), OutputWritten(2, 2, b"c\n"), OutputWritten(2, 1, b"d\n")]
            return [*written, WorkerSaid(2, failed), exited(2, 1, stack="the stack\n")]
        if isinstance(instruction, EndHost):
            evidence = WorkerEvidence(2, True, ("c", "d"), ())
            return [HostEnded((), (evidence,) if host == 1 else ())]
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 1
    assert (job.folder / "worker-2.log").read_text() == "a\nbc\nd\nthe traceback\nthe stack\n"
    assert (job.folder / "out").read_text() == "[worker 2] a\n[worker 2] bd\n"
    assert "lockstep: worker 2: KeyError: 'x'" in job.notes()
    assert f"log: {job.folder}/worker-2.log" in job.notes()


def test_a_late_connection_is_an_event_and_no_note(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        late = (
            [EventReport(WorkerConnectedLate("node2", "10.0.0.1:5", 1))]
            if instruction == StartWorker(2)
            else []
        )
        return [*late, *well(host, instruction)]

    job, found = make(react), list[object]()
    job.coordinator.events.subscribe(lambda published: found.append(published.event), WorkerConnectedLate)
    assert job.coordinator.run() == 0
    assert found == [WorkerConnectedLate("node2", "10.0.0.1:5", 1)]
    assert "10.0.0.1" not in job.notes()


def test_the_end_of_output_over_a_slow_connection_is_waited_for(make: Callable[[Reaction], Job]) -> None:
    class Ahead(SystemClock):
        ahead = 0.0

        def now(self) -> float:
            return super().now() + self.ahead

    job = make(lambda host, one: [] if host and isinstance(one, EndHost) else well(host, one))
    job.coordinator.clock = clock = Ahead()
    arriving = iter([*(OutputWritten(2, 1, b"%d\n" % piece) for piece in range(5)), HostEnded()])

    def deliver() -> None:
        if EndHost(0.5) in job.to(1) and (report := next(arriving, None)) is not None:
            clock.ahead += 15.0
            job.ends[1].send(report)

    job.loop.before_each_wait(deliver)
    assert job.coordinator.run() == 0
    assert (job.folder / "worker-2.log").read_text() == "0\n1\n2\n3\n4\n"
    assert "has not ended" not in job.notes()


def test_the_loss_of_a_host_costs_its_workers(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            job.loop.unwatch(job.ends[1].fileno())
            job.ends[1].close()
        if isinstance(instruction, StartView) and instruction.number == 2:
            return FINISHING
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 0
    assert "host node2 was lost: the connection to its agent is closed; lost worker 2" in job.notes()
    views = [one.hosts for one in job.to(0) if isinstance(one, StartView)]
    assert views == [FIRST, FIRST[:1]]


@pytest.mark.parametrize(("has_standby", "is_stopped"), [(True, False), (True, True), (False, False)])
def test_with_a_standby_a_coordinator_without_workers_does_not_end_the_job(
    make: Callable[[Reaction], Job], has_standby: bool, is_stopped: bool
) -> None:
    """The host of all workers may be alive, and continue with the standby, unless a user has stopped it."""

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            job.coordinator.state = job.coordinator.state.with_phase(Phase.LOST, 0, 1)
            if is_stopped:
                return [HostStopped(1, signal.SIGINT)]
            job.loop.unwatch(job.ends[1].fileno())
            job.ends[1].close()
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    if has_standby:
        job.coordinator.announce = lambda view, show_life, limit: None
    if has_standby and not is_stopped:
        with pytest.raises(SupersededError, match="no workers remain within reach"):
            job.coordinator.run()
        assert EndHost not in {type(instruction) for instruction in job.to(0)}
    else:
        assert job.coordinator.run() == 1
        assert "lost worker 2; no workers remain\n" in job.notes()


def test_a_host_whose_agent_a_user_stops_is_named(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            return [HostStopped(1, signal.SIGINT)]
        if isinstance(instruction, StartView) and instruction.number == 2:
            return FINISHING
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 0
    assert "host node2 was stopped: its agent received SIGINT; lost worker 2" in job.notes()


def test_a_failed_worker_is_named_with_its_host_on_all_terminals(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(2):
            failed = FailureReport(ScriptFailed(2, "ValueError: no", "Traceback"), 1, blames=False)
            return [WorkerSaid(2, failed), exited(2, 1)]
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    other = job.coordinator.agents[1]
    job.coordinator.console.readers.append(lambda text: other.send(ShowNote(text)))
    assert job.coordinator.run() == 1
    why = "worker 2 exited with status 1: ValueError: no (worker 2 on node2)"
    assert f"lockstep: {why}\n" in job.notes()
    sent = [one for one in job.to(1) if isinstance(one, ShowNote | EndHost)]
    assert sent[0] == ShowNote(why)
    assert isinstance(sent[1], EndHost)


def test_a_silent_host_costs_its_workers(
    make: Callable[[Reaction], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if host == 0 and isinstance(instruction, StartView) and instruction.number == 2:
            return FINISHING
        return [] if isinstance(instruction, StartWorker) or host == 1 else well(host, instruction)

    monkeypatch.setattr(host_watch, "ALIVE_EVERY", 0.001)
    job = make(react)
    # Each look at the clock takes a tenth of a second.
    looks = itertools.count()
    monkeypatch.setattr(job.clock, "now", lambda: next(looks) / 10)
    assert job.coordinator.run() == 0
    assert f"host node2 has been silent for {SILENCE:g} s" in job.notes()


def test_a_stop_waits_for_the_reports_of_all_hosts(make: Callable[[Reaction], Job]) -> None:
    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if isinstance(instruction, ReportAll):
            ends = [script_ended(2)] if host else []
            return [*ends, AllReported()]
        return [] if isinstance(instruction, StartWorker) else well(host, instruction)

    job = make(react)
    job.command.send(StopRequest(signal.SIGINT))
    assert job.coordinator.run() == 130
    signals = [(host, one) for host, one in job.instructions if isinstance(one, SignalWorker)]
    assert {one.worker for _, one in signals} == {0, 1, 2}
    assert all((one.worker == 2) == (host == 1) for host, one in signals)


def test_a_joiner_on_another_host_gets_the_state_before_its_view(make: Callable[[Reaction], Job]) -> None:
    asking = list[object]()

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(0 | 1 as worker):
                return [WorkerSaid(worker, EventReport(StrategyInstalled("jax")))]
            case StartWorker(2):
                return [exited(2, -signal.SIGKILL)]
            case StartWorker(3):
                asking.append(host)
                return [said(JoinRequested(3, whole=False))]
            case SendPosition(3):
                return [said(JoinRequested(3, whole=True))]
            case StartView(3):
                return [
                    report
                    for worker in ((0, 1) if host == 0 else (3,))
                    for report in (script_ended(worker), exited(worker, 0))
                ]
        notice = getattr(instruction, "notice", None)
        if host == 0 and notice in (1, 2):
            view = job.coordinator.state.view.number
            return [given(view, notice, 1000 * notice)]
        if isinstance(instruction, SendState):
            return [StateArrived(1, instruction.source.view)]
        return well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 0
    assert asking == [1]
    position, state = (StateSource(2, number, 1000 * number, 0, "10.0.0.1", 4001) for number in (1, 2))
    views = (FIRST, FIRST[:1], (FIRST[0], HostMembers(1, (3,), "node2", *PEERS[1])))
    kinds = SendPosition | SendState | StartView
    found = [one for one in job.to(1) if isinstance(one, kinds)]
    assert [(one.number, one.hosts, one.state) for one in found if isinstance(one, StartView)] == [
        (1, views[0], 0),
        (2, views[1], 0),
        (3, views[2], 2),
    ]
    assert found[2:4] == [SendPosition(3, position), SendState(1, state)]
    assert not any(isinstance(one, SendPosition | SendState) for one in job.to(0))


def test_a_joiner_that_becomes_the_chief_does_not_resume_the_job(make: Callable[[Reaction], Job]) -> None:
    """The host of all others retires while it joins; only what the first chief has resumed came before."""

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(0 | 1 as worker):
                events = [StrategyInstalled("jax"), TrainingResumed("step 4 of fit 1", 4)]
                return [WorkerSaid(worker, EventReport(event)) for event in events]
            case StartWorker(2):
                return [exited(2, -signal.SIGKILL)]
            case StartWorker(3):
                return [said(JoinRequested(3, whole=False))]
            case SendPosition(3):
                return [said(JoinRequested(3, whole=True))]
            case SendState(source=source):
                return [StateArrived(1, source.view)]
            case StartView(3) if host == 0:
                return [exited(worker, 0) for worker in (0, 1)]
            case StartView(3):
                resumed = EventReport(TrainingResumed("step 9 of fit 1", 9))
                return [WorkerSaid(3, resumed), script_ended(3), exited(3, 0)]
        notice = getattr(instruction, "notice", None)
        if host == 0 and notice in (1, 2):
            view = job.coordinator.state.view.number
            held = given(view, notice, 1000)
            return [held, HostRetires(0, "host node1 retires: the machine stops")] if notice == 1 else [held]
        return well(host, instruction)

    job, finished, changes = make(react), list[object](), list[object]()
    job.coordinator.events.subscribe(lambda published: finished.append(published.event), JobFinished)
    job.coordinator.events.subscribe(lambda published: changes.append(published.event), HostLost, HostRetired)
    assert job.coordinator.run() == 0
    (change,) = changes
    assert isinstance(change, HostRetired)
    assert change.host == "node1"
    assert change.reason.startswith("host node1 retires: the machine stops; ")
    views = [one.hosts for one in job.to(1) if isinstance(one, StartView)]
    assert views == [FIRST, FIRST[:1], (HostMembers(1, (3,), "node2", *PEERS[1]),)]
    assert [line for line in job.notes().splitlines() if "resumed" in line] == [
        "lockstep: training resumed after step 4 of fit 1"
    ]
    (ended,) = finished
    assert isinstance(ended, JobFinished)
    assert ended.before == 4


@pytest.mark.parametrize("missed", ["position", "state"])
def test_a_joiner_that_the_state_does_not_reach_is_replaced(
    make: Callable[[Reaction], Job], missed: str
) -> None:
    unreached = f"node2 has not received the {missed}: no route"

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(0 | 1 as worker):
                return [WorkerSaid(worker, EventReport(StrategyInstalled("jax")))]
            case StartWorker(2):
                return [exited(2, -signal.SIGKILL)]
            case StartWorker(3):
                return [said(JoinRequested(3, whole=missed == "state"))]
            case StartWorker(4):
                ends = [(script_ended(worker), exited(worker, 0)) for worker in (0, 1)]
                return [report for pair in ends for report in pair]
            case SendPosition(3, source):
                return [PositionMissed(3, source.view, unreached)]
            case SendState(source=source):
                return [StateArrived(1, source.view, unreached)]
        notice = getattr(instruction, "notice", None)
        if host == 0 and notice in (1, 2):
            view = job.coordinator.state.view.number
            return [given(view, notice, 1000)]
        return well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 0
    assert f"worker 3 cannot join: {unreached}" in job.notes()
    assert KillWorker(3) in job.to(1)
    assert StartWorker(4, joins=True) in job.to(1)


def test_workers_of_another_host_wait_for_a_slow_terminal(make: Callable[[Reaction], Job]) -> None:
    reading, writing = os.pipe()
    job = make(lambda host, one: [] if isinstance(one, StartWorker) else well(host, one))
    job.coordinator.console.sinks = (Sink(writing), job.coordinator.console.sinks[1])

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(2):
                return [OutputWritten(2, 1, b"x" * (1 << 20) + b"\n"), OutputWritten(2, 1, b"y" * (1 << 20))]
            case PauseOutput((2,)):
                os.close(reading)
                return [script_ended(2), exited(2, 0)]
            case StartWorker(worker):
                return [script_ended(worker), exited(worker, 0)]
        return well(host, instruction)

    job.reacts = react
    assert job.coordinator.run() == 0
    os.close(writing)
    assert PauseOutput((2,)) in job.to(1)
    assert not any(isinstance(one, PauseOutput) for one in job.to(0))


def test_workers_that_a_slow_terminal_does_not_show_do_not_wait(make: Callable[[Reaction], Job]) -> None:
    """The terminal shows the chief, worker 0, and its reader has paused; the log of worker 2 is complete."""
    reading, writing = os.pipe()
    job = make(well)
    console = job.coordinator.console
    console.sinks, console._tee = (Sink(writing), console.sinks[1]), "chief"
    text = b"y" * (1 << 21)

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(0):
                console.outlets(0)[0](b"x" * (1 << 21))
            case StartWorker(2):
                assert console.full
                return [OutputWritten(2, 1, text), *well(host, instruction)]
            case EndHost() if host == 1:
                os.close(reading)
        return well(host, instruction)

    job.reacts = react
    assert job.coordinator.run() == 0
    os.close(writing)
    assert not any(isinstance(one, PauseOutput) for one in job.to(1))
    assert (job.folder / "worker-2.log").read_bytes() == text


def test_a_coordinator_that_takes_over_lets_all_workers_write(make: Callable[[Reaction], Job]) -> None:
    """The last one may have asked them to wait for its terminal."""
    job = make(well)
    taker = job.coordinator
    hosts = tuple(HostRecord(agent.name, agent.peer) for agent in taker.agents)
    outcome = JobOutcome(1, "worker 0 failed")
    taker.record = JobRecord(taker.spec, taker.state, hosts, StartView(1, FIRST), outcome=outcome)
    assert taker.run() == 1
    assert PauseOutput(()) in job.to(1)


def test_a_coordinator_that_was_stopped_gives_no_host_up(
    make: Callable[[Reaction], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not read yet what the hosts have sent meanwhile."""

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        nonlocal ahead
        if instruction == StartWorker(2):
            ahead = 20 * SILENCE
        return [KeepAlive()] if isinstance(instruction, KeepAlive) else well(host, instruction)

    ahead = 0.0
    job = make(react)
    real = job.clock.now
    monkeypatch.setattr(job.clock, "now", lambda: real() + ahead)
    assert job.coordinator.run() == 0, job.notes()
    assert "silent" not in job.notes()


def test_instructions_follow_the_record_that_they_follow_from(make: Callable[[Reaction], Job]) -> None:
    job = make(well)
    kept: list[Instruction] = []
    receive = job.ends[1].receive

    def noted() -> Instruction | None:
        if (instruction := receive()) is not None:
            kept.append(instruction)
        return instruction

    job.ends[1].receive = noted
    assert job.coordinator.run() == 0
    first = next(one for one in kept if not isinstance(one, KeepAlive))
    assert isinstance(first, KeepRecord)
    record = decode_record(first.record)
    assert record.hosts[1].outbox == (StartView(1, FIRST), StartWorker(2))
    assert (record.hosts[1].received, record.hosts[1].sent) == (0, 2)
    assert record.state.view.workers == (0, 1, 2)
    last = [one for one in kept if isinstance(one, KeepRecord)][-1]
    assert decode_record(last.record).outcome is not None


def test_agents_know_at_once_that_the_job_survives_losses(
    make: Callable[[Reaction], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, the loss of the coordinator's host just then would end the job."""
    monkeypatch.setattr(host_watch, "ALIVE_EVERY", 3600.0)
    workers = {0, 1, 2}

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(0):
                return [WorkerSaid(0, EventReport(StrategyInstalled("jax")))]
            case StartWorker():
                return []
            case KeepRecord(record=record) if decode_record(record).state.elastic:
                left = sorted(workers)
                workers.clear()
                ends = [(script_ended(worker), exited(worker, 0)) for worker in left]
                return [report for reports in ends for report in reports]
        return well(host, instruction)

    job = make(react)
    assert job.coordinator.run() == 0, job.notes()


def test_agents_keep_no_record_that_is_too_large(
    make: Callable[[Reaction], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They drop the one that they have, which does not contain what follows; a note says it once."""
    monkeypatch.setattr(job_record, "MOST_SENT", 100)
    sent, kept = list[KeepRecord](), list[KeepRecord]()

    def react(host: int, instruction: Instruction) -> list[HostReport]:
        if isinstance(instruction, KeepRecord):
            sent.append(instruction)
        return well(host, instruction)

    job = make(react)
    job.coordinator.keep = kept.append
    assert job.coordinator.run() == 0
    assert len(kept) > 1
    assert all(decode_record(one.record) for one in kept)
    assert {one.record for one in sent} == {b""}
    assert job.notes().count("the record of the job is too large for other hosts to keep") == 1
