"""Custom loops that Lockstep drives: workers join and leave between their steps."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, runtime_checkable

import keras
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.values import PackError
from lockstep.collectives.shared.pool import SharedPool
from lockstep.errors import CheckpointError, InputError
from lockstep.keras.backends.contract import Backend
from lockstep.keras.model_digest import LastModel
from lockstep.keras.numbered_calls import NumberedCall, NumberedCalls
from lockstep.keras.state.checkpoint_callback import Checkpoint, ScriptCheckpoints
from lockstep.keras.state.settings import settings_of_parts
from lockstep.keras.state.snapshots import Snapshots
from lockstep.keras.state_verification import StateBefore, StateVerifier
from lockstep.keras.step_digests import recorder_of
from lockstep.keras.variables import named_arrays, refuse_misfits
from lockstep.keras.verification import verifications_of
from lockstep.keras.worker_exchange import CHECK_EVERY, Facts, agree, chiefs_state, setting_facts, state_facts
from lockstep.observability.events import CallEnded, CallStarted
from lockstep.worker.job import Job

Arrays = Mapping[str, npt.NDArray[Any]]


class StepLoops:
    """Drives the loops of one process; `strategy.steps` calls it."""

    def __init__(
        self,
        job: Job,
        backend: Backend,
        calls: NumberedCalls,
        snapshots: Snapshots,
        checkpoints: ScriptCheckpoints,
        last: LastModel,
    ) -> None:
        self._job = job
        self._backend = backend
        self._calls = calls
        self._snapshots = snapshots
        self._resumable = snapshots.resumable
        self._checkpoints = checkpoints
        self._last = last
        self._digests = recorder_of(job, backend.to_numpy)
        self._verifications = verifications_of(job)
        self._states = StateVerifier(job, backend, self._verifications)

    def steps(
        self, count: int, state: Mapping[str, Any], checkpoint: Checkpoint | None = None
    ) -> Iterator[int]:
        """Yield the numbers of the steps to take, from 0 or from the position of the training.

        A process that resumes from a checkpoint, or joins the others, first takes one additional step, which
        creates the variables of its models and optimizers; then the saved state replaces its results. In a
        loop that has finished, or has no step left, it does so only if variables are missing.

        Raises:
            InputError: `count` is negative, or a part of the state is of a kind that cannot be transferred.
            CheckpointError: the saved state has other parts.
        """
        if count < 0:
            raise InputError(f"strategy.steps needs a number of steps of at least 0, not {count}")
        loop = LoopState(state, self._note_skipped)
        key = f"steps of {', '.join(sorted(state))}"
        with self._resumable.turns.turn("steps", lambda: key), self._resumable.call("steps") as call:
            for part in state.values():
                if isinstance(part, keras.Model):
                    self._last.trains(part)
            if checkpoint is not None:
                self._checkpoints.begin(checkpoint)
            if finished := self._resumable.resume():
                if finished.kept is not None:
                    yield from self._replay(loop, finished.kept)
                finished.raise_error()
                return
            call.result_of = lambda call: {"steps": call.steps, "positions": loop.positions}
            try:
                with self._job.driving():
                    if self._resumable.behind:
                        if self._job.joins or call.skipped < count or loop.incomplete:
                            # The members whose state a joined worker takes over do not take part in this
                            # step.
                            with self._job.detached() if self._resumable.catches_up else nullcontext():
                                yield min(call.skipped, count - 1)
                        if self._job.joins and self._resumable.join():
                            finished = self._resumable.replay()
                            loop.skip_to(finished.kept["positions"])
                            finished.raise_error()
                            return
                        call.steps = call.skipped
                        self._calls.repeat_run_seeds()
                        self._snapshots.restore(None, loop)
                    else:
                        self._job.events.publish(CallStarted(call.name))
                        settings = setting_facts(settings_of_parts(loop.parts))
                        seeds = {"the seeds of the script": f"{call.seed:x}"}
                        self._digests.begin_call(call.name, self._calls.taken, seeds | settings)
                        self._compare(f"the beginning of {call.name}", loop, settings)
                    while call.steps < count:
                        self._job.timer.begin(call.name)
                        compilations = self._backend.compilations()
                        taken = self._calls.taken + 1
                        self._digests.begin_loop_step(taken, call.name, call.steps + 1, loop)
                        before = self._begin_step(call, loop, taken)
                        yield call.steps
                        if before is not None:
                            self._states.end(before, loop, (None, None), self._calls.where())
                        self._verifications.begin(0)
                        self._verifications.doubt = None
                        self._end_step(call, loop, count, compilations)
            except GeneratorExit:
                self._resumable.finish(None)
                raise
            finally:
                self._verifications.end_call()
                self._digests.end_call()
                self._job.timer.stop()
                self._job.events.publish(CallEnded(call.name))
            self._resumable.finish(None)

    def _replay(self, loop: "LoopState", past: Mapping[str, Any]) -> Iterator[int]:
        """Replay a loop that finished before this process began.

        Only this loop may create some of the variables; and the elements of a pass over a dataset may depend
        on the number of elements that earlier passes have read.
        """
        try:
            if loop.incomplete and past["steps"]:
                with self._job.driving(), self._job.detached():
                    yield 0
        finally:
            # This also runs if the script leaves the loop in its first step.
            self._resumable.replay()
            loop.skip_to(past["positions"])

    def _begin_step(self, call: NumberedCall, loop: "LoopState", number: int) -> StateBefore | None:
        """Begin to verify a training step; return the state before it if it is to be verified."""
        verifications, where = self._verifications, self._calls.where()
        verifications.begin(number, first=call.steps == 0)
        has_joined = verifications.doubt is not None
        before = self._states.begin(loop, None, where, loop.owners, compares=not has_joined)
        # A worker that joins first takes a step by itself, in which iterators advance.
        if before is not None and call.steps and not has_joined and len(self._job.view.workers) > 1:
            try:
                kept = self._snapshots.kept(loop, before.arrays)
            except PackError:
                # The result of an earlier call cannot be packed, so no worker can join at all.
                return before
            verifications.admit_within(lambda: self._snapshots.admit(kept))
        return before

    def _end_step(self, call: NumberedCall, loop: "LoopState", count: int, compilations: int) -> None:
        # A graph of TensorFlow updates after the last total; other functions have returned long ago.
        self._job.timer.lap("update" if keras.backend.backend() == "tensorflow" else "other")
        self._digests.end_loop_step(loop)
        call.steps += 1
        self._calls.taken += 1
        if call.steps % CHECK_EVERY == 0 or call.steps == count:
            self._compare(f"after step {call.steps} of {call.name}", loop)
        if len(self._job.view.workers) == 1:
            # The step of a single worker may make no call of the exchange, and only such a call admits
            # joiners.
            self._job.exchange(lambda _, communicator: communicator.barrier(what=self._calls.where()))
        self._snapshots.end_step(lambda whole: self._snapshots.take(whole, None, None, loop))
        self._job.timer.end(
            call.steps,
            trained=self._calls.taken,
            replicas=len(self._job.view.replicas_of(self._job.worker)),
            compiled=self._backend.compilations() != compilations,
        )
        if self._digests.ends_after(self._calls.taken):
            sys.exit(0)
        if call.steps == count:
            self._snapshots.hold(lambda: self._snapshots.take(True, None, None, loop))

    def _note_skipped(self, elements: int, of: int) -> None:
        self._resumable.skipping.note(self._calls.current.name, elements, of, "elements")

    def _compare(self, label: str, loop: "LoopState", settings: Facts | None = None) -> None:
        if len(self._job.view.workers) > 1:
            arrays = loop.named_state(None)
            if self._job.settings.allow_unlike:
                if of_chief := chiefs_state(self._job, label, self._backend.to_numpy, arrays):
                    loop.load(None, of_chief)
                arrays = {}
            state = state_facts(self._backend.to_numpy, arrays)
            if settings is not None and self._verifications.plan.verification.every:
                agree(self._job, label, settings)
                settings = None
            facts = {**(settings or {}), **state}
            self._verifications.agree(label, facts, self._calls.taken, loop.owners, whole=True)


@runtime_checkable
class Positioned(Protocol):
    """An object with a position in its data, such as the iterator of a distributed dataset."""

    @property
    def position(self) -> tuple[int, int]:
        """(Number of passes begun, number of elements taken from the last one)."""

    def skip(self, elements: int) -> None:
        """Skip elements."""


class LoopState:
    """The `lockstep.keras.backends.contract.TrainingState` of a loop: the parts that the script names.

    Args:
        parts: by name: Keras models, layers, optimizers, metrics and variables, TensorFlow's variables,
            iterators of distributed datasets, NumPy arrays, and dicts and lists of plain values. The loop's
            first step may create their variables.
        skipped: takes how many elements of an iterator were skipped, and how many will be.

    Raises:
        InputError: a part is of another kind.
    """

    def __init__(self, parts: Mapping[str, Any], skipped: Callable[[int, int], None]) -> None:
        for name, part in parts.items():
            if not (_has_variables(part) or isinstance(part, Positioned | np.ndarray | dict | list)):
                raise InputError(
                    f"state[{name!r}] is a {type(part).__name__}; expected a Keras model, layer, optimizer, "
                    "metric or variable, an iterator of a distributed dataset, a NumPy array, or a dict or "
                    "list of plain values: anything that the loop changes and that can be changed in place"
                )
        self._parts = dict(parts)
        self._skipped = skipped

    @property
    def parts(self) -> Mapping[str, Any]:
        """The parts, by name."""
        return self._parts

    @property
    def owners(self) -> list[Any]:
        """The parts that have variables."""
        return [part for part in self._parts.values() if _has_variables(part)]

    @property
    def incomplete(self) -> bool:
        """Whether the variables of some part are still to be created."""
        return not all(getattr(part, "built", True) for part in self._parts.values())

    @property
    def positions(self) -> dict[str, list[int]]:
        """The positions of the iterators, by the names of their parts."""
        parts = self._parts.items()
        return {name: list(part.position) for name, part in parts if isinstance(part, Positioned)}

    def skip_to(self, positions: Mapping[str, Sequence[int]]) -> None:
        """Skip elements until the iterators are at `positions`.

        Raises:
            CheckpointError: a part is not an iterator, is in a different pass, or is already further.
        """
        for name, position in positions.items():
            part = self._parts.get(name)
            if not isinstance(part, Positioned):
                raise CheckpointError(
                    f"state[{name!r}] was an iterator when it was saved, and is a {type(part).__name__} now"
                )
            _skip_to(part, position, name, self._skipped)

    def published(self, state: Any) -> AbstractContextManager[None]:
        """Do nothing, because the parts are the state."""
        return nullcontext()

    def named_state(self, state: Any) -> Mapping[str, Any]:
        """Return the parts' present values, as tensors or arrays; or `state`, if it is not None."""
        if state is not None:
            return dict(state)
        values: dict[str, Any] = {}
        for name, part in self._parts.items():
            if _has_variables(part):
                values |= {f"{name}/{path}": variable.value for path, variable in _variables(part).items()}
            elif isinstance(part, Positioned):
                values[name] = np.array(part.position, "int64")
            elif isinstance(part, np.ndarray):
                values[name] = part.copy()
            else:
                values[name] = np.frombuffer(_encoded(name, part), "uint8")
        return values

    def lasting_variables(self) -> Mapping[str, Any]:
        """Return the present values of the parts. All parts may matter."""
        return self.named_state(None)

    def lasting_values(self, state: Any, variables: Mapping[str, Any]) -> Sequence[Any]:
        """Return the present values of the parts."""
        return list(self.named_state(None).values())

    def prepare_load(self, state: Any) -> None:
        """Do nothing: parts are set."""

    def load(
        self, state: Any, arrays: Arrays, *, in_place: bool = False, shared: SharedPool | None = None
    ) -> None:
        """Set the parts to the values that `named_state` has returned, perhaps in another process.

        Raises:
            CheckpointError: the parts differ. Then none is changed.
        """
        present = self.named_state(None)
        fixed = {name for name, part in self._parts.items() if isinstance(part, dict | list)}
        refuse_misfits(
            {name: value for name, value in present.items() if name not in fixed},
            {name: array for name, array in arrays.items() if name not in fixed},
        )
        for name, part in self._parts.items():
            if _has_variables(part):
                for path, variable in _variables(part).items():
                    variable.assign(arrays[f"{name}/{path}"])
            elif isinstance(part, Positioned):
                _skip_to(part, arrays[name].tolist(), name, self._skipped)
            elif isinstance(part, np.ndarray):
                part[...] = arrays[name]
            else:
                _fill(part, msgspec.json.decode(arrays[name].tobytes()))


def _skip_to(
    part: Positioned, position: Sequence[int], name: str, skipped: Callable[[int, int], None]
) -> None:
    passes, taken = (int(number) for number in position)
    if part.position[0] != passes or part.position[1] > taken:
        raise CheckpointError(
            f"state[{name!r}] is in pass {part.position[0]} over its dataset, at element {part.position[1]}, "
            f"and the training was in pass {passes}, at element {taken}: create iterators at the same places "
            "before the loop"
        )
    missing = taken - part.position[1]
    for number in range(missing):
        part.skip(1)
        skipped(number + 1, missing)


def _has_variables(part: Any) -> bool:
    return hasattr(part, "variables") or hasattr(part, "assign")


def _variables(part: Any) -> Mapping[str, Any]:
    if not hasattr(part, "variables"):
        return {"value": part if hasattr(part, "path") else _TensorFlowVariable(part)}
    variables = [*part.variables, *(getattr(part, "metrics_variables", None) or ())]
    unique = list({id(variable): variable for variable in variables}.values())
    return named_arrays(unique, unique)


class _TensorFlowVariable:
    """A variable of TensorFlow with those attributes of a Keras variable that are used here."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable

    @property
    def value(self) -> Any:
        return self._variable.read_value()

    def assign(self, value: Any) -> None:
        self._variable.assign(value)


def _encoded(name: str, part: Any) -> bytes:
    try:
        return msgspec.json.encode(part)
    except (TypeError, OverflowError) as error:
        raise InputError(f"state[{name!r}] contains values that are not plain: {error}") from None


def _fill(part: Any, content: Any) -> None:
    part.clear()
    part.update(content) if isinstance(part, dict) else part.extend(content)
