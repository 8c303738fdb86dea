"""What to do when something happens to a worker. Pure: (state, event, now) -> (state, actions, reason).

A job is RUNNING until something decides its end, its `Verdict`. Then the workers get, in this order and
each only if they still run: the abort of their exchange, SIGTERM, SIGKILL. The first failure decides
the status; what follows from it (`PeerLostError` in the others) never does.

Once a worker has made a strategy the job is elastic: a worker that is lost is left behind in a new view,
whose members compute its replicas too. A script that raises is given a moment to raise on all workers.
"""

import signal
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from lockstep.control.decisions import (
    Abort,
    Action,
    DumpStack,
    Event,
    Evidence,
    Exited,
    Failed,
    Finish,
    Joined,
    Kill,
    Notice,
    Renew,
    Signal,
    StopAsked,
    TimePassed,
    Unfit,
    Verdict,
    Waits,
)
from lockstep.topology import View, place


class Stage(Enum):
    """How far the end of the job has come."""

    RUNNING = auto()
    LOOKING = auto()
    SAVING = auto()
    ENDING = auto()
    TERMINATING = auto()
    KILLING = auto()
    FINISHED = auto()


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
        save: to the chief, to keep a checkpoint before the job is stopped.
        notice: between two notices that one worker waits for another.
    """

    timeout: float = 600.0
    blame: float = 1.0
    look: float = 0.5
    abort: float = 3.0
    term: float = 3.0
    kill: float = 1.0
    save: float = 20.0
    notice: float = 10.0


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
        view: who computes what.
        elastic: whether the job can go on without a worker.
        keeps: whether the job keeps checkpoints.
        failed: what each worker whose script raised ended with, the first one first.
        finished: workers that ended well.
        condemned: stuck workers that were killed, whose end has not been seen yet.
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
    view: View | None = None
    elastic: bool = False
    keeps: bool = False
    failed: tuple[tuple[int, Verdict], ...] = ()
    finished: frozenset[int] = frozenset()
    condemned: frozenset[int] = frozenset()
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
        case Joined():
            joined = replace(state, elastic=state.view is not None)
            return Decision(joined, reason=f"worker {event.worker} has joined")
        case Waits():
            return _waits(state, event, now)
        case Unfit():
            return _end(state, Verdict(1, event.reason), now)
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
    if event.status == 0:
        state = replace(state, finished=state.finished | {event.worker})
    elif state.elastic and state.stage in (Stage.RUNNING, Stage.LOOKING) and not _blames(state, event):
        return _lost(_running(state), event, how)
    elif state.stage is Stage.RUNNING and not _blames(state, event):
        verdict = Verdict(shell_status(event.status), how, (event.worker,), Evidence.LOG)
        return _end(state, verdict, now)
    if not state.running:
        return _finish(state, f"{how}; no worker is left")
    if state.stage is Stage.SAVING:
        if _savers(state):
            # The chief needs whoever is left to come to the end of its step.
            return _renew(state, how)
        return _signal_all(state, signal.SIGTERM, now, f"{how}; every other worker gets SIGTERM")
    return Decision(state, reason=how)


def _blames(state: State, event: Exited) -> bool:
    return event.worker in state.blaming


def _running(state: State) -> State:
    """Forget who was stuck: whoever is waited for now may be another."""
    if state.stage is Stage.RUNNING:
        return state
    return replace(state, stage=Stage.RUNNING, verdict=None, deadline=None)


def _lost(state: State, event: Exited, how: str) -> Decision:
    """Go on without a worker, if there is anybody to go on."""
    failures = dict(state.failed)
    if not state.running:
        if state.finished:
            return _finish(replace(state, verdict=Verdict(0)), f"{how}; others had ended well")
        lost = Verdict(shell_status(event.status), how, (event.worker,), Evidence.LOG)
        verdict = state.failed[0][1] if state.failed else lost
        return _finish(replace(state, verdict=verdict), f"{how}; no worker is left")
    if event.worker in failures:
        if state.deadline is not None:
            return Decision(state, reason=f"{how}; perhaps the others fail too")
        how = failures[event.worker].message
    return _renew(state, how)


def _renew(state: State, how: str) -> Decision:
    """Begin a view of those members that still run and have not failed."""
    assert state.view is not None
    failures = dict(state.failed)
    staying = tuple(
        worker for worker in state.view.workers if worker in state.running and worker not in failures
    )
    if not staying:
        return Decision(state, reason=f"{how}; nobody is left to go on")
    view = place(state.view.replicas, staying, state.view.number + 1)
    reason = f"{how}; {name_workers(staying)} {'goes' if len(staying) == 1 else 'go'} on (view {view.number})"
    return Decision(replace(state, view=view), (Renew(view, reason), Notice(reason)), reason)


def _failed(state: State, event: Failed, now: float) -> Decision:
    message = f"worker {event.worker} ended with status {event.status}: {event.summary}"
    verdict = Verdict(event.status, message, (event.worker,), Evidence.LOG)
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason=f"{message}; the job is ending already")
    if not event.blames and not state.elastic:
        return _end(state, verdict, now)
    if not event.blames:
        deadline = now + state.limits.blame if state.deadline is None else state.deadline
        state = replace(state, failed=(*state.failed, (event.worker, verdict)), deadline=deadline)
        return Decision(state, reason=f"{message}; perhaps the others fail too")
    state = replace(state, blaming=state.blaming | {event.worker})
    if state.suspect is None:
        state = replace(state, suspect=verdict, deadline=now + state.limits.blame)
    return Decision(state, reason=f"{message}; its cause should show itself")


def _waits(state: State, event: Waits, now: float) -> Decision:
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason="the job is ending already")
    gone = tuple(worker for worker in event.workers if worker not in state.running)
    if state.elastic:
        # Who is lost is left behind in the next view, of which the worker has not heard yet.
        gone = tuple(worker for worker in gone if worker in state.finished)
    late = tuple(worker for worker in event.workers if worker in state.running - state.condemned)
    if gone:
        return _deserted(state, event, gone, now)
    if not late:
        return Decision(state, reason=f"whom worker {event.worker} waits for is about to be left behind")
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
    saves = event.signal == signal.SIGTERM and state.keeps and state.elastic and state.stage is Stage.RUNNING
    state = replace(state, verdict=verdict)
    if saves and (chief := _savers(state)):
        state = replace(state, stage=Stage.SAVING, deadline=now + state.limits.save)
        return Decision(
            state, (Signal(chief[0], event.signal),), f"{name}: the chief keeps a checkpoint first"
        )
    return _signal_all(state, event.signal, now, f"{name}: every worker gets it")


def _savers(state: State) -> tuple[int, ...]:
    """Return the chief, if it runs."""
    assert state.view is not None
    return (state.view.chief,) if state.view.chief in state.running else ()


def _time_passed(state: State, now: float) -> Decision:
    if state.deadline is None or now < state.deadline:
        return Decision(state, reason="nothing is due")
    match state.stage:
        case Stage.RUNNING if state.failed:
            return _leave_failed(state)
        case Stage.RUNNING if state.suspect:
            return _end(state, state.suspect, now)
        case Stage.LOOKING if state.verdict and state.elastic and state.running - set(state.verdict.workers):
            return _leave_stuck(state, state.verdict)
        case Stage.LOOKING if state.verdict:
            return _end_stuck(state, state.verdict, now)
        case Stage.SAVING:
            return _signal_all(state, signal.SIGTERM, now, "the chief has not kept a checkpoint in time")
        case Stage.ENDING:
            return _terminate(state, now)
        case Stage.TERMINATING:
            return _kill(state, now, "some workers did not end after the signal")
        case _:
            return _finish(state, "some workers cannot be ended")


def _leave_failed(state: State) -> Decision:
    """Go on without the workers whose script raised, once their processes are gone."""
    state = replace(state, deadline=None)
    late = tuple(worker for worker, _ in state.failed if worker in state.running)
    if late:
        kills = tuple(Kill(worker) for worker in late)
        return Decision(state, kills, f"{name_workers(late)} failed, and did not end")
    return _renew(state, state.failed[-1][1].message)


def _leave_stuck(state: State, verdict: Verdict) -> Decision:
    """Go on without the workers that did not arrive, once their processes are gone."""
    stuck = tuple(worker for worker in verdict.workers if worker in state.running)
    state = replace(_running(state), condemned=state.condemned.union(stuck))
    kills = tuple(Kill(worker) for worker in stuck)
    return Decision(state, (*kills, Notice(f"{verdict.message}; it is killed")), verdict.message)


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
