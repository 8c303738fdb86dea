"""The decision on an event of a job. Pure: (state, event, now) -> (state, actions, reason).

The first failure decides the exit status. Failures that it causes in other workers (`PeerLostError`) never
do.

Once a worker has created a strategy, the job is elastic: the members continue without a lost worker in a new
view, and compute its replicas too. An error of the script ends the job, even if only one worker has raised
it: otherwise another worker would take over its work, and raise the same error. For example, the next chief
calls the same callbacks. Only an error that the machine can cause, such as one of a disk, counts as a loss,
after the other workers have had a moment to raise too. Before a strategy exists, a lost worker ends the job,
because the script may fail on all workers. A lost host does not end it.

A joiner runs the script by itself up to the position of the members: it requests the position, runs up to it,
and reports that it is ready. Then the members leave their view at the end of a step, and wait. The chief
sends the state, and the next view begins with the joiner. If the joiner is on another host, the state travels
there first. A joiner that the state does not reach is killed, and replaced like any other lost joiner.

Members on a host that retires leave at the end of a step, while others start elsewhere. This costs no
restart, and no step is computed again.

When the job ends, the workers that still run get the abort of their exchange, then SIGTERM, then SIGKILL.

`decide` has one case per event, in the order of `Event`. Consequences that several events share come last.

If there are fewer workers than `--min-workers`, the chief sends its state, and all members wait at the end of
a step until enough workers have joined. Up to `--max-restarts` losses are replaced. If a replacement ends
within a minute, the next one starts after a pause of 1, 2, 4 ... 60 seconds.

A host that is cut off cannot complete a call in the old view after one member has left it, because a call
needs a part from every member. If no agent sends messages, the coordinator itself is probably cut off. It
does not give up any agent before the limit `TimeLimits.cut_off`.

If the chief is lost before it has given the state, the next view begins without the joiner, and the members
are asked again. Once the state is given, the chief's agent holds it.
"""

import signal
from dataclasses import replace

from msgspec import structs

from lockstep.observability.events import (
    CheckpointFailed,
    CheckpointsConfigured,
    CheckpointWritten,
    DistributionBegan,
    HostJoined,
    JoinRequested,
    LastStepEnded,
    ScriptEnded,
    StopRequested,
    StrategyInstalled,
    TimeoutSet,
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
    StateGiven,
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
from lockstep.supervisor.events import (
    DeadlinePassed,
    Event,
    HostGone,
    HostsHeard,
)
from lockstep.supervisor.state import (
    JOINERS,
    Decision,
    Failure,
    JobSize,
    Phase,
    Saving,
    Stage,
    State,
    WorkerRecord,
)
from lockstep.system.exit_status import describe_exit, shell_status, signal_name
from lockstep.system.prose import count, name_workers, transferred, whose_lines

_NO_ROOM = "others start when a host joins"


def decide(state: State, event: Event, now: float) -> Decision:
    """Return the decision on `event` at time `now`."""
    if state.stage is Stage.FINISHED and not isinstance(event, HostGone | HostStopped | HostsHeard):
        return Decision(state, reason="the job has ended")
    match event:
        case WorkerExited():
            decision = _worker_exited(state, event, now)
        case StartFailed():
            decision = _start_failed(state, event, now)
        case StartCancelled(worker, number):
            decision = _worker_exited(state, WorkerExited(worker, -number), now)
        case ScriptEnded(worker, status):
            ended = state.with_worker(worker, replace(state.workers[worker], script_ended=status == 0))
            how = "finished" if status == 0 else f"exited with status {status}"
            decision = Decision(ended, reason=f"the script of worker {worker} {how}")
        case LastLineAwaited(worker):
            waiting = state.with_worker(worker, replace(state.workers[worker], awaits_end=True))
            decision = Decision(waiting, reason=f"worker {worker} waits for the last line of the job")
        case FailureReport():
            decision = _failure_reported(state, event, now)
        case StrategyInstalled():
            decision = _strategy_installed(state, now)
        case DistributionBegan():
            busy = replace(state, distributes=True, idle_until=None)
            decision = Decision(busy, reason="the script distributes its computation")
        case CheckpointsConfigured():
            decision = Decision(replace(state, keeps=True), reason="the script saves checkpoints")
        case VerificationFailed():
            decision = _verification_failed(state, event, now)
        case LastStepEnded() | CheckpointWritten() | CheckpointFailed():
            decision = _saving_advanced(state, event)
        case TimeoutSet(seconds):
            limits = replace(state.limits, timeout=seconds)
            decision = Decision(replace(state, limits=limits), reason=f"the wait limit is {seconds:g} s")
        case JoinRequested():
            decision = _join_requested(state, event, now)
        case StateGiven():
            decision = _state_given(state, event, now)
        case StateArrived():
            decision = _state_arrived(state, event, now)
        case StateMoving():
            decision = _state_moving(state, event)
        case PositionMissed():
            decision = _position_missed(state, event, now)
        case WorkerArrived(host):
            size = replace(state.size, wanted=len(state.present) + len(state.joiners) + 1, closed=False)
            admission = replace(state.admission, arrivals=(*state.admission.arrivals, host))
            arrived = replace(state, size=size, admission=admission)
            decision = Decision(arrived, reason="a worker that was started by hand arrived")
        case ScaleRequest():
            decision = _scale_requested(state, event, now)
        case WaitReported():
            decision = _wait_reported(state, event, now)
        case ViewBroken():
            decision = _view_broken(state, event, now)
        case HostRetires():
            decision = _host_retires(state, event, now)
        case HostGone(host, how):
            decision = _host_lost(state, host, how, now)
        case HostStopped(host, number):
            how = f"was stopped: its agent received {signal_name(number)}"
            decision = _host_lost(state, host, how, now, stopped=True)
        case HostsHeard():
            decision = _hosts_heard(state, event, now)
        case HostJoined():
            decision = _host_joined(state, event)
        case ViewRefused(view, reason):
            decision = Decision(state, reason=f"view {view} has already ended")
            if view == state.view.number:
                decision = _end(state, JobOutcome(1, reason), now)
        case StopRequested():
            decision = _stop_requested(state, event, now)
        case DeadlinePassed():
            decision = _deadline_passed(state, now)
    return _success_told(state, _reconciled(decision, now))


def refusal(state: State, workers: int) -> str:
    """Return why a job cannot have this number of workers now, or an empty string if it can."""
    if state.vital:
        return "a job with parameter servers keeps its number of workers"
    if workers > state.view.replicas:
        return (
            f"{workers} workers cannot share {state.view.replicas} replicas, and the number of replicas is "
            f"fixed; ask for {state.view.replicas} workers or fewer"
        )
    if workers < state.size.min_workers:
        return f"with fewer than {state.size.min_workers} workers training would wait (--min-workers)"
    if state.size.by_hand and workers > len(state.present) + len(state.joiners):
        return "the workers of this job are started by hand: start another one to add a worker"
    if not state.elastic and state.stage is Stage.RUNNING:
        return (
            "the script has created no strategy and compiled no model yet, so no worker can join or leave; "
            "try again in a moment"
        )
    if state.elastic and state.stage is Stage.LOOKING:
        return "a worker seems to be stuck and is about to be removed; try again in a moment"
    return "the job is ending" if state.stage is not Stage.RUNNING or state.too_late_to_join else ""


def _worker_exited(state: State, event: WorkerExited, now: float) -> Decision:
    """Replace a joiner, continue without a lost member, or end the job."""
    worker, phase = event.worker, state.workers[event.worker].phase
    how, saving = f"worker {worker} {describe_exit(event.status)}", state.shutdown.saving
    how += f", {event.cause}" if event.cause else ""
    if phase is Phase.LEAVING:
        left = state.with_phase(Phase.LEFT, worker)
        decision = Decision(left, reason=f"{how}; it was no longer needed")
    elif phase in JOINERS:
        decision = _joiner_exited(state, worker, how, now)
    else:
        decision = _member_exited(state, event, how, now)
    if decision.state.running or decision.state.stage is Stage.FINISHED:
        return decision
    over = _finish(decision.state, f"{how}; no workers remain")
    return _with_saving_outcome(over, saving, how) if state.stage is Stage.SAVING else over


def _start_failed(state: State, event: StartFailed, now: float) -> Decision:
    """Replace a joiner, if necessary on another host; end a job that cannot begin with all workers."""
    if event.joins and event.recurs and state.active and state.workers[event.worker].phase in JOINERS:
        return _host_full(state, event, now)
    if event.joins:
        return _worker_exited(state, WorkerExited(event.worker, 1), now)
    outcome = JobOutcome(1, event.message)
    return Decision(_with_outcome(state, outcome), (FinishJob(outcome),), event.message)


def _host_full(state: State, event: StartFailed, now: float) -> Decision:
    """Start a joiner on a host that has room. If there is none, reduce the target by one worker."""
    host = state.workers[event.worker].host
    slots = tuple(wanted - (at == host) for at, wanted in enumerate(state.slots))
    state = replace(state.with_phase(Phase.LOST, event.worker), slots=slots)
    if state.roomiest_host() is None:
        state = replace(state, size=replace(state.size, wanted=max(state.size.wanted - 1, 1)))
    if state.active and state.admission.source:
        return _admit(state, now, event.message)
    return Decision(state, reason=event.message)


def _joiner_exited(state: State, worker: int, how: str, now: float) -> Decision:
    """Count the loss of a joiner, unless the job is ending anyway."""
    record, reason = state.workers[worker], f"{how} before it joined"
    state = state.with_phase(Phase.LOST, worker)
    if not state.active or state.too_late_to_join:
        return Decision(state, reason=reason)
    state = _count_loss(state, record, now)
    if state.admission.source:
        return _admit(state, now, reason)
    # The user has already seen the error of its script.
    return _loss_noted(state, reason, reported=record.phase is Phase.JOIN_FAILED)


def _member_exited(state: State, event: WorkerExited, how: str, now: float) -> Decision:
    """Note a member that succeeded; if a member is lost, continue without it or end the job."""
    worker, outcome = event.worker, state.shutdown.outcome
    state = state.with_phase(Phase.LOST if event.status else Phase.FINISHED, worker)
    if event.status == 0:
        was_stuck = outcome is not None and worker in outcome.workers
        state = _unstuck(state) if was_stuck else state
    elif not state.workers[worker].blames:
        if state.elastic and state.active and worker not in state.vital:
            return _member_lost(_unstuck(state), event, how, now)
        if state.stage is Stage.RUNNING:
            lost = JobOutcome(shell_status(event.status), how, (worker,), Evidence.LOG)
            return _end(state, lost, now)
    if state.stage is not Stage.SAVING or not state.running:
        return Decision(state, reason=how)
    if worker not in state.members:
        return Decision(state, reason=f"{how}; the others had already continued without it")
    return _saved_without(state, how, now, killed=event.status < 0)


def _saved_without(state: State, how: str, now: float, *, killed: bool) -> Decision:
    """Let the chief or its successor complete its step without lost members; then stop the others."""
    if state.view.chief in state.running:
        return _next_view(state, how, now)
    saving = state.shutdown.saving
    if killed and state.staying and saving.kept is None and not saving.failure:
        state = replace(state, shutdown=replace(state.shutdown, saving=Saving()))
        decision = _next_view(state, how, now)
        return decision.after(SignalWorker(decision.state.view.chief, signal.SIGTERM))
    reason = f"{how}; sending SIGTERM to the other workers"
    return _with_saving_outcome(_signal_all(state, signal.SIGTERM, now, reason), state.shutdown.saving, how)


def _member_lost(state: State, event: WorkerExited, how: str, now: float) -> Decision:
    """Continue an elastic job without a member, if another one is left."""
    worker, failures = event.worker, state.failures
    if not state.present:
        if state.finished:
            reason = f"{how}; the others had succeeded"
            over = _finish(_with_outcome(state, JobOutcome(0)), reason)
            return over if worker in failures else over.after(ShowMessage(reason))
        lost = JobOutcome(shell_status(event.status), how, (worker,), Evidence.LOG)
        first = next((failures[failed] for failed in failures if failed in state.members), lost)
        return _finish(_with_outcome(state, first), f"{how}; no workers remain")
    if worker in state.servers:
        state = _without_servers(state, 1)
    else:
        state = _count_loss(state, state.workers[worker], now)
    if worker not in state.members:
        return _loss_noted(state, f"{how}; the others had already continued without it", reported=True)
    if worker not in failures:
        if event.status < 0:
            return _next_view(state, how, now)
        # A script that exits with an error status may do so on all workers, like one that raises.
        state = _with_failure(state, worker, JobOutcome(event.status, how, (worker,), Evidence.LOG), now)
    if state.shutdown.deadline is not None:
        return Decision(state, reason=f"{how}; the others may fail too")
    return _next_view(state, "", now)


def _view_broken(state: State, event: ViewBroken, now: float) -> Decision:
    """Begin the next view with the same members, at the cost of a restart, unless that is useless."""
    how = f"worker {event.worker}: {event.reason}"
    awaited = state.admission.source is not None or state.shutdown.deadline is not None
    if state.stage is not Stage.RUNNING or event.view != state.view.number or awaited:
        return Decision(state, reason=f"{how}; view {event.view} has ended, or is about to")
    if event.fatal or not state.elastic:
        return _end(state, JobOutcome(1, how), now)
    if not (state.size.restarts_left or state.size.by_hand):
        how += f"; no restart is left (--max-restarts {state.size.max_restarts})"
        return _end(state, JobOutcome(1, how), now)
    left = max(state.size.restarts_left - 1, 0)
    return _next_view(replace(state, size=replace(state.size, restarts_left=left)), how, now)


def _host_retires(state: State, event: HostRetires, now: float) -> Decision:
    """Let the workers of a host leave before the host does."""
    if event.host in state.lost_hosts | state.retiring or not state.active:
        return Decision(state, reason=f"{event.reason}; this is known, or the job is already ending")
    return _hosts_retire(state, (event.host,), event.reason, now)


def _hosts_retire(state: State, hosts: tuple[int, ...], reason: str, now: float) -> Decision:
    """Retire hosts: let their workers leave, and start no workers there."""
    if state.size.by_hand or state.vital:
        why = "belong to a job with parameter servers" if state.vital else "are started by hand"
        return Decision(
            state, reason=f"{reason}; {'its' if len(hosts) == 1 else 'their'} workers {why}, and stay"
        )
    dropped = tuple(worker for worker in state.joiners if state.workers[worker].host in hosts)
    state, kills = _without_joiners(replace(state, retiring=state.retiring.union(hosts)), dropped)
    there = tuple(worker for worker in state.staying if state.workers[worker].host in hosts)
    lacks = state.filled < state.size.wanted and not state.too_late_to_join
    if there and state.outgoing:
        reason += f"; {name_workers(there)} leave{'s' * (len(there) == 1)} at the end of a step"
    elif there:
        reason += f"; {name_workers(there)} stay{'s' * (len(there) == 1)} until enough others have joined"
    if state.size.closed:
        state = replace(
            state, size=replace(state.size, wanted=max(len(state.staying) - len(state.outgoing), 1))
        )
    elif lacks and state.roomiest_host() is None:
        reason += f"; {_NO_ROOM}"
    reported = Decision(state, (ShowMessage(reason),), reason)
    return (_admit(state, now, reason) if state.admission.source else reported).after(*kills)


def _hosts_heard(state: State, event: HostsHeard, now: float) -> Decision:
    """Treat the first host that is silent for too long as lost. If all are, this host seems cut off."""
    silent, limits = state.silent(event.at, now), state.limits
    if not silent:
        return Decision(state, reason="all hosts were heard")
    if state.active and len(silent) == len(state.slots) - len(state.lost_hosts):
        trains = "continues there while no worker is lost" if limits.hold is None else "pauses there"
        text = (
            f"no host has been heard for {limits.silence:g} s; training {trains}, and the job ends after "
            f"{limits.cut_off:g} s of silence"
        )
        if not state.cut_off:
            return Decision(replace(state, cut_off=True), (ShowMessage(text),), text)
        if now - max(event.at.values()) <= limits.cut_off:
            return Decision(state, reason=text)
    elif state.cut_off:
        # The hosts do not return at the same moment.
        return Decision(replace(state, cut_off=False, heard_from=now), reason="hosts were heard again")
    return _host_lost(state, silent[0], f"has been silent for {limits.silence:g} s", now)


def _host_lost(state: State, host: int, how: str, now: float, *, stopped: bool = False) -> Decision:
    """Continue without the workers of a host, which are not replaced until a host has room.

    They have ended if the agent of the host was `stopped`. Otherwise, they may still be running there.
    """
    if state.stage is Stage.FINISHED:
        return Decision(replace(state, lost_hosts=state.lost_hosts | {host}), reason="the job has ended")
    gone = tuple(sorted(worker for worker in state.running if state.workers[worker].host == host))
    reason = f"host {state.names[host]} {how}"
    how = f"{reason}; lost {name_workers(gone)}" if gone else reason
    if host in state.retiring and state.leaving.issuperset(gone):
        how = f"{reason}, as announced; its workers had left"
    saving, leaving, waits = state.shutdown.saving, state.leaving, state.admission.source is not None
    members = state.present.intersection(gone)
    state = replace(state, lost_hosts=state.lost_hosts | {host})
    state = state.with_phase(Phase.LOST, *gone).with_phase(Phase.LEFT, *leaving.intersection(gone))
    if servers := state.servers.intersection(gone):
        state = _without_servers(state, len(servers))
    state = _with_missing(state, host)
    if not state.running or (state.active and not state.present):
        succeeded = state.active and bool(state.finished)
        how += "; the others had succeeded" if succeeded else "; no workers remain"
        failed = state.shutdown.outcome or JobOutcome(1, how, out_of_reach=bool(gone) and not stopped)
        outcome = JobOutcome(0) if succeeded else failed
        over = _finish(_with_outcome(state, outcome), how)
        over = over.after(ShowMessage(how)) if succeeded else over
        return _with_saving_outcome(over, saving, how) if state.stage is Stage.SAVING else over
    if state.stage is Stage.SAVING and members.intersection(state.members):
        return _saved_without(state, how, now, killed=True)
    if not state.active:
        return Decision(state, reason=f"{how}; the job is already ending")
    state = _unstuck(state)
    if (vital := state.vital.intersection(gone)) and state.stage is Stage.RUNNING:
        reason = f"{how}; the job cannot continue without {name_workers(tuple(sorted(vital)))}"
        return _end(state, JobOutcome(1, reason), now)
    if waits or members.intersection(state.members):
        return _next_view(state, how, now)
    return _loss_noted(state, how, reported=False)


def _with_missing(state: State, lost: int) -> State:
    """Note that a lost host had workers, and how they may return."""
    size, admission = state.size, state.admission
    arrivals = tuple(host for host in admission.arrivals if host != lost)
    there, then = state.filled + len(arrivals), ""
    if there < size.wanted and not state.too_late_to_join:
        if size.by_hand:
            size, then = replace(size, wanted=max(there, 1)), _no_more(size)
        elif state.roomiest_host() is None:
            then = _NO_ROOM
    if lost in admission.holders:
        # Other hosts may not have received all of it.
        admission = admission.without_state()
    receivers = admission.receivers - {lost}
    admission = replace(admission, arrivals=arrivals, receivers=receivers).with_consequence(then)
    return replace(state, size=size, admission=admission)


def _host_joined(state: State, event: HostJoined) -> Decision:
    """Note a host that has room for workers. A host whose workers were at fault too often gets none."""
    others, host = state.hosts, len(state.slots)
    slots, cores = (*state.slots, event.workers), (*state.cores, event.cores)
    state = replace(state, slots=slots, cores=cores, names=(*state.names, event.host))
    reason = f"host {event.host} has joined, with room for {count(event.workers, 'worker')}"
    if others and state.is_untrusted(host) and not (state.size.by_hand or state.vital):
        state = replace(state, retiring=state.retiring | {host})
        reason = (
            f"host {event.host} has joined, but no worker starts there: its workers were found at fault "
            f"{count(state.named.count(event.host), 'time')} (--avoid-host-after {state.avoid_host_after})"
        )
    return Decision(state, (ShowMessage(reason),) if state.active else (), reason)


def _failure_reported(state: State, event: FailureReport, now: float) -> Decision:
    """Wait a moment: other workers may fail too, or the blamed worker may show the cause."""
    worker, record = event.worker, state.workers[event.worker]
    how = f" exited with status {event.status}" if event.prints else ""
    message = f"worker {worker}{how}: {event.event.summary}"
    if record.phase in JOINERS:
        if not state.active:
            return Decision(state, reason=f"{message}; the job is already ending")
        state = state.with_phase(Phase.JOIN_FAILED, worker)
        return Decision(state, (ShowMessage(f"{message} (it was joining)", (worker,)),), message)
    evidence = Evidence.LOG if event.prints else Evidence.LOG_NAME
    outcome = JobOutcome(event.status, message, (worker,), evidence)
    state = state.with_worker(worker, replace(record, raised=True))
    # The failure is settled first; if a worker is still stuck then, the next report of a wait finds it.
    state = _unstuck(state) if state.elastic else state
    if state.stage is not Stage.RUNNING:
        if state.stage is Stage.ENDING and state.all_raised:
            state = _with_deadline(state, now + state.limits.leave)
        return Decision(state, reason=f"{message}; the job is already ending")
    if not event.blames:
        if not state.elastic or worker in state.vital or event.recurs:
            return _end(state, outcome, now)
        state = _with_failure(state, worker, outcome, now)
        return Decision(state, reason=f"{message}; the others may fail too")
    suspect = state.shutdown.suspect
    # Parameter servers blame the chief, which knows which worker it waits for.
    if suspect is None or (state.vital and worker == state.view.chief):
        suspect = outcome
        state = replace(state, shutdown=replace(state.shutdown, suspect=suspect))
        state = _with_deadline(state, now + state.limits.blame)
    if state.all_raised and not state.failures:
        # No worker is left that could show another cause.
        return _end(state, suspect, now)
    return Decision(state, reason=f"{message}; waiting for the cause")


def _strategy_installed(state: State, now: float) -> Decision:
    """Make the job elastic; its script should distribute something soon."""
    if not state.elastic and not state.distributes and state.view.replicas > 1:
        state = replace(state, idle_until=now + state.limits.idle)
    return Decision(replace(state, elastic=True), reason="the script created its strategy")


def _verification_failed(state: State, event: VerificationFailed, now: float) -> Decision:
    """Start another worker if workers repeat different bits, or retire a host that was named too often."""
    if event.verdict == "worker":
        return _workers_named(state, event, now)
    reason = f"{name_workers(event.workers)} computed different bits in step {event.step}"
    # Otherwise the members give the state, enter the next view without an additional worker, and stop.
    can_join = state.stage is Stage.RUNNING and not (state.vital or state.size.closed or state.size.by_hand)
    if event.verdict != "third" or not can_join:
        return Decision(state, reason=reason)
    state = replace(state, admission=replace(state.admission, accused=event.workers))
    if not _another_can_join(state):
        return Decision(_without_accused(state), reason=reason)
    instead = "" if state.replaced is None else f" in place of worker {state.replaced}"
    reason += f", each the same bits every time; another worker starts{instead}, and decides"
    return Decision(state, (ShowMessage(reason),), reason)


def _workers_named(state: State, event: VerificationFailed, now: float) -> Decision:
    """Count the hosts of workers at fault; retire those that were named too often, but keep the last host."""
    hosts, most = state.hosts_of(event.workers), state.avoid_host_after
    state = replace(state, named=(*state.named, *dict.fromkeys(state.names[host] for host in hosts)))
    times = {host: state.named.count(state.names[host]) for host in state.hosts}
    often = [host for host in state.hosts if state.is_untrusted(host)]
    # Without another step, no worker leaves.
    if not state.active or state.finished or not set(often).intersection(hosts):
        reason = f"{name_workers(event.workers)} computed wrong bits in step {event.step}"
        return Decision(state, reason=reason)
    # This includes a host that was the last one when it was named, if another host has joined since.
    avoided = sorted(often, key=lambda host: (-times[host], host))[: len(state.hosts) - 1]
    told = tuple(sorted(avoided)) or tuple(often)
    named = " and ".join(
        f"workers of host {state.names[host]} were found at fault {count(times[host], 'time')}"
        for host in told
    )
    if not avoided:
        text = f"{named}, and no other host could continue (--avoid-host-after {most})"
        return Decision(state, (ShowMessage(text),), text)
    text = f"{named}: no new worker starts there (--avoid-host-after {most})"
    return _hosts_retire(state, told, text, now)


def _saving_advanced(state: State, event: LastStepEnded | CheckpointWritten | CheckpointFailed) -> Decision:
    """Note the chief's progress with the last checkpoint; for earlier checkpoints, only return a reason."""
    saving, actions = state.shutdown.saving, tuple[Action, ...]()
    match event:
        case LastStepEnded(step):
            saving = replace(saving, step=step)
            reason = f"stopping: step {step} is complete; writing its checkpoint"
            actions = (ShowMessage(reason),)
        case CheckpointWritten(_, step):
            saving = replace(saving, kept=step)
            reason = f"checkpoint written at step {step}"
        case CheckpointFailed(failure):
            saving = replace(saving, failure=failure)
            reason = f"no checkpoint: {failure}"
    if state.stage is not Stage.SAVING:
        return Decision(state, reason=reason)
    return Decision(replace(state, shutdown=replace(state.shutdown, saving=saving)), actions, reason)


def _join_requested(state: State, event: JoinRequested, now: float) -> Decision:
    """Note the request of a joiner; answer at once if the chief has sent the state."""
    worker, phase, source = event.worker, state.workers[event.worker].phase, state.admission.source
    if phase not in JOINERS or phase is Phase.JOIN_FAILED or not state.active:
        return Decision(state, reason=f"worker {worker} no longer joins")
    if event.whole:
        state, reason = state.with_phase(Phase.READY, worker), f"worker {worker} is ready"
        return _admit(state, now, "") if source else Decision(state, reason=reason)
    reason = f"worker {worker} asks for the training position"
    if source:
        # The members wait at the position of the state.
        return Decision(state, (SendPosition(worker, source),), reason)
    return Decision(state.with_phase(Phase.LOCATING, worker), reason=reason)


def _state_given(state: State, event: StateGiven, now: float) -> Decision:
    """Forward the position, or begin the next view with the state."""
    if event.view != state.view.number:
        return Decision(state, reason=f"view {event.view} has already ended")
    if event.whole and state.stage is Stage.SAVING:
        return _next_view(state, "the job is stopping", now)
    if not state.active:
        return Decision(state, reason="the job is already ending")
    state = _unstuck(state) if event.whole else state
    if (source := event.source) is None:
        # Joiners would wait for a state that never comes.
        least = state.size.min_workers
        reason = f"no worker can join: {event.failure}"
        state, kills = _without_joiners(state, state.joiners)
        size = replace(state.size, min_workers=1, restarts_left=0, closed=True)
        admission = replace(state.admission, backoff_until=None, accused=())
        state = replace(state, size=size, admission=admission)
        outgoing = state.outgoing
        staying = len(state.staying) - len(outgoing)
        if staying < least:
            reason += f"; training continues with fewer than {least} workers (--min-workers)"
        state = replace(state, size=replace(size, wanted=max(staying, 1)))
        if event.whole:
            # The members are at the end of a step, and no state is needed for some to leave.
            state = state.with_phase(Phase.LEAVING, *outgoing)
        reported = Decision(state, (ShowMessage(reason),), reason)
        return (_next_view(state, reason, now) if event.whole else reported).after(*kills)
    locating = sorted(state.within(Phase.LOCATING))
    positions = tuple(SendPosition(worker, source) for worker in locating)
    state = state.with_phase(Phase.JOINING, *locating)
    if not event.whole:
        return Decision(state, positions, "the chief reported the training position")
    holders = frozenset({source.host})
    admission = replace(state.admission, source=source, holders=holders, posted=Notice.NOTHING)
    return _admit(replace(state, admission=admission), now, "").after(*positions)


def _state_arrived(state: State, event: StateArrived, now: float) -> Decision:
    """Begin the next view if the state has reached all joiners that it can reach."""
    admission, host = state.admission, frozenset({event.host})
    if event.view != state.view.number or not admission.source:
        return Decision(state, reason=f"the state of view {event.view} is no longer needed")
    if event.failure:
        state = replace(state, admission=replace(admission, receivers=admission.receivers - host))
        late = tuple(worker for worker in state.lacking if state.workers[worker].host == event.host)
        return _unreached(state, late, event.failure, now)
    state = replace(state, admission=replace(admission, holders=admission.holders | host))
    if state.lacking or admission.report_at is None:
        return Decision(state, reason="the state has arrived; training waits for others")
    return _admit(state, now, "")


def _state_moving(state: State, event: StateMoving) -> Decision:
    """Note how much of the state has reached a host, for the next message."""
    if event.view != state.view.number or not state.admission.source:
        return Decision(state, reason=f"the state of view {event.view} is no longer needed")
    text = transferred(event.received, event.size, event.seconds)
    moved = dict(state.admission.moved) | {event.host: text}
    state = replace(state, admission=replace(state.admission, moved=tuple(moved.items())))
    return Decision(state, reason=f"the state on its way to host {event.host}: {text}")


def _position_missed(state: State, event: PositionMissed, now: float) -> Decision:
    """Ask again for the position if its view has ended meanwhile; otherwise give up the joiner."""
    if not state.active or state.workers[event.worker].phase is not Phase.JOINING:
        return Decision(state, reason=f"worker {event.worker} no longer joins")
    if event.view != state.view.number:
        return _join_requested(state, JoinRequested(event.worker, whole=False), now)
    return _unreached(state, (event.worker,), event.failure, now)


def _scale_requested(state: State, event: ScaleRequest, now: float) -> Decision:
    """Aim for another number of workers, with a fresh budget of restarts."""
    size = replace(state.size, wanted=event.workers, restarts_left=state.size.max_restarts, closed=False)
    admission = replace(state.admission, young_losses=0, backoff_until=None)
    lasting = [worker for worker in state.staying if not state.retires(worker)]
    dropped = state.joiners[max(event.workers - len(lasting), 0) :]
    state = replace(state, size=size, admission=admission).with_slots(event.workers)
    state, kills = _without_joiners(state, dropped)
    reason = f"the job now wants {count(event.workers, 'worker')}"
    if dropped:
        reason += f"; {name_workers(dropped)} no longer need{'s' if len(dropped) == 1 else ''} to join"
    reported = Decision(state, (ShowMessage(reason),), reason)
    return (_admit(state, now, reason) if admission.source else reported).after(*kills)


def _wait_reported(state: State, event: WaitReported, now: float) -> Decision:
    """Assess a wait: it may be in vain, end with the view, or be long or too long."""
    worker, running, waited = event.worker, state.running, f"{event.seconds:.0f} s"
    if state.stage is not Stage.RUNNING:
        return Decision(state, reason="the job is already ending")
    if state.admission.source:
        return Decision(state, reason=f"worker {worker} waits for the next view, like all members")
    if state.view_since is not None and now - event.seconds < state.view_since:
        return Decision(state, reason=f"worker {worker} reports a wait in an old view")

    # An elastic job continues without lost workers in a view that this worker does not know yet.
    exited = tuple(w for w in event.waits_for if (w in state.finished if state.elastic else w not in running))
    record = state.workers[worker]
    if exited and not record.waits_in_vain:
        # The worker may have sent the report just before the last worker arrived; a second report rules this
        # out.
        again = state.with_worker(worker, replace(record, waits_in_vain=True))
        return Decision(
            again, reason=f"worker {worker} may wait for a finished worker; the next report decides"
        )
    if exited:
        message = f"{name_workers(exited)} exited with status 0 while worker {worker} waited for "
        message += f"{'it' if len(exited) == 1 else 'them'} in {event.what}"
        return _end(state, JobOutcome(1, message, exited, Evidence.LOG), now)

    late = tuple(w for w in event.waits_for if w in running and not state.workers[w].condemned)
    if not late:
        return Decision(state, reason=f"the next view leaves out the workers that worker {worker} waits for")
    state = state.with_worker(worker, replace(record, waits_in_vain=False))
    if event.seconds >= state.limits.timeout and state.shutdown.deadline is None:
        message = f"{name_workers(late)} did not reach {event.what}: worker {worker} has waited "
        message += f"{waited} (--timeout {state.limits.timeout:g})"
        outcome, deadline = JobOutcome(1, message, late, Evidence.STACK), now + state.limits.look
        looking = replace(state.shutdown, stage=Stage.LOOKING, outcome=outcome, deadline=deadline)
        return Decision(replace(state, shutdown=looking), tuple(map(DumpStack, late)), message)
    last = dict(state.reported_late).get(late, now - state.limits.repeat)
    text = f"worker {worker} has waited {waited} for {name_workers(late)} in {event.what}"
    if event.seconds < state.limits.repeat or now - last < state.limits.repeat:
        return Decision(state, reason=text)
    reported_late = dict(state.reported_late) | {late: now}
    return Decision(replace(state, reported_late=tuple(reported_late.items())), (ShowMessage(text),), text)


def _stop_requested(state: State, event: StopRequested, now: float) -> Decision:
    """Stop the job: after one more checkpoint if it saves checkpoints, otherwise at once."""
    name, shutdown = signal_name(event.signal), state.shutdown
    grace = max(0.0, state.limits.save - event.waited)
    if state.stage is Stage.SAVING:
        killed = _kill(state, now, f"received {name} during the grace period")
        return _with_saving_outcome(killed, shutdown.saving, f"received {name}")
    if state.stage in (Stage.TERMINATING, Stage.KILLING):
        return _kill(state, now, f"received {name} again")
    if state.stage is Stage.RUNNING and state.succeeds:
        reason = f"{name} arrived after the script finished: the job succeeded"
        state = _with_outcome(state, JobOutcome(0))
        if state.keeps:
            # The chief may be writing the last checkpoint.
            state = _at_stage(state, Stage.ENDING, now + grace)
            return Decision(state, (ShowMessage(reason),), reason)
        return _signal_all(state, event.signal, now, reason).after(ShowMessage(reason))
    active = state.stage is Stage.RUNNING
    stopped = JobOutcome(128 + event.signal, f"stopped by {name}", stopped=True)
    outcome = shutdown.outcome or stopped
    state = _with_outcome(state, outcome)
    if not (state.keeps and state.elastic and active and state.staying):
        decision = _signal_all(state, event.signal, now, f"{name}: forwarding it to every worker")
        # Workers that were started by hand release their terminals before the job has ended.
        shows = state.size.by_hand and outcome.message
        return decision.after(ShowMessage(outcome.message)) if shows else decision

    # The chief writes a checkpoint at the end of its step. The members must not wait for joiners before that.
    reason = f"stopping ({name}): waiting up to {round(grace, 1):g} s for the step and a checkpoint"
    if event.signal == signal.SIGINT:
        reason += "; Ctrl-C again ends the job at once"
    waits = state.admission.source or set(state.staying) != set(state.members)
    state = _at_stage(state, Stage.SAVING, now + grace)
    state = replace(state, shutdown=replace(state.shutdown, saving=Saving()))
    decision = _next_view(state, reason, now) if waits else Decision(state, (ShowMessage(reason),), reason)
    return decision.after(SignalWorker(decision.state.view.chief, signal.SIGTERM))


def _deadline_passed(state: State, now: float) -> Decision:
    """Take the first action that is due."""
    admission = state.admission
    if state.shutdown.deadline is not None and now >= state.shutdown.deadline:
        return _stage_over(state, now)
    if admission.deadline is not None and now >= admission.deadline:
        if admission.report_at is not None:
            late = f"the state has not arrived within {state.limits.timeout:g} s (--timeout)"
            return _unreached(state, state.lacking, late, now)
        if admission.accused:
            return _admit(_without_accused(state), now, "no other worker has joined to decide")
        number = len(state.staying) + len(state.ready)
        message = f"too few workers for {state.limits.timeout:g} s (--timeout): {number} of at least "
        message += f"{state.size.min_workers} (--min-workers)"
        return _end(state, JobOutcome(1, message, state.joiners, Evidence.LOG), now)
    if admission.report_at is not None and now >= admission.report_at:
        hosts = {state.workers[worker].host for worker in state.lacking}
        moved = "; ".join(how for host, how in sorted(admission.moved) if host in hosts)
        text = f"training waits until the state has reached the host of {name_workers(state.lacking)}"
        text += f": {moved}" if moved else ""
        shown = (ShowMessage(text),) if state.lacking else ()
        state = replace(state, admission=replace(admission, report_at=now + state.limits.repeat))
        return Decision(state, shown, text)
    if state.idle_until is not None and now >= state.idle_until:
        return _nothing_distributed(state)
    if admission.backoff_until is not None and now >= admission.backoff_until:
        state = replace(state, admission=replace(admission, backoff_until=None))
        return Decision(state, reason="workers can start again")
    return Decision(state, reason="nothing is due")


def _nothing_distributed(state: State) -> Decision:
    """Notify the user that the script distributes nothing, which may be intended."""
    lines = whose_lines(len(state.members), state.view.replicas)
    text = (
        f"the script has distributed nothing in the {state.limits.idle:g} s since it created a strategy or "
        "compiled a model; until it calls model.fit, evaluate or predict, strategy.run or strategy.steps, "
        f"{lines}"
    )
    reported = (ShowMessage(text),) if state.stage is Stage.RUNNING else ()
    return Decision(replace(state, idle_until=None), reported, text)


def _stage_over(state: State, now: float) -> Decision:
    """Settle failures, continue without stuck workers, or take the next step of the end."""
    outcome, running = state.shutdown.outcome, state.running
    match state.stage:
        case Stage.RUNNING:
            there = running.union(state.members)
            if failed := tuple(worker for worker in state.failures if worker in there):
                blaming = [worker for worker in state.present if state.workers[worker].blames]
                if blaming and (not state.staying or state.vital.intersection(blaming)):
                    # The members cannot continue without the failed workers.
                    return _end(state, state.failures[failed[0]], now)
                return _without_failed(state, failed, now)
            if state.shutdown.suspect:
                return _end(state, state.shutdown.suspect, now)
            return Decision(_with_deadline(state, None), reason="the failed workers were already left out")
        case Stage.LOOKING:
            assert outcome is not None
            stuck = tuple(worker for worker in outcome.workers if worker in running)
            if state.elastic and state.present.difference(outcome.workers):
                # The others continue without these workers once their processes have ended.
                state = _unstuck(state)
                for worker in stuck:
                    state = state.with_worker(worker, replace(state.workers[worker], condemned=True))
                ends = "it; its log ends" if len(stuck) == 1 else "them; their logs end"
                text = f"{outcome.message}; killing {ends} with the Python stack"
                reported = Decision(state, (ShowMessage(text),), outcome.message)
                return reported.after(*map(KillWorker, stuck))
            # Stuck workers do not react to the abort.
            ended = _end(state, outcome, now)
            signals = tuple(SignalWorker(worker, signal.SIGTERM) for worker in sorted(stuck))
            return replace(ended, actions=(*ended.actions, *signals))
        case Stage.SAVING:
            saving, within = state.shutdown.saving, f"within {state.limits.save:g} s (--grace)"
            late = "the step did not finish"
            if saving.step is not None:
                late = f"the checkpoint of step {saving.step} was not written"
            text = saving.outcome(f"{late} {within}")
            return _signal_all(state, signal.SIGTERM, now, text).after(ShowMessage(text))
        case Stage.ENDING:
            # Stuck workers have already received SIGTERM.
            stuck = outcome.workers if outcome and outcome.evidence is Evidence.STACK else ()
            actions = tuple(
                KillWorker(worker) if worker in stuck else SignalWorker(worker, signal.SIGTERM)
                for worker in sorted(running)
            )
            state = _at_stage(state, Stage.TERMINATING, now + state.limits.term)
            return Decision(state, actions, "some workers did not exit after the abort")
        case Stage.TERMINATING:
            late, is_single = name_workers(sorted(running)), len(running) == 1
            text = f"{late} did not exit within {state.limits.term:g} s after the signal: killing "
            text += "it" if is_single else "them"
            return _kill(state, now, text).after(ShowMessage(text))
        case _:
            return _finish(state, "some workers cannot be killed")


def _without_failed(state: State, failed: tuple[int, ...], now: float) -> Decision:
    """Continue without the failed workers, once their processes have ended."""
    state = _with_deadline(state, None)
    late = tuple(worker for worker in failed if worker in state.running)
    kills = tuple(map(KillWorker, late))
    if late == failed or set(late).intersection(state.members):
        return Decision(state, kills, f"{name_workers(late)} failed but did not exit")
    return _next_view(state, "", now).after(*kills)


# Shared consequences: failures and losses.


def _unstuck(state: State) -> State:
    """Clear the stuck workers: the members may now wait for others."""
    if state.stage is not Stage.LOOKING:
        return state
    shutdown = replace(state.shutdown, stage=Stage.RUNNING, outcome=None, deadline=None)
    return replace(state, shutdown=shutdown)


def _with_failure(state: State, worker: int, outcome: JobOutcome, now: float) -> State:
    """Note a failure, and give the other workers a moment to fail too."""
    record = replace(state.workers[worker], failure=Failure(outcome, len(state.failures)))
    state = state.with_worker(worker, record)
    waits = state.shutdown.deadline is not None
    return state if waits else _with_deadline(state, now + state.limits.blame)


def _count_loss(state: State, lost: WorkerRecord, now: float) -> State:
    """Decide whether a lost worker will be replaced, and when."""
    size, limits, admission = state.size, state.limits, state.admission
    if state.too_late_to_join or state.filled >= size.wanted:
        return state
    if not size.restarts_left:
        # The target is now one worker less; users see this number.
        size = replace(size, wanted=max(size.wanted - 1, 1), closed=size.closed or size.wanted == 1)
        return replace(state, size=size, admission=admission.with_consequence(_no_more(size)))
    size, losses = replace(size, restarts_left=size.restarts_left - 1), admission.young_losses
    if lost.started_at is None or now - lost.started_at >= limits.young:
        return replace(state, size=size, admission=replace(admission, young_losses=0))
    pause = min(limits.pause * 2.0 ** min(losses, 100), limits.longest_pause)
    has_room = state.roomiest_host() is not None
    admission = replace(
        admission,
        young_losses=losses + 1,
        backoff_until=now + pause,
        unreported=f"another worker starts in {pause:g} s" if has_room else _NO_ROOM,
    )
    return replace(state, size=size, admission=admission)


def _without_servers(state: State, number: int) -> State:
    """Reduce the target by the lost servers: their standbys continue, and nothing replaces them."""
    admission = state.admission.with_consequence("a lost parameter server is not replaced")
    wanted = max(state.size.wanted - number, 1)
    return replace(state, size=replace(state.size, wanted=wanted), admission=admission)


def _no_more(size: JobSize) -> str:
    if size.by_hand and not size.closed:
        return "start it again and it joins"
    why = "no worker can join" if size.closed else f"--max-restarts {size.max_restarts}"
    return f"lost workers are {'no longer' if size.max_restarts else 'not'} replaced ({why})"


def _loss_noted(state: State, reason: str, *, reported: bool) -> Decision:
    """Note a loss that does not affect the members; if `reported`, a message has already named it."""
    if state.admission.unreported:
        reported, reason = False, f"{reason}; {state.admission.unreported}"
    state = replace(state, admission=replace(state.admission, unreported=""))
    return Decision(state, () if reported else (ShowMessage(reason),), reason)


# Shared consequences: the next view and its workers.


def _next_view(state: State, how: str, now: float) -> Decision:
    """Continue without lost workers, with `how` as the reason unless failures give it."""
    staying, why = state.staying, _why(state, how)
    if state.size.by_hand and state.active:
        # The others wait for the last line of the job, and enter no view.
        staying = tuple(worker for worker in staying if not state.workers[worker].script_ended) or staying
    if not staying:
        return Decision(state, reason=f"{why}; no workers remain")
    if state.admission.source:
        return _admit(state, now, how)
    view = state.next_view(staying)
    reason = f"{why}; {name_workers(staying)} continue{'s' * (len(staying) == 1)}"
    admission = replace(state.admission, posted=Notice.NOTHING, unreported="")
    shown = ShowMessage(reason, _logs(state))
    state = replace(state, view=view, view_since=now, admission=admission)
    return Decision(state, (state.start_view(reason), shown), reason)


def _admit(state: State, now: float, how: str) -> Decision:
    """Begin a view with the ready joiners, or let the members wait for more workers."""
    why, size = _why(state, how), state.size
    if state.admission.accused and not state.ready:
        if _another_can_join(state):
            reason = "training waits for another worker, which decides"
            if not why:
                return Decision(_waiting(state, now), reason=reason)
            return Decision(_waiting(state, now), (ShowMessage(f"{why}; {reason}"),), f"{why}; {reason}")
        state = _without_accused(state)
    staying, ready, outgoing = state.staying, state.ready, state.outgoing
    # Members whose hosts retire come last, even if they have to stay.
    lasting = sorted((*staying, *ready), key=lambda worker: worker in staying and state.retires(worker))
    chosen = set(lasting[: max(size.wanted or len(staying), 1)]).difference(outgoing)
    workers = tuple(worker for worker in (*staying, *ready) if worker in chosen)
    if len(workers) < (least := size.min_workers):
        if size.wanted < least:
            message = f"too few workers remain: {len(workers)} of at least {least} (--min-workers)"
            return _end(state, JobOutcome(1, f"{why or _no_more(size)}; {message}"), now)
        outcome = f"training waits: {count(len(workers), 'worker')} of at least {least} (--min-workers)"
        reason = f"{why}; {outcome}" if why else outcome
        return Decision(_waiting(state, now), (ShowMessage(reason),), reason)
    if state.lacking:
        return _state_sent(state, now, why)
    view = state.next_view(workers)
    new, old = tuple(w for w in workers if w in ready), tuple(w for w in staying if w not in workers)
    changes = [f"{name_workers(new)} joined"] if new else []
    changes += [f"{name_workers(old)} left"] if old else []
    outcome = f"{' and '.join(changes) or 'no worker joins'} ({count(len(workers), 'worker')})"
    reason = f"{why}; {outcome}" if why else outcome
    source = state.admission.source if new else None
    admission = replace(state.admission.without_state(), unreported="")
    shown = ShowMessage(reason, _logs(state))
    state = replace(state, view=view, view_since=now, admission=admission)
    state = state.with_phase(Phase.MEMBER, *new).with_phase(Phase.LEAVING, *old)
    for worker in new:
        state = state.with_worker(worker, replace(state.workers[worker], member_since=view.number))
    return Decision(state, (state.start_view(reason, source), shown), reason)


def _another_can_join(state: State) -> bool:
    """Whether an arbiter, which decides between the accused workers, is starting or can start."""
    room = state.filled < state.size.wanted and state.roomiest_host() is not None
    return bool(state.joiners) or room


def _without_accused(state: State) -> State:
    """Begin the next view without an arbiter, so that the workers that repeat different bits stop."""
    return replace(state, admission=replace(state.admission, accused=()))


def _waiting(state: State, now: float) -> State:
    """Give the wait for the next view a deadline, if it has none."""
    admission = state.admission
    deadline = now + state.limits.timeout if admission.deadline is None else admission.deadline
    return replace(state, admission=replace(admission, deadline=deadline, report_at=None, unreported=""))


def _state_sent(state: State, now: float, why: str) -> Decision:
    """Send the state to all hosts whose joiners lack it; the members wait until it has arrived."""
    source = state.admission.source
    assert source is not None
    hosts = {state.workers[worker].host for worker in state.lacking}
    report_at = state.admission.report_at or now + state.limits.repeat
    sends = tuple(SendState(host, source) for host in sorted(hosts - state.admission.receivers))
    state = _waiting(state, now)
    receivers = state.admission.receivers | hosts
    state = replace(state, admission=replace(state.admission, receivers=receivers, report_at=report_at))
    reason = f"the state is on its way to the host of {name_workers(state.lacking)}"
    if not why:
        return Decision(state, sends, reason)
    reason = f"{why}; {reason}"
    return Decision(state, (*sends, ShowMessage(reason)), reason)


def _unreached(state: State, workers: tuple[int, ...], why: str, now: float) -> Decision:
    """Kill joiners that the state or the position does not reach; the members continue."""
    state = state.with_phase(Phase.JOIN_FAILED, *workers)
    reason = f"{name_workers(workers)} cannot join: {why}" if workers else why
    lost = (*((ShowMessage(reason),) if workers else ()), *map(KillWorker, workers))
    if not state.admission.source:
        return Decision(state, lost, reason)
    return replace(_admit(state, now, "").after(*lost), reason=reason)


def _why(state: State, how: str) -> str:
    """Describe the loss of the members that are missing from the next view, and its consequence."""
    raised = [outcome.message for worker, outcome in state.failures.items() if worker in state.members]
    return "; ".join(text for text in (*raised, how, state.admission.unreported) if text)


def _logs(state: State) -> tuple[int, ...]:
    """Return the members that have failed, whose logs have the error."""
    return tuple(worker for worker in state.failures if worker in state.members)


def _reconciled(decision: Decision, now: float) -> Decision:
    """Start missing workers, and ask the members for the state or the position that joiners need."""
    state, size, admission = decision.state, decision.state.size, decision.state.admission
    if state.stage is not Stage.RUNNING or not state.elastic or not size.wanted:
        return decision
    if state.too_late_to_join:
        return _admission_closed(decision)
    actions: tuple[Action, ...] = ()
    missing = size.wanted - state.filled
    paused = admission.backoff_until is not None and now < admission.backoff_until
    # The script may raise on all workers, so that no other worker is needed.
    unsure = state.failures and state.shutdown.deadline is not None
    replaced = state.replaced
    if missing > 0 and not paused and not unsure:
        for worker in range(first := max(state.workers) + 1, first + missing):
            host, *later = admission.arrivals or (state.roomiest_host(),)
            if host is None:
                break
            admission = replace(admission, arrivals=tuple(later))
            state = state.with_worker(worker, WorkerRecord(Phase.JOINING, host, started_at=now))
            yielding = state.leaving if replaced is None else state.leaving | {replaced}
            start = StartWorker(worker, joins=True, yielding=tuple(sorted(yielding)))
            actions = (*actions, start)
        admission = replace(admission, backoff_until=None)
    if not admission.source:
        members, notice = len(state.staying), Notice.NOTHING
        if state.ready or state.outgoing or members > size.wanted or members < size.min_workers:
            notice = Notice.CHANGE
        elif state.within(Phase.LOCATING):
            notice = Notice.POSITION
        if notice is not admission.posted:
            decision, actions = _notice_posted(decision, notice, actions)
            admission = replace(admission, posted=notice)
    state = replace(state, admission=admission)
    return replace(decision, state=state, actions=(*decision.actions, *actions))


def _notice_posted(
    decision: Decision, notice: Notice, actions: tuple[Action, ...]
) -> tuple[Decision, tuple[Action, ...]]:
    """Post a notice with the view that the decision begins, or else to the members of the current one."""
    if not any(isinstance(action, StartView) for action in decision.actions):
        return decision, (*actions, AskMembers(notice))
    begun = tuple(
        structs.replace(action, notice=notice) if isinstance(action, StartView) else action
        for action in decision.actions
    )
    return replace(decision, actions=begun), actions


def _admission_closed(decision: Decision) -> Decision:
    """End the joiners of a job whose script has ended; wait only for members."""
    state, dropped = decision.state, decision.state.joiners
    state, kills = _without_joiners(state, dropped)
    if dropped and state.size.by_hand:
        text = f"the script has finished, so {name_workers(dropped)} can no longer join"
        kills = (ShowMessage(text), *kills)
    actions = (*decision.actions, *kills)
    if state.present:
        state = replace(state, admission=replace(state.admission, backoff_until=None))
        return replace(decision, state=state, actions=actions)
    return _finish(state, f"{decision.reason}; no members remain").after(*actions)


def _success_told(before: State, decision: Decision) -> Decision:
    """Tell users who started workers by hand of the success, when all members wait for the last line."""
    tells = decision.state.awaits_last_line and not before.awaits_last_line
    return replace(decision, actions=(*decision.actions, TellSuccess())) if tells else decision


def _without_joiners(state: State, workers: tuple[int, ...]) -> tuple[State, tuple[Action, ...]]:
    """Kill joiners that are no longer needed."""
    return state.with_phase(Phase.LEAVING, *workers), tuple(map(KillWorker, workers))


# Shared consequences: the end of the job.


def _end(state: State, outcome: JobOutcome, now: float) -> Decision:
    """End the job with `outcome`."""
    limits = state.limits
    state = _with_outcome(state, outcome)
    state = _at_stage(state, Stage.ENDING, now + (limits.leave if state.all_raised else limits.abort))
    if not state.running:
        return _finish(state, outcome.message)
    if not state.size.by_hand:
        return Decision(state, (AbortExchange(outcome.message),), outcome.message)
    text = f"{outcome.message}; the job ends: restart all workers"
    # Show it now: at the end, the workers in the user's terminals have already exited.
    return Decision(state, (AbortExchange(text), ShowMessage(text)), outcome.message)


def _signal_all(state: State, number: int, now: float, reason: str) -> Decision:
    """Send a signal to all workers."""
    state = _at_stage(state, Stage.TERMINATING, now + state.limits.term)
    return Decision(state, tuple(SignalWorker(worker, number) for worker in sorted(state.running)), reason)


def _kill(state: State, now: float, reason: str) -> Decision:
    """Kill all workers."""
    state = _at_stage(state, Stage.KILLING, now + state.limits.kill)
    return Decision(state, tuple(map(KillWorker, sorted(state.running))), reason)


def _finish(state: State, reason: str) -> Decision:
    """Finish the job; name the failures of members even if the job has succeeded."""
    outcome = state.shutdown.outcome or state.shutdown.suspect or JobOutcome(0)
    failures = state.failures
    raised = [(failures[worker].message, (worker,)) for worker in _logs(state)]
    reported = tuple(ShowMessage(*failure) for failure in raised if not outcome.message)
    state = _at_stage(_with_outcome(state, outcome), Stage.FINISHED, None)
    return Decision(state, (*reported, FinishJob(outcome)), reason)


def _at_stage(state: State, stage: Stage, deadline: float | None) -> State:
    """Begin a stage of the end, in which no worker is started or admitted."""
    shutdown = replace(state.shutdown, stage=stage, deadline=deadline)
    admission = replace(state.admission.without_state(), backoff_until=None)
    return replace(state, shutdown=shutdown, admission=admission)


def _with_deadline(state: State, deadline: float | None) -> State:
    return replace(state, shutdown=replace(state.shutdown, deadline=deadline))


def _with_outcome(state: State, outcome: JobOutcome) -> State:
    return replace(state, shutdown=replace(state.shutdown, outcome=outcome))


def _with_saving_outcome(decision: Decision, saving: Saving, how: str) -> Decision:
    """Add a message on the available checkpoint, now that `how` ends the wait for the last one."""
    text = saving.outcome(f"{how} before it was written")
    return replace(decision.after(ShowMessage(text)), reason=f"{text}; {decision.reason}")
