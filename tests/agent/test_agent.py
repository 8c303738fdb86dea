"""The coordinator and the agent with fake workers."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_launcher import FakeHandle, FakeLauncher, end_by_signal

from lockstep.agent.agent import Agent
from lockstep.agent.host_load import LoadMeter
from lockstep.agent.starter import LocalStarter
from lockstep.agent.worker_output import LocalOutput
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.coordinator.coordinator import Coordinator
from lockstep.coordinator.host_agent import HostAgent
from lockstep.observability import events as run_events
from lockstep.observability.bus import Bus
from lockstep.observability.console import Console
from lockstep.observability.event_log import EventLog
from lockstep.observability.measurements import STEP_PARTS, StepsMeasured
from lockstep.protocol.admin import StopRequest
from lockstep.protocol.channel import Attachment
from lockstep.protocol.host import EndHost, HostEnded, HostReport, Instruction
from lockstep.protocol.job_spec import JobSpec
from lockstep.protocol.worker import EventReport, FailureReport
from lockstep.supervisor.state import JobSize, State, TimeLimits
from lockstep.system.clock import SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.output import Sink
from lockstep.system.paths import RunPaths
from lockstep.transport.local_channel import LocalChannel
from lockstep.transport.packet_channel import PacketChannel

QUICK = TimeLimits(timeout=60, blame=0.01, look=0.01, abort=0.01, term=0.01, kill=0.01)


@dataclass
class FakeDescendants:
    """The fake workers of a test."""

    workers: list[FakeHandle]
    graces: list[float] = field(default_factory=list)

    def reap(self, owned: frozenset[int]) -> None:
        pass

    def end(self, grace: float) -> tuple[int, ...]:
        self.graces.append(grace)
        for worker in self.workers:
            worker.end(-signal.SIGKILL)
            worker.reaped = True
        return ()


@dataclass
class Outcome:
    status: int
    stdout: str
    stderr: str
    events: list[dict[str, object]]
    workers: list[FakeHandle]
    aborts: list[str]
    graces: list[float]

    def events_of(self, event: str) -> list[dict[str, object]]:
        names = ("time", "event")
        return [
            {name: value for name, value in entry.items() if name not in names}
            for entry in self.events
            if entry["event"] == event
        ]


Play = Callable[[FakeHandle], None]
Connect = Callable[[], tuple[Any, Any]]


def packet_channels() -> tuple[Any, Any]:
    """Connect coordinator and agent like two processes."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return PacketChannel(one, HostReport), PacketChannel(other, Instruction)


def nothing() -> Attachment:
    return Attachment(os.open(os.devnull, os.O_RDONLY))


class FakeExchange(ControlSegment):
    """An exchange whose abort ends all workers."""

    aborts: list[str]
    workers: list[FakeHandle]

    def abort(self, reason: str) -> None:
        self.aborts.append(reason)
        for worker in self.workers:
            worker.end(1)


@dataclass
class Stage:
    """Runs the agent with workers that follow `plays`; the last `joining` ones are joiners."""

    folder: Path
    connect: Connect
    command: PacketChannel[StopRequest, StopRequest]
    agent_side: PacketChannel[StopRequest, StopRequest]

    def run(
        self,
        *plays: Play,
        react: Callable[[FakeHandle, int], None] = end_by_signal,
        on_event: Callable[[run_events.Event], None] = lambda event: None,
        tee: str = "chief",
        joining: int = 0,
        limits: TimeLimits = QUICK,
    ) -> Outcome:
        paths, aborts = RunPaths(self.folder), []
        launcher = FakeLauncher(lambda worker: plays[worker.launch.worker](worker), react)
        descendants = FakeDescendants(launcher.started)
        workers, wanted = len(plays) - joining, len(plays) if joining else 0
        spec = JobSpec(target="a.py", workers=workers, replicas=len(plays), threads=1, run_dir=self.folder)

        to_agent, to_coordinator = self.connect()

        def open_exchange(members: int) -> FakeExchange:
            exchange = FakeExchange.create(members)
            exchange.aborts, exchange.workers = aborts, launcher.started
            return exchange

        out, err = self.folder / "out", self.folder / "err"
        with out.open("wb", 0) as stdout, err.open("wb", 0) as stderr:
            console = Console(Sink(stdout.fileno()), Sink(stderr.fileno()), tee, 0)  # type: ignore[arg-type]
            events = Bus(SystemClock(), complain=pytest.fail)
            with EventLog.open(paths.events, pytest.fail) as log:
                events.subscribe(log.append, *run_events.RUN_EVENTS)
                events.subscribe(lambda published: on_event(published.event), *run_events.RUN_EVENTS)
                output = LocalOutput(console, paths)
                with EventLoop() as loop:
                    agent = Agent(
                        spec,
                        to_coordinator,
                        loop,
                        LocalStarter(spec, paths, os.getpid(), launcher, output),
                        open_exchange,
                        nothing(),
                        output,
                        descendants,
                        LoadMeter(),
                    )
                    coordinator = Coordinator(
                        spec,
                        paths,
                        os.getpid(),
                        (HostAgent(to_agent),),
                        self.agent_side,
                        loop,
                        console,
                        events,
                        SystemClock(),
                        State.of(spec.view, limits, JobSize.of(wanted, 1, 0)),
                    )
                    with contextlib.closing(agent):
                        status = coordinator.run()
        entries = [json.loads(line) for line in paths.events.read_text().splitlines()]
        return Outcome(
            status,
            out.read_text(),
            err.read_text(),
            entries,
            launcher.started,
            aborts,
            descendants.graces,
        )


@pytest.fixture(params=[LocalChannel.pair, packet_channels], ids=["one process", "packets"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    command, coordinator_side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with command, coordinator_side:
        yield Stage(
            tmp_path,
            request.param,
            PacketChannel(command, StopRequest),
            PacketChannel(coordinator_side, StopRequest),
        )


def well(worker: FakeHandle) -> None:
    worker.send(EventReport(run_events.WorkerReady(worker.launch.worker)))
    worker.send(EventReport(run_events.StrategyInstalled("jax")))
    worker.send(EventReport(run_events.DistributionBegan()))
    worker.write(stdout=f"out {worker.launch.worker}\n".encode(), stderr=b"err\n")
    worker.send(EventReport(run_events.ScriptEnded(worker.launch.worker, 0)))
    worker.end(0)


def waits(worker: FakeHandle) -> None:
    worker.send(EventReport(run_events.WorkerReady(worker.launch.worker)))


def test_a_run_that_succeeds(stage: Stage) -> None:
    outcome = stage.run(well, well)
    assert (outcome.status, outcome.stdout, outcome.stderr) == (0, "out 0\n", "err\n")
    assert [(stage.folder / f"worker-{n}.log").read_text() for n in (0, 1)] == [
        "out 0\nerr\n",
        "out 1\nerr\n",
    ]
    assert [event["status"] for event in outcome.events_of("exited")] == [0, 0]
    strategy = {"backend": "jax", "libraries": {}}
    assert outcome.events_of("strategy") == [strategy | {"worker": 0}, strategy | {"worker": 1}]
    (finished,) = outcome.events_of("finished")
    assert {name: finished[name] for name in ("status", "message", "workers", "steps")} == {
        "status": 0,
        "message": "",
        "workers": [],
        "steps": None,
    }
    assert outcome.aborts == []
    assert outcome.graces == [0.5, 0]


def test_the_last_line_summarizes_the_job(stage: Stage) -> None:
    def trains(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.StrategyInstalled("jax")))
        worker.send(EventReport(run_events.CheckpointWritten("kept/step-3", 3, 0.1)))
        worker.send(EventReport(run_events.ScriptEnded(worker.launch.worker, 0)))
        # Only the chief's report counts.
        steps = 3 + worker.launch.worker
        worker.send(EventReport(run_events.TrainingEnded(steps, "small", "1f3c")))
        worker.end(0)

    outcome = stage.run(trains, trains)
    line = outcome.stderr.splitlines()[-1]
    assert line.startswith("lockstep: finished in ")
    assert line.endswith("s: 3 steps on 2 workers; 2 checkpoints; digest 1f3c of model 'small'")
    (finished,) = outcome.events_of("finished")
    expected = {"lost": 0, "joined": 0, "checkpoints": 2, "before": 0, "steps": 3, "model": "small"}
    assert finished.items() >= {**expected, "digest": "1f3c"}.items()


def test_the_end_of_a_job_that_failed_has_the_steps_that_are_known(stage: Stage) -> None:
    parts = dict.fromkeys(STEP_PARTS, 0.0)

    def fails(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.StrategyInstalled("jax")))
        worker.send(EventReport(run_events.TrainingResumed("step 4 of fit 1", 4)))
        numbers = {"call": "fit 1", "number": 9, "trained": 9, "count": 5, "began": 0.0, "examples": 5}
        worker.send(EventReport(StepsMeasured(**numbers, replicas=1, seconds=0.0, **parts)))
        worker.send(EventReport(run_events.CheckpointWritten("kept/step-7", 7, 0.1)))
        worker.end(1)

    (finished,) = stage.run(fails, fails).events_of("finished")
    assert (finished["status"], finished["before"], finished["steps"], finished["reached"]) == (1, 4, None, 9)


def test_tee_all_prefixes_each_line_with_its_worker(stage: Stage) -> None:
    outcome = stage.run(well, well, tee="all")
    assert sorted(outcome.stdout.splitlines()) == ["[worker 0] out 0", "[worker 1] out 1"]


def test_output_and_messages_before_a_workers_end_are_kept(stage: Stage) -> None:
    def fails(worker: FakeHandle) -> None:
        worker.write(stderr=b"Traceback: no good\n")
        failed = run_events.ScriptFailed(worker.launch.worker, "ValueError: no good", "Traceback")
        worker.send(FailureReport(failed, 1, False))
        worker.end(1)

    outcome = stage.run(waits, fails)
    assert outcome.status == 1
    assert outcome.aborts == ["worker 1 exited with status 1: ValueError: no good"]
    assert outcome.stderr == (
        "lockstep: worker 1 exited with status 1: ValueError: no good\n"
        "  | Traceback: no good\n"
        f"  log: {stage.folder}/worker-1.log\n"
    )
    assert outcome.events_of("failed") == [
        {"worker": 1, "summary": "ValueError: no good", "traceback": "Traceback"}
    ]


def test_a_redundant_traceback_is_in_the_log_only(stage: Stage) -> None:
    def refused(worker: FakeHandle) -> None:
        worker.write(stdout=b"epoch 1\n")
        worker.send(
            FailureReport(
                run_events.ScriptFailed(worker.launch.worker, "ScopeError: no (a.py:3)", "Traceback\n"),
                1,
                blames=False,
                prints=False,
            )
        )
        worker.end(1)

    outcome = stage.run(refused, waits)
    assert outcome.stderr == (
        f"lockstep: worker 0: ScopeError: no (a.py:3)\n  log: {stage.folder}/worker-0.log\n"
        "  help: lockstep explain ScopeError\n"
    )
    assert outcome.aborts == ["worker 0: ScopeError: no (a.py:3)"]
    assert (stage.folder / "worker-0.log").read_text() == "epoch 1\nTraceback\n"


def test_waits_reported_before_the_end_of_a_worker_are_no_early_exit(stage: Stage) -> None:
    def reports_then_ends(worker: FakeHandle) -> None:
        for seconds in (0.5, 1.0, 1.5):
            worker.send(EventReport(run_events.WaitReported(1, "barrier", (0,), seconds)))
        well(worker)

    assert stage.run(well, reports_then_ends).status == 0


def test_a_worker_that_exited_early_is_named(stage: Stage) -> None:
    started: list[FakeHandle] = []

    def wait_in_vain(event: run_events.Event) -> None:
        if isinstance(event, run_events.WorkerExited) and started:
            worker = started.pop()
            for seconds in (0.5, 1.0):
                worker.send(EventReport(run_events.WaitReported(1, "barrier", (0,), seconds)))

    outcome = stage.run(well, started.append, on_event=wait_in_vain)
    message = "worker 0 exited with status 0 while worker 1 waited for it in barrier"
    assert outcome.aborts == [message]
    assert outcome.status == 1
    assert outcome.stderr == f"err\nlockstep: {message}\n  log: {stage.folder}/worker-0.log\n"


def test_a_long_wait_is_shown(stage: Stage) -> None:
    def waits_long(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.WaitReported(1, "step 3", (0,), 12.0)))
        well(worker)

    outcome = stage.run(well, waits_long)
    assert outcome.stderr.splitlines().count("lockstep: worker 1 has waited 12 s for worker 0 in step 3") == 1


def test_a_wait_of_several_workers_for_a_download_is_shown_once(stage: Stage) -> None:
    def waits_for_file(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.DownloadAwaited("a.npz", "worker 0", 5)))
        well(worker)

    outcome = stage.run(well, waits_for_file, waits_for_file)
    (line,) = [line for line in outcome.stderr.splitlines() if "a.npz" in line]
    assert line in [f"lockstep: worker {worker} waits for worker 0 to download a.npz" for worker in (1, 2)]


@pytest.mark.parametrize(
    "packet", [b'{"type": "nix"}', b'{"type": "report", "event": {"event": "of a newer version"}}']
)
def test_an_unknown_message_is_logged_and_ignored(stage: Stage, packet: bytes) -> None:
    def babbles(worker: FakeHandle) -> None:
        worker.send_packet(packet)
        well(worker)

    outcome = stage.run(well, babbles)
    assert outcome.status == 0
    assert [entry["worker"] for entry in outcome.events_of("misunderstood")] == [1]


def test_a_stop_reaches_every_worker_once(stage: Stage) -> None:
    stage.command.send(StopRequest(signal.SIGTERM))
    # On a busy machine the workers need their time to end.
    outcome = stage.run(waits, waits, limits=replace(QUICK, term=60))
    assert outcome.status == 143
    assert [worker.signals for worker in outcome.workers] == [[15], [15]]
    assert outcome.stderr == "lockstep: stopped by SIGTERM\n"
    assert outcome.graces == [0.5, 0]


def test_workers_that_ignore_a_stop_are_killed(stage: Stage) -> None:
    def ignore(worker: FakeHandle, number: int) -> None:
        if number == signal.SIGKILL:
            worker.end(-number)

    stage.command.send(StopRequest(signal.SIGINT))
    outcome = stage.run(waits, waits, react=ignore)
    assert outcome.status == 130
    assert [worker.signals for worker in outcome.workers] == [[2, 9], [2, 9]]
    assert outcome.graces == [0, 0]


def test_the_end_of_a_worker_after_the_job_is_not_logged(stage: Stage) -> None:
    """The agent has killed the worker and has no other status of it."""
    stage.command.send(StopRequest(signal.SIGINT))
    outcome = stage.run(waits, waits, react=lambda worker, number: None)
    assert outcome.status == 130
    assert outcome.events_of("exited") == []
    assert outcome.graces == [0, 0]


def test_a_channel_that_closes_after_the_end_of_the_job_is_no_loss(stage: Stage) -> None:
    """The coordinator closes it as soon as it has the answer."""
    to_agent, to_coordinator = stage.connect()
    nothing: Any = SimpleNamespace(
        prepare=lambda: None, reap=lambda owned: None, end=lambda grace: (), close=lambda: None
    )
    said = list[str]()
    with EventLoop() as loop:
        agent = Agent(
            JobSpec(target="a.py", run_dir=stage.folder),
            to_coordinator,
            loop,
            nothing,
            lambda members: pytest.fail("there is no view"),
            Attachment.missing(),
            nothing,
            nothing,
            LoadMeter(),
            say=said.append,
        )
        with contextlib.closing(agent):
            to_agent.send(EndHost(0.0, status=3))
            while not agent.ended:
                loop.turn(0.0)
            while not isinstance(report := to_agent.receive(), HostEnded):
                assert report is not None
            to_agent.close()
            loop.turn(0.0)
            assert (agent.ended, agent.status, said) == (True, 3, [])


def test_killing_a_joiner_leaves_the_grace_of_remaining_processes(
    stage: Stage,
) -> None:
    members: list[FakeHandle] = []

    def trains(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.StrategyInstalled("jax")))
        members.append(worker)

    outcome = stage.run(trains, lambda joins: well(members[0]), joining=1)
    assert outcome.status == 0
    assert outcome.workers[1].signals == [signal.SIGKILL]
    assert outcome.graces == [0.5, 0]


def test_the_end_of_the_command_ends_all_processes_at_once(stage: Stage) -> None:
    stage.command.close()
    outcome = stage.run(waits, waits)
    assert outcome.status == 137
    assert outcome.graces == [0]
    (finished,) = outcome.events_of("finished")
    assert (finished["status"], finished["message"]) == (137, "the command was killed")


COMPILES = "compiling and computing the first step of fit 1"


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        (run_events.ImportStarted("keras"), "importing keras (0 s)"),
        (run_events.CallStarted("fit 1"), COMPILES),
        (
            run_events.StepsSkipped("fit 1", 1200, 5000),
            "skipping the first steps of fit 1, which were taken before: 1,200 of 5,000",
        ),
        (run_events.StepsSkipped("fit 1", 5000, 5000), COMPILES),
    ],
)
def test_a_note_explains_silence_before_the_first_step(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, last: run_events.WorkerEvent, shown: str
) -> None:
    for pause in ("_QUIET", "NOTE_EVERY"):
        monkeypatch.setattr(f"lockstep.coordinator.startup_progress.{pause}", 0.0)

    def compiles(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.WorkerReady(worker.launch.worker)))
        worker.send(EventReport(run_events.StrategyInstalled("jax")))
        worker.send(EventReport(last))

    def stop(event: run_events.Event) -> None:
        if event == last:
            stage.command.send(StopRequest(signal.SIGINT))

    outcome = stage.run(waits, compiles, on_event=stop)
    assert outcome.status == 130
    assert f"; worker 1: {shown}\n" in outcome.stderr


def test_a_kill_for_lack_of_memory_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([3, *[4] * 99])
    monkeypatch.setattr("lockstep.agent.agent.memory_kills", lambda: next(kills))

    def killed(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.WorkerReady(worker.launch.worker)))
        worker.end(-signal.SIGKILL)

    outcome = stage.run(killed)
    assert outcome.status == 137
    assert outcome.events_of("no memory") == [{"worker": 0, "kills": 1}]
    assert outcome.stderr.startswith(
        "lockstep: memory ran out, so the kernel killed worker 0: use fewer workers"
    )
    assert "worker 0 was killed by SIGKILL, by the kernel, because memory ran out\n" in outcome.stderr


def test_each_of_several_workers_that_the_kernel_kills_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([3, *[5] * 99])
    monkeypatch.setattr("lockstep.agent.agent.memory_kills", lambda: next(kills))

    def killed(worker: FakeHandle) -> None:
        worker.end(-signal.SIGKILL)

    outcome = stage.run(killed, killed, killed)
    ends = [event["cause"] for event in outcome.events_of("exited")]
    assert ends == ["by the kernel, because memory ran out"] * 2 + [""]


def test_workers_that_the_agent_kills_have_not_run_out_of_memory(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = iter([3, *[4] * 99])
    monkeypatch.setattr("lockstep.agent.agent.memory_kills", lambda: next(kills))

    def ignores(worker: FakeHandle, number: int) -> None:
        if number == signal.SIGKILL:
            worker.end(-signal.SIGKILL)

    def stop(event: run_events.Event) -> None:
        if isinstance(event, run_events.WorkerReady):
            stage.command.send(StopRequest(signal.SIGTERM))

    outcome = stage.run(waits, react=ignores, on_event=stop)
    assert outcome.events_of("no memory") == []
    assert "memory" not in outcome.stderr


def test_a_note_reports_a_run_without_a_strategy(stage: Stage) -> None:
    def alone(worker: FakeHandle) -> None:
        worker.end(0)

    what = "the script used no strategy and compiled no model"
    line = f"lockstep: {what}: each of the 2 workers ran all of it by itself\n"
    assert stage.run(alone, alone).stderr == line


def test_a_note_reports_a_strategy_that_distributes_nothing(stage: Stage) -> None:
    def by_itself(worker: FakeHandle) -> None:
        worker.send(EventReport(run_events.StrategyInstalled("jax")))
        worker.end(0)

    said = stage.run(by_itself, by_itself).stderr
    assert "the script distributed nothing: each of the 2 workers runs the whole script by itself" in said


def test_a_worker_that_cannot_be_started_ends_the_job(stage: Stage) -> None:
    def refuse(worker: FakeHandle) -> None:
        worker.end(0)
        raise OSError(11, "too many processes")

    outcome = stage.run(waits, refuse)
    assert outcome.status == 1
    assert outcome.stderr == "lockstep: cannot start worker 1: too many processes\n"
    assert outcome.graces == [0, 0]
