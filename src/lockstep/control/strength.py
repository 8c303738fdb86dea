"""Who takes part: views after a loss, replacements, workers that join and leave. Pure.

A worker that joins runs the script by itself up to where the members are: it asks for the position, gets as
far, and asks to be let in. Then the members leave their view at the end of a step; all wait until the chief
has given the state, and the next view begins with the new worker.
"""

from dataclasses import replace

from lockstep.control import ending
from lockstep.control.decisions import (
    Action,
    Ask,
    Asks,
    Deliver,
    Evidence,
    Given,
    Kill,
    Notice,
    Renew,
    ScaleAsked,
    Start,
    Verdict,
)
from lockstep.control.state import Decision, Recruit, Size, Stage, State
from lockstep.control.wording import count, name_workers
from lockstep.topology import Request, place


def renew(state: State, how: str, now: float) -> Decision:
    """Go on without a worker that was lost, as `how` says."""
    assert state.view is not None
    staying = state.staying
    if not staying:
        return Decision(state, reason=f"{how}; nobody is left to go on")
    if state.given:
        return admit(state, now, f"{how}; ")
    view = place(state.view.replicas, staying, state.view.number + 1)
    reason = f"{how}; {name_workers(staying)} {'goes' if len(staying) == 1 else 'go'} on (view {view.number})"
    state = replace(state, view=view, asked=Request.NOTHING)
    return Decision(state, (Renew(view, reason), Notice(reason)), reason)


def count_loss(state: State, worker: int, now: float) -> tuple[State, str]:
    """Decide whether a worker that was lost will be replaced; say so if not."""
    size = state.size
    if not size.wanted or state.finished:
        return state, ""
    if not size.restarts:
        # What a person sees is the number that is wanted from now on.
        state = replace(state, size=replace(size, wanted=max(size.wanted - 1, 1)))
        return state, f"; it is not replaced (--max-restarts {size.most_restarts})"
    since = dict(state.joined).get(worker)
    if (recruit := state.recruit(worker)) is not None:
        since = recruit.since
    young = since is not None and now - since < state.limits.young
    losses = state.young_losses + 1 if young else 0
    pause = min(state.limits.pause * 2 ** (losses - 1), state.limits.longest_pause) if losses else 0.0
    return replace(
        state,
        size=replace(size, restarts=size.restarts - 1),
        young_losses=losses,
        next_start=now + pause if losses else None,
    ), ""


def recruit_lost(state: State, worker: int, how: str, now: float) -> Decision:
    """Note that a worker has ended before it had joined."""
    if state.stage is not Stage.RUNNING or state.finished:
        return Decision(state.without_recruit(worker), reason=f"{how} before it had joined")
    state, replaced = count_loss(state, worker, now)
    state = state.without_recruit(worker)
    reason = f"{how} before it had joined{replaced}"
    if state.given:
        decision = admit(state, now, f"{reason}; ")
        return replace(decision, actions=(Notice(reason), *decision.actions))
    return Decision(state, (Notice(reason),), reason)


def asked(state: State, event: Asks, now: float) -> Decision:
    """Note what a worker that joins waits for; give it what has been given."""
    recruit = state.recruit(event.worker)
    if recruit is None:
        return Decision(state, reason=f"worker {event.worker} does not join any more")
    asks = Request.CHANGE if event.whole else Request.POSITION
    reason = f"worker {event.worker} {'is ready' if event.whole else 'asks where the training is'}"
    if state.given and not event.whole:
        # All wait, and the position is that of the state.
        return Decision(state, (Deliver(event.worker),), reason)
    state = _with_recruit(state, replace(recruit, asks=asks))
    return admit(state, now, f"{reason}; ") if state.given else Decision(state, reason=reason)


def given(state: State, event: Given, now: float) -> Decision:
    """Go on when the chief has given what it was asked for."""
    if state.view is None or event.view != state.view.number:
        return Decision(state, reason=f"view {event.view} is over already")
    if event.whole and state.stage is Stage.SAVING:
        return renew(replace(state, given=False), "the job is about to be stopped", now)
    if state.stage not in (Stage.RUNNING, Stage.LOOKING):
        return Decision(state, reason="the job is ending already")
    state = replace(state, asked=Request.NOTHING)
    if event.failure:
        return _not_given(state, event, now)
    waiting = [one for one in state.recruits if one.asks is Request.POSITION]
    for one in waiting:
        state = _with_recruit(state, replace(one, asks=Request.NOTHING))
    told = tuple(Deliver(one.worker) for one in waiting)
    if not event.whole:
        return Decision(state, told, "the chief has said where the training is")
    if state.stage is Stage.LOOKING:
        state = replace(state, stage=Stage.RUNNING, verdict=None, deadline=None)
    decision = admit(replace(state, given=True), now, "")
    return replace(decision, actions=(*told, *decision.actions))


def admit(state: State, now: float, why: str) -> Decision:
    """Begin a view with those who are ready, or wait until there are enough workers; all members wait."""
    assert state.view is not None
    staying, wanted = state.staying, state.size.wanted or len(state.staying)
    ready = tuple(one.worker for one in state.recruits if one.asks is Request.CHANGE)
    workers = (*staying, *ready)[: max(wanted, 1)]
    if len(workers) < state.size.least:
        return _wait(state, len(workers), now, why)
    view = place(state.view.replicas, workers, state.view.number + 1)
    new, old = [w for w in workers if w in ready], tuple(w for w in staying if w not in workers)
    since = tuple((one.worker, one.since) for one in state.recruits if one.worker in new)
    changes = [f"{name_workers(tuple(new))} joined"] if new else []
    changes += [f"{name_workers(old)} left"] if old else []
    size = count(len(workers), "worker")
    reason = f"{why}{' and '.join(changes) or 'nobody joins'} ({size}, view {view.number})"
    state = replace(
        state,
        view=view,
        given=False,
        patience_ends=None,
        recruits=tuple(one for one in state.recruits if one.worker not in new),
        joined=state.joined + since,
        leaving=state.leaving.union(old),
    )
    return Decision(state, (Renew(view, reason), Notice(reason)), reason)


def refusal(state: State, workers: int) -> str:
    """Say why a job cannot have so many workers now; nothing if it can."""
    assert state.view is not None
    if workers > state.view.replicas:
        return (
            f"{workers} workers cannot share {state.view.replicas} replicas, which the job has for its whole "
            f"life; ask for {state.view.replicas} workers or fewer"
        )
    if workers < state.size.least:
        return f"with fewer than {state.size.least} workers training would wait (--min-workers)"
    if state.stage is not Stage.RUNNING or state.finished:
        return "the job is ending"
    if not state.elastic:
        return "the script has not made its strategy yet, so nobody can join or leave; try again in a moment"
    return ""


def scaled(state: State, event: ScaleAsked, now: float) -> Decision:
    """Strive for another number of workers."""
    restarts = state.size.most_restarts
    size = Size(event.workers, state.size.least, restarts, restarts)
    state = replace(state, size=size, young_losses=0, next_start=None)
    surplus = len(state.staying) + len(state.recruits) - event.workers
    dropped = tuple(one.worker for one in reversed(state.recruits))[: max(surplus, 0)]
    actions: tuple[Action, ...] = tuple(Kill(worker) for worker in dropped)
    for worker in dropped:
        state = state.without_recruit(worker)
    state = replace(state, leaving=state.leaving.union(dropped))
    reason = f"{count(event.workers, 'worker')} wanted from now on"
    if state.given:
        decision = admit(state, now, f"{reason}; ")
        return replace(decision, actions=(*actions, *decision.actions))
    return Decision(state, (*actions, Notice(reason)), reason)


def settle(decision: Decision, now: float) -> Decision:
    """Start the workers that are missing, and ask the members for what is needed."""
    state = decision.state
    if state.stage is not Stage.RUNNING or not state.elastic or state.view is None or not state.size.wanted:
        return decision
    if state.finished:
        return _dismiss(decision)
    if state.failed and state.deadline is not None:
        return decision
    state, starts = _recruited(state, now)
    request = Request.NOTHING if state.given else _request(state)
    asks: tuple[Action, ...] = (Ask(request),) if request is not state.asked else ()
    return replace(decision, state=replace(state, asked=request), actions=(*decision.actions, *starts, *asks))


def dismissed(state: State, worker: int, how: str) -> Decision:
    """Note that a worker that was told to leave has ended."""
    return Decision(replace(state, leaving=state.leaving - {worker}), reason=f"{how}, as it was told")


def _with_recruit(state: State, recruit: Recruit) -> State:
    recruits = tuple(recruit if one.worker == recruit.worker else one for one in state.recruits)
    return replace(state, recruits=recruits)


def _recruited(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    assert state.view is not None
    members = state.present.intersection(state.view.workers)
    missing = state.size.wanted - len(members) - len(state.recruits)
    if missing <= 0 or (state.next_start is not None and now < state.next_start):
        return state, ()
    workers = range(state.next_worker, state.next_worker + missing)
    state = replace(
        state,
        running=state.running.union(workers),
        recruits=state.recruits + tuple(Recruit(worker, now) for worker in workers),
        next_worker=workers.stop,
        next_start=None,
    )
    return state, tuple(Start(worker) for worker in workers)


def _request(state: State) -> Request:
    """Return what the members have to be asked for."""
    asks = {one.asks for one in state.recruits}
    members = len(state.staying)
    if Request.CHANGE in asks or members > state.size.wanted or members < state.size.least:
        return Request.CHANGE
    return Request.POSITION if Request.POSITION in asks else Request.NOTHING


def _wait(state: State, number: int, now: float, why: str) -> Decision:
    """Let all members wait for more workers, if there is hope."""
    least = state.size.least
    reason = f"{why}training waits: {count(number, 'worker')} of at least {least} (--min-workers)"
    if state.size.wanted < least:
        message = (
            f"{count(number, 'worker')} is too few (--min-workers {least}), and none is replaced any more "
        )
        message += f"(--max-restarts {state.size.most_restarts})"
        return ending.end(state, Verdict(1, message), now)
    if state.patience_ends is not None:
        return Decision(state, reason=reason)
    state = replace(state, patience_ends=now + state.limits.timeout)
    return Decision(state, (Notice(reason),), reason)


def patience_over(state: State, now: float) -> Decision:
    """End a job whose workers have waited too long for others."""
    message = f"too few workers (--min-workers {state.size.least}) for {state.limits.timeout:g} s (--timeout)"
    late = tuple(one.worker for one in state.recruits)
    return ending.end(state, Verdict(1, message, late, Evidence.LOG), now)


def _not_given(state: State, event: Given, now: float) -> Decision:
    """Give up those who wait for what cannot be given."""
    kinds = (Request.CHANGE,) if event.whole else (Request.POSITION,)
    waiting = [one.worker for one in state.recruits if one.asks in kinds]
    reason = f"nobody can join: {event.failure}"
    actions: tuple[Action, ...] = (Notice(reason), *(Kill(worker) for worker in waiting))
    for worker in waiting:
        state = state.without_recruit(worker)
    size = replace(state.size, wanted=len(state.staying), least=1, restarts=0)
    state = replace(state, size=size, leaving=state.leaving.union(waiting))
    if not event.whole:
        return Decision(state, actions, reason)
    decision = renew(state, reason, now)
    return replace(decision, actions=(*actions, *decision.actions))


def _dismiss(decision: Decision) -> Decision:
    """End the workers that join a job whose script has come to its end."""
    state = decision.state
    workers = tuple(one.worker for one in state.recruits)
    state = replace(state, recruits=(), leaving=state.leaving.union(workers), next_start=None)
    return replace(decision, state=state, actions=(*decision.actions, *(Kill(worker) for worker in workers)))
