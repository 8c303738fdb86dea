"""Compares a step that replicas compute with the same step of plain Keras, in one process on the whole batch.

So users need not trust a list of exact parts. Both compute from the same state and batch, and with the same
random numbers: each draw is a constant, dropout drops nothing, and BatchNormalization uses its averages. If
the program can, it computes in single precision instead of half precision, because rounding would hide
differences. A deviation by more than rounding (`lockstep.keras.fit.deviations`) is a difference from training
in one process. It is expected if a note has named the part of the program; any other difference is reported.

The reference is Keras's own function for the kind of step, which does not know of replicas. The other side is
the step of training: `GlobalStep`, with one worker that computes all replicas. One file computes the step
(`lockstep.keras.fit.compared_step`), another compares its parts (`lockstep.keras.fit.step_comparison`).

Both sides begin with the same values of all variables, which are restored after each computation, and with
empty metrics. They then begin once more with metrics that have counted the batch, to compare the states of
metrics: a step must not forget what they have counted. Plain Keras takes its step before the trials of the
model, and the replicas take theirs afterwards. So a side effect of a trial shows as a difference. So does a
wrong fact that the `GlobalStep` of the comparison learned in an earlier call, because it lasts as long as
that of training. A wrapper around `train_step` adds the gradients that the optimizers get to the logs, with
which they leave a compiled function on every backend.

    part                                     reference
    logs, outputs                            those of plain Keras
    gradients of each update, by variable    what the optimizers of plain Keras get
    variables that an update changes         Keras's own update from the replicas' gradients: the first step
                                             of Adam is nearly the sign of a gradient, so different roundings
                                             of the gradient would give different updates
    states of layers and metrics, others     those of plain Keras, as changes from the common beginning

If something differs, the model is called once more with the whole batch and with each replica's rows. The
first layer with equal inputs and different outputs is where the difference begins. A note that names a metric
or figure explains a difference in it; a note on an optimizer explains one in the variables that it updates.
The name of a state of a layer explains only this state. Kinds of layers that draw numbers or normalize
explain nothing, because both computations have the same constants for them. Any other named part of the
program explains all but updates from given gradients, which only a `train_step` may change. But it explains
only values of replicas: where these combine means over examples, plain Keras also takes the step with the
rows of each replica alone, and the loss, the gradients, the outputs, the metrics and the states of layers
must follow from these steps.

A check of several backends also compares plain Keras on one backend with plain Keras on another one, from
the same weights and batch (`lockstep.keras.fit.backend_comparison`).

The job of a check has one worker, and its settings say what to check (`JobSettings.checks`). In it, models
are saved into the folder of the run, from which Keras's functions load them (`keras/kept_saves.py`), each
`fit` ends after three steps, and an audit hook ends the script before it changes anything outside of the
process (`worker/file_writes.py`). The hook does not see writes by libraries in C, such as those of TensorFlow
and KerasTuner: Landlock refuses these (`system/landlock.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from lockstep.errors import LockstepError
from lockstep.keras.backends.contract import Backend, StepKind
from lockstep.keras.fit.backend_comparison import BackendComparison
from lockstep.keras.fit.compared_step import ComparedStep
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.kept_steps import KeptStep
from lockstep.keras.fit.part_names import explaining
from lockstep.keras.fit.plain_function import FunctionWithGradients
from lockstep.keras.fit.step_comparison import StepComparison
from lockstep.keras.private.common import outputs_with_metrics
from lockstep.observability.events import Difference, StepCompared
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import replaced
from lockstep.worker.script import summarize, summarize_own


class Witness:
    """Compares steps of the models of one job, which has one worker.

    Args:
        job: the job, with all replicas on this worker.
        backend: the backend of the models.
        step: returns the step of a model that replicas compute.
        plainly: returns a context in which a function of a model, by its attribute, is Keras's own.
        context: returns, for a model, the context of the program's own `train_step`.
    """

    def __init__(
        self,
        job: Job,
        backend: Backend,
        step: Callable[[Any, StepKind], GlobalStep],
        plainly: Callable[[Any, str], AbstractContextManager[None]],
        context: Callable[[Any], Callable[[], AbstractContextManager[None]]],
    ) -> None:
        self._job = job
        self._backend = backend
        self._step = step
        self._plainly = plainly
        self._context = context
        self._functions: tuple[Any, dict[StepKind, FunctionWithGradients]] = (None, {})

    def _function(self, model: Any, kind: StepKind) -> FunctionWithGradients:
        """Return Keras's function for a kind of step, which lasts as long as that of training.

        A compiled function keeps the Python values of its first step, as that of training does.
        """
        compared, functions = self._functions
        if compared is not model:
            _, functions = self._functions = (model, {})
        if kind not in functions or getattr(model, f"{kind}_function") is None:
            functions[kind] = FunctionWithGradients(model)
        return functions[kind]

    @contextmanager
    def compared(
        self, call: str, model: Any, kind: StepKind, batch: Any, names: Callable[[], Sequence[str]]
    ) -> Iterator[None]:
        """Compare a step, and publish the result; the model and the random states do not change.

        Plain Keras takes the step before the block, in which the program is tried, and replicas afterwards.
        So side effects of the block also show as differences.

        Args:
            call: the name of the script's call.
            model: the model, built and compiled.
            kind: the kind of the step.
            batch: the whole batch, in the form in which the program's step gets it.
            names: returns, after the block, the parts of the program that a note has named.
        """
        comparison, reason = None, ""
        equal: list[str] = []
        differences: list[Difference] = []
        of_others: list[StepCompared] = []
        try:
            with replaced(model, "steps_per_execution", 1):
                function, plainly = self._function(model, kind), partial(self._as_keras, model, kind)
                step = ComparedStep(
                    self._job, self._backend, model, kind, batch, function=function, plainly=plainly
                )
                replicated = partial(self._step, model, kind)
                comparison = StepComparison(step, self._job.view.replicas, replicated)
                of_others = self._of_backends(call, step, BackendComparison(step, comparison))
        except Exception as error:
            reason = _reason(error)
        yield
        try:
            if comparison is not None:
                with replaced(model, "steps_per_execution", 1):
                    comparison.follow()
                    equal, differences = self._results(step, comparison, names())
        except Exception as error:
            reason = _reason(error)
        self._job.events.publish(
            StepCompared(
                call=call,
                model=model.name,
                kind=kind,
                equal=tuple(equal),
                differences=tuple(differences),
                reason=reason,
            )
        )
        for event in of_others:
            self._job.events.publish(event)

    @contextmanager
    def _as_keras(self, model: Any, kind: StepKind) -> Iterator[None]:
        """Within the block, the function of a model for a kind of step is Keras's own."""
        with self._context(model)(), self._plainly(model, f"{kind}_function"):
            yield

    def _of_backends(
        self, call: str, step: ComparedStep, comparison: BackendComparison
    ) -> list[StepCompared]:
        """Compare the step with that of an earlier job on another backend, or keep it for later jobs."""
        folder = self._job.settings.kept_steps
        if folder is None:
            return []
        path = folder / f"{call} {step.kind}.npz"
        equal: list[str] = []
        differences: list[Difference] = []
        reference, reason = "another backend", ""
        if path.exists():
            try:
                kept = KeptStep.load(path)
                reference = kept.backend
                equal, differences = comparison.unlike(kept)
            except Exception as error:
                reason = _reason(error)
        else:
            try:
                comparison.kept().save(path)
            except ValueError:
                # Rows of objects, such as ragged ones, cannot be kept.
                return []
            except OSError as error:
                reason = f"the step cannot be kept in {folder.parent}: {_reason(error)}"
            else:
                return []
        event = StepCompared(
            call=call,
            model=step.model.name,
            kind=step.kind,
            reference=reference,
            equal=tuple(equal),
            differences=tuple(differences),
            reason=reason,
        )
        return [event]

    @staticmethod
    def _results(
        step: ComparedStep, comparison: StepComparison, names: Sequence[str]
    ) -> tuple[list[str], list[Difference]]:
        updated, outputs = step.updated(), outputs_with_metrics(step.model)

        def names_of(part: str) -> list[str]:
            return explaining(part, names, updated, outputs, step.updates)

        deviations = comparison.deviations(names_of)
        equal = [part for part, difference in deviations.items() if difference is None]
        begins = comparison.beginning() if len(equal) < len(deviations) else ""
        return equal, [
            Difference(
                part,
                str(difference),
                begins,
                "" if difference.unexplained else ", ".join(names_of(part)),
            )
            for part, difference in deviations.items()
            if difference is not None
        ]


def _reason(error: Exception) -> str:
    """Return why a step was not compared."""
    return summarize_own(error) if isinstance(error, LockstepError) else summarize(error)
