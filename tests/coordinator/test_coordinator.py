"""The coordinator with a fake agent: the reports that it receives, and its instructions."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from agent_reports import exited, script_ended

from lockstep.coordinator import coordinator
from lockstep.coordinator.admin_socket import address
from lockstep.coordinator.coordinator import Coordinator
from lockstep.coordinator.host_agent import HostAgent
from lockstep.errors import UnfitError
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import RUN_EVENTS, StopRequested, StrategyInstalled
from lockstep.protocol.admin import (
    MAX_PACKET,
    AdminRequest,
    Reply,
    Status,
    StatusRequest,
    StopRequest,
    decode_reply,
    encode,
)
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import (
    AllReported,
    EndHost,
    HostEnded,
    HostReport,
    Instruction,
    KillWorker,
    ReportAll,
    SignalWorker,
    StartFailed,
    StartView,
    StartWorker,
    ViewRefused,
    WorkerSaid,
)
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import AbortExchange, EventReport, HostMembers, LastLineAwaited
from lockstep.supervisor.state import JobSize, Shutdown, Stage, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.topology import place
from lockstep.transport.local_channel import LocalChannel

Reaction = Callable[[Instruction], "list[HostReport]"]
STATE = replace(State.of(place(4, (0, 1)), TimeLimits(), JobSize()), elastic=True)
ALL = [(0, signal.SIGTERM), (1, signal.SIGTERM)]


class Job:
    """A coordinator of two workers, and the agent's end of its channel.

    Attributes:
        instructions: the instructions that the agent received.
        reacts: returns the agent's reports on an instruction.
    """

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.instructions: list[Instruction] = []
        self.reacts: Reaction = lambda instruction: []
        self.loop = EventLoop()
        self.channel: Channel[HostReport, Instruction]
        to_agent, self.channel = LocalChannel.pair()
        self.command, command = LocalChannel.pair()
        self.err = (folder / "err").open("wb", 0)
        self.out = (folder / "out").open("wb", 0)
        console = Console(Sink(self.out.fileno()), Sink(self.err.fileno()), "chief", 0)
        paths = RunPaths(folder)
        self.log = EventLog.open(paths.events, pytest.fail)
        events = Bus(SystemClock(), complain=pytest.fail)
        events.subscribe(self.log.append, *RUN_EVENTS)
        spec = JobSpec(target="a.py", workers=2, replicas=4, threads=1, run_dir=folder)
        self.coordinator = Coordinator(
            spec,
            paths,
            os.getpid(),
            (HostAgent(to_agent),),
            command,
            self.loop,
            console,
            events,
            SystemClock(),
            state,
        )
        self.loop.watch(self.channel.fileno(), self._receive)

    def _receive(self) -> None:
        while isinstance(instruction := self.channel.receive(), Instruction):
            self.instructions.append(instruction)
            for report in self.reacts(instruction):
                self.channel.send(report)

    def entries(self, event: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in RunPaths(self.folder).events.read_text().splitlines()]
        return [{k: v for k, v in line.items() if k != "time"} for line in lines if line["event"] == event]

    def close(self) -> None:
        for end in (self.channel, self.command, self.log, self.out, self.err, self.loop):
            end.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[[State], Job]]:
    jobs: list[Job] = []

    def make(state: State) -> Job:
        jobs.append(Job(tmp_path, state))
        return jobs[-1]

    yield make
    for made in jobs:
        made.coordinator._requests.close()
        made.close()


def new_state() -> State:
    return State.of(place(4, (0, 1)), TimeLimits(), JobSize.of(2, 1, 0))


def ends(instruction: Instruction) -> list[HostReport]:
    return [HostEnded()] if isinstance(instruction, EndHost) else []


def obeys(instruction: Instruction) -> list[HostReport]:
    """The reports of an agent whose workers a signal ends at once."""
    match instruction:
        case ReportAll():
            return [AllReported()]
        case SignalWorker(worker, number):
            return [exited(worker, -number)]
        case KillWorker(worker):
            return [exited(worker, -signal.SIGKILL)]
    return ends(instruction)


def test_the_agent_receives_the_first_view_and_then_starts_its_members(
    job: Callable[[State], Job],
) -> None:
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(worker):
                said = script_ended(worker)
                return [EventReport(run_events.WorkerStarted(worker, 7)), said, exited(worker, 0)]
        return ends(instruction)

    made.reacts = react
    assert made.coordinator.run() == 0
    assert made.instructions == [
        StartView(1, (HostMembers(0, (0, 1)),)),
        StartWorker(0),
        StartWorker(1),
        EndHost(0.5),
    ]
    assert made.entries("started")[0] == {"event": "started", "worker": 0, "pid": 7}


def test_the_next_view_excludes_a_lost_worker(job: Callable[[State], Job]) -> None:
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(1):
                strategies = [WorkerSaid(worker, EventReport(StrategyInstalled("jax"))) for worker in (0, 1)]
                return [*strategies, exited(1, -signal.SIGKILL)]
            case StartView(2):
                return [script_ended(0), exited(0, 0)]
        return ends(instruction)

    made.reacts = react
    assert made.coordinator.run() == 0
    (view,) = made.entries("view")
    reason = str(view["reason"])
    assert reason.startswith("worker 1 was killed by SIGKILL; ")
    assert view == {"event": "view", "number": 2, "workers": [0], "reason": reason}
    assert [one for one in made.instructions if isinstance(one, StartView)][1:] == [
        StartView(2, (HostMembers(0, (0,)),), reason)
    ]


def test_workers_that_were_started_by_hand_exit_together(job: Callable[[State], Job]) -> None:
    made = job(replace(new_state(), size=JobSize(2, by_hand=True)))

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(worker):
                return [script_ended(worker), WorkerSaid(worker, LastLineAwaited(worker))]
            case AbortExchange():
                return [exited(worker, 0) for worker in (0, 1)]
        return ends(instruction)

    made.reacts = react
    assert made.coordinator.run() == 0
    (released,) = [one for one in made.instructions if isinstance(one, AbortExchange)]
    assert released == AbortExchange("the job has finished")


def test_pending_reports_of_workers_precede_a_stop(job: Callable[[State], Job]) -> None:
    """The scripts have finished although no report has arrived: the job succeeds."""
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case ReportAll():
                return [*(script_ended(worker) for worker in (0, 1)), AllReported()]
            case SignalWorker(worker, number):
                return [exited(worker, -number)]
            case KillWorker(worker):
                return [exited(worker, -signal.SIGKILL)]
        return ends(instruction)

    made.reacts = react
    made.command.send(StopRequest(signal.SIGINT))
    assert made.coordinator.run() == 0
    assert [one for one in made.instructions if isinstance(one, SignalWorker | KillWorker)] == [
        SignalWorker(0, signal.SIGINT),
        SignalWorker(1, signal.SIGINT),
    ]


def test_a_stop_does_not_wait_for_an_agent_that_does_not_report(
    job: Callable[[State], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_REPORT_PATIENCE", 0.01)
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case SignalWorker(worker, number):
                # The late report on `ReportAll` has no effect.
                return [AllReported(), exited(worker, -number)]
        return ends(instruction)

    made.reacts = react
    made.command.send(StopRequest(signal.SIGINT))
    assert made.coordinator.run() == 130
    assert made.instructions.index(ReportAll()) < made.instructions.index(SignalWorker(0, signal.SIGINT))


def test_a_report_in_the_same_turn_as_its_deadline_stops_the_job_once(
    job: Callable[[State], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(new_state())
    clock = made.coordinator.clock
    later, now = [0.0], clock.now
    monkeypatch.setattr(clock, "now", lambda: now() + later[0])
    # As if it took a minute to publish the event.
    made.coordinator.events.subscribe(lambda published: later.append(later.pop() + 60.0), StopRequested)

    made.reacts = obeys
    made.command.send(StopRequest(signal.SIGINT))
    assert made.coordinator.run() == 130
    assert len(made.entries("stop")) == 1


def test_a_job_ends_without_the_last_report_of_its_agent(
    job: Callable[[State], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "_END_PATIENCE", 0.01)
    made = job(new_state())
    made.reacts = lambda instruction: (
        [exited(instruction.worker, 0)] if isinstance(instruction, StartWorker) else []
    )
    assert made.coordinator.run() == 0
    assert made.instructions[-1] == EndHost(0.5)
    assert b"the agent has not ended all processes within 0.51 s\n" in (made.folder / "err").read_bytes()


def test_workers_do_not_wait_for_a_slow_terminal_once_the_job_is_stopped(
    job: Callable[[State], Job],
) -> None:
    made = job(new_state())

    drops = list[bool]()

    def react(instruction: Instruction) -> list[HostReport]:
        drops.extend([made.coordinator.console.drops] if isinstance(instruction, ReportAll) else [])
        return obeys(instruction)

    made.reacts = react
    made.command.send(StopRequest(signal.SIGINT))
    assert made.coordinator.run() == 130
    assert drops == [True]
    assert made.coordinator.console.drops


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (ViewRefused(1, "there is too little memory"), "there is too little memory"),
        (StartFailed(0, False, "no processes"), "cannot start worker 0: no processes"),
    ],
)
def test_a_job_that_cannot_begin_ends(job: Callable[[State], Job], report: HostReport, message: str) -> None:
    made = job(new_state())
    made.reacts = lambda instruction: [report] if isinstance(instruction, StartView) else ends(instruction)
    assert made.coordinator.run() == 1
    assert made.entries("finished")[0]["message"] == message


def test_a_later_view_that_cannot_begin_ends_the_job(job: Callable[[State], Job]) -> None:
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        match instruction:
            case StartWorker(1):
                return [WorkerSaid(0, EventReport(StrategyInstalled("jax"))), exited(1, -9)]
            case StartView(2):
                return [ViewRefused(2, "there is too little memory"), exited(0, 1)]
        return ends(instruction)

    made.reacts = react
    assert made.coordinator.run() == 1
    assert str(made.entries("finished")[0]["message"]).endswith(", but there is too little memory")


def test_notes_on_what_takes_long_after_the_first_step(job: Callable[[State], Job]) -> None:
    made = job(new_state())
    events = (
        run_events.FirstStepEnded(),
        run_events.ImportStarted("torch"),
        run_events.StepsSkipped("fit 1", 1200, 5000),
        run_events.StepsSkipped("fit 1", 5000, 5000),
        run_events.CheckpointWritten("kept/step-1", 1, 4.9),
        run_events.CheckpointWritten("kept/step-2", 2, 12.4),
    )

    def react(instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(1):
            said = [WorkerSaid(0, EventReport(event)) for event in events]
            return [*said, *(script_ended(worker) for worker in (0, 1)), *exits]
        return ends(instruction)

    exits = [exited(worker, 0) for worker in (0, 1)]
    made.reacts = react
    assert made.coordinator.run() == 0
    notes = (made.folder / "err").read_text().splitlines()
    assert [line for line in notes if "worker 0" in line or "checkpoint kept" in line] == [
        "lockstep: worker 0 is skipping the first steps of fit 1, which were taken before: 1,200 of 5,000",
        "lockstep: checkpoint kept/step-1",
        "lockstep: checkpoint kept/step-2 (12 s)",
    ]


def test_the_end_of_its_agent_ends_the_job(job: Callable[[State], Job]) -> None:
    made = job(new_state())

    def react(instruction: Instruction) -> list[HostReport]:
        if instruction == StartWorker(1):
            made.loop.unwatch(made.channel.fileno())
            made.channel.close()
        return []

    made.reacts = react
    assert made.coordinator.run() == 1
    assert made.entries("finished")[0]["message"] == "the agent of this host has ended"


def test_lost_output_is_an_event_and_a_note(job: Callable[[State], Job]) -> None:
    made = job(new_state())
    full = os.open("/dev/full", os.O_WRONLY)
    made.coordinator.console.sinks = (Sink(full), made.coordinator.console.sinks[1])
    made.coordinator.console.sinks[0].write(b"output of a worker")

    def react(instruction: Instruction) -> list[HostReport]:
        if isinstance(instruction, StartView):
            return [*(exited(worker, 0) for worker in (0, 1))]
        return ends(instruction)

    made.reacts = react
    assert made.coordinator.run() == 0
    os.close(full)
    text = "cannot write to stdout (No space left on device); training continues"
    (lost,) = made.entries("output lost")
    assert str(lost["reason"]).startswith(text)
    assert f"lockstep: {text}".encode() in (made.folder / "err").read_bytes()


@pytest.mark.parametrize(
    ("state", "signals", "stage"),
    [
        (replace(STATE, keeps=True), ALL[:1], Stage.SAVING),
        (STATE, ALL, Stage.TERMINATING),
        (replace(STATE, shutdown=Shutdown(Stage.LOOKING)), ALL, Stage.TERMINATING),
        (replace(STATE, shutdown=Shutdown(Stage.ENDING)), [], Stage.ENDING),
    ],
)
def test_a_second_stop_request_changes_nothing(
    job: Callable[[State], Job], state: State, signals: list[tuple[int, int]], stage: Stage
) -> None:
    made = job(state)
    made.coordinator._take_requests()
    for _ in range(3):
        assert isinstance(send_request(made, StopRequest()), Status)
        made._receive()
        assert not any(isinstance(one, KillWorker) for one in made.instructions)
        sent = [(one.worker, one.signal) for one in made.instructions if isinstance(one, SignalWorker)]
        assert (sent, made.coordinator.state.stage) == (signals, stage)


def test_a_stop_of_another_terminal_that_has_waited_has_the_rest_of_the_grace_period(
    job: Callable[[State], Job],
) -> None:
    made = job(replace(STATE, keeps=True, limits=TimeLimits(save=20.0)))
    made.coordinator._take_requests()
    made.coordinator.stop_for_terminal(StopRequest(signal.SIGTERM, 19.0))
    assert "waiting up to 1 s for the step and a checkpoint" in (made.folder / "err").read_text()
    deadline = made.coordinator.state.shutdown.deadline
    assert deadline is not None
    assert deadline <= made.coordinator.clock.now() + 1.0


def test_a_job_whose_socket_cannot_be_opened_goes_on(job: Callable[[State], Job]) -> None:
    made = job(new_state())
    made.reacts = lambda instruction: (
        [script_ended(instruction.worker), exited(instruction.worker, 0)]
        if isinstance(instruction, StartWorker)
        else ends(instruction)
    )
    made.coordinator.requests = UnfitError("cannot open the admin socket of job a: Too many open files")
    assert made.coordinator.run() == 0
    notes = (made.folder / "err").read_text()
    assert notes.count("remote control is unavailable: cannot open the admin socket of job a") == 1


def test_the_status_names_the_members(job: Callable[[State], Job]) -> None:
    made = job(replace(STATE, size=JobSize.of(2, 1, 0)))
    made.coordinator._take_requests()
    status = send_request(made, StatusRequest())
    assert isinstance(status, Status)
    assert (status.workers, status.joining, status.wanted, status.replicas) == ((0, 1), (), 2, 4)


def send_request(job: Job, request: AdminRequest) -> Reply:
    """Send a job a request, as another process does."""
    admin = job.coordinator._requests.admin
    assert admin is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(300)
        client.connect(address(admin.name))
        client.send(encode(request))
        admin.serve()
        return decode_reply(client.recv(MAX_PACKET))
