"""Texts about a job for users: how it ended, what it cost, what to do, and why it failed. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from lockstep.errors import code_in
from lockstep.observability.events import JobTotals
from lockstep.observability.run_state import RunState, effective_share
from lockstep.observability.slowness import is_often
from lockstep.protocol.host import WorkerEvidence
from lockstep.supervisor.actions import Evidence, JobOutcome
from lockstep.system.prose import count, duration_text, percent, printable

NO_END = "the end is not recorded: the run was killed, its host was lost, or the disk was full"
_FIRST_SECONDS = 60.0
"""Seconds in which a job mostly starts and compiles: its share of effective training says nothing yet."""


def fields_of_end(totals: JobTotals, seconds: float) -> dict[str, Any]:
    """Return the totals of a job as fields of the event at its end; it took `seconds`."""
    done = msgspec.structs.asdict(totals)
    done["strained"] = {name: strain for name, strain in totals.strained.items() if is_often(strain)}
    return {"seconds": round(seconds, 3), **done}


def last_line(totals: JobTotals, seconds: float, workers: int, failed: int = 0, compared: str = "") -> str:
    """Return the last line of a job, or an empty string if it did not train.

    Without the chief's report, for example because the script called `os._exit`, there may be more steps.

    Args:
        totals: the totals of the job.
        seconds: its duration.
        workers: the number of workers with which it ended.
        failed: the number of workers on which the script ended with an error.
        compared: the verdict of the comparison with one process; empty if none was requested.
    """
    if totals.steps is None and not totals.reached:
        return ""
    before = f", {totals.before} of them before," if totals.before else ""
    script = f"the script failed on {count(failed, 'worker')}" if failed else ""
    changes = _in_parentheses(_membership(totals), script)
    # Lockstep does not count the steps of a custom loop that it does not drive.
    steps = f": {count(totals.steps, 'step')}{before}" if totals.steps else ""
    if totals.steps is None:
        steps = f": at least {count(totals.reached, 'step')}{before}"
    took = f"{duration_text(seconds)}{_in_parentheses(_time_spent(totals, seconds))}"
    parts = [f"finished in {took}{steps} on {count(workers, 'worker')}{changes}"]
    parts += troubles(totals)
    if compared:
        parts.append(compared)
    if totals.checkpoints:
        parts.append(count(totals.checkpoints, "checkpoint"))
    parts += _verified(totals)
    if totals.digest:
        parts.append(f"digest {totals.digest} of model {totals.model!r}")
    return "; ".join(parts)


def _in_parentheses(*texts: str) -> str:
    inside = ", ".join(filter(None, texts))
    return f" ({inside})" if inside else ""


def how_it_goes(totals: JobTotals, seconds: float) -> list[str]:
    """Return the progress of a job after `seconds`, in a few words, or an empty list if there is none."""
    texts = [_time_spent(totals, seconds), _membership(totals), *troubles(totals), *_verified(totals)]
    return list(filter(None, texts))


def _verified(totals: JobTotals) -> list[str]:
    return [f"{count(totals.verified, 'computation')} verified"] if totals.verified else []


def _time_spent(totals: JobTotals, seconds: float) -> str:
    share = effective_share(totals, seconds) if seconds >= _FIRST_SECONDS else None
    texts = [] if share is None else [f"{percent(share)} effective training"]
    paused = duration_text(totals.paused)
    texts += [f"{count(totals.pauses, 'pause')} of {paused}"] if totals.pauses else []
    return ", ".join(texts)


def _membership(totals: JobTotals) -> str:
    numbers = {"lost": totals.lost, "joined": totals.joined}
    hosts = {"lost": totals.lost_hosts, "retired": totals.retired_hosts, "joined": totals.joined_hosts}
    texts = [f"{number} {change}" for change, number in numbers.items() if number]
    return ", ".join(
        texts + [f"{count(number, 'host')} {change}" for change, number in hosts.items() if number]
    )


def troubles(totals: JobTotals) -> list[str]:
    """Return the troubles of a job, one text each, except for changes of its membership."""
    texts = []
    if totals.job_restarts:
        texts.append(
            f"started again {count(totals.job_restarts, 'time')}, and all figures are from the last start"
        )
    if totals.failed_checkpoints:
        why = _in_parentheses(printable(totals.checkpoint_failure))
        newest = "none is complete"
        if totals.saved is not None:
            newest = f"the newest complete one is from step {totals.saved}"
            newest += f" of {totals.steps}" if totals.steps and totals.saved < totals.steps else ""
        texts.append(f"{count(totals.failed_checkpoints, 'checkpoint')} failed, {newest}{why}")
    if totals.removed_checkpoints:
        older = count(totals.removed_checkpoints, "older checkpoint")
        texts.append(f"{older} removed early, because the disk was full")
    if totals.remaining_checkpoints:
        why = _in_parentheses(printable(totals.removal_failure))
        texts.append(f"{count(totals.remaining_checkpoints, 'older checkpoint')} could not be removed{why}")
    texts += map(printable, totals.lost_gpus)
    if totals.lost_outputs:
        texts.append(f"{count(totals.lost_outputs, 'output')} could not be written")
    if totals.failed_verifications:
        texts.append(f"{count(totals.failed_verifications, 'verification')} failed")
    if totals.not_finite:
        names = ", ".join(map(printable, totals.not_finite))
        texts.append(f"not finite: {names}, first seen at step {min(totals.not_finite.values())}")
    for host, strain in totals.strained.items():
        for trouble, number in (
            ("overloaded by other programs", strain.overloaded),
            ("throttled", strain.throttled),
        ):
            if is_often(strain) and number:
                texts.append(f"{printable(host)} {trouble} {percent(number / strain.measured)} of the time")
    return texts


def state_of(finished: Mapping[str, Any] | None, *, active: bool) -> str:
    """Return the state of a run: `finished`, `failed`, `stopped`, `running`, or `lost` without an end.

    Args:
        finished: the fields of its event `finished`; None without it.
        active: whether a process uses its folder.
    """
    if finished is None:
        return "running" if active else "lost"
    if finished.get("status") == 0:
        return "finished"
    return "stopped" if str(finished.get("message", "")).startswith("stopped by ") else "failed"


def headline(run: RunState, state: str) -> str:
    """Return how a run in a state went, in a few words."""
    number, message = len(troubles(run.totals)), str((run.finished or {}).get("message", ""))
    problems = f"with {count(number, 'problem')}" if number else "without problems"
    match state:
        case "finished":
            return f"finished {problems}"
        case "running":
            return f"running {problems}"
        case "lost":
            return NO_END
        case "failed" if message:
            return f"failed: {printable(message)}"
    return printable(message) or state


def remedies(run: RunState, state: str) -> list[str]:
    """Return the remedies for the state of a run and its troubles, one text each."""
    totals, texts = run.totals, []
    if state in ("failed", "stopped", "lost"):
        script_failed = any(info.phase == "failed" for info in run.workers.values())
        first = "mend the script; " if script_failed else ""
        again = f"the same command resumes from step {totals.saved}"
        if totals.saved is None:
            again = "the same command begins again, because no checkpoint was written"
        texts.append(first + again)
    if totals.failed_checkpoints:
        is_full = "No space left" in totals.checkpoint_failure
        remedy = (
            "free space on the disk of the checkpoints"
            if is_full
            else "fix the cause of the failed checkpoints"
        )
        texts.append(remedy + ("; until then, only older steps are safe" if state == "running" else ""))
    elif totals.removed_checkpoints:
        texts.append("free space on the disk of the checkpoints, or keep fewer of them (--keep)")
    if totals.remaining_checkpoints:
        texts.append("look at the permissions and the disk of the folder of checkpoints, and remove old ones")
    if totals.lost_gpus:
        texts.append(
            "look for the Xid of the GPU in the kernel's log (sudo dmesg | grep -i xid), and reboot its host"
        )
    if totals.lost_outputs:
        texts.append("free space on the disk of the run folder: a part of its logs or figures is missing")
    if totals.failed_verifications:
        texts.append("run lockstep doctor on the hosts that the events 'verification failed' name")
    if totals.not_finite:
        texts.append(
            "look for the cause in the program: -n 1 with the same --replicas computes the same bits, and "
            "the callback TerminateOnNaN stops at the first such step"
        )
    for host, strain in totals.strained.items():
        if is_often(strain) and strain.overloaded:
            texts.append(f"give {printable(host)} to this job alone, or use fewer workers there")
        if is_often(strain) and strain.throttled:
            texts.append(f"raise the CPU quota of {printable(host)}, or the power or cooling of its GPUs")
    return texts


_DECIDED = {
    "AbortExchange": "ends the exchange of the previous membership",
    "StartView": "begins a new view",
    "StartWorker": "starts a worker",
    "AskMembers": "asks the workers for a change after their step",
    "SendPosition": "tells a joining worker the position of the training",
    "SendState": "sends the state to a joining worker",
    "SignalWorker": "signals workers to end",
    "KillWorker": "kills workers",
    "DumpStack": "asks for Python stacks",
    "ShowMessage": "",
    "TellSuccess": "lets the workers exit",
    "FinishJob": "ends the job",
}
"""What a decision does, by the class of the action; empty for what its reason says."""


def decided(reason: str, actions: Iterable[Any]) -> str:
    """Describe a decision of supervision: its reason, and its consequences."""
    texts = filter(None, (_DECIDED.get(str(action), "") for action in actions))
    follows = ", ".join(dict.fromkeys(texts))
    return "; Lockstep ".join(filter(None, [printable(reason), follows]))


def explain(
    outcome: JobOutcome,
    evidence: Iterable[WorkerEvidence],
    shown: Callable[[int], bool],
    name_log: Callable[[int], str],
) -> str:
    """Return the message of a failed job with its evidence, and how to report an error of Lockstep.

    Args:
        outcome: how the job ended.
        evidence: the evidence of the workers that the outcome names.
        shown: whether the terminal has already shown a worker's output.
        name_log: returns the path of a worker's log, relative to the user's current folder if possible.
    """
    lines = [outcome.message]
    for worker in evidence if outcome.evidence is not Evidence.NONE else ():
        if outcome.evidence is Evidence.STACK:
            lines += _stack(worker)
        elif outcome.evidence is Evidence.LOG and not shown(worker.worker):
            lines += [f"  | {line}" for line in worker.log]
        if worker.has_log:
            lines.append(f"  log: {name_log(worker.worker)}")
    if code := code_in(outcome.message):
        lines.append(f"  help: lockstep explain {code}")
    return "\n".join(lines)


def _stack(evidence: WorkerEvidence) -> list[str]:
    if not evidence.stack:
        return [f"  worker {evidence.worker} sent no stack"]
    heading = f"  worker {evidence.worker} is here (most recent call first):"
    return [heading, *(f"    {frame}" for frame in evidence.stack)]
