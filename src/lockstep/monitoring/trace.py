"""Single training steps of a run in the Trace Event Format, which Perfetto and Chrome show.

Each host is a process and each worker a thread of it. A step is a slice with a slice for each of its parts,
in the order of `STEP_PARTS`: a worker measures how long a part takes, not when.

With parameter servers, one worker takes each step. The slices of the chief are the results that it receives,
which it numbers in the order of completion.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import ConfigError
from lockstep.monitoring.run_folder import RunFolder, steps_trained, task_of
from lockstep.observability.measurements import STEP_PARTS, StepsMeasured
from lockstep.observability.run_lines import GrowingFile, Happening, measurement
from lockstep.observability.run_state import RunState
from lockstep.system.paths import RunPaths

_STEPS = re.compile("([0-9]{1,18})(?::([0-9]{1,18}))?")
_MICRO = 1e6
_CHANGES = ("view", "joined", "left", "lost", "coordinator", "checkpoint", "checkpoint failed", "paused")

TraceEvent = Mapping[str, Any]
"""An event as the format defines it; times are in microseconds since 1970."""


class SingleStep(NamedTuple):
    """A training step that a worker has recorded one by one.

    Attributes:
        step: the number of the training step, from 1.
        worker: its id.
        call: its call, such as `fit 1`.
        number: its number in its call, from 1; with parameter servers, among the steps that the worker takes.
        start: the time of its start, in microseconds since 1970.
        parts: the microseconds of each of `STEP_PARTS`.
    """

    step: int
    worker: int
    call: str
    number: int
    start: int
    parts: tuple[int, ...]

    @property
    def end(self) -> int:
        """The time of its end, in microseconds since 1970."""
        return self.start + sum(self.parts)


def parse_steps(text: str) -> range:
    """Return the steps that a text such as `100:110` names, both included, or a single number.

    Raises:
        ConfigError: the text does not name steps.
    """
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(
            f"--steps {text} names no steps: give the first and the last one, counted from 1, such as 100:110"
        )
    return range(first, last + 1)


def trace_of(folder: Path, steps: range) -> list[TraceEvent]:
    """Return trace events for some steps of the run in a folder, and for the run's events meanwhile.

    Raises:
        ConfigError: the folder has no run, or not all of the steps were recorded one by one.
        OSError: a file cannot be read.
    """
    followed = RunFolder(folder)
    followed.update()
    run = followed.state
    if not run.job:
        raise ConfigError(f"{folder} is not the folder of a run: it has no {followed.paths.events.name}")
    begun = [event.time for event in run.events if event.event == "job"]
    recorded = newest(single_steps(followed.paths), begun)
    wanted = [step for step in recorded if step.step in steps]
    taken = {step.step for step in recorded if task_of(run, step.worker) != "chief"}
    refuse_missing(steps, sorted(taken), steps_trained(run))
    return trace_events(wanted, run)


def single_steps(paths: RunPaths) -> Iterator[tuple[float, SingleStep]]:
    """Yield the recorded steps of a run folder, each with the time of its measurement."""
    for line in GrowingFile(paths.measurements).lines():
        recorded = measurement(line)
        if recorded is None or recorded.worker is None or not isinstance(recorded.event, StepsMeasured):
            continue
        measured = recorded.event
        began = round(measured.began * _MICRO)
        before = measured.trained - measured.number
        steps = measured.steps or [before + number for number, *_ in measured.singles]
        for step, (number, start, *parts) in zip(steps, measured.singles, strict=False):
            yield (
                recorded.time,
                SingleStep(step, recorded.worker, measured.call, number, began + start, tuple(parts)),
            )


def newest(recorded: Iterable[tuple[float, SingleStep]], begun: Sequence[float]) -> list[SingleStep]:
    """Return each step as the last run in its folder took it, because a run may repeat earlier steps.

    Args:
        recorded: steps with the times of their measurements.
        begun: when each run in the folder began, in seconds since 1970.
    """
    steps: dict[int, tuple[int, dict[int, SingleStep]]] = {}
    for time, step in recorded:
        run = bisect(begun, time)
        last, workers = steps.get(step.step, (run, {}))
        if run > last:
            workers = {}
        if run >= last:
            # A joiner takes the step before its first one by itself.
            steps[step.step] = (run, {**workers, step.worker: step})
    return [step for _, workers in steps.values() for step in workers.values()]


def refuse_missing(steps: range, recorded: Sequence[int], trained: int) -> None:
    """Raise ConfigError if not all steps were recorded; `recorded` are the numbers of the recorded ones."""
    if sum(step in steps for step in recorded) == len(steps):
        return
    if not recorded:
        raise ConfigError(
            "no step of this run was recorded one by one: it has no training step yet, or one replica, whose "
            "steps Keras itself takes"
        )
    windows = [
        (group[0][1], group[-1][1])
        for _, entries in groupby(enumerate(recorded), lambda entry: entry[1] - entry[0])
        for group in (list(entries),)
    ]
    single = set(recorded)
    missing = next(step for step in steps if step not in single)
    before = [window for window in windows if window[0] < missing][-1:]
    after = [window for window in windows if window[0] > missing][:1]
    near = " and ".join(f"{first}:{last}" if last > first else f"{first}" for first, last in before + after)
    taken = f"; the run has taken {trained} steps" if steps[-1] > trained else ""
    raise ConfigError(
        f"step {missing} was not recorded one by one; the nearest steps that were: {near}{taken}"
    )


def trace_events(steps: Iterable[SingleStep], run: RunState) -> list[TraceEvent]:
    """Return trace events for steps of a run, and for the run's events between the first and the last."""
    by_worker: dict[int, list[SingleStep]] = {}
    for step in sorted(steps, key=lambda step: (step.worker, step.start)):
        by_worker.setdefault(step.worker, []).append(step)
    hosts = {worker: host_of(worker, run) for worker in by_worker}
    numbers = {name: at for at, name in enumerate(dict.fromkeys(hosts.values()), 1)}
    events: list[TraceEvent] = [_name("process_name", number, 0, name) for name, number in numbers.items()]
    for worker, taken in by_worker.items():
        process = numbers[hosts[worker]]
        task = task_of(run, worker)
        name = f"worker {worker} (chief)" if task == "chief" else f"worker {worker}"
        events.append(_name("thread_name", process, worker, name))
        free = 0
        for step in taken:
            # Times are rounded: steps must not overlap.
            start = max(step.start, free)
            free = start + sum(step.parts)
            events += _slices(step._replace(start=start), process, task)
    begin = min(taken[0].start for taken in by_worker.values()) / _MICRO
    end = max(taken[-1].end for taken in by_worker.values()) / _MICRO
    for event in run.events:
        if event.event in _CHANGES and begin <= event.time <= end:
            process = numbers.get(hosts.get(event.worker, ""), 1) if event.worker is not None else 1
            events.append(_instant(event, process))
    return events


def slowest(events: Iterable[TraceEvent]) -> str:
    """Name the step that took a worker longest, without waiting for others, and its largest part."""
    taken: list[tuple[TraceEvent, dict[str, int]]] = []
    for event in events:
        if event.get("cat") == "step":
            taken.append((event, {}))
        elif event.get("cat") == "part":
            taken[-1][1][event["name"]] = event["dur"]
    step, parts = max(
        taken, key=lambda step_and_parts: step_and_parts[0]["dur"] - step_and_parts[1].get("wait", 0)
    )
    text = f"{step['name']} took worker {step['tid']} the longest: {step['dur'] / 1000:,.3g} ms"
    if parts:
        part = max(parts, key=lambda name: parts[name])
        text += f", of which {part} took {parts[part] / 1000:,.3g} ms"
    return text


def host_of(worker: int, run: RunState) -> str:
    """Return the name of the host of a worker, from its load, or from how the run began."""
    info = run.workers.get(worker)
    if info is not None and info.host:
        return info.host
    names = [name for name, workers in run.job.get("hosts", ()) for _ in range(workers)]
    if worker < len(names):
        return str(names[worker])
    return "unknown host" if names else str(run.job.get("host", "this host"))


def _name(kind: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slices(step: SingleStep, process: int, task: str) -> Iterator[TraceEvent]:
    track = {"ph": "X", "pid": process, "tid": step.worker}
    numbered = "number on worker" if task == "worker" else "number in call"
    arguments = {"call": step.call, numbered: step.number}
    duration = sum(step.parts)
    yield {
        "name": f"{'result' if task == 'chief' else 'step'} {step.step}",
        "cat": "step",
        **track,
        "ts": step.start,
        "dur": duration,
        "args": arguments,
    }
    start = step.start
    # Earlier versions recorded no nested calls.
    for part, microseconds in zip(STEP_PARTS, step.parts, strict=False):
        if microseconds:
            yield {"name": part, "cat": "part", **track, "ts": start, "dur": microseconds}
        start += microseconds


def _instant(happening: Happening, process: int) -> TraceEvent:
    fields = happening.fields
    match happening.event:
        case "view":
            name = f"view {fields.get('number')}"
        case "joined" | "left" | "lost":
            name = f"worker {happening.worker} {happening.event}"
        case "checkpoint":
            name = f"checkpoint of step {fields.get('step')}"
        case "paused":
            name = f"training paused for {fields.get('seconds')} s"
        case "coordinator":
            name = "another coordinator takes over"
        case other:
            name = other
    return {
        "name": name,
        "cat": "job",
        "ph": "i",
        "s": "g",
        "ts": round(happening.time * _MICRO),
        "pid": process,
        "tid": happening.worker or 0,
        "args": dict(fields),
    }
