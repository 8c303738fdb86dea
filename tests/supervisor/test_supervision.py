"""Supervision: a table of single decisions, and scenarios with complete traces.

A scenario file is its own golden trace: unindented lines are events, indented lines the decisions.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_workers import failure, state_given

from lockstep.observability.events import (
    CheckpointFailed,
    CheckpointsConfigured,
    CheckpointWritten,
    DistributionBegan,
    JoinRequested,
    LastStepEnded,
    ScriptEnded,
    StopRequested,
    StrategyInstalled,
    VerificationFailed,
    WaitReported,
    WorkerExited,
)
from lockstep.protocol.admin import ScaleRequest
from lockstep.protocol.host import (
    AskMembers,
    DumpStack,
    HostRetires,
    HostStopped,
    KillWorker,
    PositionMissed,
    SendPosition,
    SendState,
    SignalWorker,
    StartCancelled,
    StartFailed,
    StartView,
    StartWorker,
    StateArrived,
    StateMoving,
    ViewRefused,
    WorkerArrived,
)
from lockstep.protocol.worker import (
    AbortExchange,
    FailureReport,
    LastLineAwaited,
    Notice,
    StateSource,
    ViewBroken,
)
from lockstep.supervisor.actions import (
    Action,
    Evidence,
    FinishJob,
    JobOutcome,
    ShowMessage,
    TellSuccess,
)
from lockstep.supervisor.decide import decide, refusal
from lockstep.supervisor.events import (
    DeadlinePassed,
    Event,
    HostGone,
    HostJoined,
    HostsHeard,
)
from lockstep.supervisor.state import (
    Admission,
    JobSize,
    Phase,
    Shutdown,
    Stage,
    State,
    TimeLimits,
    WorkerRecord,
)
from lockstep.system.exit_status import signal_name
from lockstep.system.prose import name_workers
from lockstep.topology import place, place_on_hosts

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


def at_stage(state: State, stage: Stage) -> State:
    return replace(state, shutdown=replace(state.shutdown, stage=stage))


TWO = State.of(place(2, (0, 1)), TimeLimits(timeout=60.0), JobSize())
THREE = State.of(place(3, (0, 1, 2)), TimeLimits(), JobSize())
ELASTIC = replace(State.of(place(4, (0, 1)), TimeLimits(), JobSize.of(2, 1, 1)), elastic=True)
JOINING = replace(
    ELASTIC.with_worker(2, WorkerRecord(Phase.JOINING, started_at=1.0)), size=JobSize.of(3, 1, 0)
)
ASKED = replace(JOINING.with_phase(Phase.READY, 2), admission=Admission(Notice.CHANGE))
HERE = frozenset({0})
SOURCE = StateSource(1, 1, 1000, 0)
WAITING = replace(
    JOINING, size=JobSize.of(3, 3, 0), admission=Admission(source=SOURCE, holders=HERE, deadline=60.0)
)
AFAR = JOINING.with_worker(2, replace(JOINING.workers[2], host=1))
SENDING = decide(
    replace(AFAR.with_phase(Phase.READY, 2), admission=Admission(Notice.CHANGE)), state_given(1, True), 0.0
)
SENT = SENDING.state
LATE = replace(SENT, admission=replace(SENT.admission, deadline=8.0))
AT_THE_END = replace(THREE, elastic=True, size=JobSize.of(3, 1, 1)).with_phase(Phase.FINISHED, 1)
ENDING = replace(TWO, shutdown=Shutdown(Stage.ENDING, 8.0, JobOutcome(3, "because")))
TERMINATING = at_stage(ENDING, Stage.TERMINATING)


def insisting(workers: tuple[int, ...], verdict: str = "third") -> VerificationFailed:
    return VerificationFailed(step=3, arrays=("kernel",), workers=workers, verdict=verdict)


PATTERNS: list[tuple[str, Callable[..., Event]]] = [
    (r"the script of worker (?P<worker>\d+) ends", partial(ScriptEnded, status=0)),
    (r"worker (?P<worker>\d+) waits for the last line", LastLineAwaited),
    (r"worker (?P<worker>\d+) ends with (?P<status>-?\d+)", WorkerExited),
    (
        r"worker (?P<worker>\d+) fails with (?P<status>\d+)(?P<blames>, blaming)?(?P<recurs>, recurring)?"
        r": (?P<summary>.*)",
        failure,
    ),
    (
        r"worker (?P<worker>\d+) waits (?P<seconds>[\d.]+) s in (?P<what>.*) for (?P<waits_for>[\d ]+)",
        WaitReported,
    ),
    (r"worker \d+ has a strategy", lambda: StrategyInstalled("jax")),
    (r"workers (?P<accused>[\d ]+) insist on their bits", lambda accused: insisting(accused)),
    (r"a verification names workers? (?P<accused>[\d ]+)", lambda accused: insisting(accused, "worker")),
    (r"the script distributes", DistributionBegan),
    (r"worker (?P<worker>\d+) asks (?P<whole>to be let in|where)", JoinRequested),
    (
        r"the chief of view (?P<view>\d+) gives the (?P<whole>state|position)(, but (?P<failure>.*))?",
        state_given,
    ),
    (r"a worker is started by hand", WorkerArrived),
    (r"host (?P<host>\d+) retires", lambda host: HostRetires(host, f"host {host} retires")),
    (r"host (?P<host>\d+) is lost", partial(HostGone, how="was lost")),
    (r"hosts were heard at (?P<at>[\d. ]+)", HostsHeard),
    (r"host (?P<host>\d+) is stopped by (?P<signal>\d+)", HostStopped),
    (r"the state reaches host (?P<host>\d+) in view (?P<view>\d+)", StateArrived),
    (
        r"the chief of view (?P<view>\d+) on host (?P<host>\d+) gives the (?P<whole>state|position)",
        state_given,
    ),
    (
        r"host (?P<name>\S+) joins with (?P<workers>\d+) workers?",
        lambda name, workers: HostJoined(name, workers, 1),
    ),
    (r"scale to (?P<workers>\d+)", ScaleRequest),
    (r"stop by (?P<signal>\d+)", StopRequested),
    (r"the script keeps checkpoints", lambda: CheckpointsConfigured("kept")),
    (r"step (?P<step>\d+) ends, the last one", LastStepEnded),
    (
        r"the checkpoint of step (?P<step>\d+) is on the disk",
        partial(CheckpointWritten, "kept/step", seconds=0.1),
    ),
    (r"a checkpoint cannot be written: (?P<reason>.*)", CheckpointFailed),
    (r"time passes", DeadlinePassed),
]
CONVERT: dict[str, Callable[[str], Any]] = {
    "at": lambda text: dict(enumerate(map(float, text.split()))),
    "worker": int,
    "workers": int,
    "waits_for": lambda text: tuple(map(int, text.split())),
    "accused": lambda text: tuple(map(int, text.split())),
    "step": int,
    "reason": str,
    "status": int,
    "signal": int,
    "seconds": float,
    "blames": bool,
    "recurs": bool,
    "summary": str,
    "what": str,
    "whole": lambda text: text in ("to be let in", "state"),
    "view": int,
    "host": int,
    "name": str,
    "failure": lambda text: text or "",
}


def parse(text: str) -> Event:
    for pattern, kind in PATTERNS:
        if match := re.fullmatch(pattern, text):
            return kind(**{name: CONVERT[name](value) for name, value in match.groupdict().items()})
    raise AssertionError(f"no event: {text}")


def render(action: Action) -> str:
    match action:
        case AbortExchange(reason):
            return f"abort: {reason}"
        case StartView(number, notice=notice):
            asked = f", asked for {notice.name}" if notice else ""
            return f"view {number} of {name_workers(action.workers)}{asked}"
        case SendState(host):
            return f"send the state to host {host}"
        case StartWorker(worker):
            return f"start worker {worker}"
        case AskMembers(notice):
            return f"ask the members for {notice.name}"
        case SendPosition(worker):
            return f"tell worker {worker} where the training is"
        case SignalWorker(worker, number):
            return f"signal worker {worker}: {signal_name(number)}"
        case KillWorker(worker):
            return f"kill worker {worker}"
        case DumpStack(worker):
            return f"ask worker {worker} for its stack"
        case ShowMessage(text, logs):
            return f"tell: {text}{f' [logs of {logs}]' if logs else ''}"
        case TellSuccess():
            return "tell that the job has succeeded"
        case FinishJob(outcome):
            shown = f" [{outcome.evidence.name} of {outcome.workers}]" if outcome.workers else ""
            return f"finish with {outcome.status}: {outcome.message or 'all is well'}{shown}"


def trace(scenario: str) -> str:
    """Return the decisions on the scenario's events, written as a scenario."""
    lines, state = [], TWO
    for line in scenario.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        if match := re.fullmatch(r"workers (\d+), timeout (\d+)", line):
            count = int(match[1])
            view = place(count, tuple(range(count)))
            limits = TimeLimits(timeout=float(match[2]))
            state = replace(State.of(view, limits, JobSize()), distributes=True)
        elif match := re.fullmatch(r"at least (\d+), restarts (\d+)(?:, replicas (\d+))?", line):
            count = len(state.running)
            view = place(int(match[3] or count), tuple(range(count)))
            size = JobSize.of(count, int(match[1]), int(match[2]))
            state = replace(state, size=size, view=view)
        elif match := re.fullmatch(r"hosts of ([\d ]+)", line):
            ids = iter(range(len(state.running)))
            hosts = tuple(tuple(islice(ids, int(number))) for number in match[1].split())
            view = place_on_hosts(state.view.replicas, hosts, 1)
            state = replace(State.of(view, state.limits, state.size), distributes=True)
        elif match := re.fullmatch(r"avoids a host after (\d+)", line):
            state = replace(state, avoid_host_after=int(match[1]))
        elif line == "workers are started by hand":
            state = replace(state, size=JobSize(len(state.running), by_hand=True))
        elif line == "nothing is distributed yet":
            state = replace(state, distributes=False)
        elif line == "keeps checkpoints":
            state = replace(state, keeps=True)
        elif match := re.fullmatch(r"([\d.]+): (.*)", line):
            decision = decide(state, parse(match[2]), float(match[1]))
            state = decision.state
            lines += [f"    {render(action)}" for action in decision.actions]
            due = "" if state.due is None else f", due {state.due:g}"
            lines.append(f"    = {state.stage.name}{due}: {decision.reason}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    assert trace(path.read_text()) == path.read_text()


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 40


@pytest.mark.parametrize(
    ("state", "event", "actions", "stage"),
    [
        (TWO, WorkerExited(0, 0), (), Stage.RUNNING),
        (TWO, WorkerExited(1, 3), (AbortExchange("worker 1 exited with status 3"),), Stage.ENDING),
        (TWO, WorkerExited(1, -11), (AbortExchange("worker 1 was killed by SIGSEGV"),), Stage.ENDING),
        (
            TWO,
            failure(1, 1, "E: x", False),
            (AbortExchange("worker 1 exited with status 1: E: x"),),
            Stage.ENDING,
        ),
        (
            TWO,
            failure(1, 1, "E: x", False, prints=False),
            (AbortExchange("worker 1: E: x"),),
            Stage.ENDING,
        ),
        (TWO, failure(1, 1, "E: x", True), (), Stage.RUNNING),
        (
            TWO.with_phase(Phase.LOST, 0),
            failure(1, 1, "E: x", True),
            (AbortExchange("worker 1 exited with status 1: E: x"),),
            Stage.ENDING,
        ),
        (TWO, WaitReported(0, "step 1", (1,), 59.9), None, Stage.RUNNING),
        (TWO, WaitReported(0, "step 1", (1,), 60.0), (DumpStack(1),), Stage.LOOKING),
        (TWO, WaitReported(0, "step 1", (1,), 9.9), (), Stage.RUNNING),
        (
            TWO,
            ViewBroken(1, 1, "lost the connection"),
            (AbortExchange("worker 1: lost the connection"),),
            Stage.ENDING,
        ),
        (TWO, StopRequested(2), (SignalWorker(0, 2), SignalWorker(1, 2)), Stage.TERMINATING),
        (TWO, DeadlinePassed(), (), Stage.RUNNING),
        (ENDING, DeadlinePassed(), (SignalWorker(0, 15), SignalWorker(1, 15)), Stage.TERMINATING),
        (ENDING, WorkerExited(0, 1), (), Stage.ENDING),
        (ENDING, failure(0, 1, "E: y", False), (), Stage.ENDING),
        (ENDING, WaitReported(0, "step 1", (1,), 99.0), (), Stage.ENDING),
        (ENDING, StopRequested(15), (SignalWorker(0, 15), SignalWorker(1, 15)), Stage.TERMINATING),
        (TERMINATING, StopRequested(15), (KillWorker(0), KillWorker(1)), Stage.KILLING),
        (
            TERMINATING,
            DeadlinePassed(),
            (
                ShowMessage("workers 0 and 1 did not exit within 3 s after the signal: killing them"),
                KillWorker(0),
                KillWorker(1),
            ),
            Stage.KILLING,
        ),
        (
            at_stage(TERMINATING, Stage.KILLING),
            DeadlinePassed(),
            (FinishJob(JobOutcome(3, "because")),),
            Stage.FINISHED,
        ),
        (
            ENDING.with_phase(Phase.LOST, 0),
            WorkerExited(1, -9),
            (FinishJob(JobOutcome(3, "because")),),
            Stage.FINISHED,
        ),
        (
            TWO.with_phase(Phase.LOST, 0),
            WorkerExited(1, 0),
            (FinishJob(JobOutcome(0)),),
            Stage.FINISHED,
        ),
        (
            TWO.with_phase(Phase.LOST, 0),
            WorkerExited(1, -9),
            (FinishJob(JobOutcome(137, "worker 1 was killed by SIGKILL", (1,), Evidence.LOG)),),
            Stage.FINISHED,
        ),
        (at_stage(TWO, Stage.FINISHED), StopRequested(2), (), Stage.FINISHED),
    ],
)
def test_decision(state: State, event: Event, actions: tuple[object, ...] | None, stage: Stage) -> None:
    decision = decide(state, event, 8.0)
    if actions is not None:
        assert decision.actions == actions
    assert decision.state.stage is stage
    assert decision.reason


@pytest.mark.parametrize(
    ("state", "event", "actions"),
    [
        (ELASTIC, WorkerExited(1, -9), (StartView, ShowMessage, StartWorker(2, joins=True))),
        (ELASTIC, WorkerExited(1, 0), ()),
        (
            ELASTIC,
            ScaleRequest(4),
            (
                ShowMessage("the job now wants 4 workers"),
                StartWorker(2, joins=True),
                StartWorker(3, joins=True),
            ),
        ),
        (
            ELASTIC,
            ScaleRequest(1),
            (ShowMessage("the job now wants 1 worker"), AskMembers(Notice.CHANGE)),
        ),
        (ELASTIC, ViewRefused(1, "no memory"), (AbortExchange("no memory"),)),
        (JOINING, JoinRequested(2, whole=False), (AskMembers(Notice.POSITION),)),
        (JOINING, JoinRequested(2, whole=True), (AskMembers(Notice.CHANGE),)),
        (JOINING, JoinRequested(1, whole=True), ()),
        (JOINING.with_phase(Phase.JOIN_FAILED, 2), JoinRequested(2, whole=True), ()),
        (JOINING, WorkerExited(2, -9), (ShowMessage,)),
        (JOINING, WorkerExited(1, 0), (KillWorker(2),)),
        (JOINING, ScaleRequest(2), (KillWorker(2), ShowMessage)),
        (ASKED, state_given(1, whole=True), (StartView, ShowMessage("worker 2 joined (3 workers)"))),
        (ASKED, state_given(1, whole=True, failure="no memory"), (KillWorker(2), StartView, ShowMessage)),
        (ASKED, state_given(0, whole=True), ()),
        (ASKED, WorkerExited(2, -9), (ShowMessage, AskMembers(Notice.NOTHING))),
        (WAITING, JoinRequested(2, whole=False), (SendPosition(2, SOURCE),)),
        (WAITING, JoinRequested(2, whole=True), (StartView, ShowMessage)),
        (WAITING, WorkerExited(2, -9), (AbortExchange,)),
        (WAITING, WaitReported(0, "the change of workers", (1,), 700.0), ()),
        (WAITING, StopRequested(15), (SignalWorker(0, 15), SignalWorker(1, 15), SignalWorker(2, 15))),
        *(
            (
                replace(WAITING, keeps=True),
                StopRequested(number),
                (SignalWorker(0, 15), StartView, ShowMessage),
            )
            for number in (1, 2, 15)
        ),
        (
            replace(WAITING, admission=Admission(source=SOURCE, deadline=8.0)),
            DeadlinePassed(),
            (AbortExchange,),
        ),
        (SENT, StateArrived(1, 1), (StartView, ShowMessage("worker 2 joined (3 workers)"))),
        (
            SENT,
            StateArrived(1, 1, "lost"),
            (ShowMessage("worker 2 cannot join: lost"), KillWorker(2), StartView, ShowMessage),
        ),
        (SENT, StateArrived(1, 0), ()),
        (SENT, state_given(0, whole=True), ()),
        (SENT, ViewBroken(1, 1, "lost"), ()),
        (SENT, WaitReported(1, "the change of workers", (0,), 700.0), ()),
        (SENT, WorkerExited(0, -9), (ShowMessage,)),
        (SENT, WorkerExited(2, -9), (StartView, ShowMessage)),
        (SENT, ScaleRequest(2), (KillWorker(2), StartView, ShowMessage)),
        (SENT, StopRequested(15), (SignalWorker(0, 15), SignalWorker(1, 15), SignalWorker(2, 15))),
        (SENT.with_phase(Phase.JOIN_FAILED, 2), StateArrived(1, 1, "lost"), (StartView, ShowMessage)),
        (LATE, DeadlinePassed(), (ShowMessage, KillWorker(2), StartView, ShowMessage)),
        (
            replace(SENT, admission=replace(SENT.admission, report_at=8.0)),
            DeadlinePassed(),
            (ShowMessage("training waits until the state has reached the host of worker 2"),),
        ),
        (SENT, StateMoving(1, 1, 5, 10, 1.0), ()),
        (
            replace(SENT, admission=replace(SENT.admission, report_at=8.0, moved=((0, "all"), (1, "half")))),
            DeadlinePassed(),
            (ShowMessage("training waits until the state has reached the host of worker 2: half"),),
        ),
        (AFAR, PositionMissed(2, 1, "lost"), (ShowMessage("worker 2 cannot join: lost"), KillWorker(2))),
        (AFAR, PositionMissed(2, 0, "view 0 has ended"), (AskMembers(Notice.POSITION),)),
        (AFAR.with_phase(Phase.JOIN_FAILED, 2), PositionMissed(2, 1, "lost"), ()),
        (AT_THE_END, WorkerExited(0, -9), (StartView, ShowMessage)),
    ],
)
def test_decision_about_the_membership(state: State, event: Event, actions: tuple[object, ...]) -> None:
    decided = decide(state, event, 8.0).actions
    assert len(decided) == len(actions)
    for action, expected in zip(decided, actions, strict=True):
        assert (type(action) if isinstance(expected, type) else action) == expected


def test_the_state_is_sent_once_to_each_host_that_lacks_it() -> None:
    assert SENDING.actions == (SendState(1, SOURCE),)
    assert SENT.due == TimeLimits().repeat
    with_two = SENT.with_worker(3, WorkerRecord(Phase.JOINING, host=1, started_at=2.0))
    with_two = replace(with_two, size=JobSize.of(4, 1, 0))
    again = decide(with_two, JoinRequested(3, whole=True), 3.0)
    assert again.actions == ()
    assert again.state.lacking == (2, 3)
    begun = decide(again.state, StateArrived(1, 1), 4.0).state
    assert begun.view.workers == (0, 1, 2, 3)
    assert begun.admission == Admission()
    # A replacement on a host that it has not reached needs it again.
    waiting = decide(replace(SENT, size=JobSize.of(3, 3, 0)), StateArrived(1, 1, "lost"), 4.0).state
    assert waiting.admission.source
    replaced = waiting.with_worker(3, WorkerRecord(Phase.JOINING, host=1, started_at=4.0))
    assert decide(replaced, JoinRequested(3, whole=True), 5.0).actions == (SendState(1, SOURCE),)
    # Other hosts still receive it.
    other = with_two.with_worker(3, replace(with_two.workers[3], host=2))
    other = decide(other, JoinRequested(3, whole=True), 3.0).state
    failed = decide(other, StateArrived(1, 1, "lost"), 4.0)
    assert failed.state.lacking == (3,)
    assert failed.actions == (ShowMessage("worker 2 cannot join: lost"), KillWorker(2))


def test_the_newest_report_on_a_moving_state_counts() -> None:
    state = SENT
    for event in (
        StateMoving(1, 1, 600_000_000, 4_000_000_000, 6.0),
        StateMoving(1, 1, 1_200_000_000, 4_000_000_000, 8.0),
        # Of another view.
        StateMoving(1, 0, 9, 9, 9.0),
    ):
        state = decide(state, event, 4.0).state
    assert state.admission.moved == ((1, "1.2 of 4.0 GB, 150 MB/s"),)
    assert decide(state, StateArrived(1, 1), 5.0).state.admission.moved == ()


@pytest.mark.parametrize(
    ("state", "workers", "reason"),
    [
        (ELASTIC, 3, ""),
        (ELASTIC, 5, "5 workers cannot share 4 replicas"),
        (replace(ELASTIC, size=JobSize.of(2, 2, 0)), 1, "with fewer than 2 workers training would wait"),
        (replace(ELASTIC, size=JobSize(2, by_hand=True)), 2, ""),
        (replace(ELASTIC, size=JobSize(2, by_hand=True)), 3, "the workers of this job are started by hand"),
        (replace(ELASTIC, elastic=False), 3, "the script has created no strategy and compiled no model yet"),
        (at_stage(ELASTIC, Stage.LOOKING), 3, "a worker seems to be stuck"),
        (at_stage(ELASTIC, Stage.SAVING), 3, "the job is ending"),
        (ELASTIC.with_phase(Phase.FINISHED, 1), 3, "the job is ending"),
    ],
)
def test_an_impossible_number_of_workers_is_refused_with_the_reason(
    state: State, workers: int, reason: str
) -> None:
    assert refusal(state, workers).startswith(reason)
    assert bool(refusal(state, workers)) == bool(reason)


def test_a_notice_comes_once_per_late_worker_and_interval() -> None:
    texts, state = [], THREE
    for now in range(1, 31):
        for worker in (0, 1):
            decision = decide(state, WaitReported(worker, "step 4", (2,), float(now)), float(now))
            state = decision.state
            texts += [action.text for action in decision.actions if isinstance(action, ShowMessage)]
    assert texts == [f"worker 0 has waited {now} s for worker 2 in step 4" for now in (10, 20, 30)]


def test_an_early_exit_needs_two_waits_in_a_row_for_the_ended_worker() -> None:
    state = THREE.with_phase(Phase.LOST, 1)
    for workers in [(1,), (2,), (1,)]:
        decision = decide(state, WaitReported(0, "barrier", workers, 1.0), 1.0)
        state = decision.state
        assert decision.actions == ()
    assert decide(state, WaitReported(0, "barrier", (1,), 1.5), 1.5).state.stage is Stage.ENDING


def test_a_broken_view_is_followed_by_one_with_the_same_members() -> None:
    """Each costs a restart. The other members report the same view too, which changes nothing."""
    decision = decide(ELASTIC, ViewBroken(1, 1, "lost the connection to node2"), 5.0)
    assert decision.state.view == place(4, (0, 1), 2)
    assert decision.state.size.restarts_left == 0
    text = "worker 1: lost the connection to node2; workers 0 and 1 continue"
    assert decision.actions[0] == decision.state.start_view(text)
    again = decide(decision.state, ViewBroken(0, 1, "lost the connection to node1"), 5.1)
    assert (again.state, again.actions) == (decision.state, ())
    fatal = decide(decision.state, ViewBroken(0, 2, "node1 cannot reach node2", fatal=True), 6.0)
    assert fatal.state.shutdown.outcome == JobOutcome(1, "worker 0: node1 cannot reach node2")
    last = decide(decision.state, ViewBroken(0, 2, "lost it again"), 6.0)
    assert last.state.shutdown.outcome == JobOutcome(
        1, "worker 0: lost it again; no restart is left (--max-restarts 1)"
    )


def test_a_worker_that_cannot_start_counts_as_one_that_exited() -> None:
    cancelled, exited = StartCancelled(1, 15), WorkerExited(1, -15)
    assert decide(ELASTIC, cancelled, 5.0) == decide(ELASTIC, exited, 5.0)
    failed, exited = StartFailed(1, True, "no processes"), WorkerExited(1, 1)
    assert decide(ELASTIC, failed, 5.0) == decide(ELASTIC, exited, 5.0)


def test_a_host_without_a_gpu_gets_no_other_worker() -> None:
    """It costs no restart. Another host gets the worker if it has room; otherwise the job wants one less."""
    lost = decide(ELASTIC, WorkerExited(1, -6, "GPU 1: it has fallen off the bus"), 5.0)
    text = "worker 1 was killed by SIGABRT, GPU 1: it has fallen off the bus; worker 0 continues"
    assert ShowMessage(text) in lost.actions
    assert lost.actions[-1] == StartWorker(2, joins=True)
    failed = StartFailed(2, True, "no other GPU is free", recurs=True)
    alone = decide(lost.state, failed, 5.1)
    assert alone.actions == ()
    assert (alone.state.size.wanted, alone.state.slots) == (1, (1,))
    assert alone.state.size.restarts_left == lost.state.size.restarts_left
    assert decide(alone.state, DeadlinePassed(), 500.0).actions == ()
    roomy = decide(lost.state, HostJoined("node2", 1, 2), 5.05).state
    assert decide(roomy, failed, 5.1).actions == (StartWorker(3, joins=True),)
    # A joiner that is not needed any more changes nothing, and an end does not wait for it.
    dropped = decide(lost.state, ScaleRequest(1), 5.05).state
    assert decide(dropped, failed, 5.1).state.slots == dropped.slots
    stopped = decide(lost.state, StopRequested(15), 5.05).state
    ended = decide(stopped, WorkerExited(0, -15), 5.06).state
    assert decide(ended, failed, 5.1).state.stage is Stage.FINISHED


def test_a_stop_that_has_waited_has_the_rest_of_the_grace_period() -> None:
    """The command kills the coordinator a few seconds after this period, which begins with the signal."""
    saves = replace(WAITING, keeps=True)
    for waited, left in ((0.0, 20.0), (19.0, 1.0), (30.0, 0.0)):
        decision = decide(saves, StopRequested(15, waited), 50.0)
        assert decision.state.shutdown.deadline == 50.0 + left
        assert f"waiting up to {left:g} s for the step" in decision.reason


def test_a_job_that_cannot_start_all_workers_ends_at_once() -> None:
    decision = decide(TWO, StartFailed(0, False, "no processes"), 0.0)
    assert decision.actions == (FinishJob(JobOutcome(1, "cannot start worker 0: no processes")),)


@pytest.mark.parametrize(
    "state",
    [
        replace(ELASTIC, admission=Admission(source=SOURCE)),
        replace(ELASTIC, shutdown=Shutdown(deadline=9.0)),
        replace(ENDING, elastic=True),
    ],
)
def test_a_view_that_is_about_to_end_is_not_broken(state: State) -> None:
    assert decide(state, ViewBroken(0, state.view.number, "lost the connection"), 5.0).actions == ()


workers = st.integers(0, 2)
events = st.one_of(
    st.builds(ViewBroken, workers, st.integers(1, 3), st.just("lost"), st.booleans()),
    st.builds(WorkerExited, workers, st.sampled_from([0, 0, 1, 3, -9])),
    st.builds(ScriptEnded, workers, st.just(0)),
    st.builds(failure, workers, st.just(1), st.just("E"), st.booleans()),
    st.builds(
        WaitReported, workers, st.just("step"), st.lists(workers, min_size=1).map(tuple), st.floats(0, 20)
    ),
    st.builds(StopRequested, st.sampled_from([2, 15])),
    st.builds(LastStepEnded, st.just(3)),
    st.builds(CheckpointWritten, st.just("kept/step"), st.just(3), st.just(0.1)),
    st.builds(CheckpointFailed, st.just("the disk is full")),
    st.just(DeadlinePassed()),
)
others = st.integers(0, 9)
changes = st.one_of(
    st.builds(JoinRequested, others, st.booleans()),
    st.builds(
        state_given,
        st.integers(1, 6),
        st.booleans(),
        st.sampled_from(["", "", "no memory"]),
        st.integers(0, 1),
    ),
    st.builds(StateArrived, st.integers(0, 1), st.integers(1, 6), st.sampled_from(["", "", "lost"])),
    st.builds(StateMoving, st.integers(0, 1), st.integers(1, 6), others, others, st.floats(0, 9)),
    st.builds(PositionMissed, others, st.integers(1, 6), st.just("lost")),
    st.builds(ScaleRequest, st.integers(1, 6)),
    st.builds(insisting, st.sampled_from([(0, 1), (1, 2), (0, 2)])),
    st.builds(WorkerExited, others, st.sampled_from([1, -9])),
    st.builds(failure, others, st.just(1), st.just("E"), st.just(False)),
    st.builds(ViewRefused, st.integers(1, 6), st.just("no memory")),
    st.builds(HostRetires, st.integers(0, 3), st.just("host b retires")),
    st.builds(HostGone, st.integers(0, 3), st.just("was lost")),
    st.builds(HostStopped, st.integers(0, 3), st.just(2)),
    st.builds(HostsHeard, st.dictionaries(st.integers(0, 3), st.floats(0, 200))),
    st.builds(HostJoined, st.just("c"), st.integers(1, 3), st.integers(1, 4)),
)
states = st.builds(
    lambda size, keeps: replace(
        State.of(place_on_hosts(5, ((0, 1), (2,))), TimeLimits(timeout=10), size, keeps=keeps), elastic=True
    ),
    st.builds(JobSize.of, st.just(3), st.integers(1, 3), st.integers(0, 3)),
    st.booleans(),
)


def is_possible(state: State, event: Event) -> bool:
    """Return whether `event` is possible in `state`."""
    if isinstance(event, WorkerExited | ScriptEnded | FailureReport | WaitReported | JoinRequested):
        return event.worker in state.running
    if isinstance(event, PositionMissed):
        return event.worker in state.workers
    if isinstance(event, HostGone | HostStopped | HostRetires):
        known = event.host < len(state.slots)
        return known and (event.host not in state.lost_hosts or isinstance(event, HostRetires))
    if isinstance(event, HostsHeard):
        return set(event.at) <= set(range(len(state.slots))) - state.lost_hosts
    if isinstance(event, ViewRefused):
        return state.stage is Stage.RUNNING
    return not isinstance(event, ScaleRequest) or not refusal(state, event.workers)


FOLLOWS = {
    Phase.JOIN_FAILED: {Phase.LEAVING, Phase.LOST},
    Phase.MEMBER: {Phase.LEAVING, Phase.FINISHED, Phase.LOST},
    Phase.LEAVING: {Phase.LEFT},
    Phase.FINISHED: set[Phase](),
    Phase.LEFT: set[Phase](),
    Phase.LOST: set[Phase](),
}


def check(before: State, actions: tuple[Action, ...], after: State) -> None:
    for action in actions:
        match action:
            case SignalWorker(worker, _) | KillWorker(worker) | DumpStack(worker) | SendPosition(worker):
                assert worker in before.running
            case StartWorker(worker):
                assert worker not in before.workers
                assert worker in after.running
            case StartView(number):
                assert number == before.view.number + 1
                assert set(action.workers) <= after.present
            case FinishJob():
                assert action is actions[-1]
    for worker, record in before.workers.items():
        assert after.workers[worker].phase in FOLLOWS.get(record.phase, set(Phase)) | {record.phase}


def play(state: State, timed_events: list[tuple[float, Event]]) -> None:
    """Run the events of a job; then time passes, which alone ends a job that has begun to end."""
    now, finishes, aborts = 0.0, 0, 0
    for passed, event in [*timed_events, *[(30.0, DeadlinePassed())] * 8]:
        now += passed
        if not is_possible(state, event):
            continue
        decision = decide(state, event, now)
        check(state, decision.actions, decision.state)
        finishes += sum(isinstance(action, FinishJob) for action in decision.actions)
        aborts += sum(isinstance(action, AbortExchange) for action in decision.actions)
        if state.stage not in (Stage.RUNNING, Stage.LOOKING):
            assert decision.state.shutdown.outcome == state.shutdown.outcome
        state = decision.state
    assert aborts <= 1
    assert finishes == (state.stage is Stage.FINISHED)
    assert (state.stage is Stage.FINISHED) == (state.shutdown.outcome is not None)
    if state.elastic and state.stage is Stage.RUNNING and not state.running.intersection(state.failures):
        assert state.admission.source or not state.within(Phase.LOST).intersection(state.members)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), events), max_size=30))
def test_any_events_end_the_job_once_and_no_action_concerns_ended_workers(
    timed_events: list[tuple[float, Event]],
) -> None:
    play(replace(THREE, limits=TimeLimits(timeout=10)), timed_events)


@settings(deadline=None)
@given(states, st.lists(st.tuples(st.floats(0, 5), st.one_of(events, changes)), max_size=40))
def test_any_changes_of_the_membership_end_the_job_once(
    state: State, timed_events: list[tuple[float, Event]]
) -> None:
    play(state, timed_events)


def test_a_worker_that_a_user_starts_joins_on_its_host() -> None:
    """Also if another host lacks more workers."""
    state = State.of(place_on_hosts(3, ((0, 1), (2,))), TimeLimits(), JobSize(1, by_hand=True))
    state = replace(state, elastic=True).with_phase(Phase.LOST, 1, 2)
    for host in (1, 0):
        state = decide(state, WorkerArrived(host), 8.0).state
    assert [state.workers[worker].host for worker in (3, 4)] == [1, 0]


SERVED = replace(
    State.of(
        place(5, (0, 1, 2, 3, 4)),
        TimeLimits(),
        JobSize.of(5, 1, 3),
        vital=frozenset({0}),
        servers=frozenset({3, 4}),
    ),
    elastic=True,
)
"""A job with a chief, two workers and two parameter servers."""


def test_a_job_with_parameter_servers_replaces_a_lost_worker() -> None:
    decision = decide(SERVED, WorkerExited(2, -9), 9.0)
    assert decision.state.stage is Stage.RUNNING
    assert [action.worker for action in decision.actions if isinstance(action, StartWorker)] == [5]
    assert [action.workers for action in decision.actions if isinstance(action, StartView)] == [(0, 1, 3, 4)]


def test_a_job_with_parameter_servers_replaces_no_lost_server() -> None:
    decision = decide(SERVED, WorkerExited(3, -9), 9.0)
    assert decision.state.stage is Stage.RUNNING
    assert decision.reason == (
        "worker 3 was killed by SIGKILL; a lost parameter server is not replaced; workers 0, 1, 2 and 4 "
        "continue"
    )
    assert [action for action in decision.actions if isinstance(action, StartWorker)] == []
    decision = decide(decision.state, WorkerExited(1, -9), 10.0)
    assert [action.worker for action in decision.actions if isinstance(action, StartWorker)] == [5]


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_job_with_parameter_servers_tells_what_follows_from_each_loss(order: tuple[int, int]) -> None:
    """A worker and a server that raise one soon after the other, where lost workers are not replaced."""
    state, told = replace(SERVED, size=JobSize.of(5, 1, 0)), []
    events: list[Event] = [
        failure(worker, 1, "ValueError: no", blames=False, prints=True) for worker in order
    ]
    events += [WorkerExited(worker, 1) for worker in order]
    for event, now in zip([*events, DeadlinePassed()], (9.0, 9.0, 9.1, 9.2, 10.5), strict=True):
        decision = decide(state, event, now)
        state = decision.state
        told += [action.text for action in decision.actions if isinstance(action, ShowMessage)]
    whole = "; ".join(told)
    assert whole.count("lost workers are not replaced (--max-restarts 0)") == 1, whole
    assert whole.count("a lost parameter server is not replaced") == 1, whole


def test_the_processes_of_a_job_with_parameter_servers_stay_on_a_host_that_retires() -> None:
    state = replace(SERVED, view=place_on_hosts(5, ((0, 1), (2, 3, 4)))).with_slots(5)
    for worker in (2, 3, 4):
        state = state.with_worker(worker, replace(state.workers[worker], host=1))
    decision = decide(state, HostRetires(1, "host b retires"), 9.0)
    assert decision.reason == "host b retires; its workers belong to a job with parameter servers, and stay"
    assert decision.actions == ()


def test_a_job_with_parameter_servers_continues_without_a_host_of_workers_only() -> None:
    hosts = place_on_hosts(5, ((0, 1), (2,), (3, 4)))
    names = ("a", "b", "c")
    state = State.of(hosts, TimeLimits(), JobSize.of(5, 1, 3), names=names, vital=frozenset({0, 3, 4}))
    state = replace(state, elastic=True)
    decision = decide(state, HostGone(1, "has been silent for 5 s"), 9.0)
    assert decision.state.stage is Stage.RUNNING
    assert [action for action in decision.actions if isinstance(action, StartWorker)] == []
    assert "others start when a host joins" in decision.reason
    joined = decide(decision.state, HostJoined("d", 1, 2), 9.5)
    assert [action.worker for action in joined.actions if isinstance(action, StartWorker)] == [5]
    decision = decide(state, HostGone(2, "has been silent for 5 s"), 9.0)
    assert decision.state.stage is Stage.ENDING
    assert decision.state.shutdown.outcome is not None
    assert decision.state.shutdown.outcome.message == (
        "host c has been silent for 5 s; lost workers 3 and 4; the job cannot continue without workers 3 "
        "and 4"
    )


@pytest.mark.parametrize("worker", [0, 3, 4])
def test_a_job_with_parameter_servers_ends_with_a_process_that_it_cannot_lose(worker: int) -> None:
    served = replace(SERVED, vital=frozenset({0, 3, 4}))
    state = decide(served, WorkerExited(worker, -9), 9.0).state
    assert state.stage is Stage.ENDING
    assert state.shutdown.outcome is not None
    assert state.shutdown.outcome.message == f"worker {worker} was killed by SIGKILL"
    failed = decide(served, failure(worker, 1, "ValueError", blames=False, prints=True), 9.0).state
    assert failed.stage is Stage.ENDING


@pytest.mark.parametrize("blaming", [(0, 3, 4), (0,)])
def test_a_job_whose_members_end_because_all_workers_have_failed_ends(blaming: tuple[int, ...]) -> None:
    """No worker that would replace one of them could learn where the training is."""
    state, shown = replace(SERVED, vital=frozenset({0})), list[str]()
    events: list[tuple[float, Event]] = [
        (9.0, failure(worker, 1, "ModelError: no", blames=False, prints=True)) for worker in (2, 1)
    ]
    events += [(10.0, DeadlinePassed())]
    events += [(10.1, failure(worker, 1, "no worker", blames=True, prints=False)) for worker in blaming]
    events += [(10.2, WorkerExited(2, -9)), (10.2, WorkerExited(1, -9)), (11.1, DeadlinePassed())]
    for now, event in events:
        decision = decide(state, event, now)
        state = decision.state
        shown += [type(action).__name__ for action in decision.actions]
    assert "StartView" not in shown
    assert state.stage is Stage.ENDING
    assert state.shutdown.outcome is not None
    assert state.shutdown.outcome.message == "worker 2 exited with status 1: ModelError: no"
    for worker in (0, 3, 4):
        state = decide(state, WorkerExited(worker, 1), 11.2).state
    assert state.stage is Stage.FINISHED


def test_a_chief_that_blames_a_worker_counts_more_than_a_server_that_blames_the_chief() -> None:
    state = SERVED
    for worker, summary in ((3, "the chief has ended"), (0, "worker 2 is stuck"), (4, "the chief has ended")):
        state = decide(state, failure(worker, 1, summary, blames=True, prints=False), 9.0).state
    assert state.shutdown.suspect is not None
    assert state.shutdown.suspect.message == "worker 0: worker 2 is stuck"


def test_a_job_with_parameter_servers_keeps_its_size() -> None:
    assert refusal(SERVED, 4) == "a job with parameter servers keeps its number of workers"
