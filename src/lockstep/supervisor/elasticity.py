"""Who takes part: views after a loss, replacements, workers that join and leave. Pure.

A worker that joins runs the script by itself up to where the members are: it asks for the position, gets as
far, and asks to be let in. Then the members leave their view at the end of a step; all wait until the chief
has given the state, and the next view begins with the new worker.
"""

from dataclasses import replace

from lockstep.protocol.request import Request
from lockstep.supervisor import shutdown
from lockstep.supervisor.events import (
    Action,
    AskMembers,
    Evidence,
    JobOutcome,
    JoinRequested,
    KillWorker,
    ScaleRequested,
    SendPosition,
    ShowMessage,
    StartView,
    StartWorker,
    StateGiven,
)
from lockstep.supervisor.state import Decision, JobSize, Joiner, Stage, State
from lockstep.system.prose import count, name_workers
from lockstep.topology import place


def renew(state: State, how: str, now: float) -> Decision:
    """Go on without the workers that were lost, as `how` says; nothing of those whose script raised."""
    assert state.view is not None
    staying, why = state.staying, _why(state, how)
    if not staying:
        return Decision(state, reason=f"{why}; no workers remain")
    if state.given:
        return admit(state, now, how)
    view = place(state.view.replicas, staying, state.view.number + 1)
    reason = f"{why}; {name_workers(staying)} continue{'s' * (len(staying) == 1)} (view {view.number})"
    state = replace(state, view=view, view_since=now, asked=Request.NOTHING, untold="")
    return Decision(state, (StartView(view, reason), ShowMessage(reason)), reason)


def count_loss(state: State, since: float | None, now: float) -> State:
    """Decide whether a worker that is gone will be replaced; `since` is its start, if it had to join."""
    size = state.size
    if state.finished or len(state.present) + len(state.joiners) >= size.wanted:
        return state
    if not size.restarts:
        # What a person sees is the number that is wanted from now on.
        size = replace(size, wanted=max(size.wanted - 1, 1))
        return replace(state, size=size, untold=_no_more(size))
    size = replace(size, restarts=size.restarts - 1)
    young = since is not None and now - since < state.limits.young
    if not young:
        return replace(state, size=size, young_losses=0)
    pause = min(state.limits.pause * 2.0 ** min(state.young_losses, 100), state.limits.longest_pause)
    untold = f"another worker starts in {pause:g} s"
    losses = state.young_losses + 1
    return replace(state, size=size, young_losses=losses, next_start=now + pause, untold=untold)


def unstuck(state: State) -> State:
    """Forget who was stuck: whoever is waited for now may be another."""
    if state.stage is not Stage.LOOKING:
        return state
    return replace(state, stage=Stage.RUNNING, outcome=None, deadline=None)


def joiner_failed(state: State, joiner: Joiner, message: str) -> Decision:
    """Note that the script of a worker that was to join has raised."""
    if state.stage not in (Stage.RUNNING, Stage.LOOKING):
        return Decision(state, reason=f"{message}; the job is already ending")
    state = _with_joiner(state, replace(joiner, asks=Request.NOTHING, failed=True))
    return Decision(state, (ShowMessage(f"{message} (it was joining)"),), message)


def joiner_lost(state: State, joiner: Joiner, how: str, now: float) -> Decision:
    """Note that a worker has ended before it had joined."""
    state = state.without_joiner(joiner.worker)
    reason = f"{how} before it joined"
    if state.stage not in (Stage.RUNNING, Stage.LOOKING) or state.finished:
        return Decision(state, reason=reason)
    state = count_loss(state, joiner.since, now)
    if state.given:
        return admit(state, now, reason)
    return note(state, reason, told=joiner.failed)


def note(state: State, reason: str, *, told: bool) -> Decision:
    """Note a loss that changes nothing for the members; `told` if the person knows all but what follows."""
    told = told and not state.untold
    reason = f"{reason}; {state.untold}" if state.untold else reason
    return Decision(replace(state, untold=""), () if told else (ShowMessage(reason),), reason)


def asked(state: State, event: JoinRequested, now: float) -> Decision:
    """Note what a worker that joins waits for; give it what has been given."""
    joiner = state.joiner(event.worker)
    if joiner is None or state.stage not in (Stage.RUNNING, Stage.LOOKING):
        return Decision(state, reason=f"worker {event.worker} no longer joins")
    asks = Request.CHANGE if event.whole else Request.POSITION
    reason = f"worker {event.worker} {'is ready' if event.whole else 'asks for the training position'}"
    if state.given and not event.whole:
        # All wait, and the position is that of the state.
        return Decision(state, (SendPosition(event.worker),), reason)
    state = _with_joiner(state, replace(joiner, asks=asks))
    return admit(state, now, "") if state.given else Decision(state, reason=reason)


def given(state: State, event: StateGiven, now: float) -> Decision:
    """Go on when the chief has given what it was asked for."""
    if state.view is None or event.view != state.view.number:
        return Decision(state, reason=f"view {event.view} has already ended")
    if event.whole and state.stage is Stage.SAVING:
        return renew(replace(state, given=False), "the job is stopping", now)
    if state.stage not in (Stage.RUNNING, Stage.LOOKING):
        return Decision(state, reason="the job is already ending")
    state = unstuck(state) if event.whole else state
    if event.failure:
        return _not_given(state, event, now)
    waiting = [one for one in state.joiners if one.asks is Request.POSITION]
    for one in waiting:
        state = _with_joiner(state, replace(one, asks=Request.NOTHING))
    told = tuple(SendPosition(one.worker) for one in waiting)
    if not event.whole:
        return Decision(state, told, "the chief reported the training position")
    decision = admit(replace(state, given=True, asked=Request.NOTHING), now, "")
    return replace(decision, actions=(*told, *decision.actions))


def admit(state: State, now: float, how: str) -> Decision:
    """Begin a view with those who are ready, or wait until there are enough workers; all members wait."""
    assert state.view is not None
    why = _why(state, how)
    staying, wanted = state.staying, state.size.wanted or len(state.staying)
    ready = _ready(state)
    workers = (*staying, *ready)[: max(wanted, 1)]
    if len(workers) < state.size.least:
        return _wait(state, len(workers), now, why)
    view = place(state.view.replicas, workers, state.view.number + 1)
    new, old = [w for w in workers if w in ready], tuple(w for w in staying if w not in workers)
    since = tuple((one.worker, one.since) for one in state.joiners if one.worker in new)
    changes = [f"{name_workers(tuple(new))} joined"] if new else []
    changes += [f"{name_workers(old)} left"] if old else []
    size = count(len(workers), "worker")
    what = f"{' and '.join(changes) or 'no worker joins'} ({size}, view {view.number})"
    reason = f"{why}; {what}" if why else what
    state = replace(
        state,
        view=view,
        view_since=now,
        given=False,
        untold="",
        patience_ends=None,
        joiners=tuple(one for one in state.joiners if one.worker not in new),
        joined=state.joined + since,
        leaving=state.leaving.union(old),
    )
    return Decision(state, (StartView(view, reason), ShowMessage(reason)), reason)


def refusal(state: State, workers: int) -> str:
    """Say why a job cannot have so many workers now; nothing if it can."""
    assert state.view is not None
    if workers > state.view.replicas:
        return (
            f"{workers} workers cannot share {state.view.replicas} replicas, and the number of replicas is "
            f"fixed; ask for {state.view.replicas} workers or fewer"
        )
    if workers < state.size.least:
        return f"with fewer than {state.size.least} workers training would wait (--min-workers)"
    if state.size.by_hand and workers > len(state.present) + len(state.joiners):
        return "the workers of this job are started by hand: start another one to add a worker"
    if not state.elastic and state.stage is Stage.RUNNING:
        return (
            "the script has created no strategy and compiled no model yet, so no worker can join or leave; "
            "try again in a moment"
        )
    if state.elastic and state.stage is Stage.LOOKING:
        return "a worker seems to be stuck and is about to be removed; try again in a moment"
    return "the job is ending" if state.stage is not Stage.RUNNING or state.finished else ""


def arrived(state: State) -> Decision:
    """Strive for one worker more: the one that a person has started."""
    size = replace(state.size, wanted=len(state.present) + len(state.joiners) + 1, closed=False)
    return Decision(replace(state, size=size), reason="a worker that was started by hand arrived")


def scaled(state: State, event: ScaleRequested, now: float) -> Decision:
    """Strive for another number of workers."""
    restarts = state.size.most_restarts
    size = replace(state.size, wanted=event.workers, restarts=restarts, closed=False)
    state = replace(state, size=size, young_losses=0, next_start=None)
    free = max(event.workers - len(state.staying), 0)
    dropped = tuple(one.worker for one in state.joiners[free:])
    state, kills = _without_joiners(state, dropped)
    reason = f"the job now wants {count(event.workers, 'worker')}"
    if dropped:
        reason += f"; {name_workers(dropped)} no longer need{'s' if len(dropped) == 1 else ''} to join"
    decision = admit(state, now, reason) if state.given else Decision(state, (ShowMessage(reason),), reason)
    return replace(decision, actions=(*kills, *decision.actions))


def settle(decision: Decision, now: float) -> Decision:
    """Start the workers that are missing, and ask the members for what is needed."""
    state = decision.state
    if state.stage is not Stage.RUNNING or not state.elastic or state.view is None or not state.size.wanted:
        return decision
    if state.finished:
        return _dismiss(decision)
    state, actions = _joiners_started(state, now)
    request = Request.NOTHING if state.given else _request(state)
    if request is not state.asked:
        state, actions = replace(state, asked=request), (*actions, AskMembers(request))
    return replace(decision, state=state, actions=(*decision.actions, *actions)) if actions else decision


def dismissed(state: State, worker: int, how: str) -> Decision:
    """Note that a worker that was told to leave has ended."""
    return Decision(
        replace(state, leaving=state.leaving - {worker}), reason=f"{how}; it was no longer needed"
    )


def _with_joiner(state: State, joiner: Joiner) -> State:
    joiners = tuple(joiner if one.worker == joiner.worker else one for one in state.joiners)
    return replace(state, joiners=joiners)


def _joiners_started(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    missing = state.size.wanted - len(state.present) - len(state.joiners)
    if missing <= 0 or (state.next_start is not None and now < state.next_start):
        return state, ()
    if state.failed and state.deadline is not None:
        # Perhaps the script raises everywhere, and nobody will be needed.
        return state, ()
    workers = range(state.next_worker, state.next_worker + missing)
    state = replace(
        state,
        running=state.running.union(workers),
        joiners=state.joiners + tuple(Joiner(worker, now) for worker in workers),
        next_worker=workers.stop,
        next_start=None,
    )
    return state, tuple(StartWorker(worker) for worker in workers)


def _ready(state: State) -> tuple[int, ...]:
    return tuple(one.worker for one in state.joiners if one.asks is Request.CHANGE)


def _request(state: State) -> Request:
    """Return what the members have to be asked for."""
    asks = {one.asks for one in state.joiners}
    members = len(state.staying)
    if Request.CHANGE in asks or members > state.size.wanted or members < state.size.least:
        return Request.CHANGE
    return Request.POSITION if Request.POSITION in asks else Request.NOTHING


def _wait(state: State, number: int, now: float, why: str) -> Decision:
    """Let all members wait for more workers, if there is hope."""
    least = state.size.least
    if state.size.wanted < least:
        message = f"too few workers remain: {number} of at least {least} (--min-workers)"
        return shutdown.end(state, JobOutcome(1, f"{why or _no_more(state.size)}; {message}"), now)
    what = f"training waits: {count(number, 'worker')} of at least {least} (--min-workers)"
    reason = f"{why}; {what}" if why else what
    if state.patience_ends is None:
        state = replace(state, patience_ends=now + state.limits.timeout)
    return Decision(replace(state, untold=""), (ShowMessage(reason),), reason)


def _why(state: State, how: str) -> str:
    """Say what happened to the members that the next view leaves behind, and what follows."""
    raised = [outcome.message for worker, outcome in state.failed if worker in state.members]
    return "; ".join(text for text in (*raised, how, state.untold) if text)


def _no_more(size: JobSize) -> str:
    if size.by_hand and not size.closed:
        return "start it again and it joins"
    why = "no worker can join" if size.closed else f"--max-restarts {size.most_restarts}"
    return f"lost workers are {'no longer' if size.most_restarts else 'not'} replaced ({why})"


def patience_over(state: State, now: float) -> Decision:
    """End a job whose workers have waited too long for others."""
    number = len(state.staying) + len(_ready(state))
    message = f"too few workers for {state.limits.timeout:g} s (--timeout): {number} of at least "
    message += f"{state.size.least} (--min-workers)"
    late = tuple(one.worker for one in state.joiners)
    return shutdown.end(state, JobOutcome(1, message, late, Evidence.LOG), now)


def _not_given(state: State, event: StateGiven, now: float) -> Decision:
    """Go on with the members that there are: whoever is to join waits for what cannot be given."""
    reason, least = f"no worker can join: {event.failure}", state.size.least
    if len(state.staying) < least:
        reason += f"; training continues with fewer than {least} workers (--min-workers)"
    state, kills = _without_joiners(state, tuple(one.worker for one in state.joiners))
    size = replace(state.size, wanted=max(len(state.staying), 1), least=1, restarts=0, closed=True)
    state = replace(state, size=size, next_start=None)
    decision = renew(state, reason, now) if event.whole else Decision(state, (ShowMessage(reason),), reason)
    return replace(decision, actions=(*kills, *decision.actions))


def _dismiss(decision: Decision) -> Decision:
    """End the workers that join a job whose script has come to its end; wait for members only."""
    dropped = tuple(one.worker for one in decision.state.joiners)
    state, kills = _without_joiners(decision.state, dropped)
    if dropped and state.size.by_hand:
        text = f"the script has finished, so {name_workers(dropped)} can no longer join"
        kills = (ShowMessage(text), *kills)
    actions = (*decision.actions, *kills)
    if state.present:
        return replace(decision, state=replace(state, next_start=None), actions=actions)
    over = shutdown.finish(state, f"{decision.reason}; no members remain")
    return replace(over, actions=(*actions, *over.actions))


def _without_joiners(state: State, workers: tuple[int, ...]) -> tuple[State, tuple[Action, ...]]:
    """End workers that need not join any more."""
    joiners = tuple(one for one in state.joiners if one.worker not in workers)
    state = replace(state, joiners=joiners, leaving=state.leaving.union(workers))
    return state, tuple(KillWorker(worker) for worker in workers)
