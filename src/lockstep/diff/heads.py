"""How the programs and hosts of two runs differ, in the program's terms.

Settings are compared by name, as a call has recorded them (`keras/state/settings.py`). Consequences of other
differences are omitted: settings of a layer that only one run has, or an order with a different batch size.
"""

import difflib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.diff.recording import Recording
from lockstep.system.environment import THREAD_VARIABLES

Cause = Literal[
    "configuration",
    "versions",
    "processor",
    "script",
    "seed",
    "input",
    "gradient",
    "reduction",
    "update",
    "state",
    "order",
]
Concern = Literal["computation", "optimizer", "callbacks", "reading", "data", "length", "anything"]
"""What a difference can have an effect on. Callbacks can end a training, and change the learning rate."""

ABSENT = "absent"
_KERAS = "keras.config."
_INTEROP = "TF_NUM_INTEROP_THREADS"
_DRAWN = (", random states ", ", seed ")
_ROWS = re.compile(r"(?<=\[)\d+")
"""The number of rows in the description of arrays, such as `float32[96, 4] float32[96, 3]`."""
_CALLBACK = re.compile(r"setting callback (\d+) \((.*?)\): (.*)")
_FROM_START = "0 to "
"""The beginning of the epochs of a `fit` without `initial_epoch`."""
_MOST_LINES = 6
"""Lines of a source file that are shown of each run."""


@dataclass(frozen=True)
class HeadDifference:
    """A difference of the programs or hosts of two runs, on which their bits depend.

    Attributes:
        cause: the kind of the difference.
        name: its name, such as `version of numpy`.
        first: its value in the first run.
        second: its value in the second run.
        concerns: the parts of a step that it can affect.
        lines: for a source file, the lines that differ, with `-` before those of the first run.
    """

    cause: Cause
    name: str
    first: str
    second: str
    concerns: Concern = "computation"
    lines: tuple[str, ...] = ()


def _difference(
    cause: Cause,
    name: str,
    values: Iterable[str],
    concerns: Concern = "computation",
    lines: Iterable[str] = (),
) -> HeadDifference:
    first, second = values
    return HeadDifference(cause, name, first, second, concerns, tuple(lines))


def head_differences(first: Recording, second: Recording) -> Iterator[HeadDifference]:
    """Yield the differences of everything on which the runs' bits depend, the most general first."""
    ours, theirs = first.program, second.program
    yield from _changed("seed", "seed", ours.get("seed"), theirs.get("seed"))
    for name in ("backend", "replicas", "threads"):
        yield from _changed("configuration", name, ours.get(name), theirs.get(name))
    yield from _changed("configuration", "input", ours.get("input"), theirs.get("input"), "reading")
    configs = ours.get("keras", {}), theirs.get("keras", {})
    # Runs of earlier versions have not recorded them.
    for name in sorted(configs[0].keys() & configs[1].keys()):
        concern: Concern = "computation" if name == "epsilon" else "reading"
        yield from _changed("configuration", f"{_KERAS}{name}", configs[0][name], configs[1][name], concern)
    versions = ours.get("versions", {}), theirs.get("versions", {})
    # If only one of the scripts imports a package, the scripts differ.
    for name in sorted(versions[0].keys() & versions[1].keys()):
        yield from _changed("versions", f"version of {name}", versions[0][name], versions[1][name])
    # A replay in one process has as many of these threads as the run has processes, which does not affect
    # bits.
    replayed = (_INTEROP,) if first.in_one_process != second.in_one_process else ()
    settled = replayed if ours.get("threads") == theirs.get("threads") else THREAD_VARIABLES
    flags = [{k: v for k, v in each.get("flags", {}).items() if k not in settled} for each in (ours, theirs)]
    yield from _all_changed("configuration", "environment variable ", *flags)
    yield from _changed("processor", "processor", ours.get("processor"), theirs.get("processor"))
    features = [set(str(each.get("features", "")).split()) for each in (ours, theirs)]
    for name in sorted(features[0] ^ features[1]):
        there = ["present" if name in some else ABSENT for some in features]
        yield _difference("processor", f"processor feature {name}", there)
    yield from _source_differences(first, second)
    same_seed = ours.get("seed") == theirs.get("seed")
    for call in [call for call in first.settings if call in second.settings]:
        settings = _setting_differences(call, first.settings[call], second.settings[call])
        # Seeds within the script follow from the job's seed.
        yield from (difference for difference in settings if same_seed or difference.cause != "seed")
    yield from _variable_differences(first, second)
    words = [[*map(str, recording.job.get("arguments", ()))] for recording in (first, second)]
    arguments = [" ".join(each) or "none" for each in words]
    if arguments[0] != arguments[1]:
        yield _difference("configuration", "arguments of the script", arguments, "anything")


def _changed(
    cause: Cause, name: str, ours: object, theirs: object, concerns: Concern = "computation"
) -> Iterator[HeadDifference]:
    if ours != theirs:
        yield HeadDifference(cause, name, _shown(ours), _shown(theirs), concerns)


def _all_changed(
    cause: Cause, kind: str, ours: Mapping[str, object], theirs: Mapping[str, object]
) -> Iterator[HeadDifference]:
    for name in sorted({*ours, *theirs}):
        yield from _changed(cause, f"{kind}{name}", ours.get(name), theirs.get(name))


def _shown(value: object) -> str:
    return ABSENT if value is None else str(value)


def _source_differences(first: Recording, second: Recording) -> Iterator[HeadDifference]:
    """Yield the differing source files, the script first, with their lines if both runs have kept them."""
    sources = [dict(each.program.get("sources", {})) for each in (first, second)]
    scripts = [str(each.program.get("script", "")) for each in (first, second)]
    pairs = [("script", *scripts)]
    others = sorted({*sources[0], *sources[1]}.difference(scripts))
    pairs += [(f"module {name}", name, name) for name in others]
    for subject, ours, theirs in pairs:
        hashes = sources[0].get(ours), sources[1].get(theirs)
        if hashes[0] != hashes[1]:
            old, new = first.source(ours), second.source(theirs)
            lines = () if old is None or new is None else tuple(_differing_lines(old, new))
            yield _difference("script", subject, map(_shown, hashes), lines=lines)


def _differing_lines(first: str, second: str) -> Iterator[str]:
    """Yield the differing lines with their numbers; only the first of many."""
    ours, theirs = first.splitlines(), second.splitlines()
    changes = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    removed = [f"- {n + 1}: {ours[n]}" for tag, a, b, _, _ in changes if tag != "equal" for n in range(a, b)]
    added = [f"+ {n + 1}: {theirs[n]}" for tag, _, _, a, b in changes if tag != "equal" for n in range(a, b)]
    for lines in (removed, added):
        yield from lines[:_MOST_LINES]
        if len(lines) > _MOST_LINES:
            yield f"{lines[0][0]} and {len(lines) - _MOST_LINES} more lines"


def _variable_differences(first: Recording, second: Recording) -> Iterator[HeadDifference]:
    """Yield the differing variables of the script: those of `--env`, and those that its source names."""
    set_for_run = [
        {k: v for k, v in each.job.get("env", {}).items() if v is not None} for each in (first, second)
    ]
    read = [each.program.get("variables") for each in (first, second)]
    # Runs of earlier versions have not recorded them.
    marks = [some or {} for some in read] if None not in read else [{}, {}]
    for name in sorted({*set_for_run[0], *set_for_run[1], *marks[0], *marks[1]}):
        values = [some.get(name) for some in set_for_run]
        if None in values:
            # Only hashes of these are recorded.
            hashes = [some.get(name) for some in marks]
            if hashes[0] == hashes[1] and hashes[0] is not None:
                continue
            # No source names it, but a library may read it.
            missing = "not given" if hashes == [None, None] else ABSENT
            others = ("set", "set to another value")
            if None in hashes:
                others = ("set", "set")
            elif "set" in hashes:
                # A secret, or a variable of --env NAME, may have the same value.
                others = ("set", "set to an unknown value")
            values = [
                value if value is not None else missing if mark is None else other
                for value, mark, other in zip(values, hashes, others, strict=True)
            ]
        if values[0] != values[1]:
            yield _difference("configuration", f"environment variable {name}", map(str, values), "anything")


def _setting_differences(
    call: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[HeadDifference]:
    """Yield how the settings of a call differ."""
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    yield from _callback_differences(call, ours, theirs)
    settles_order = any(name in ("call batch size", "call shuffle") for name in names)
    for name in names:
        values = ours.get(name, ABSENT), theirs.get(name, ABSENT)
        if (
            name.endswith("data sample")
            or _CALLBACK.fullmatch(name)
            or _is_of_absent_part(name, ours, theirs)
        ):
            continue
        if name == "the seeds of the script":
            yield _difference("seed", f"{name} in {call}", values)
        elif name in ("data", "validation data"):
            yield _data_difference(name, call, *values)
        elif name.endswith("order"):
            if not settles_order and _without_draws(values[0]) != _without_draws(values[1]):
                yield _difference("configuration", f"{name} of {call}", values, "data")
        elif name.startswith("call "):
            argument = name.removeprefix("call ").replace(" ", "_")
            concern: Concern = "length" if argument in ("epochs", "steps_per_epoch") else "data"
            if argument == "epochs" and all(value.startswith(_FROM_START) for value in values):
                values = values[0].removeprefix(_FROM_START), values[1].removeprefix(_FROM_START)
            yield _difference("configuration", f"{argument} of {call}", values, concern)
        elif name.startswith(("data ", "validation ")):
            yield _difference("configuration", f"{name} of {call}", values, "data")
        else:
            yield _part_difference(name, call, *values)


def _is_of_absent_part(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    """Whether a setting follows from the class of its part, which differs or which one run lacks."""
    part, colon, key = name.rpartition(": ")
    kind = f"{part}: class"
    return bool(colon) and key != "class" and ours.get(kind) != theirs.get(kind)


def _part_difference(name: str, call: str, ours: str, theirs: str) -> HeadDifference:
    """Return the difference of a setting of a layer, the optimizer or the loss."""
    part, colon, key = name.removeprefix("setting ").rpartition(": ")
    if not colon:
        part, key = f"the {key} of {call}", ""
    elif part.startswith("optimizer"):
        part = f"the {part} of {call}"
    if key.startswith("code ("):
        key = "code"
    subject = part if key in ("", "class") else f"{key} of {part}"
    concern: Concern = "optimizer" if name.startswith("setting optimizer") else "computation"
    return HeadDifference("configuration", subject, _plain(ours), _plain(theirs), concern)


def _callback_differences(
    call: str, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterator[HeadDifference]:
    """Yield the differences between the callbacks of a call: their classes, order and parameters."""
    first, second = _callbacks(ours), _callbacks(theirs)
    kinds = [[kind for kind, _ in some] for some in (first, second)]
    texts = [", ".join(some) or "none" for some in kinds]
    if Counter(kinds[0]) != Counter(kinds[1]):
        yield _difference("configuration", f"callbacks of {call}", texts, "callbacks")
    elif kinds[0] != kinds[1]:
        yield _difference("configuration", f"order of the callbacks of {call}", texts, "callbacks")
    for kind in dict.fromkeys(kinds[0]):
        pairs = [[parameters for name, parameters in some if name == kind] for some in (first, second)]
        for before, now in zip(*pairs, strict=False):
            for name in dict.fromkeys([*before, *now]):
                values = before.get(name, ABSENT), now.get(name, ABSENT)
                if values[0] != values[1]:
                    subject = f"{name} of callback {kind} in {call}"
                    yield _difference("configuration", subject, map(_plain, values), "callbacks")


def _callbacks(settings: Mapping[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Return the class and the parameters of each callback, in order."""
    callbacks: dict[int, tuple[str, dict[str, str]]] = {}
    for name, text in settings.items():
        if match := _CALLBACK.fullmatch(name):
            _, parameters = callbacks.setdefault(int(match[1]), (match[2], {}))
            if match[3] != "class":
                parameters[match[3]] = text
    return [callbacks[number] for number in sorted(callbacks)]


def _data_difference(name: str, call: str, ours: str, theirs: str) -> HeadDifference:
    """Return the difference between the data of a call; only the number of rows, if nothing else differs."""
    rows = [set(_ROWS.findall(text)) for text in (ours, theirs)]
    if _ROWS.sub("", ours) == _ROWS.sub("", theirs) and len(rows[0]) == len(rows[1]) == 1:
        subject = f"the number of {name.removesuffix('data')}examples in {call}"
        return _difference("input", subject, [*rows[0], *rows[1]], "data")
    return HeadDifference("input", f"{name} in {call}", ours, theirs, "data")


def _without_draws(order: str) -> str:
    """Return the description of an order without the random numbers that determine it."""
    for mark in _DRAWN:
        order = order.partition(mark)[0]
    return order


def _plain(text: str) -> str:
    """Return the text of a setting as in a program: `float32` for the config of a dtype policy."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else _written(value)


def _written(value: Any) -> str:
    match value:
        case {"class_name": "DTypePolicy", "config": {"name": str(name)}}:
            return name
        case {"class_name": str(kind), "config": config}:
            return _constructed(kind, config)
        case {"class": str(kind), **parts}:
            return _constructed(kind, {key: part for key, part in parts.items() if key != "code" or part})
        case dict():
            return "{" + ", ".join(f"{key}: {_written(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_written, value)) + "]"
        case bool() | None:
            return str(value)
        case float():
            return _shortest(value)
    return json.dumps(value)


def _constructed(kind: str, config: Any) -> str:
    arguments = config.items() if isinstance(config, dict) else ()
    parameters = [
        f"{key}={_written(value)}" for key, value in arguments if value is not None and key != "name"
    ]
    return f"{kind}({', '.join(parameters)})"


def _shortest(value: float) -> str:
    """Return the shortest number that equals this one in single precision, as in a program."""
    try:
        if struct.unpack("f", struct.pack("f", value))[0] != value:
            return repr(value)
    except OverflowError:
        return repr(value)
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if struct.unpack("f", struct.pack("f", float(text)))[0] == value:
            return text
    return repr(value)
