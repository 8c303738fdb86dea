"""The first difference of two recordings, and its cause. Pure.

First comes the fact: the first step with a recorded difference, and the part of the step that differs: the
state before it, its examples, a partial, the total or the state after it. The cause explains the fact: a
difference between the programs, versions or hosts if one can have this effect, otherwise the fact itself. A
job with parameter servers does not record steps, but only states: there, each difference of programs or hosts
can be the cause. Without such a difference, the cause is the order of arrivals, or different examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.diff.heads import Cause, HeadDifference, head_differences
from lockstep.diff.recording import Key, RecordedHashes, Recording
from lockstep.errors import ConfigError
from lockstep.observability.digest_records import HASH_DIGITS
from lockstep.system.prose import count

Place = Literal["first state", "state", "input", "gradient", "reduction", "update", "result", "length", "end"]
"""What differs first: `first state` before the first step, `state` between two steps, `result` of a test, the
number of steps (`length`), and the model at the `end`, although all recorded steps are equal."""

END_OF_SCRIPT = "the end of the script"
"""Names the record of the state of the model that was trained last."""
_ROW_DIGITS = 8


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        equal: whether everything that both runs have recorded is equal.
        compared: number of training steps that both have recorded.
        step: the first step that differs, from 1; None if the runs are equal.
        after: the last step before it that both have recorded, and that is equal; 0 if there is none.
        place: the part that differs first.
        cause: the cause of the difference.
        explained: the difference of the programs or hosts that explains it; None if there is none.
        heads: all differences of the programs and hosts.
        replicas: the replicas whose examples or partials differ.
        of: the number of replicas that were compared.
        rows: for replicas whose examples differ, the differing rows, from 0, if they were recorded.
        swapped: whether these rows are those of the other run in a different order.
        names: the arrays or variables that differ; empty if they were not recorded.
        missing: the hashes whose absence makes the step, the place or the names uncertain.
        key: the key of the step.
        lengths: the numbers of steps of both runs.
        points: number of points outside of steps at which both have recorded the state.
        job_replicas: R.
    """

    equal: bool
    compared: int
    step: int | None = None
    after: int = 0
    place: Place | None = None
    cause: Cause | None = None
    explained: HeadDifference | None = None
    heads: tuple[HeadDifference, ...] = ()
    replicas: tuple[int, ...] = ()
    of: int = 0
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    swapped: bool = False
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    key: Key | None = None
    lengths: tuple[int, int] = (0, 0)
    points: int = 0
    job_replicas: int = 0


@dataclass(frozen=True)
class _Fact:
    place: Place
    replicas: tuple[int, ...] = ()
    of: int = 0
    rows: Mapping[int, Sequence[int]] = field(default_factory=dict)
    swapped: bool = False
    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def compare(first: Recording, second: Recording) -> Comparison:
    """Compare two runs of the same number of replicas.

    If their backends differ, only the examples are compared: other numbers cannot be equal.

    Raises:
        ConfigError: the runs do not have anything in common that could be equal.
    """
    replicas = first.replicas, second.replicas
    served = first.has_servers and second.has_servers
    if replicas[0] != replicas[1] and not served:
        raise ConfigError(
            f"{first.folder} has {count(replicas[0], 'replica')} and {second.folder} has "
            f"{count(replicas[1], 'replica')}, so nothing in them can be equal: compare runs with the same "
            "--replicas"
        )
    if not first.steps.keys() & second.steps.keys():
        raise ConfigError(
            f"{first.folder} and {second.folder} have recorded no common step, so nothing is compared"
        )
    heads = tuple(head_differences(first, second))
    only_inputs = any(head.name == "backend" for head in heads)
    common = sorted(first.steps.keys() & second.steps.keys())
    compared = sum(not key.tests for key in common)
    lengths = _length(first), _length(second)
    points = [key for key in common if key.tests and not key.number]
    before: RecordedHashes | None = None
    last_equal = 0
    knows_state = False
    for key in common:
        ours, theirs = first.steps[key], second.steps[key]
        previous = (first.steps[before.key], second.steps[before.key]) if before is not None else None
        fact = _differing(ours, theirs, previous, first.replicas, only_inputs)
        if fact is not None:
            if fact.place == "first state" and knows_state:
                fact = replace(fact, place="state")
            gap = key.step - (not key.tests) > last_equal and fact.place != "first state"
            missing = ("the steps between",) if gap else ()
            if served:
                fact, missing = replace(fact, place="state"), ()
                cause, explained = _cause_on_servers(heads)
            else:
                # A step between them may differ anywhere.
                cause, explained = _cause(_Fact("end") if gap and fact.place == "state" else fact, heads)
            return Comparison(
                equal=False,
                compared=compared,
                step=max(1, key.step),
                after=last_equal,
                place=fact.place,
                cause=cause,
                explained=explained,
                heads=heads,
                replicas=fact.replicas,
                of=fact.of,
                rows=fact.rows,
                swapped=fact.swapped,
                names=fact.names,
                missing=(*missing, *fact.missing),
                key=key,
                lengths=lengths,
                points=len(points),
                job_replicas=first.replicas,
            )
        knows_state = knows_state or bool(ours.before and theirs.before)
        if not key.tests:
            before = ours
        if not key.tests or key in points:
            last_equal = key.step
    ended = _at_the_end(
        first=first,
        second=second,
        heads=heads,
        compared=compared,
        last_equal=last_equal,
        lengths=lengths,
        only_inputs=only_inputs,
    )
    return replace(ended, points=len(points), job_replicas=first.replicas)


def _cause_on_servers(heads: tuple[HeadDifference, ...]) -> tuple[Cause, HeadDifference | None]:
    """Return the cause of a difference between two jobs with parameter servers."""
    # The numbers of processes of two such jobs may differ without an effect.
    able = [head for head in heads if head.name != "replicas"]
    return (able[0].cause, able[0]) if able else ("order", None)


def _at_the_end(
    first: Recording,
    second: Recording,
    heads: tuple[HeadDifference, ...],
    compared: int,
    last_equal: int,
    lengths: tuple[int, int],
    only_inputs: bool,
) -> Comparison:
    """Compare the ends of runs whose common steps are equal."""
    equal = Comparison(True, compared, after=last_equal, heads=heads, lengths=lengths)
    if not (first.succeeded and second.succeeded):
        return equal
    if lengths[0] != lengths[1]:
        cause, explained = _cause(_Fact("length"), heads)
        step = min(lengths) + 1
        return Comparison(
            equal=False,
            compared=compared,
            step=step,
            after=min(lengths),
            place="length",
            cause=cause,
            explained=explained,
            heads=heads,
            lengths=lengths,
        )
    digests = first.finished.get("digest"), second.finished.get("digest")
    # The digest also depends on the names and values of metrics.
    ends = [recording.steps.get(Key(lengths[0], True, END_OF_SCRIPT, 0)) for recording in (first, second)]
    same_state = all(end is not None and end.before for end in ends)
    if all(digests) and digests[0] != digests[1] and not (only_inputs or same_state):
        cause, explained = _cause(_Fact("end"), heads)
        missing = ("the steps after",) if last_equal < lengths[0] else ("the state after the last step",)
        step = min(last_equal + 1, lengths[0])
        return Comparison(
            equal=False,
            compared=compared,
            step=step,
            after=last_equal,
            place="end",
            cause=cause,
            explained=explained,
            heads=heads,
            missing=missing,
            lengths=lengths,
        )
    return equal


def _differing(
    first: RecordedHashes,
    second: RecordedHashes,
    previous: tuple[RecordedHashes, RecordedHashes] | None,
    replicas: int,
    only_inputs: bool,
) -> _Fact | None:
    """Return the first difference in a step, or None if everything that both have recorded of it is equal."""
    state_differs = not only_inputs and _differ(first.before, second.before)
    if state_differs and (names := _state_names(first, second, "before")):
        return _before(previous, names)
    if fact := _input(first, second):
        return fact
    if only_inputs:
        return None
    return _partial(first, second) or _total(first, second, replicas) or _after(first, second)


def _before(previous: tuple[RecordedHashes, RecordedHashes] | None, names: tuple[str, ...]) -> _Fact:
    names = () if names == _UNKNOWN else names
    missing = () if names else ("the variables",)
    if previous is None:
        return _Fact("first state", names=names, missing=missing)
    if not (previous[0].after and previous[1].after):
        missing = (*missing, "the state after the step before")
    return _Fact("state", names=names, missing=missing)


def _input(first: RecordedHashes, second: RecordedHashes) -> _Fact | None:
    common = first.inputs.keys() & second.inputs.keys()
    replicas = tuple(sorted(r for r in common if first.inputs[r] != second.inputs[r]))
    if not replicas:
        return None
    rows: dict[int, list[int]] = {}
    ours: list[str] = []
    theirs: list[str] = []
    for replica in replicas:
        mine, yours = (_split(each.rows.get(replica, ""), _ROW_DIGITS) for each in (first, second))
        examples = first.examples.get(replica)
        if mine and len(mine) == len(yours) == examples:
            rows[replica] = [row for row, (a, b) in enumerate(zip(mine, yours, strict=True)) if a != b]
        ours += mine
        theirs += yours
    missing = () if rows.keys() == set(replicas) else ("the rows",)
    swapped = not missing and sorted(ours) == sorted(theirs)
    return _Fact("input", replicas, len(common), rows, swapped, missing=missing)


def _partial(first: RecordedHashes, second: RecordedHashes) -> _Fact | None:
    common = first.partials.keys() & second.partials.keys()
    differing = []
    names: list[str] = []
    for replica in sorted(r for r in common if first.partials[r] != second.partials[r]):
        parts = first.partial_parts.get(replica, ""), second.partial_parts.get(replica, "")
        differing_names = _named((first.names, parts[0]), (second.names, parts[1]))
        if differing_names:
            differing.append(replica)
            names += [each for each in differing_names if each not in names and differing_names != _UNKNOWN]
    if not differing:
        return None
    missing = [] if names else ["the gradients by variable"]
    if first.key.tests:
        return _Fact("result", tuple(differing), len(common), names=tuple(names), missing=tuple(missing))
    if not (first.before and second.before) and len(differing) == len(common):
        missing.append("the state before the step")
    if not all(replica in first.inputs and replica in second.inputs for replica in differing):
        missing.append("the examples")
    return _Fact("gradient", tuple(differing), len(common), names=tuple(names), missing=tuple(missing))


def _total(first: RecordedHashes, second: RecordedHashes, replicas: int) -> _Fact | None:
    if not _differ(first.total, second.total):
        return None
    names = _named((first.names, first.total_parts), (second.names, second.total_parts))
    if not names:
        return None
    both = first.partials.keys() & second.partials.keys()
    missing = () if len(both) == replicas else ("the partials of all replicas",)
    names = () if names == _UNKNOWN else names
    return _Fact("reduction", names=names, missing=missing)


def _after(first: RecordedHashes, second: RecordedHashes) -> _Fact | None:
    if not _differ(first.after, second.after) or not (names := _state_names(first, second, "after")):
        return None
    names = () if names == _UNKNOWN else names
    missing = [] if names else ["the variables"]
    if not (first.total and second.total):
        missing.append("the total")
    if not (first.before and second.before):
        missing.append("the state before the step")
    return _Fact("update", names=names, missing=tuple(missing))


_UNKNOWN = ("?",)
"""Instead of names: something differs whose name was not recorded."""


def _differ(first: str, second: str) -> bool:
    """Whether both hashes are recorded, and differ."""
    return bool(first and second) and first != second


def _state_names(
    first: RecordedHashes, second: RecordedHashes, when: Literal["before", "after"]
) -> tuple[str, ...]:
    parts = (
        (first.before_parts, second.before_parts)
        if when == "before"
        else (first.after_parts, second.after_parts)
    )
    return _named((first.variables, parts[0]), (second.variables, parts[1]))


def _named(first: tuple[tuple[str, ...], str], second: tuple[tuple[str, ...], str]) -> tuple[str, ...]:
    """Return the names whose hashes differ in two records with different hashes of everything.

    Returns:
        `_UNKNOWN` if the hashes by name are not recorded. Nothing if only the names differ, because a record
        may have the results of more metrics.
    """
    ours, theirs = (
        dict(zip(names, _split(parts, HASH_DIGITS), strict=False)) for names, parts in (first, second)
    )
    if not ours or not theirs:
        return _UNKNOWN
    common = [name for name in ours if name in theirs]
    if not common and len(ours) == len(theirs):
        # Variables may have other names after a change of the script.
        pairs = zip(ours.items(), theirs.values(), strict=True)
        return tuple(name for (name, mine), yours in pairs if mine != yours)
    return tuple(name for name in common if ours[name] != theirs[name]) if common else _UNKNOWN


def _split(text: str, digits: int) -> list[str]:
    return [text[at : at + digits] for at in range(0, len(text), digits)]


def _length(recording: Recording) -> int:
    """Return the number of training steps of a run, or the known number if it did not finish."""
    return max(*(recording.finished.get(name) or 0 for name in ("steps", "reached")), recording.last)


def _cause(fact: _Fact, heads: Sequence[HeadDifference]) -> tuple[Cause, HeadDifference | None]:
    """Return the cause of a difference, and the difference of the programs or hosts that explains it."""
    order: tuple[Cause, ...] = ("seed", "configuration", "input", "versions", "processor", "script")
    able = [head for head in heads if _explains(head, fact)]
    # Arguments and variables of the script may have changed anything, so their effects explain more.
    able.sort(key=lambda head: 2.5 if head.concerns == "anything" else order.index(head.cause))
    if able:
        return able[0].cause, able[0]
    match fact.place:
        case "first state" | "state" | "end" | "length":
            return "state", None
        case "result":
            return "gradient", None
        case place:
            return place, None


def _explains(head: HeadDifference, fact: _Fact) -> bool:
    """Whether a difference of the programs or hosts can have an effect where the runs first differ."""
    concerns = head.concerns
    if concerns == "anything":
        return fact.place != "reduction"
    of_optimizer, of_callbacks = concerns == "optimizer", concerns == "callbacks"
    of_data = head.cause == "input" or concerns == "data"
    of_length = concerns in ("length", "callbacks")
    match fact.place:
        case "first state":
            assigned = bool(fact.names) and all(map(_is_optimizers, fact.names))
            if of_optimizer or of_callbacks:
                return assigned
            return not (of_data or of_length)
        case "state":
            # The difference does not come from a computation: something has assigned it. An optimizer assigns
            # averages to the weights.
            averages = of_optimizer and head.name.startswith(("use_ema ", "ema_"))
            return averages or (of_callbacks and bool(fact.names) and all(map(_is_optimizers, fact.names)))
        case "input":
            return of_data or concerns == "reading" or head.cause in ("seed", "versions")
        case "gradient" | "result":
            return not (of_optimizer or of_callbacks or of_data or of_length)
        case "reduction":
            return head.cause in ("versions", "processor")
        case "update":
            return head.cause != "seed" and not (of_callbacks or of_data or of_length)
        case "length":
            return of_length or of_data or head.cause == "script"
        case "end":
            return True


def _is_optimizers(name: str) -> bool:
    return name.rpartition("/")[2] in ("learning_rate", "iteration")
