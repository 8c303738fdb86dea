"""The events of a run as texts, with equal events as one. Pure.

The page, the report and `lockstep top` count and join events in the same way.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.coordinator.job_report import decided
from lockstep.observability.run_lines import Happening
from lockstep.system.exit_status import describe_exit
from lockstep.system.prose import count, duration_text, name_workers

_SEPARATING = ("job", "view")
"""Events before and after which equal events are told apart: the membership changes."""
_VERDICTS = {
    "worker": "wrong bits of {}",
    "undecided": "different bits of {}, and nobody decides which are right,",
    "third": "different bits of {}, and another worker decides which are right,",
    "step": "different bits each time",
    "everyone": "different bits of all workers",
    "repeated": "wrong bits of {}, which are computed again,",
}
"""What the verdict of a verification says of its workers."""
_VERDICTS_ON = {
    "sum": _VERDICTS
    | {"repeated": "a wrong sum or check of it, which is summed again,", "sum": "a wrong sum, twice,"},
    "memory": _VERDICTS | {"repeated": "a wrong copy or hash of the state, which is made again,"},
}
"""The same for parts of a step that have other words."""


@dataclass
class ToldEvents:
    """Equal events of one worker or of several, with the same membership.

    Attributes:
        event: the name of the events.
        text: their text besides their name and their workers; may be empty.
        workers: the workers that published them, sorted; empty for events of the run itself.
        first, last: the times of the first and the last one, in seconds since 1970.
        number: the number of events.
    """

    event: str
    text: str
    workers: tuple[int, ...]
    first: float
    last: float
    number: int = 1

    @property
    def is_repeated(self) -> bool:
        """Whether a worker has published such an event more than once; reports of a wait do not count."""
        return self.event != "wait" and self.number > max(1, len(self.workers))


def join_equal(
    events: Iterable[Happening], told: Callable[[Happening], str | None], most: int
) -> list[ToldEvents]:
    """Join equal events; return the newest `most` groups in the order of their last events.

    Args:
        events: the events, the newest first.
        told: returns the text of an event, or None for an event that is not shown.
        most: the largest number of groups.
    """
    groups: dict[tuple[Any, ...], ToldEvents] = {}
    changes = 0
    for event in events:
        if event.event in _SEPARATING:
            if len(groups) == most:
                # Older events do not belong to a group.
                break
            changes += 1
        text = told(event)
        if text is None:
            continue
        # The reports of a wait differ in their seconds.
        same = (event.fields.get("what"), event.fields.get("waits_for")) if event.event == "wait" else text
        key = (event.event, str(same), changes)
        if (group := groups.get(key)) is not None:
            group.first = event.time
            group.number += 1
            if event.worker is not None and event.worker not in group.workers:
                group.workers = tuple(sorted((*group.workers, event.worker)))
        elif len(groups) < most:
            workers = () if event.worker is None else (event.worker,)
            groups[key] = ToldEvents(event.event, text, workers, first=event.time, last=event.time)
    return list(reversed(groups.values()))


def details(event: Happening, otherwise: Callable[[Happening], str]) -> str:
    """Return an event's text besides its name and its worker, or an empty text.

    Args:
        event: the event.
        otherwise: returns the fields of an event without a text of its own.
    """
    fields = event.fields
    match event.event:
        case "job" | "started":
            # The configuration, and the table of workers, have their fields.
            return ""
        case "joined" | "left" | "lost" | "checkpoint failed" | "output lost":
            return str(fields.get("reason", ""))
        case "failed":
            return str(fields.get("summary", ""))
        case "decision":
            return decided(str(fields.get("reason", "")), _items(fields.get("actions")))
        case "view":
            return f"view {fields.get('number')} with {_named(fields.get('workers'))}: {fields.get('reason')}"
        case "wait":
            seconds = duration_text(seconds_of(event))
            return f"{fields.get('what')}: {seconds} for {_named(fields.get('waits_for'))}"
        case "paused":
            return duration_text(seconds_of(event))
        case "verification failed" if said := _verdict(fields):
            arrays = ", ".join(map(str, _items(fields.get("arrays"))[:3]))
            if not arrays and fields.get("part") == "gradient":
                arrays = "its examples"
            verdict = f"{said} in {arrays}" if arrays else said.rstrip(",")
            return f"step {fields.get('step')}, {fields.get('part')}: {verdict}"
        case "exited" if isinstance(status := fields.get("status"), int):
            return ", ".join(filter(None, (describe_exit(status), str(fields.get("cause") or ""))))
        case "done" if isinstance(status := fields.get("status"), int):
            return f"exit status {status}"
        case "call":
            epochs, steps = fields.get("epochs"), fields.get("steps_per_epoch")
            until = f" until epoch {epochs}" if epochs else ""
            each = f", {count(steps, 'step')} each" if isinstance(steps, int) else ""
            return f"{fields.get('name')}{until}{each}"
        case "call ended":
            return str(fields.get("name", ""))
        case "checkpoint":
            return f"{fields.get('path')}, written in {duration_text(seconds_of(event))}"
        case "checkpoint removed" | "checkpoint not removed":
            return f"{fields.get('path')}: {fields.get('reason')}"
        case "resumed":
            return f"after {fields.get('where')}"
        case "warning":
            return str(fields.get("text", ""))
        case _:
            return otherwise(event)


def _verdict(fields: Mapping[str, Any]) -> str:
    """Return a verdict's text on its workers, or an empty text for an unknown verdict."""
    hosts = ", ".join(map(str, _items(fields.get("hosts"))))
    who = _named(fields.get("workers")) + (f" ({hosts})" if hosts else "")
    verdicts = _VERDICTS_ON.get(str(fields.get("part")), _VERDICTS)
    return verdicts.get(str(fields.get("verdict")), "").format(who)


def seconds_of(event: Happening) -> float:
    """Return the field `seconds` of an event; 0 if it has none."""
    seconds = event.fields.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) and math.isfinite(seconds) else 0.0


def _named(workers: Any) -> str:
    numbers = [worker for worker in _items(workers) if isinstance(worker, int)]
    return name_workers(numbers) if numbers else "no worker"


def _items(value: Any) -> Sequence[Any]:
    """Return the items of a field, which may contain anything."""
    return value if isinstance(value, list | tuple) else ()
