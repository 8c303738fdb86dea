"""What to do when something happens to a worker. Pure: (state, event, now) -> (state, actions, reason).

The first failure decides the status; what follows from it (`PeerLostError` in the others) never does.

Once a worker has made a strategy the job is elastic: a worker that is lost is left behind in a new view,
whose members compute its replicas too. A script that raises is given a moment to raise on all workers.
"""

import signal
from dataclasses import replace

from lockstep.supervisor import elasticity, shutdown
from lockstep.supervisor.events import (
    CheckpointFailed,
    CheckpointingStarted,
    CheckpointKept,
    DeadlinePassed,
    DistributionStarted,
    DumpStack,
    Event,
    Evidence,
    FinalStepEnded,
    JobOutcome,
    JoinRequested,
    KillWorker,
    ScaleRequested,
    ScriptEnded,
    ScriptFailed,
    ShowMessage,
    SignalWorker,
    StateGiven,
    StopRequested,
    StrategyCreated,
    TimeoutChanged,
    ViewFailed,
    WaitReported,
    WorkerArrived,
    WorkerExited,
)
from lockstep.supervisor.state import Decision, Saving, Stage, State
from lockstep.system.exit_status import describe_exit, shell_status, signal_name, whose_lines
from lockstep.system.prose import name_workers


def decide(state: State, event: Event, now: float) -> Decision:
    """Return what follows from `event` at time `now`."""
    if state.stage is Stage.FINISHED:
        return Decision(state, reason="the job has ended")
    return elasticity.settle(_decide(state, event, now), now)


def _decide(state: State, event: Event, now: float) -> Decision:
    match event:
        case WorkerExited():
            return _exited(state, event, now)
        case ScriptEnded(worker):
            done = replace(state, done=state.done | {worker})
            return Decision(done, reason=f"the script of worker {worker} finished")
        case ScriptFailed():
            return _failed(state, event, now)
        case StrategyCreated():
            return _ready(state, event, now)
        case DistributionStarted():
            busy = replace(state, distributes=True, idle_until=None)
            return Decision(busy, reason="the script distributes its computation")
        case CheckpointingStarted():
            return Decision(replace(state, keeps=True), reason="the script saves checkpoints")
        case FinalStepEnded() | CheckpointKept() | CheckpointFailed():
            return _saved(state, event)
        case TimeoutChanged(seconds):
            limits = replace(state.limits, timeout=seconds)
            return Decision(replace(state, limits=limits), reason=f"the wait limit is {seconds:g} s")
        case JoinRequested():
            return elasticity.asked(state, event, now)
        case StateGiven():
            return elasticity.given(state, event, now)
        case WorkerArrived():
            return elasticity.arrived(state)
        case ScaleRequested():
            return elasticity.scaled(state, event, now)
        case WaitReported():
            return _waits(state, event, now)
        case ViewFailed():
            return shutdown.end(state, JobOutcome(1, event.reason), now)
        case StopRequested():
            return _stop_asked(state, event, now)
        case DeadlinePassed():
            return _time_passed(state, now)


def _ready(state: State, event: StrategyCreated, now: float) -> Decision:
    ready = replace(state, elastic=state.view is not None)
    if not state.elastic and not state.distributes and state.view is not None and state.view.replicas > 1:
        ready = replace(ready, idle_until=now + state.limits.idle)
    return Decision(ready, reason=f"worker {event.worker} created a strategy")


def _exited(state: State, event: WorkerExited, now: float) -> Decision:
    state = replace(state, running=state.running - {event.worker})
    how = f"worker {event.worker} {describe_exit(event.status)}"
    if event.worker in state.leaving or state.joiner(event.worker) is not None:
        decision = _outsider_exited(state, event, how, now)
    else:
        decision = _member_exited(state, event, how, now)
    if not decision.state.running and decision.state.stage is not Stage.FINISHED:
        over = shutdown.finish(decision.state, f"{how}; no workers remain")
        return _told_outcome(over, state, how) if state.stage is Stage.SAVING else over
    return decision


def _outsider_exited(state: State, event: WorkerExited, how: str, now: float) -> Decision:
    if event.worker in state.leaving:
        return elasticity.dismissed(state, event.worker, how)
    joiner = state.joiner(event.worker)
    assert joiner is not None
    return elasticity.joiner_lost(state, joiner, how, now)


def _member_exited(state: State, event: WorkerExited, how: str, now: float) -> Decision:
    if event.status == 0:
        was_stuck = state.outcome is not None and event.worker in state.outcome.workers
        state = elasticity.unstuck(state) if was_stuck else state
        state = replace(state, finished=state.finished | {event.worker})
    elif state.elastic and state.stage in (Stage.RUNNING, Stage.LOOKING) and not _blames(state, event):
        return _lost(elasticity.unstuck(state), event, how, now)
    elif state.stage is Stage.RUNNING and not _blames(state, event):
        outcome = JobOutcome(shell_status(event.status), how, (event.worker,), Evidence.LOG)
        return shutdown.end(state, outcome, now)
    if state.stage is Stage.SAVING and state.running:
        if event.worker not in state.members:
            return Decision(state, reason=f"{how}; the others had already continued without it")
        if state.members[0] in state.running:
            # It needs whoever is left to come to the end of its step.
            return elasticity.renew(state, how, now)
        reason = f"{how}; sending SIGTERM to the other workers"
        return _told_outcome(shutdown.signal_all(state, signal.SIGTERM, now, reason), state, how)
    return Decision(state, reason=how)


def _blames(state: State, event: WorkerExited) -> bool:
    return event.worker in state.blaming


def _lost(state: State, event: WorkerExited, how: str, now: float) -> Decision:
    """Go on without a worker, if there is anybody to go on."""
    if not state.present:
        if state.finished:
            reason = f"{how}; the others had succeeded"
            over = shutdown.finish(replace(state, outcome=JobOutcome(0)), reason)
            told = event.worker in dict(state.failed)
            return over if told else replace(over, actions=(ShowMessage(reason), *over.actions))
        lost = JobOutcome(shell_status(event.status), how, (event.worker,), Evidence.LOG)
        raised = [outcome for worker, outcome in state.failed if worker in state.members]
        return shutdown.finish(replace(state, outcome=(*raised, lost)[0]), f"{how}; no workers remain")
    state = elasticity.count_loss(state, dict(state.joined).get(event.worker), now)
    if event.worker not in state.members:
        return elasticity.note(state, f"{how}; the others had already continued without it", told=True)
    if event.worker not in dict(state.failed):
        if event.status < 0:
            return elasticity.renew(state, how, now)
        # A script that leaves with a status of its own may do so on all workers, as one that raises.
        outcome = JobOutcome(event.status, how, (event.worker,), Evidence.LOG)
        state = _with_failure(state, event.worker, outcome, now)
    if state.deadline is not None:
        return Decision(state, reason=f"{how}; the others may fail too")
    return elasticity.renew(state, "", now)


def _with_failure(state: State, worker: int, outcome: JobOutcome, now: float) -> State:
    """Note a failure, and give the others a moment to fail too."""
    deadline = now + state.limits.blame if state.deadline is None else state.deadline
    return replace(state, failed=(*state.failed, (worker, outcome)), deadline=deadline)


def _failed(state: State, event: ScriptFailed, now: float) -> Decision:
    how = f" exited with status {event.status}" if event.prints else ""
    message = f"worker {event.worker}{how}: {event.summary}"
    evidence = Evidence.LOG if event.prints else Evidence.LOG_NAME
    outcome = JobOutcome(event.status, message, (event.worker,), evidence)
    if (joiner := state.joiner(event.worker)) is not None:
        return elasticity.joiner_failed(state, joiner, message)
    if state.stage is not Stage.RUNNING:
        state = replace(state, blaming=state.blaming | {event.worker})
        if state.stage is Stage.ENDING and state.all_raised:
            state = replace(state, deadline=now + state.limits.leave)
        return Decision(state, reason=f"{message}; the job is already ending")
    if not event.blames and not state.elastic:
        return shutdown.end(replace(state, blaming=state.blaming | {event.worker}), outcome, now)
    if not event.blames:
        state = _with_failure(state, event.worker, outcome, now)
        return Decision(state, reason=f"{message}; the others may fail too")
    state = replace(state, blaming=state.blaming | {event.worker})
    if state.suspect is None:
        state = replace(state, suspect=outcome, deadline=now + state.limits.blame)
    if state.running <= state.blaming and not state.failed:
        # No worker is left that could show another cause.
        return shutdown.end(state, state.suspect or outcome, now)
    return Decision(state, reason=f"{message}; waiting for the cause")


def _waits(state: State, event: WaitReported, now: float) -> Decision:
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason="the job is already ending")
    if state.given:
        return Decision(state, reason=f"worker {event.worker} waits for the next view, like all members")
    if state.view_since is not None and now - event.seconds < state.view_since:
        return Decision(state, reason=f"worker {event.worker} reports a wait in an old view")
    gone = tuple(worker for worker in event.workers if worker not in state.running)
    if state.elastic:
        # Who is lost is left behind in the next view, of which the worker has not heard yet.
        gone = tuple(worker for worker in gone if worker in state.finished)
    late = tuple(worker for worker in event.workers if worker in state.running - state.condemned)
    if gone:
        return _deserted(state, event, gone, now)
    if not late:
        return Decision(
            state, reason=f"the next view leaves out the workers that worker {event.worker} waits for"
        )
    state = replace(state, deserted=state.deserted - {event.worker})
    if late and event.seconds >= state.limits.timeout:
        return _stuck(state, event, late, now)
    return _notice(state, event, late, now)


def _deserted(state: State, event: WaitReported, gone: tuple[int, ...], now: float) -> Decision:
    if event.worker not in state.deserted:
        # The report may have been sent just before the last worker arrived; a second one cannot.
        again = replace(state, deserted=state.deserted | {event.worker})
        return Decision(
            again,
            reason=f"worker {event.worker} may wait for a finished worker; the next report decides",
        )
    message = f"{name_workers(gone)} exited with status 0 while worker {event.worker} waited for "
    message += f"{'it' if len(gone) == 1 else 'them'} in {event.what}"
    return shutdown.end(state, JobOutcome(1, message, gone, Evidence.LOG), now)


def _stuck(state: State, event: WaitReported, late: tuple[int, ...], now: float) -> Decision:
    message = f"{name_workers(late)} did not reach {event.what}: worker {event.worker} has waited "
    message += f"{event.seconds:.0f} s (--timeout {state.limits.timeout:g})"
    outcome = JobOutcome(1, message, late, Evidence.STACK)
    deadline = now + state.limits.look
    state = replace(state, stage=Stage.LOOKING, outcome=outcome, deadline=deadline)
    return Decision(state, tuple(DumpStack(worker) for worker in late), message)


def _notice(state: State, event: WaitReported, late: tuple[int, ...], now: float) -> Decision:
    last = dict(state.noticed).get(late, now - state.limits.notice)
    text = f"worker {event.worker} has waited {event.seconds:.0f} s for {name_workers(late)} in {event.what}"
    if event.seconds < state.limits.notice or now - last < state.limits.notice:
        return Decision(state, reason=text)
    noticed = dict(state.noticed) | {late: now}
    return Decision(replace(state, noticed=tuple(noticed.items())), (ShowMessage(text),), text)


def _stop_asked(state: State, event: StopRequested, now: float) -> Decision:
    name = signal_name(event.signal)
    if state.stage is Stage.SAVING:
        again = shutdown.kill(state, now, f"received {name} during the grace period")
        return _told_outcome(again, state, f"received {name}")
    if state.stage in (Stage.TERMINATING, Stage.KILLING):
        return shutdown.kill(state, now, f"received {name} again")
    if (
        state.stage is Stage.RUNNING
        and state.suspect is None
        and state.present
        and state.present <= state.done
    ):
        return _stop_after_the_end(state, event.signal, now)
    outcome = state.outcome or JobOutcome(128 + event.signal, f"stopped by {name}")
    saves = event.signal == signal.SIGTERM and state.keeps and state.elastic and state.stage is Stage.RUNNING
    state = replace(state, outcome=outcome)
    if saves and state.staying:
        return _save(state, event.signal, now)
    return shutdown.signal_all(state, event.signal, now, f"{name}: forwarding it to every worker")


def _stop_after_the_end(state: State, number: int, now: float) -> Decision:
    """End processes whose scripts had come to their end before the job was asked to stop."""
    reason = f"{signal_name(number)} arrived after the script finished: the job succeeded"
    state = replace(state, outcome=JobOutcome(0))
    if number == signal.SIGTERM and state.keeps:
        # The chief may be writing the last checkpoint.
        deadline = now + state.limits.save
        state = replace(state, stage=Stage.ENDING, deadline=deadline, next_start=None, patience_ends=None)
        return Decision(state, (ShowMessage(reason),), reason)
    decision = shutdown.signal_all(state, number, now, reason)
    return replace(decision, actions=(ShowMessage(reason), *decision.actions))


def _save(state: State, number: int, now: float) -> Decision:
    """Let the chief keep a checkpoint at the end of its step; nobody waits for others until then."""
    grace = state.limits.save
    reason = f"stopping ({signal_name(number)}): waiting up to {grace:g} s for the step and a checkpoint"
    waits = state.given or state.staying != state.members
    state = replace(
        state,
        stage=Stage.SAVING,
        saving=Saving(),
        deadline=now + grace,
        given=False,
        next_start=None,
        patience_ends=None,
    )
    decision = (
        elasticity.renew(state, reason, now) if waits else Decision(state, (ShowMessage(reason),), reason)
    )
    return replace(decision, actions=(SignalWorker(decision.state.members[0], number), *decision.actions))


def _saved(state: State, event: FinalStepEnded | CheckpointKept | CheckpointFailed) -> Decision:
    """Note how far the chief is that keeps the last checkpoint; others were kept before, and were told."""
    saving = state.saving
    match event:
        case FinalStepEnded(step):
            saving = replace(saving, step=step)
            reason = f"stopping: step {step} is complete; writing its checkpoint"
        case CheckpointKept(step):
            saving = replace(saving, kept=step)
            reason = f"checkpoint written at step {step}"
        case CheckpointFailed(failure):
            saving = replace(saving, failure=failure)
            reason = f"no checkpoint: {failure}"
    if state.stage is not Stage.SAVING:
        return Decision(state, reason=reason)
    actions = (ShowMessage(reason),) if isinstance(event, FinalStepEnded) else ()
    return Decision(replace(state, saving=saving), actions, reason)


def _saved_too_late(state: State, now: float) -> Decision:
    step, grace = state.saving.step, f"{state.limits.save:g} s (--grace)"
    late = "the step did not finish" if step is None else f"the checkpoint of step {step} was not written"
    told = ShowMessage(state.saving.outcome(f"{late} within {grace}"))
    decision = shutdown.signal_all(state, signal.SIGTERM, now, told.text)
    return replace(decision, actions=(told, *decision.actions))


def _told_outcome(decision: Decision, state: State, how: str) -> Decision:
    """Tell the person what has come of the last checkpoint, now that `how` ends the wait for it."""
    text = state.saving.outcome(f"{how} before it was written")
    return replace(
        decision, actions=(ShowMessage(text), *decision.actions), reason=f"{text}; {decision.reason}"
    )


def _time_passed(state: State, now: float) -> Decision:
    if state.deadline is not None and now >= state.deadline:
        return _deadline_passed(state, now)
    if state.patience_ends is not None and now >= state.patience_ends:
        return elasticity.patience_over(state, now)
    if state.idle_until is not None and now >= state.idle_until:
        return _idle(state)
    if state.next_start is not None and now >= state.next_start:
        return Decision(replace(state, next_start=None), reason="workers can start again")
    return Decision(state, reason="nothing is due")


def _idle(state: State) -> Decision:
    """Say that nothing is distributed yet, which may be as it should."""
    assert state.view is not None
    lines = whose_lines(len(state.members), state.view.replicas)
    text = (
        f"the script has distributed nothing in the {state.limits.idle:g} s since it created a strategy or "
        "compiled a model; until it calls model.fit, evaluate or predict, strategy.run or strategy.steps, "
        f"{lines}"
    )
    told = (ShowMessage(text),) if state.stage is Stage.RUNNING else ()
    return Decision(replace(state, idle_until=None), told, text)


def _deadline_passed(state: State, now: float) -> Decision:
    match state.stage:
        case Stage.RUNNING if _unsettled(state):
            return _leave_failed(state, now)
        case Stage.RUNNING if state.suspect:
            return shutdown.end(state, state.suspect, now)
        case Stage.RUNNING:
            return Decision(replace(state, deadline=None), reason="the failed workers were already left out")
        case Stage.LOOKING if state.outcome and state.elastic and state.present - set(state.outcome.workers):
            return _leave_stuck(state, state.outcome)
        case Stage.LOOKING if state.outcome:
            return shutdown.end_stuck(state, state.outcome, now)
        case Stage.SAVING:
            return _saved_too_late(state, now)
        case Stage.ENDING:
            return shutdown.terminate(state, now)
        case Stage.TERMINATING:
            return shutdown.kill(state, now, "some workers did not exit after the signal")
        case _:
            return shutdown.finish(state, "some workers cannot be killed")


def _leave_failed(state: State, now: float) -> Decision:
    """Go on without the workers whose script raised, once their processes are gone."""
    state = replace(state, deadline=None)
    failed = _unsettled(state)
    late = tuple(worker for worker in failed if worker in state.running)
    kills = tuple(KillWorker(worker) for worker in late)
    if late == failed or set(late).intersection(state.members):
        return Decision(state, kills, f"{name_workers(late)} failed but did not exit")
    decision = elasticity.renew(state, "", now)
    return replace(decision, actions=(*kills, *decision.actions))


def _unsettled(state: State) -> tuple[int, ...]:
    """Return the workers whose script raised, and that still run or have not been left behind yet."""
    there = state.running.union(state.members)
    return tuple(worker for worker, _ in state.failed if worker in there)


def _leave_stuck(state: State, outcome: JobOutcome) -> Decision:
    """Go on without the workers that did not arrive, once their processes are gone."""
    stuck = tuple(worker for worker in outcome.workers if worker in state.running)
    state = replace(elasticity.unstuck(state), condemned=state.condemned.union(stuck))
    kills = tuple(KillWorker(worker) for worker in stuck)
    text = f"{outcome.message}; killing {'it' if len(stuck) == 1 else 'them'}"
    return Decision(state, (*kills, ShowMessage(text)), outcome.message)
