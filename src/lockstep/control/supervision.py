"""What to do when something happens to a worker. Pure: (state, event, now) -> (state, actions, reason).

A job is RUNNING until something decides its end, its `Verdict`. Then the workers get, in this order and
each only if they still run: the abort of their exchange, SIGTERM, SIGKILL. The first failure decides
the status; what follows from it (`PeerLostError` in the others) never does.
"""

import signal
from dataclasses import dataclass, field, replace
from enum import Enum, auto


class Stage(Enum):
    """How far the end of the job has come."""

    RUNNING = auto()
    LOOKING = auto()
    ENDING = auto()
    TERMINATING = auto()
    KILLING = auto()
    FINISHED = auto()


class Evidence(Enum):
    """What a message about a worker should show."""

    NONE = auto()
    LOG = auto()
    STACK = auto()


@dataclass(frozen=True)
class Limits:
    """Seconds that supervision gives.

    Attributes:
        timeout: to a worker that others wait for.
        blame: to the cause of an error that blames another worker, to show itself.
        look: to a stuck worker, to write its stack.
        abort: to workers that hear of the abort, until SIGTERM.
        term: to workers that got SIGTERM or the person's own signal, until SIGKILL.
        kill: to workers that got SIGKILL, until the job ends without them.
        notice: between two notices that one worker waits for another.
    """

    timeout: float = 600.0
    blame: float = 1.0
    look: float = 0.5
    abort: float = 3.0
    term: float = 3.0
    kill: float = 1.0
    notice: float = 10.0


@dataclass(frozen=True)
class Exited:
    """A worker's process ended; `status` is negative for a signal."""

    worker: int
    status: int


@dataclass(frozen=True)
class Failed:
    """A worker's script raised; `blames` if only because of another worker."""

    worker: int
    status: int
    summary: str
    blames: bool


@dataclass(frozen=True)
class Waits:
    """A worker has waited for `seconds` in `what` for `workers`."""

    worker: int
    what: str
    workers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class StopAsked:
    """A person or a scheduler wants the job to end."""

    signal: int


@dataclass(frozen=True)
class TimePassed:
    """The deadline of the state has come."""


Event = Exited | Failed | Waits | StopAsked | TimePassed


@dataclass(frozen=True)
class Abort:
    """End the exchange between the workers."""

    reason: str


@dataclass(frozen=True)
class Signal:
    """Send `signal` to the main process of a worker."""

    worker: int
    signal: int


@dataclass(frozen=True)
class Kill:
    """Kill the main process of a worker."""

    worker: int


@dataclass(frozen=True)
class DumpStack:
    """Ask a worker for its Python stack."""

    worker: int


@dataclass(frozen=True)
class Notice:
    """Tell the person."""

    text: str


@dataclass(frozen=True)
class Verdict:
    """How the job ends.

    Attributes:
        status: the exit status of the job.
        message: why, in one line; empty if all went well.
        workers: whose evidence to show.
        evidence: which.
    """

    status: int
    message: str = ""
    workers: tuple[int, ...] = ()
    evidence: Evidence = Evidence.NONE


@dataclass(frozen=True)
class Finish:
    """Kill what is left, tell the person, end with the verdict's status."""

    verdict: Verdict


Action = Abort | Signal | Kill | DumpStack | Notice | Finish


@dataclass(frozen=True)
class State:
    """What supervision remembers.

    Attributes:
        running: ids of the workers whose process lives.
        limits: the seconds it gives.
        stage: how far the end of the job has come.
        verdict: how the job ends, once decided.
        suspect: the verdict if no cause shows itself.
        blaming: workers whose own failure only blames another worker.
        deserted: workers that have said once that they wait for one that ended well.
        deadline: when `TimePassed` is due.
        noticed: when each set of late workers was last told of.
    """

    running: frozenset[int]
    limits: Limits = field(default_factory=Limits)
    stage: Stage = Stage.RUNNING
    verdict: Verdict | None = None
    suspect: Verdict | None = None
    blaming: frozenset[int] = frozenset()
    deserted: frozenset[int] = frozenset()
    deadline: float | None = None
    noticed: tuple[tuple[tuple[int, ...], float], ...] = ()


@dataclass(frozen=True)
class Decision:
    """The next state, what to do now, and why."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""


def decide(state: State, event: Event, now: float) -> Decision:
    """Return what follows from `event` at time `now`."""
    if state.stage is Stage.FINISHED:
        return Decision(state, reason="the job has ended")
    match event:
        case Exited():
            return _exited(state, event, now)
        case Failed():
            return _failed(state, event, now)
        case Waits():
            return _waits(state, event, now)
        case StopAsked():
            return _stop_asked(state, event, now)
        case TimePassed():
            return _time_passed(state, now)


def shell_status(status: int) -> int:
    """Return the exit status a shell shows: 128 + N for signal N."""
    return 128 - status if status < 0 else status


def describe_exit(status: int) -> str:
    """Say how a process ended; `status` is negative for a signal."""
    return f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"


def signal_name(number: int) -> str:
    """Return a name such as SIGTERM."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def name_workers(workers: tuple[int, ...]) -> str:
    """Return "worker 3", "workers 1 and 2", "workers 0, 1 and 2"."""
    names = [str(worker) for worker in workers]
    if len(names) == 1:
        return f"worker {names[0]}"
    return f"workers {', '.join(names[:-1])} and {names[-1]}"


def _exited(state: State, event: Exited, now: float) -> Decision:
    state = replace(state, running=state.running - {event.worker})
    how = f"worker {event.worker} {describe_exit(event.status)}"
    if state.stage is Stage.RUNNING and event.status != 0 and event.worker not in state.blaming:
        verdict = Verdict(shell_status(event.status), how, (event.worker,), Evidence.LOG)
        return _end(state, verdict, now)
    if not state.running:
        return _finish(state, f"{how}; no worker is left")
    return Decision(state, reason=how)


def _failed(state: State, event: Failed, now: float) -> Decision:
    message = f"worker {event.worker} ended with status {event.status}: {event.summary}"
    verdict = Verdict(event.status, message, (event.worker,), Evidence.LOG)
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason=f"{message}; the job is ending already")
    if not event.blames:
        return _end(state, verdict, now)
    state = replace(state, blaming=state.blaming | {event.worker})
    if state.suspect is None:
        state = replace(state, suspect=verdict, deadline=now + state.limits.blame)
    return Decision(state, reason=f"{message}; its cause should show itself")


def _waits(state: State, event: Waits, now: float) -> Decision:
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason="the job is ending already")
    gone = tuple(worker for worker in event.workers if worker not in state.running)
    late = tuple(worker for worker in event.workers if worker in state.running)
    if gone:
        return _deserted(state, event, gone, now)
    state = replace(state, deserted=state.deserted - {event.worker})
    if late and event.seconds >= state.limits.timeout:
        return _stuck(state, event, late, now)
    return _notice(state, event, late, now)


def _deserted(state: State, event: Waits, gone: tuple[int, ...], now: float) -> Decision:
    if event.worker not in state.deserted:
        # The report may have been sent just before the last worker arrived; a second one cannot.
        again = replace(state, deserted=state.deserted | {event.worker})
        return Decision(again, reason=f"worker {event.worker} may wait in vain; the next report tells")
    message = f"{name_workers(gone)} ended with status 0 while worker {event.worker} waited for "
    message += f"{'it' if len(gone) == 1 else 'them'} in {event.what}"
    return _end(state, Verdict(1, message, gone, Evidence.LOG), now)


def _stuck(state: State, event: Waits, late: tuple[int, ...], now: float) -> Decision:
    message = f"{name_workers(late)} did not arrive in {event.what}: worker {event.worker} has waited "
    message += f"{event.seconds:.0f} s (--timeout {state.limits.timeout:g})"
    verdict = Verdict(1, message, late, Evidence.STACK)
    deadline = now + state.limits.look
    state = replace(state, stage=Stage.LOOKING, verdict=verdict, deadline=deadline)
    return Decision(state, tuple(DumpStack(worker) for worker in late), message)


def _notice(state: State, event: Waits, late: tuple[int, ...], now: float) -> Decision:
    last = dict(state.noticed).get(late, now - state.limits.notice)
    text = f"worker {event.worker} has waited {event.seconds:.0f} s for {name_workers(late)} in {event.what}"
    if event.seconds < state.limits.notice or now - last < state.limits.notice:
        return Decision(state, reason=text)
    noticed = dict(state.noticed) | {late: now}
    return Decision(replace(state, noticed=tuple(noticed.items())), (Notice(text),), text)


def _stop_asked(state: State, event: StopAsked, now: float) -> Decision:
    name = signal_name(event.signal)
    if state.stage in (Stage.TERMINATING, Stage.KILLING):
        return _kill(state, now, f"{name} came again")
    verdict = state.verdict or Verdict(128 + event.signal, f"stopped by {name}")
    state = replace(state, verdict=verdict)
    return _signal_all(state, event.signal, now, f"{name}: every worker gets it")


def _time_passed(state: State, now: float) -> Decision:
    if state.deadline is None or now < state.deadline:
        return Decision(state, reason="nothing is due")
    match state.stage:
        case Stage.RUNNING if state.suspect:
            return _end(state, state.suspect, now)
        case Stage.LOOKING if state.verdict:
            return _end_stuck(state, state.verdict, now)
        case Stage.ENDING:
            return _terminate(state, now)
        case Stage.TERMINATING:
            return _kill(state, now, "some workers did not end after the signal")
        case _:
            return _finish(state, "some workers cannot be ended")


def _end(state: State, verdict: Verdict, now: float) -> Decision:
    state = replace(state, stage=Stage.ENDING, verdict=verdict, deadline=now + state.limits.abort)
    if not state.running:
        return _finish(state, verdict.message)
    return Decision(state, (Abort(verdict.message),), verdict.message)


def _end_stuck(state: State, verdict: Verdict, now: float) -> Decision:
    # Who is stuck hears no abort.
    decision = _end(state, verdict, now)
    stuck = sorted(state.running.intersection(verdict.workers))
    return replace(
        decision, actions=decision.actions + tuple(Signal(worker, signal.SIGTERM) for worker in stuck)
    )


def _terminate(state: State, now: float) -> Decision:
    decision = _signal_all(state, signal.SIGTERM, now, "some workers did not end after the abort")
    # Who was stuck has had SIGTERM already.
    told = state.verdict.workers if state.verdict and state.verdict.evidence is Evidence.STACK else ()
    actions = tuple(
        Kill(a.worker) if isinstance(a, Signal) and a.worker in told else a for a in decision.actions
    )
    return replace(decision, actions=actions)


def _signal_all(state: State, number: int, now: float, reason: str) -> Decision:
    state = replace(state, stage=Stage.TERMINATING, deadline=now + state.limits.term)
    return Decision(state, tuple(Signal(worker, number) for worker in sorted(state.running)), reason)


def _kill(state: State, now: float, reason: str) -> Decision:
    state = replace(state, stage=Stage.KILLING, deadline=now + state.limits.kill)
    return Decision(state, tuple(Kill(worker) for worker in sorted(state.running)), reason)


def _finish(state: State, reason: str) -> Decision:
    verdict = state.verdict or state.suspect or Verdict(0)
    state = replace(state, stage=Stage.FINISHED, verdict=verdict, deadline=None)
    return Decision(state, (Finish(verdict),), reason)
