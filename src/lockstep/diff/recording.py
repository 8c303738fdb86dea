"""Reads the digest log of a run into steps: one object has all workers' records of a step.

A folder may contain several runs, one after the other. The last one counts, together with the earlier steps
that previous runs have recorded if it resumed after them.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import ConfigError
from lockstep.observability.digest_log import segments
from lockstep.observability.digest_records import DIGEST_FORMAT
from lockstep.observability.events import is_within
from lockstep.observability.run_lines import happenings, json_objects
from lockstep.observability.run_state import RunState
from lockstep.system.files import read_regular
from lockstep.system.paths import RunPaths, kept_source

BY_REPLICA = ("examples", "inputs", "rows", "partials", "partial_parts")
_SHARED = ("total", "total_parts", "before", "before_parts", "after", "after_parts")


class Key(NamedTuple):
    """The key of a step; keys are in the order of the steps. A test follows the training step of its number.

    Attributes:
        step: the number of training steps of the run, with this one if it trains.
        tests: whether it is not a training step.
        call: its call, such as `evaluate 2`; empty for a training step.
        number: its number in its call; 0 for a training step, and for the state outside of any step, where
            `call` names the point, such as `the end of fit 1`.
    """

    step: int
    tests: bool
    call: str = ""
    number: int = 0


@dataclass
class RecordedHashes:
    """The recorded hashes of one step. The fields are those of `StepDigests`.

    Attributes:
        names: the names of the arrays of partials and total; empty if unknown.
        variables: the names of the variables; empty if unknown.
    """

    key: Key
    call: str = ""
    number: int = 0
    names: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    examples: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, str] = field(default_factory=dict)
    rows: dict[int, str] = field(default_factory=dict)
    partials: dict[int, str] = field(default_factory=dict)
    partial_parts: dict[int, str] = field(default_factory=dict)
    total: str = ""
    total_parts: str = ""
    before: str = ""
    before_parts: str = ""
    after: str = ""
    after_parts: str = ""


@dataclass
class Recording:
    """The last run of a folder.

    Attributes:
        folder: the folder of the run.
        job: the fields of the event `job`.
        program: the fields of the event `program` of the first worker.
        settings: for each call that has recorded them, the settings.
        steps: the recorded steps by key.
        finished: the fields of the event `finished`; empty if the run has not ended.
        calls: the script's calls in order, by name, and whether each has ended.
        lost: number of events of workers that are missing in the log.
    """

    folder: Path
    job: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)
    settings: dict[str, Mapping[str, str]] = field(default_factory=dict)
    steps: dict[Key, RecordedHashes] = field(default_factory=dict)
    finished: Mapping[str, Any] = field(default_factory=dict)
    calls: Mapping[str, bool] = field(default_factory=dict)
    lost: int = 0

    @property
    def has_servers(self) -> bool:
        """Whether the job has parameter servers."""
        return bool(self.job.get("parameter_servers"))

    @property
    def in_one_process(self) -> bool:
        """Whether the run is a replay, in one process, of a job with parameter servers."""
        return self.has_servers and self.job.get("workers") == 1

    @property
    def replicas(self) -> int:
        """R."""
        return int(self.program.get("replicas", self.job.get("replicas", 0)))

    def source(self, name: str) -> str | None:
        """Return the text of a source file as the run has used it, or None if the folder does not have it."""
        script = (self.job.get("script") or {}).get("path")
        expected = self.program.get("sources", {}).get(name)
        if not script or not expected:
            return None
        path = kept_source(RunPaths(self.folder).sources, Path(script).parent / name)
        try:
            text = read_regular(path)
        except OSError:
            return None
        same = hashlib.sha256(text).hexdigest() == expected
        return text.decode(errors="replace") if same else None

    @property
    def first(self) -> int:
        """The first recorded training step; 0 if there is none."""
        return min((key.step for key in self.steps if not key.tests), default=0)

    @property
    def last(self) -> int:
        """The last recorded training step; 0 if there is none."""
        return max((key.step for key in self.steps if not key.tests), default=0)

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended with status 0."""
        return self.finished.get("status") == 0


def read_recording(folder: Path) -> Recording:
    """Read the digest log of a run folder.

    Raises:
        ConfigError: the folder has no digest log, or one of a format that this version cannot read.
    """
    paths = RunPaths(folder)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder}: there is no such folder; give the folder of a run, such as runs/train-..."
        )
    files = segments(paths.digests) if paths.digests.is_dir() else []
    if not files:
        raise ConfigError(
            f"{folder} has no digest log: it is not a run folder, or the run trained nothing, or an earlier "
            "version of Lockstep wrote it"
        )
    runs = [_Reader(folder)]
    for record in (record for path in files for record in json_objects(_read(path))):
        if record.get("event") == "job":
            runs.append(_Reader(folder, thinned=runs[-1].thinned))
        runs[-1].add(record)
    runs = [run for run in runs if run.recording.steps or run.recording.program]
    if not runs:
        raise ConfigError(f"{folder}: the digest log has no steps")
    last = runs.pop().recording
    while runs and last.first > 1:
        earlier = runs.pop().recording
        steps = {key: step for key, step in earlier.steps.items() if key.step < last.first}
        last.steps = steps | last.steps
        last.settings = earlier.settings | last.settings
    _join_loops(last)
    _add_events(last, paths.events)
    return last


def _join_loops(recording: Recording) -> None:
    """Add the state before a step of a loop: the script's own code between two steps belongs to a step."""
    for key, step in recording.steps.items():
        before = recording.steps.get(Key(key.step - 1, tests=False))
        if step.call.startswith("steps ") and before is not None and before.call == step.call:
            step.before, step.before_parts = before.after, before.after_parts


class _Reader:
    def __init__(self, folder: Path, *, thinned: bool = False) -> None:
        self.recording = Recording(folder)
        self._names: dict[str, tuple[str, ...]] = {}
        self._serials: dict[int, int] = {}
        self.thinned = thinned

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a line; skip an invalid one."""
        recording = self.recording
        match record:
            case {"event": "job"}:
                recording.job = record
            case {"event": "segment", "stride": int(stride)}:
                # Whole events are missing in a segment that was thinned.
                self.thinned = stride > 1
                self._serials.clear()
            case {"event": "program", "format": int(number)} if number > DIGEST_FORMAT:
                raise ConfigError(
                    f"{recording.folder}: the digest log has format {number}, and this version reads "
                    f"format {DIGEST_FORMAT}: install the version of Lockstep that has written it"
                )
            case {"event": "program", "worker": int(worker)}:
                if not recording.program or worker <= recording.program["worker"]:
                    recording.program = record
                self._serials.pop(worker, None)
            case {"event": "settings", "call": str(call), "settings": {**settings}}:
                recording.settings.setdefault(call, {str(name): str(text) for name, text in settings.items()})
            case {"event": "names", "key": str(key), "names": [*names]}:
                self._names[key] = tuple(map(str, names))
            case {"event": "digests", "worker": int(worker), "serial": int(serial), "steps": [*steps]}:
                before = serial - 1 if self.thinned else self._serials.get(worker, serial - 1)
                recording.lost += max(0, serial - before - 1)
                self._serials[worker] = serial
                for step in steps:
                    self._add_step(step)

    def _add_step(self, step: Any) -> None:
        match step:
            case {"step": int(count), "call": str(call), "number": int(number)}:
                tests = not step.get("trains", True)
                key = Key(count, tests, call, number) if tests else Key(count, tests)
            case _:
                return
        hashes = self.recording.steps.setdefault(key, RecordedHashes(key, call, number))
        hashes.names = self._names.get(step.get("names", ""), ()) or hashes.names
        hashes.variables = self._names.get(step.get("variables", ""), ()) or hashes.variables
        for name in BY_REPLICA:
            values = step.get(name)
            if isinstance(values, dict):
                getattr(hashes, name).update({int(replica): value for replica, value in values.items()})
        for name in _SHARED:
            if text := step.get(name):
                setattr(hashes, name, str(text))


def _read(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _add_events(recording: Recording, events: Path) -> None:
    """Add the end of the last run in the event log, and the calls of its script."""
    state, calls = RunState(keeps_history=False), dict[str, bool]()
    for event in happenings(_read(events)) if events.is_file() else ():
        state = state.after(event)
        name = str(event.fields.get("name"))
        if event.event == "job":
            calls.clear()
        elif event.event in ("call", "call ended") and not is_within(name):
            calls[name] = calls.get(name, False) or event.event == "call ended"
    recording.finished, recording.calls = state.finished or {}, calls
