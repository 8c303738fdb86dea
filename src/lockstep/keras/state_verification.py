"""Verification of the state: in a verified step, all workers compare their states before and after it.

An update is a function of the state and the total, and every worker applies the same total to the same state.
If a worker's update is wrong, or its memory has changed since then, its state differs from the others'.

* If states differ after the update, but not before it, each worker restores its copy of the state before the
  step and updates it again. `judge` decides from both attempts of all workers, as it does for partials: the
  worker at fault ends, and the others have the right state. A worker without others compares with itself.
* If states differ before the step, all workers copy and hash theirs again: perhaps only a copy or a hash was
  wrong. If the states still differ, gradients since the last comparison may come from a wrong state. They are
  now in the totals, and so in the states of all workers. No worker has a correct state any more. The
  checkpoints that are later than that comparison are removed, and the job ends with `WrongStateError`; the
  command starts it again from the newest one left. Without one, the job ends for good.

The copy takes as much memory as the state, during the step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Communicator
from lockstep.data.digest import digest_array
from lockstep.keras.backends.contract import Backend, TrainingState
from lockstep.keras.python_replicas import plain_variables
from lockstep.keras.verdicts import (
    Answer,
    Hashes,
    Verdict,
    differing_names,
    judge_again,
    listed,
    with_earlier,
)
from lockstep.keras.verification import Verifications
from lockstep.system.prose import name_workers
from lockstep.topology import View
from lockstep.worker.job import Job

Result = tuple[Any, Any]
"""The logs of a step, and the state after it."""


class StateBefore(NamedTuple):
    """A copy of the state before a step.

    Attributes:
        owners: the objects whose state it is.
        arrays: the arrays by name, as `TrainingState.load` takes them.
        hashes: the hashes of the arrays.
        variables: the variables of TensorFlow that are not Keras's, with their values.
    """

    owners: Sequence[Any]
    arrays: Mapping[str, npt.NDArray[Any]]
    hashes: Hashes
    variables: Sequence[tuple[Any, npt.NDArray[Any]]] = ()

    def restored(self, program: TrainingState, state: Any) -> Any:
        """Return `state` with the values from before the step."""
        for variable, value in self.variables:
            variable.assign(value)
        return program.load(state, self.arrays)


class StateVerifier:
    """Verifies the state of training in its verified steps.

    Args:
        job: the job of this worker.
        backend: the backend of the model.
        verifications: the verifications of the job.
    """

    def __init__(self, job: Job, backend: Backend, verifications: Verifications) -> None:
        self._job = job
        self._backend = backend
        self._verifications = verifications

    def begin(
        self, program: TrainingState, state: Any, label: str, owners: Sequence[Any], *, compares: bool = True
    ) -> StateBefore | None:
        """Copy the state before a step, which all workers have; return None if it is not to be verified.

        Args:
            program: the program of the step.
            state: the state before the step.
            label: names the step.
            owners: see `Verifications.compared`.
            compares: whether to compare it with the others', which has not been done yet.

        Raises:
            WrongStateError: a state is wrong, and there is an earlier checkpoint.
            DisagreementError: a state is wrong, and there is none.
        """
        if not (self._verifications.drawn and self._verifications.trains) or self._job.joins:
            return None
        self._backend.settle()
        values = program.named_state(state)
        if any(getattr(value, "is_deleted", bool)() for value in values.values()):
            # Keras itself cannot read them either.
            return None
        before = self._copied(values, owners)
        if not compares:
            return before
        answers, _ = self._answers(before, (before.hashes,), label, lambda: program.published(state))
        first, differing = _judged(answers, list(values))
        if first.kind != "equal":
            before = self._copied(values, owners)
            answers, equal_at = self._answers(
                before, (before.hashes,), label, lambda: program.published(state)
            )
            self._compare(answers, equal_at, list(values), f"{label}: the state before the step", "memory")
            self._verifications.publish(Verdict("repeated", first.workers), differing, "memory")
        return before

    def _copied(self, values: Mapping[str, Any], owners: Sequence[Any]) -> StateBefore:
        """Return a copy of the state with these values."""
        arrays = {name: np.array(self._backend.to_numpy(value)) for name, value in values.items()}
        plain = [variable for owner in owners for variable in plain_variables(owner)]
        variables = [(variable, np.array(variable.numpy())) for variable in plain]
        return StateBefore(owners, arrays, _hashed(arrays), variables)

    def end(
        self,
        before: StateBefore,
        program: TrainingState,
        result: Result,
        label: str,
        again: Callable[[Any], Result] | None = None,
    ) -> Result:
        """Return the result of a step, when the state after it is correct.

        A worker at fault ends here.

        Args:
            before: the result of `begin`.
            program: the program of the step.
            result: the result of the step.
            label: names the step.
            again: makes the update again, given the state before the step; None if only the script could.

        Raises:
            WrongStateError: a state is wrong that cannot be computed again, and there is a checkpoint.
            DisagreementError: likewise, and there is none, or it is unknown which state is right.
            StepWithdrawn: another worker decides which state is right.
        """
        hashes, names = self._hashes(program, result)
        answers, equal_at = self._answers(before, (hashes,), label, lambda: program.published(result[1]))
        earlier = self._verifications.answers_before("update")
        if again is None:
            self._compare(answers, equal_at, names, f"{label}: the state after the step", "update")
        elif len(answers) == 1 or len({answer.attempts for answer in answers}) > 1 or earlier:
            result = again(before.restored(program, result[1]))
            second, names = self._hashes(program, result)
            answers, _ = self._answers(before, (hashes, second), label, lambda: program.published(result[1]))
            verdict, differing = _judged(answers, names, earlier)
            self._verifications.withdraw_step(verdict, differing, "update", answers)
            self._verifications.follow(verdict, f"{label}: the state after the update", differing, "update")
        self._verifications.note_compared(before.owners, self._verifications.step)
        return result

    def _compare(
        self, answers: Sequence[Answer], equal_at: int, names: Sequence[str], label: str, part: str
    ) -> None:
        """Roll back if the states of workers differ, to `equal_at`, the last step after which all were equal.

        In a step that was not verified, the workers of a host may have had the same wrong total. So they
        cannot outvote another host.
        """
        verdict, differing = _judged(answers, names, answers)
        if verdict.kind == "equal":
            return
        self._verifications.publish(verdict, differing, part)
        who, shown = name_workers(verdict.workers), listed(differing)
        self._verifications.roll_back(
            verdict.accusation(label, shown)
            if verdict.kind == "worker"
            else f"{label} has different bits on {who} in {shown}, and no further worker can decide which "
            f"are right{verdict.why}; the processor, the memory or a library of one of their hosts is at "
            "fault",
            verdict.workers,
            equal_at,
        )

    def _hashes(self, program: TrainingState, result: Result) -> tuple[Hashes, list[str]]:
        self._backend.settle()
        values = program.named_state(result[1])
        return _hashed({name: self._backend.to_numpy(value) for name, value in values.items()}), list(values)

    def _answers(
        self,
        before: StateBefore,
        attempts: tuple[Hashes, ...],
        label: str,
        catching_up: Callable[[], AbstractContextManager[None]],
    ) -> tuple[list[Answer], int]:
        """Return all answers, and the last step after which all workers knew that their states were equal."""
        answer = Answer(self._job.worker, attempts, self._verifications.places)
        blob = msgspec.msgpack.encode((answer, self._verifications.compared(before.owners)))

        def gather(_: View, communicator: Communicator) -> list[bytes]:
            return communicator.gather(blob, what=f"the verification of the state in {label}")

        blobs = self._job.exchange(gather, catching_up)
        of_workers = [msgspec.msgpack.decode(other, type=tuple[Answer, int]) for other in blobs]
        return [answer for answer, _ in of_workers], min(compared for _, compared in of_workers)


def _judged(
    answers: Sequence[Answer], names: Sequence[str], earlier: Sequence[Answer] = ()
) -> tuple[Verdict, list[str]]:
    """Return the workers at fault, and the names of the arrays that differ."""
    attempts = [hashes for answer in with_earlier(answers, earlier) for hashes in answer.attempts]
    return judge_again(answers, earlier), differing_names(names, attempts)


def _hashed(arrays: Mapping[str, npt.NDArray[Any]]) -> Hashes:
    return b"".join(map(digest_array, arrays.values()))
