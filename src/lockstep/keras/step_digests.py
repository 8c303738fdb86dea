"""Records hashes of steps, with which `lockstep diff` finds the first difference between two runs.

Each worker records its own results, without messages to others: the examples and the partials of its
replicas. The worker that computes replica 0 also records the total and the state, which are equal on all
workers. Recording does not change the results of steps.

All of the first steps of a job are recorded. Later ones are recorded if a stride divides their number. The
stride is a power of two that keeps the time for recording within a small part of the time of the steps. So
all workers, and other runs, record the same steps, or every second or fourth one.

A worker hashes its results after the update has begun, so recording does not add a message or a wait. On JAX,
whose arrays are immutable, the state after a step is hashed after the next step, which waits for it anyway.
"""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import structs

from lockstep.data.digest import digest_array, digest_arrays, digest_rows
from lockstep.errors import LockstepError
from lockstep.keras.backends.contract import GRADIENTS, METRICS, Total, TrainingState
from lockstep.keras.host_report import libraries
from lockstep.keras.rounds import Round
from lockstep.observability.digest_records import (
    HASH_DIGITS,
    DigestsRecorded,
    NamesRecorded,
    ProgramRecorded,
    SettingsRecorded,
    StepDigests,
)
from lockstep.system.environment import numeric_flags, variable_marks
from lockstep.system.processor import processor_features, processor_model
from lockstep.worker.job import Job
from lockstep.worker.program_sources import own_sources, own_variables, package_versions, script_source

ALL_UNTIL = 128
"""The last step up to which every step is recorded."""
_FULL_EVERY = 128
_STATE_EVERY = 16
"""One of so many recorded steps has the state, if it is large."""
_TESTS = 16
"""The most steps of an evaluation that are recorded."""
_PART_OF_TIME = 0.005
_RECORDS_PER_CHOICE = 8
_SMALL_TOTAL = 128 * 1024
_SMALL_STATE = 256 * 1024
_FEW_ARRAYS = 128
_FEW_ROWS = 128
_ROW_PARTS = 1024
_FLUSH_EVERY = 1.0
_MOST_CHARACTERS = 96 * 1024
"""The most characters of hashes in one event, whose message must fit in a packet. A step with more hashes is
recorded without parts."""

_CONFIG = ("floatx", "epsilon", "image_data_format")
"""Functions of `keras.config` that return values of keras.json, besides the backend."""

Describe = Callable[[str], str]
"""Returns the name of an array of a partial for people."""


@dataclass
class RecordedStep:
    """A step that is being recorded.

    Attributes:
        fields: the fields of its `StepDigests` so far.
        full: whether to record everything by name.
        holds_state: whether the state is recorded.
        data: the examples of the replicas that this worker has computed.
        rows: the number of examples of all replicas; 0 if it is unknown.
        rounds: the rounds of the step that have not been hashed, and their totals.
        hashed: number of rounds that have been hashed.
        names: the names of the arrays of all rounds, in the order of their hashes.
        partials: the hashes of the arrays of each replica.
        totals: the hashes of the arrays of the totals.
        total_bytes: the size of the totals.
        values: the values of the variables after the step, if `after` has not been computed from them yet.
    """

    fields: dict[str, Any]
    full: bool
    holds_state: bool
    data: dict[int, Any] = field(default_factory=dict)
    rows: int = 0
    rounds: list[tuple[Round, Total]] = field(default_factory=list)
    hashed: int = 0
    names: list[str] = field(default_factory=list)
    partials: dict[int, bytes] = field(default_factory=dict)
    totals: bytes = b""
    total_bytes: int = 0
    values: Sequence[Any] | None = None

    def read(self, replica: int, data: Any) -> None:
        """Add the examples of a replica, which do not change before the step ends."""
        self.data[replica] = data

    def add_round(self, round_: Round, total: Total) -> None:
        """Add a round, whose arrays do not change before the step ends."""
        self.rounds.append((round_, total))


class DigestRecorder:
    """Records the steps of one process.

    Args:
        job: the job on whose bus it publishes, if there are subscribers to digests.
        to_numpy: converts an array of the backend to NumPy.
        now: reads a clock, in seconds.
    """

    def __init__(
        self,
        job: Job,
        to_numpy: Callable[[Any], npt.NDArray[Any]],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._job = job
        self._to_numpy = to_numpy
        self._now = now
        wish = job.settings.digests
        self._is_off = wish == "off"
        self._all = bool(wish) and not self._is_off
        self._until = int(wish) if wish.isdecimal() else None
        self._immutable = keras.backend.backend() == "jax"
        self._stride = 1
        self._program: ProgramRecorded | None = None
        self._settings: dict[str, Mapping[str, str]] = {}
        self._keys: dict[tuple[str, ...], str] = {}
        self._steps: list[StepDigests] = []
        self._characters = 0
        self._flushed = now()
        self._serial = 0
        self._pending: RecordedStep | None = None
        self._variables: Mapping[str, Any] = {}
        self._of: Any = None
        self._state_bytes = 0
        self._begun = now()
        self._busy = self._spent = 0.0
        self._recorded = 0
        self._loop: RecordedStep | None = None
        self._lacks_shapes = True
        self._taken = self._rounds = 0
        self._round_ended = 0.0

    @property
    def active(self) -> bool:
        """Whether steps are recorded."""
        return not self._is_off and self._job.events.has_subscribers(DigestsRecorded)

    def begin_call(self, call: str, trained: int, settings: Mapping[str, str]) -> None:
        """Record everything on which a call's bits depend and that differs from the previous call."""
        if not self.active:
            return
        job = self._job
        hidden = [name for name, value in job.settings.env.items() if value is None]
        program = ProgramRecorded(
            seed=job.settings.seed,
            replicas=job.view.replicas,
            threads=job.settings.threads,
            input="joint" if job.settings.joint_input else "divided",
            backend=keras.backend.backend(),
            versions={"python": platform.python_version(), **package_versions(), **libraries()},
            flags=numeric_flags(),
            processor=processor_model(),
            features=processor_features(),
            sources=own_sources(),
            script=script_source(),
            keras={name: str(getattr(keras.config, name)()) for name in _CONFIG},
            variables=variable_marks(own_variables(), hidden),
        )
        if program != self._program:
            self._program = program
            self._job.events.publish(program)
        method = call.partition(" ")[0]
        if self._settings.get(method) != settings:
            self._settings[method] = dict(settings)
            self._job.events.publish(SettingsRecorded(call=call, trained=trained, settings=dict(settings)))

    def begin(self, step: int, call: str, number: int, *, trains: bool) -> RecordedStep | None:
        """Begin a step, and return its record, or None if it is not recorded.

        Args:
            step: number of training steps of the job, with this one if it trains, without the rounds of loops
                that Lockstep does not drive.
            call: the name of the call, such as `fit 1`.
            number: the number of the step in its call, from 1.
            trains: whether it is a training step.
        """
        self._begun = self._now()
        step += self._rounds
        if trains:
            self._taken = step - self._rounds
        # A worker that is about to join computes a step only to compile it.
        if self._job.joins or not self.active or not self._is_due(step, number, trains):
            return None
        full = self._all or step == 1 or step % _FULL_EVERY == 0 or (number == 1 and step <= ALL_UNTIL)
        may_hold_state = (
            full or self._state_bytes <= _SMALL_STATE or step % (_STATE_EVERY * self._stride) == 0
        )
        holds_state = trains and may_hold_state and self._owns_first()
        fields = {"step": step, "call": call, "number": number, "trains": trains}
        return RecordedStep(fields, full, holds_state)

    def before_update(self, record: RecordedStep | None, program: TrainingState, state: Any) -> None:
        """Record the state before a step, after its partials are computed, and before the update.

        The arrays of `state` may be overwritten by the update.
        """
        holds_state = record is not None and record.holds_state
        if self._pending is None and not holds_state:
            return
        begun = self._now()
        if record is not None and holds_state:
            values = self._values(record, program, state)
            digest, parts = self._hashed(values)
            record.fields |= {"before": digest, "variables": self._key(tuple(self._variables))}
            if self._shows_parts(record, len(values)):
                record.fields["before_parts"] = parts
            if self._pending is not None and _are_same(self._pending.values, values):
                self._finish(self._pending, digest, parts)
        self.settle()
        self._spent += self._now() - begun

    def after_update(
        self,
        record: RecordedStep | None,
        program: TrainingState,
        state: Any,
        describe: Describe = str,
    ) -> None:
        """Record the rest of a step, whose update has begun.

        Args:
            record: the result of `begin`.
            program: the program of the step.
            state: the state after the step, perhaps still being computed.
            describe: returns the name of an array of the partials for people.
        """
        if record is None:
            self._busy += self._now() - self._begun
            return
        begun = self._now()
        self._record_inputs(record)
        several = len(record.rounds) > 1
        for number, (round_, total) in enumerate(record.rounds, 1):
            # Each of several rounds may update other variables.
            self._hash_round(record, round_, total, f"round {number}: ".__add__ if several else describe)
        record.rounds.clear()
        self._record_rounds(record)
        if record.holds_state:
            record.values = self._values(record, program, state)
        if record.values is not None and self._immutable:
            self._pending = record
        elif record.values is not None:
            self._finish(record, *self._hashed(record.values))
        else:
            self._add(StepDigests(**record.fields))
        self._count(record, begun)

    def settle(self) -> None:
        """Complete the record of the last step, before anything can overwrite the arrays of the state."""
        if (pending := self._pending) is not None:
            assert pending.values is not None
            self._finish(pending, *self._hashed(pending.values))

    def record_state_now(self, step: int, label: str, program: TrainingState) -> None:
        """Record the state outside of any step.

        Args:
            step: number of training steps of the job so far.
            label: names this point of the run, such as `the end of fit 1`.
            program: the program whose state it is. The state is in the variables.
        """
        if not self.active or not self._owns_first():
            return
        self.settle()
        variables = program.lasting_variables()
        digest, parts = self._hashed(program.lasting_values(None, variables))
        names = self._key(tuple(variables))
        digests = StepDigests(
            step=step + self._rounds,
            call=label,
            number=0,
            trains=False,
            variables=names,
            before=digest,
            before_parts=parts,
        )
        self._add(digests)

    def end_call(self) -> None:
        """Publish all records, because a call ends."""
        self.settle()
        self._flush()

    def end(self) -> None:
        """Publish the last records at the end of the script, which may have failed within a step."""
        try:
            self.settle()
        except Exception:
            # The arrays of the last state come from a computation that has failed.
            self._pending = None
        self._flush()

    def begin_loop_step(self, step: int, call: str, number: int, state: TrainingState) -> None:
        """Begin a step of a custom loop; see `begin`."""
        self._loop = self.begin(step, call, number, trains=True)
        if self._loop is not None and self._loop.holds_state and number == 1:
            digest, parts = self._named(state.named_state(None))
            self._loop.fields |= {"before": digest, "before_parts": parts}

    def end_loop_step(self, state: TrainingState) -> None:
        """Record the state after a step of a custom loop."""
        record, self._loop = self._loop, None
        if record is None:
            self._busy += self._now() - self._begun
            return
        begun = self._now()
        self._record_inputs(record)
        self._record_rounds(record)
        if record.holds_state:
            values = state.named_state(None)
            digest, parts = self._named(values)
            record.fields |= {"after": digest, "after_parts": parts, "variables": self._key(tuple(values))}
        self._add(StepDigests(**record.fields))
        self._count(record, begun)

    def record_loop_round(self, round_: Round, total: Total, *, driven: bool) -> None:
        """Record a round of a custom loop, whose arrays the next round may overwrite.

        In a loop that Lockstep does not drive, each round counts as a step.
        """
        record = self._loop
        if not driven:
            self._rounds += 1
            record = self.begin(self._taken, round_.label, self._rounds, trains=True)
            self._begun, self._round_ended = self._round_ended or self._begun, self._now()
        if record is None:
            self._busy += 0.0 if driven else self._round_ended - self._begun
            return
        begun = self._now()
        for replica in round_.contributed if not record.hashed else ():
            try:
                record.read(replica, list(round_.inputs(replica)))
            except LockstepError:
                # The inputs are not on this worker.
                continue
        self._hash_round(record, round_, total, f"round {record.hashed + 1}: ".__add__)
        if not driven:
            self._record_inputs(record)
            self._record_rounds(record)
            self._add(StepDigests(**record.fields))
            self._count(record, begun)

    def ends_after(self, step: int) -> bool:
        """Whether the run should record only the steps before this one, and may end now."""
        return self._until is not None and step > self._until

    def _is_due(self, step: int, number: int, trains: bool) -> bool:
        if self._all:
            return True
        return (step <= ALL_UNTIL or step % self._stride == 0) and (trains or number <= _TESTS)

    def _owns_first(self) -> bool:
        return 0 in self._job.view.replicas_of(self._job.worker)

    def _values(self, record: RecordedStep | None, program: TrainingState, state: Any) -> Sequence[Any]:
        """Return the values of the variables in `state`."""
        refresh = record is not None and (record.full or record.fields["number"] <= 2)
        if program is not self._of or refresh:
            self._of, self._variables = program, program.lasting_variables()
        return program.lasting_values(state, self._variables)

    def _hashed(self, values: Sequence[Any]) -> tuple[str, str]:
        """Return the hash of all values and the hash of each, both empty if the memory of one was reused."""
        if any(getattr(value, "is_deleted", bool)() for value in values):
            return "", ""
        arrays = [self._to_numpy(value) for value in values]
        self._state_bytes = sum(array.nbytes for array in arrays)
        parts = b"".join(map(digest_array, arrays))
        return xxhash.xxh3_64_hexdigest(parts), parts.hex()

    def _named(self, values: Mapping[str, Any]) -> tuple[str, str]:
        return self._hashed(list(values.values()))

    def _record_inputs(self, record: RecordedStep) -> None:
        examples, inputs, rows = {}, {}, {}
        shapes: tuple[str, ...] = ()
        for replica, data in record.data.items():
            arrays = self._arrays(data)
            if not arrays:
                continue
            inputs[replica] = digest_arrays(arrays).hex()[:HASH_DIGITS]
            counts = {len(array) if array.ndim else 0 for array in arrays}
            if len(counts) == 1 and (count := counts.pop()):
                examples[replica] = count
                # A job may resume within a call.
                if record.rows and (self._lacks_shapes or record.fields["number"] == 1):
                    shapes = tuple(f"{array.dtype}{[record.rows, *array.shape[1:]]}" for array in arrays)
                if record.full or count <= _FEW_ROWS:
                    rows[replica] = digest_rows(arrays, _ROW_PARTS).hex()
        self._lacks_shapes = self._lacks_shapes and not shapes
        record.fields |= {"shapes": shapes, "examples": examples, "inputs": inputs, "rows": rows}
        record.data.clear()

    def _arrays(self, data: Any) -> list[npt.NDArray[Any]]:
        """Return the leaves of examples as arrays, or none if some cannot be hashed by their contents."""
        arrays = []
        for leaf in keras.tree.flatten(data):
            if leaf is None:
                continue
            try:
                array = leaf if isinstance(leaf, np.ndarray) else self._to_numpy(leaf)
            except (TypeError, ValueError, AttributeError, RuntimeError):
                # An example is a ragged tensor.
                return []
            if array.dtype.kind == "O" and not all(isinstance(item, str | bytes) for item in array.flat):
                return []
            arrays.append(array)
        return arrays

    def _hash_round(self, record: RecordedStep, round_: Round, total: Total, describe: Describe) -> None:
        if round_.layout is None:
            return
        record.hashed += 1
        record.names += [describe(name) for name in round_.named_parts(round_.layout.zeros)]
        for replica, arrays in round_.contributed.items():
            parts = b"".join(map(digest_array, round_.named_parts(arrays).values()))
            record.partials[replica] = record.partials.get(replica, b"") + parts
        summed = round_.parts({name: total[name] for name in round_.layout.names if name in total})
        totals = [summed[name] for name in sorted(summed)]
        record.total_bytes += sum(array.nbytes for array in totals)
        small = record.total_bytes <= _SMALL_TOTAL
        if self._owns_first() and (small or record.full):
            record.totals += b"".join(map(digest_array, totals))

    def _record_rounds(self, record: RecordedStep) -> None:
        """Add the hashes of all rounds to the fields."""
        partials, totals = record.partials, record.totals
        record.fields["partials"] = {r: xxhash.xxh3_64_hexdigest(parts) for r, parts in partials.items()}
        by_name = self._shows_parts(record, len(record.names))
        if record.names and by_name:
            record.fields |= {
                "names": self._key(tuple(record.names)),
                "partial_parts": {r: parts.hex() for r, parts in partials.items()},
            }
        if totals and (record.full or record.total_bytes <= _SMALL_TOTAL):
            record.fields["total"] = xxhash.xxh3_64_hexdigest(totals)
            if by_name:
                record.fields["total_parts"] = totals.hex()

    def _shows_parts(self, record: RecordedStep, count: int) -> bool:
        return record.full or count <= _FEW_ARRAYS

    def _finish(self, record: RecordedStep, digest: str, parts: str) -> None:
        """Add a record, with the state after its step."""
        record.fields["after"] = digest
        if record.values is not None and self._shows_parts(record, len(record.values)):
            record.fields["after_parts"] = parts
        record.values = self._pending = None
        self._add(StepDigests(**record.fields))

    def _add(self, digests: StepDigests) -> None:
        if _characters(digests) > _MOST_CHARACTERS:
            digests = structs.replace(digests, rows={}, partial_parts={})
        if _characters(digests) > _MOST_CHARACTERS:
            digests = structs.replace(digests, total_parts="", before_parts="", after_parts="")
        if self._characters + _characters(digests) > _MOST_CHARACTERS:
            self._flush()
        self._steps.append(digests)
        self._characters += _characters(digests)
        if self._now() - self._flushed >= _FLUSH_EVERY:
            self._flush()

    def _flush(self) -> None:
        if self._steps:
            self._serial += 1
            steps, self._steps, self._characters = tuple(self._steps), [], 0
            self._job.events.publish(DigestsRecorded(serial=self._serial, stride=self._stride, steps=steps))
        self._flushed = self._now()

    def _key(self, names: tuple[str, ...]) -> str:
        """Return the key of a list of names, which is published once."""
        key = self._keys.get(names)
        if key is None:
            key = self._keys[names] = xxhash.xxh3_64_hexdigest("\0".join(names).encode())
            self._job.events.publish(NamesRecorded(key, names))
        return key

    def _count(self, record: RecordedStep, begun: float) -> None:
        """Add the time of a step and of recording it; choose the stride."""
        now = self._now()
        self._spent += now - begun
        self._busy += now - self._begun
        step = record.fields["step"]
        if not record.fields["trains"]:
            return
        self._recorded += 1
        if step == 1:
            # The first step compiles, so its time does not count.
            self._recorded, self._busy, self._spent = 0, 0.0, 0.0
        elif step >= ALL_UNTIL and self._recorded >= _RECORDS_PER_CHOICE and not self._all:
            part = self._spent / self._busy if self._busy else 0.0
            while part > _PART_OF_TIME:
                self._stride, part = self._stride * 2, part / 2
            if part < _PART_OF_TIME / 4 and self._stride > 1:
                self._stride //= 2
            self._recorded, self._busy, self._spent = 0, 0.0, 0.0


def _are_same(first: Sequence[Any] | None, second: Sequence[Any]) -> bool:
    """Whether two sequences have the same objects."""
    return (
        first is not None
        and len(first) == len(second)
        and all(value is other for value, other in zip(first, second, strict=True))
    )


def _characters(step: StepDigests) -> int:
    texts = (step.total_parts, step.before_parts, step.after_parts)
    by_replica = (step.rows, step.partial_parts)
    return 512 + sum(map(len, texts)) + sum(len(text) for some in by_replica for text in some.values())


_recorders: list[DigestRecorder] = []


def recorder_of(job: Job, to_numpy: Callable[[Any], npt.NDArray[Any]]) -> DigestRecorder:
    """Return the recorder of this process and its job."""
    if not _recorders or _recorders[0]._job is not job:
        _recorders[:] = [DigestRecorder(job, to_numpy)]
        job.at_exit(_recorders[0].end)
    return _recorders[0]


def variable_names(model: Any) -> Describe:
    """Return a function that names the gradients and metrics of a model in partials by its variables."""
    names = {f"{GRADIENTS}{i}": variable.path for i, variable in enumerate(model.trainable_variables)}
    names |= {
        f"{METRICS}{i}": f"metric {variable.path}" for i, variable in enumerate(model.metrics_variables)
    }
    return lambda name: names.get(name, name)
