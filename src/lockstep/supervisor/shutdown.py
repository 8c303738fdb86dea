"""How a job ends. Pure.

The workers get, in this order and each only if they still run: the abort of their exchange, SIGTERM, SIGKILL.
"""

import signal
from dataclasses import replace

from lockstep.supervisor.events import (
    AbortExchange,
    Evidence,
    FinishJob,
    JobOutcome,
    KillWorker,
    ShowMessage,
    SignalWorker,
)
from lockstep.supervisor.state import Decision, Stage, State


def end(state: State, outcome: JobOutcome, now: float) -> Decision:
    """End the job with `outcome`."""
    state = replace(
        state,
        stage=Stage.ENDING,
        outcome=outcome,
        deadline=now + (state.limits.leave if state.all_raised else state.limits.abort),
        next_start=None,
        patience_ends=None,
    )
    if not state.running:
        return finish(state, outcome.message)
    if not state.size.by_hand:
        return Decision(state, (AbortExchange(outcome.message),), outcome.message)
    text = f"{outcome.message}; the job ends: restart all workers"
    # Who is told at the very end has no worker in its terminal any more.
    return Decision(state, (AbortExchange(text), ShowMessage(text)), outcome.message)


def end_stuck(state: State, outcome: JobOutcome, now: float) -> Decision:
    """End the job because of stuck workers, who hear no abort."""
    decision = end(state, outcome, now)
    stuck = sorted(state.running.intersection(outcome.workers))
    return replace(
        decision, actions=decision.actions + tuple(SignalWorker(worker, signal.SIGTERM) for worker in stuck)
    )


def terminate(state: State, now: float) -> Decision:
    """Send SIGTERM to workers that have not ended after the abort."""
    decision = signal_all(state, signal.SIGTERM, now, "some workers did not exit after the abort")
    # Who was stuck has had SIGTERM already.
    told = state.outcome.workers if state.outcome and state.outcome.evidence is Evidence.STACK else ()
    actions = tuple(
        KillWorker(a.worker) if isinstance(a, SignalWorker) and a.worker in told else a
        for a in decision.actions
    )
    return replace(decision, actions=actions)


def signal_all(state: State, number: int, now: float, reason: str) -> Decision:
    """Send a signal to all workers."""
    state = replace(
        state,
        stage=Stage.TERMINATING,
        deadline=now + state.limits.term,
        next_start=None,
        patience_ends=None,
    )
    return Decision(state, tuple(SignalWorker(worker, number) for worker in sorted(state.running)), reason)


def kill(state: State, now: float, reason: str) -> Decision:
    """Kill all workers."""
    state = replace(state, stage=Stage.KILLING, deadline=now + state.limits.kill)
    return Decision(state, tuple(KillWorker(worker) for worker in sorted(state.running)), reason)


def finish(state: State, reason: str) -> Decision:
    """Be done with the job; a script that raised on one worker is told of, though others ended well."""
    outcome = state.outcome or state.suspect or JobOutcome(0)
    raised = () if outcome.message else tuple(one for worker, one in state.failed if worker in state.members)
    state = replace(
        state, stage=Stage.FINISHED, outcome=outcome, deadline=None, next_start=None, patience_ends=None
    )
    return Decision(state, (*(ShowMessage(one.message) for one in raised), FinishJob(outcome)), reason)
