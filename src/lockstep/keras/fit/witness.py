"""Compares a step that replicas compute with the same step of plain Keras, in one process on the whole batch.

So nobody has to trust a list of exact parts. Both compute from the same state and batch, and with the same
random numbers: each draw is a constant, dropout drops nothing, and BatchNormalization uses its averages.
Layers that compute in half precision do so in single precision, since rounding would hide differences. What
differs by more than rounding (`lockstep.keras.fit.deviations`) is a difference between the training and that
of one process. It is expected if a note has named the part of the program; any other difference is reported.

The reference is Keras's own function for the kind of step, which knows nothing of replicas. The other side is
the step of the training: `GlobalStep`, with one worker that computes all replicas.

Both sides begin with the same values of all variables, which are restored after each computation, and with
empty metrics. They then begin once more with metrics that have counted the batch, to compare the states of
metrics: a step must not forget what they have counted. Plain Keras takes its step before the trials of the
model, and the replicas take theirs afterwards. So what a trial leaves behind is a difference. So is what the
`GlobalStep` of the comparison has wrongly learned in an earlier call, because it lasts as long as that of the
training. A wrapper around `train_step` adds the gradients that the optimizers get to the logs, with which
they leave a compiled function on every backend.

    part                                     reference
    logs, outputs                            those of plain Keras
    gradients of each update, by variable    what the optimizers of plain Keras get
    variables that an update changes         Keras's own update from the replicas' gradients: the first step
                                             of Adam is nearly the sign of a gradient, so different roundings
                                             of the gradient would give different updates
    states of layers and metrics, others     those of plain Keras, as changes from the common beginning

If something differs, the model is called once more with the whole batch and with each replica's rows. The
first layer with equal inputs and different outputs is where the difference begins. A note that names a metric
or figure explains a difference in it; one on an optimizer, in what it updates. The name of a state of a layer
explains only this state. Kinds of layers that draw numbers or normalize explain nothing, because both
computations have the same constants for them. Any other named part of the program explains all but updates
from given gradients, which only a `train_step` may change. But it explains only values of replicas: where
these combine means over examples, plain Keras also takes the step with the rows of each replica alone, and
the loss, the gradients, the outputs, the metrics and the states of layers must follow from these steps.

A check of several backends also compares plain Keras on one backend with plain Keras on another one, from
the same weights and batch (`keras/fit/kept_steps.py`).

The job of a check has one worker, and its settings say what to check (`JobSettings.checks`). In it, models
are saved into the folder of the run, from which Keras's functions load them (`keras/kept_saves.py`), each
`fit` ends after three steps, and an audit hook ends the script before it changes anything outside of the
process (`worker/file_writes.py`). The hook does not see writes by libraries in C, such as those of TensorFlow
and KerasTuner: Landlock refuses these (`system/landlock.py`).
"""

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import LockstepError
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import GRADIENTS, METRICS, Backend, StepKind, Total
from lockstep.keras.backends.growth import MEAN, SUM, Growths, growths_of, runs_python
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.whole_batch import is_gather
from lockstep.keras.fit.deviations import Deviation, deviation
from lockstep.keras.fit.exactness import OCCURRENCES, VARIABLES
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.kept_steps import KeptStep, LayerRows, StepOutcome
from lockstep.keras.fit.plain_function import (
    GRADIENT,
    FunctionWithGradients,
    moved_bits,
    rounded_outputs,
    single_precision,
)
from lockstep.keras.fit.trials import (
    DRAWS,
    FIGURE,
    LIBRARIES,
    METRIC,
    STATE_CHANGES,
    UNTRIED,
    LayerCalls,
    neutral,
    rows_are_equal,
    without_remarks,
)
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.private.common import layers_of, outputs_with_metrics
from lockstep.keras.randomness import random_numbers
from lockstep.keras.reached_objects import unchanged
from lockstep.keras.variables import assign, flat_metrics, optimizers_of, step_state
from lockstep.observability.events import Difference, StepCompared
from lockstep.system.prose import count
from lockstep.worker.job import Job
from lockstep.worker.patch_registry import replaced
from lockstep.worker.script import summarize, summarize_own

Array = npt.NDArray[Any]
_EPSILONS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23}
"""The distances from 1 to the next number, by precision."""
_ROUNDINGS = 2
"""Computations of plain Keras from inputs that differ in the last bits."""
_OF_OUTPUTS = 1 / 8
"""The weight of a change due to rounded outputs of layers, compared with one due to rounded inputs."""
_SCALE = 256.0
"""The largest loss scale in a comparison."""
LATER = " (update "
"""The beginning of what the name of a gradient of a later update has in brackets."""
_ROWS = 4
"""Rows of the inputs and outputs of layers that are compared between backends."""


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
        self.job = job
        self.backend = backend
        self.step = step
        self.plainly = plainly
        self.context = context
        self._functions: tuple[Any, dict[StepKind, FunctionWithGradients]] = (None, {})

    def function(self, model: Any, kind: StepKind) -> "FunctionWithGradients":
        """Return Keras's function for a kind of step, which lasts as long as that of the training.

        A compiled one goes on with the values that Python had in its first step, as that of the training.
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
        """Compare a step, and publish the result; the model and the random states stay as they are.

        Plain Keras takes the step before the block, in which the program is tried, and replicas afterwards.
        So what the block leaves behind is a difference, too.

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
                comparison = _Comparison(self, model, kind, batch)
                of_others = self._of_backends(call, model, kind, comparison)
        except Exception as error:
            reason = _reason(error)
        yield
        try:
            if comparison is not None:
                with replaced(model, "steps_per_execution", 1):
                    comparison.follow()
                    equal, differences = self._results(comparison, names())
        except Exception as error:
            reason = _reason(error)
        self.job.events.publish(
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
            self.job.events.publish(event)

    def _of_backends(
        self, call: str, model: Any, kind: StepKind, comparison: "_Comparison"
    ) -> list[StepCompared]:
        """Compare the step with that of an earlier job on another backend, or keep it for later jobs."""
        folder = self.job.settings.kept_steps
        if folder is None:
            return []
        path = folder / f"{call} {kind}.npz"
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
            model=model.name,
            kind=kind,
            reference=reference,
            equal=tuple(equal),
            differences=tuple(differences),
            reason=reason,
        )
        return [event]

    @staticmethod
    def _results(comparison: "_Comparison", names: Sequence[str]) -> tuple[list[str], list[Difference]]:
        updated, outputs = comparison.updated(), outputs_with_metrics(comparison.model)

        def names_of(part: str) -> list[str]:
            return explaining(part, names, updated, outputs, comparison.updates)

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


def explaining(
    part: str,
    names: Sequence[str],
    updated: Container[str] = (),
    outputs: Sequence[str] = (),
    updates: int = 1,
) -> list[str]:
    """Return those of the named parts of a program that may make a part of a step differ.

    A metric, a figure or the state of a layer explains only itself. An optimizer explains what it updates,
    and what follows from that in the same step. Random numbers that are equal for all rows explain nothing.
    Anything else changes the gradients, and with them everything but an update from given gradients, which
    only the program's own step may change.

    Args:
        part: the part of a step.
        names: the named parts of the program.
        updated: the paths of the variables that optimizers change.
        outputs: the names of outputs, with which Keras begins the figures of their metrics.
        updates: the number of updates in the step.
    """
    return [name for name in names if _explains(without_remarks(name), part, updated, outputs, updates)]


def _explains(name: str, part: str, updated: Container[str], outputs: Sequence[str], updates: int) -> bool:
    if name.startswith(METRIC):
        metric = name.removeprefix(METRIC)
        starts = ["", *(f"{output}_" for output in outputs)]
        figures = [f"{start}{weighted}{metric}" for start in starts for weighted in ("", "weighted_")]
        return part in (f"state of {metric}", *figures)
    if name.startswith(FIGURE):
        figure, _, _ = name.removeprefix(FIGURE).rpartition(" of ")
        return part in (figure, f"state of {figure}")
    if name.startswith(VARIABLES):
        return part == f"state {name.removeprefix(VARIABLES)}"
    kind, _, path = part.partition(" ")
    if name.endswith(OCCURRENCES):
        if updates > 1:
            # All but the gradients of the first update may follow from an update.
            return kind != "gradient" or LATER in path
        return kind == "update" or (kind == "state" and path in updated)
    if kind == "update":
        return name.startswith("train_step of ")
    return not name.startswith(DRAWS) or name.removeprefix(DRAWS) in LIBRARIES


def _is_float(array: Array) -> bool:
    return bool(keras.backend.is_float_dtype(keras.backend.standardize_dtype(array.dtype)))


def _first_rows(array: Array) -> Array:
    return array[:_ROWS] if array.ndim else array


def _but_whole(array: Array, changed: Array) -> Array:
    """Return changed numbers, but whole numbers, which may be indices, as they were."""
    return np.where(array == np.round(array), array, changed) if array.dtype.kind == "f" else changed


def _misfit(kept: KeptStep, shapes: Mapping[str, Sequence[int]], batch: Any) -> str:
    """Return why a step of another backend cannot be taken again; empty if it can."""
    for path in dict.fromkeys([*kept.shapes, *shapes]):
        if kept.shapes.get(path) != shapes.get(path):
            ours, theirs = shapes.get(path), kept.shapes.get(path)
            if ours is None or theirs is None:
                return f"only one of them has the variable {path}"
            return f"the shape of {path} is {ours} instead of {theirs}"
    rows = [None if leaf is None else leaf.shape[1:] for leaf in keras.tree.flatten(batch)]
    theirs_of_rows = [None if leaf is None else leaf.shape[1:] for leaf in kept.batch]
    return f"rows have the shapes {rows} instead of {theirs_of_rows}" if rows != theirs_of_rows else ""


class _Comparison:
    """One comparison: the two computations, and where they begin to differ.

    The first one, of plain Keras, is made at once.

    Attributes:
        model: the model.
    """

    def __init__(self, witness: Witness, model: Any, kind: StepKind, batch: Any) -> None:
        self._witness = witness
        self._backend = witness.backend
        self._job = witness.job
        self.model = model
        self._kind: StepKind = kind
        self._batch = keras.tree.map_structure(self._host, batch)
        self._global = whole_batch(self._batch, self._job.view.replicas)
        self._function = witness.function(model, kind)
        self._program = self._backend.program(model, kind)
        self._epsilon = self._precision()
        with self._neutral(), self._first_values():
            self._before = self._state(None)
            self._reference = self._plain()
        self._exchanges = False

    def follow(self) -> None:
        """Let the model be tried again if Python has other values than before, and runs in each step."""
        if self._kind != "predict" and runs_python(self.model):
            self._witness.step(self.model, self._kind).follow(self._global)

    @property
    def updates(self) -> int:
        """The number of updates that plain Keras makes in the step."""
        return len(self._function.updated)

    def updated(self) -> set[str]:
        """Return the paths of the variables that optimizers change."""
        optimizers = optimizers_of(self.model)
        changed = [*self.model.trainable_variables, *(v for each in optimizers for v in each.variables)]
        ids = {id(variable) for variable in changed}
        return {name for name, variable in self._variables().items() if id(variable) in ids}

    def deviations(self, names: Callable[[str], Sequence[str]]) -> dict[str, Deviation | None]:
        """Return what the step computes, by names of its parts, with how replicas deviate.

        Args:
            names: returns the names in notes that explain a deviation of a part.
        """
        reference, step = self._reference, self._witness.step(self.model, self._kind)
        self._program = step.program
        with self._neutral(), self._first_values():
            # A trial may have created variables.
            self._before = {**self._state(None), **self._before}
            replicas = self._of_replicas(step)
            rounded = [self._rounded(number) for number in range(_ROUNDINGS)]
            expected = self._updated(replicas)
            counting = self._counting_on(step)
            deviations = self._deviations(reference, replicas, rounded, expected, counting)
            if not all(difference is None or names(part) for part, difference in deviations.items()):
                # Equal rows may be rounded differently at different places of a batch. Outputs that cannot
                # be moved hide no deviation.
                with contextlib.suppress(Exception):
                    for size in (2 * self._epsilon, -2 * self._epsilon):
                        with rounded_outputs(self.model, size):
                            rounded.append(self._nearer(self._plain(anew=True)))
                    deviations = self._deviations(reference, replicas, rounded, expected, counting)
            named = {part: names(part) for part, difference in deviations.items() if difference is not None}
            with contextlib.suppress(_NotAloneError):
                explained = {
                    part
                    for part in named
                    if named[part] and not any(name.startswith(DRAWS) for name in named[part])
                }
                untried = any(UNTRIED in name for part in explained for name in named[part])
                for part, why in self._unexplained(explained, replicas, rounded, untried=untried).items():
                    if (difference := deviations[part]) is not None:
                        deviations[part] = replace(difference, unexplained=why)
        return deviations

    def _unexplained(
        self, parts: set[str], replicas: StepOutcome, rounded: Sequence[StepOutcome], *, untried: bool
    ) -> dict[str, str]:
        """Return those parts of which a name does not explain that they differ, and why.

        They do not have the values of plain Keras for the rows of each replica. Or these values add up to
        those of the whole batch, so that replicas could have combined them. Not returned are parts that
        replicas do not combine as means over the examples.

        Raises:
            _NotAloneError: the rows of a replica cannot be computed alone, so names explain everything.
        """
        growths = growths_of(self.model)
        # A second update follows from the first one, and so from the rows of all replicas.
        if self._exchanges or growths.whole or self.updates > 1:
            return {}
        parts = {part for part in parts if not self._is_no_mean(part, growths)}
        if not parts:
            return {}

        expected, summed = (self._of_shares(growth=growth) for growth in (MEAN, SUM))
        gradients = {part for part in parts if part.startswith("gradient ")}
        if gradients and not untried:
            deviations = self._gradients(self._reference, summed, rounded)
            if all(difference is None for difference in deviations.values()):
                return dict.fromkeys(gradients, "although it is the sum over the replicas")
        suspects = parts & self._uncombined(expected, summed, replicas, (rounded, rounded), self._reference)
        if suspects:
            others = tuple(
                [self._of_shares(moved_bits(number, self._epsilon), growth) for number in range(_ROUNDINGS)]
                for growth in (MEAN, SUM)
            )
            suspects &= self._uncombined(expected, summed, replicas, others, None)
        return dict.fromkeys(suspects, "and from the values for the rows of each replica")

    def _is_no_mean(self, part: str, growths: Growths) -> bool:
        """Whether replicas do not combine a part of the step as a mean over the examples."""
        combined = [name for (_, name), growth in growths.steps.get(self._kind, {}).items() if growth != MEAN]
        if part.startswith("gradient ") or "loss" in part:
            # States of layers and of metrics do not depend on what becomes of the losses.
            of_losses = (*growths.losses.values(), *growths.layers.values())
            summed = growths.divisor != 1 or any(growth != MEAN for growth in of_losses)
            return summed or any(name.startswith(GRADIENTS) for name in combined)
        if part.startswith("state ") and not part.startswith("state of "):
            return any(name.startswith(STATE_CHANGES) for name in combined)
        states = self.model.metrics_variables
        counted = {id(states[int(name.partition("/")[2])]) for name in combined if name.startswith(METRICS)}
        variables = self._variables()
        owners = {owner for name, owner in self._metrics().items() if id(variables[name]) in counted}
        return part.removeprefix("state of ") in owners

    def _uncombined(
        self,
        means: StepOutcome,
        sums: StepOutcome,
        replicas: StepOutcome,
        others: Sequence[Sequence[StepOutcome]],
        base: StepOutcome | None,
    ) -> set[str]:
        """Return the parts of replicas that are not combined from steps with the rows of each replica.

        Args:
            means: combined from these steps, as means over the examples.
            sums: the same with sums over the replicas.
            replicas: what the replicas compute.
            others: roundings of both.
            base: the outcome of which `others` are roundings, if that is not `means` and `sums`.
        """
        figures = self._figures(means, replicas, others[0], base)
        found = {name: figures[name] for name in means.figures}
        found |= self._gradients(means, replicas, others[0], base)
        owners = self._metrics()
        for name, mean in means.state.items():
            # A metric has a sum over rows, or a mean of single numbers.
            values = zip((mean, sums.state[name]) if name in owners else (mean,), others, strict=False)
            ways = [self._state_deviation(name, value, replicas, alike, base) for value, alike in values]
            if name not in owners:
                found[f"state {name}"] = ways[0]
            elif None not in ways:
                found[f"state of {owners[name]}"] = ways[0]
                found.setdefault(owners[name], ways[0])
        return {part for part, difference in found.items() if difference is not None}

    def _of_shares(
        self, change: Callable[[Any], Any] = lambda array: array, growth: int = MEAN
    ) -> StepOutcome:
        """Return what plain Keras computes for the rows of each replica, as far as replicas combine it.

        Args:
            change: changes the weights and the inputs.
            growth: of the gradients and of the states of metrics, which are combined by it.

        Raises:
            _NotAloneError: the program fails with the rows of one replica, or computes other parts.
        """
        # Independent of how the training divides a batch.
        examples = self._global.examples
        shares = np.array_split(np.arange(examples), min(self._job.view.replicas, examples))

        def rows_of(share: Array) -> Any:
            return keras.tree.map_structure(
                lambda array: None if array is None else array[share], self._batch
            )

        batches = [rows_of(share) for share in shares]
        try:
            outcomes = [self._plain(change, batch=batch) for batch in batches]
        except Exception as error:
            raise _NotAloneError from error
        first, *others = outcomes
        if any(
            other.figures.keys() != first.figures.keys() or other.gradients.keys() != first.gradients.keys()
            for other in others
        ):
            raise _NotAloneError

        def combined(values: Sequence[Array], growth: int) -> Array:
            parts = [
                (len(share) / examples) ** (1 - growth) * value.astype("float64")
                for share, value in zip(shares, values, strict=True)
            ]
            total: Array = np.sum(parts, axis=0)
            return total.astype(values[0].dtype)

        figures = dict[str, Array]()
        for name in first.figures:
            values = [outcome.figures[name] for outcome in outcomes]
            if self._kind == "predict":
                # Other outputs than rows, or rows of different lengths, are not joined.
                if all(value.ndim and value.shape[1:] == values[0].shape[1:] for value in values):
                    figures[name] = np.concatenate(values)
            elif name == "loss" and not has_own(self.model, f"{self._kind}_step"):
                figures[name] = combined(values, MEAN)
        gradients = {
            key: combined([outcome.gradients[key] for outcome in outcomes], growth) for key in first.gradients
        }
        owners = self._metrics()
        of_layers = {id(variable) for variable in self.model.non_trainable_variables}
        held = [name for name, each in self._variables().items() if name in owners or id(each) in of_layers]
        state = {}
        for name in held:
            if name in first.state and first.state[name].dtype.kind == "f":
                changes = [self._change(name, outcome.state[name]) for outcome in outcomes]
                state[name] = self._before[name] + combined(changes, growth if name in owners else MEAN)
        return StepOutcome(figures, gradients, state)

    def _deviations(
        self,
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        expected: Mapping[str, Array],
        counting: tuple[StepOutcome, StepOutcome],
    ) -> dict[str, Deviation | None]:
        figures = self._figures(reference, replicas, rounded)
        states = self._states(expected, reference, replicas, rounded)
        counted = self._states({}, *counting, rounded, self._reference)
        states |= {part: states.get(part) or difference for part, difference in counted.items()}
        for name, difference in figures.items():
            if difference is not None:
                # The figure shows it already.
                states.pop(f"state of {name}", None)
        return {
            **figures,
            **self._gradients(reference, replicas, rounded),
            **self._updated_variables(expected, replicas.state),
            **states,
        }

    def _counting_on(self, step: GlobalStep) -> tuple[StepOutcome, StepOutcome]:
        """Return the states of metrics that have counted the batch before, of plain Keras and of replicas.

        The states are those after the step, without what was counted before.
        """
        metrics, before = self._metrics(), self._before
        first = {name: array for name, array in self._reference.state.items() if name in metrics}
        if self._kind == "predict" or not first:
            return StepOutcome({}, {}, {}), StepOutcome({}, {}, {})
        self._before = {**before, **first}
        try:
            self._program.load(None, self._before)
            outcomes = self._plain(), self._of_replicas(step)
        finally:
            self._before = before
            self._program.load(None, before)

        def without_first(outcome: StepOutcome) -> StepOutcome:
            after = {name: (outcome.state[name], array) for name, array in first.items()}
            return StepOutcome(
                {},
                {},
                {
                    name: before[name] + (value - array) if value.dtype.kind == "f" else value
                    for name, (value, array) in after.items()
                },
            )

        plain, replicas = map(without_first, outcomes)
        return plain, replicas

    def beginning(self) -> str:
        """Name the first layer whose outputs for some rows depend on whether the others are there."""
        replicas = self._job.view.replicas
        shares = [self._global.share(replica) for replica in range(replicas)]
        parts = [share.data() for share in shares if share.examples]
        try:
            with self._constant():
                whole, *others = [self._layer_calls(data) for data in (self._batch, *parts)]
        except Exception:
            return ""
        counts = [self._global.examples, *(share.examples for share in shares if share.examples)]
        for layer, calls in whole.items():
            records = [calls, *(other[layer] for other in others if layer in other)]
            for inputs_and_outputs in zip(*records, strict=False):
                inputs, outputs = zip(*inputs_and_outputs, strict=True)
                if rows_are_equal(inputs, counts) and not rows_are_equal(outputs, counts):
                    return f"layer {layer.name}"
        return ""

    def kept(self) -> KeptStep:
        """Return the step of plain Keras, to be taken again on other backends."""
        layers: list[LayerRows] = []
        with contextlib.suppress(Exception), self._constant():
            layers = self._layer_rows()
        return KeptStep(
            backend=keras.backend.backend(),
            shapes=self._shapes(),
            batch=keras.tree.flatten(self._batch),
            before={name: array for name, array in self._before.items() if _is_float(array)},
            outcome=self._reference,
            layers=layers,
        )

    def unlike(self, kept: KeptStep) -> tuple[list[str], list[Difference]]:
        """Take a step of another backend again, with plain Keras; return the equal parts, and the others."""
        updates, theirs = (
            len({update for update, _ in outcome.gradients}) for outcome in (self._reference, kept.outcome)
        )
        text = _misfit(kept, self._shapes(), self._batch)
        if not text and updates != theirs:
            text = f"the step makes {count(updates, 'update')} instead of {theirs}"
        if text:
            return [], [Difference("model and batch", text)]
        before, batch = self._before, self._batch
        values = self._kept_values(kept)
        self._before = {**before, **values}
        self._batch = keras.tree.pack_sequence_as(batch, list(kept.batch))
        try:
            with self._constant(), self._first_values():
                self._program.load(None, self._before)
                plain = self._plain()
                rounded = [self._rounded(number) for number in range(_ROUNDINGS)]
                expected = self._updated(kept.outcome)
                after = {name: kept.outcome.state[name] for name in expected if name in values}
                sides = kept.backend, keras.backend.backend()
                deviations = {
                    **self._figures(kept.outcome, plain, rounded, plain, sides),
                    **self._gradients(kept.outcome, plain, rounded, plain),
                    **self._updated_variables(after, expected),
                }
                equal = [part for part, difference in deviations.items() if difference is None]
                begins = self._first_unlike(kept.layers) if len(equal) < len(deviations) else ""
        finally:
            self._before, self._batch = {**self._state(None), **before}, batch
            self._program.load(None, self._before)
        return equal, [
            Difference(part, str(difference), begins)
            for part, difference in deviations.items()
            if difference is not None
        ]

    def _kept_values(self, kept: KeptStep) -> dict[str, Array]:
        """Return the values of this model's variables before a kept step; a learning rate stays as it is."""
        optimizers = optimizers_of(self.model)
        rates = {id(variable) for optimizer in optimizers for variable in optimizer.variables}
        return {
            name: kept.before[name].astype(self._before[name].dtype)
            for name, variable in self._variables().items()
            if name in kept.before
            and name in self._before
            and kept.before[name].shape == self._before[name].shape
            and not (id(variable) in rates and not kept.before[name].shape)
        }

    def _shapes(self) -> dict[str, list[int]]:
        return {variable.path: list(variable.shape) for variable in self.model.trainable_variables}

    def _first_unlike(self, layers: Sequence[LayerRows]) -> str:
        """Name the first layer with the inputs of another backend and other outputs."""
        try:
            computed = self._layer_rows()
        except Exception:
            return ""
        for theirs, rows in zip(layers, computed, strict=False):
            if self._are_alike(theirs.inputs, rows.inputs) and not self._are_alike(
                theirs.outputs, rows.outputs
            ):
                return f"layer {rows.name}"
        return ""

    def _are_alike(self, theirs: Sequence[Array], rows: Sequence[Array]) -> bool:
        return len(theirs) == len(rows) and not any(
            deviation(array, other, (), self._epsilon) for array, other in zip(theirs, rows, strict=True)
        )

    # The calls of layers.

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """Within the block, draws are constants, and rounding is as small as it can be."""
        with neutral(self.model, lambda name: None, constant=True), single_precision(self.model):
            yield

    @contextmanager
    def _constant(self) -> Iterator[None]:
        """Within the block, layers draw constants, and change nothing that lasts."""
        with self._neutral(), random_numbers(0), unchanged(self.model):
            yield

    def _layer_calls(self, data: Any) -> dict[Any, list[tuple[list[Array], list[Array]]]]:
        """Call the model; return the inputs and outputs of its layers, in the order of their first calls."""
        model = self.model
        layers = [layer for layer in layers_of(model) if layer is not model]
        order: list[Any] = []
        records = {id(layer): LayerCalls() for layer in layers}
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(records[id(layer)].recording(layer, order.append))
            with keras.StatelessScope(collect_losses=True):
                x = keras.tree.map_structure(
                    keras.ops.convert_to_tensor, keras.utils.unpack_x_y_sample_weight(data)[0]
                )
                model(x, training=self._kind == "train")
        return {layer: records[id(layer)].calls for layer in dict.fromkeys(order)}

    def _layer_rows(self) -> list[LayerRows]:
        rows = []
        for layer, calls in self._layer_calls(self._batch).items():
            inputs, outputs = (
                [array[:_ROWS] if array.ndim else array for array in each] for each in calls[0]
            )
            rows.append(LayerRows(layer.name, inputs, outputs))
        return rows

    # The computations.

    def _plain(
        self,
        change: Callable[[Any], Any] = lambda array: array,
        *,
        anew: bool = False,
        batch: Any = None,
    ) -> StepOutcome:
        """Return what plain Keras computes.

        Args:
            change: changes the weights and the inputs.
            anew: whether the function is made anew, for this computation only.
            batch: the batch, by default the whole one.
        """
        model, kind, batch = self.model, self._kind, self._batch if batch is None else batch
        function = None if anew else self._function.made
        with (
            self._undone(),
            self._job.trying(1),
            self._witness.context(model)(),
            self._witness.plainly(model, f"{kind}_function"),
            self._function.adding_gradients(),
            ExitStack() as stack,
        ):
            weights = {variable.path for variable in model.trainable_variables} & self._before.keys()
            assign(model, {name: change(self._before[name]) for name in sorted(weights)})
            if isinstance(batch, tuple | list):
                x = keras.tree.map_structure(
                    lambda array: None if array is None else _but_whole(array, change(array)), batch[0]
                )
                batch = type(batch)([x, *batch[1:]])
            if anew:
                # JAX keeps what it has compiled for a method.
                step = getattr(model, f"{kind}_step")
                stack.enter_context(replaced(model, f"{kind}_step", lambda *args: step(*args)))
            if function is None:
                getattr(model, f"make_{kind}_function")(force=True)
                function = getattr(model, f"{kind}_function")
            if not anew:
                self._function.made = function
            return self._outcome(*self._backend.plain_step(model, kind, function, batch))

    def _rounded(self, number: int) -> StepOutcome:
        """Return what plain Keras computes from weights and inputs that differ in the last bits."""
        return self._plain(moved_bits(number, self._epsilon))

    def _nearer(self, outcome: StepOutcome) -> StepOutcome:
        """Return a part of the distance of an outcome from the reference.

        The outputs of all layers were rounded, up and down, so a small multiple of what this changes is a
        bound.
        """

        def nearer(values: Mapping[Any, Array], reference: Mapping[Any, Array]) -> dict[Any, Array]:
            return {
                key: reference[key] + _OF_OUTPUTS * (value - reference[key])
                if key in reference and value.dtype.kind == "f" and value.shape == reference[key].shape
                else value
                for key, value in values.items()
            }

        reference = self._reference
        return StepOutcome(
            nearer(outcome.figures, reference.figures),
            nearer(outcome.gradients, reference.gradients),
            nearer(outcome.state, reference.state),
        )

    def _of_replicas(self, step: GlobalStep) -> StepOutcome:
        with self._undone():
            result, state, totals = step.compute_once(self._global)
            outcome = self._outcome(result, state)
            rounds = [(number, total) for number, total in enumerate(totals) if not is_gather(total)]
            self._exchanges = len(rounds) < len(totals) or any(
                "density" in step.program.parts(number, total) for number, total in rounds
            )
            for update, (number, total) in enumerate(rounds):
                named: Total = divided(self.model, self._kind, step.program.parts(number, total))
                outcome.gradients |= {
                    (update, int(name.partition("/")[2])): np.array(array)
                    for name, array in named.items()
                    if name.startswith(GRADIENTS)
                }
            return outcome

    def _outcome(self, result: Any, state: Any) -> StepOutcome:
        gradients, figures = {}, {}
        for path, leaf in keras.tree.flatten_with_path(result if result is not None else {}):
            if path and str(path[0]).startswith(GRADIENT):
                _, _, number, position = str(path[0]).split()
                gradients[int(number), int(position)] = self._host(leaf)
            else:
                name = "/".join(map(str, path))
                figures[f"outputs {name}".strip() if self._kind == "predict" else name] = self._host(leaf)
        return StepOutcome(figures, gradients, self._state(state))

    def _updated(self, replicas: StepOutcome) -> dict[str, Array]:
        """Return the variables after Keras's own update from the replicas' gradients, if it is known."""
        if self._kind != "train" or len(self._function.updated) != 1:
            return {}
        if self._function.has_occurrences:
            # Plain Keras may not make the update from the sum of the occurrences.
            return {}
        (update,) = self._function.updated
        optimizer, positions = update.optimizer, range(len(update.variables))
        if hasattr(optimizer, "inner_optimizer") or not type(optimizer).__module__.startswith("keras."):
            return {}
        if replicas.gradients.keys() != {(0, position) for position in positions}:
            return {}
        with self._undone():
            self._backend.updater(update)([replicas.gradients[0, position] for position in positions])
            changed = {id(variable) for variable in update.changed}
            after = self._state(None)
        return {name: after[name] for name, variable in self._variables().items() if id(variable) in changed}

    # Comparing.

    def _figures(
        self,
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        exact: StepOutcome | None = None,
        sides: tuple[str, str] = ("plain Keras", "replicas"),
    ) -> dict[str, Deviation | None]:
        """Return the deviations of figures; `rounded` are roundings of `exact`, by default the reference."""
        deviations: dict[str, Deviation | None] = {}
        for name in {**reference.figures, **replicas.figures}:
            if name in reference.figures and name in replicas.figures:
                alike = [outcome.figures[name] for outcome in rounded if name in outcome.figures]
                pair = reference.figures[name], replicas.figures[name]
                base = None if exact is None else exact.figures[name]
                deviations[name] = deviation(*pair, alike, self._epsilon, base=base)
            else:
                side = sides[name not in reference.figures]
                deviations[name] = Deviation(np.inf, f"computed by {side} only")
        return deviations

    def _gradients(
        self,
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        exact: StepOutcome | None = None,
    ) -> dict[str, Deviation | None]:
        deviations: dict[str, Deviation | None] = {}
        largest = [float(np.max(np.abs(array), initial=0)) for array in reference.gradients.values()]
        for (number, position), value in reference.gradients.items():
            path = self._function.updated[number].variables[position].path
            name = f"gradient {path}" + (f"{LATER}{number + 1})" if number else "")
            of_replicas = replicas.gradients.get((number, position))
            key = number, position
            alike = [outcome.gradients[key] for outcome in rounded if key in outcome.gradients]
            deviations[name] = deviation(
                value,
                np.zeros_like(value) if of_replicas is None else of_replicas,
                alike,
                self._epsilon,
                max(largest),
                base=None if exact is None else exact.gradients.get(key),
            )
        return deviations

    def _updated_variables(
        self, expected: Mapping[str, Array], after: Mapping[str, Array]
    ) -> dict[str, Deviation | None]:
        """Return the deviations of the variables after an update from those of Keras's own update."""
        deviations: dict[str, Deviation | None] = {}
        for name, value in expected.items():
            # A fused kernel rounds in another way than Keras; updates of single precision compute in it.
            single = value.dtype.itemsize > 2
            epsilon = 4 * _EPSILONS["float32"] if single else self._epsilon
            size = float(np.max(np.abs(self._before[name]), initial=0)) if value.dtype.kind == "f" else 0.0
            pair = self._change(name, value), self._change(name, after[name])
            deviations[f"update {name}"] = deviation(*pair, (), epsilon, 16 * size)
        return deviations

    def _states(
        self,
        expected: Mapping[str, Array],
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        exact: StepOutcome | None = None,
    ) -> dict[str, Deviation | None]:
        """Return the deviations of the variables for which `expected` has no value.

        `rounded` are roundings of `exact`, by default the reference.
        """
        owners = self._metrics()
        deviations: dict[str, Deviation | None] = {}
        for name, value in reference.state.items():
            pair = value, replicas.state[name]
            if name in expected or all(np.array_equal(array, self._before[name]) for array in pair):
                continue
            part = f"state of {owners[name]}" if name in owners else f"state {name}"
            deviates = self._state_deviation(name, value, replicas, rounded, exact)
            deviations[part] = deviations.get(part) or deviates
        return deviations

    def _state_deviation(
        self,
        name: str,
        value: Array,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        exact: StepOutcome | None,
    ) -> Deviation | None:
        return deviation(
            self._change(name, value),
            self._change(name, replicas.state[name]),
            [self._change(name, outcome.state[name]) for outcome in rounded],
            self._epsilon,
            float(np.max(np.abs(value), initial=0)) if value.dtype.kind == "f" else 0.0,
            base=None if exact is None else self._change(name, exact.state[name]),
        )

    def _change(self, name: str, value: Array) -> Array:
        return value - self._before[name] if value.dtype.kind == "f" else value

    def _metrics(self) -> dict[str, str]:
        """Return the names of the metrics by the paths of their variables."""
        owners = {
            id(variable): metric.name
            for metric in flat_metrics(self.model.metrics)
            for variable in metric.variables
        }
        return {
            name: owners[id(variable)]
            for name, variable in self._variables().items()
            if id(variable) in owners
        }

    # The state.

    def _variables(self) -> Mapping[str, Any]:
        return step_state(self.model)

    def _precision(self) -> float:
        """Return the distance from 1 to the next number in the lowest precision of the comparison."""
        model = self.model
        with single_precision(model) as changed:
            dtypes = {layer.compute_dtype for layer in layers_of(model)}
        dtypes |= {keras.backend.standardize_dtype(variable.dtype) for variable in model.variables}
        if changed:
            # The program may cast numbers to half precision itself, or may not be able to call its model.
            with contextlib.suppress(Exception), self._constant():
                for layer_calls in self._layer_calls(self._batch).values():
                    arrays = [array for _, outputs in layer_calls for array in outputs]
                    dtypes |= {keras.backend.standardize_dtype(array.dtype) for array in arrays}
        return max(_EPSILONS.get(dtype, 0.0) for dtype in (*dtypes, "float32"))

    def _state(self, state: Any) -> dict[str, Array]:
        return {name: self._host(array) for name, array in self._program.named_state(state).items()}

    def _host(self, array: Any) -> Any:
        # A copy: the figure of a metric may be its variable, which will be restored.
        return array if array is None else np.array(self._backend.to_numpy(array))

    @contextmanager
    def _first_values(self) -> Iterator[None]:
        """Within the block, metrics have seen no batch, so that they show what one step adds to them.

        Loss scales are small. At a large one, the gradients of the whole batch may overflow, but not those of
        replicas.
        """
        scaling = [each for each in optimizers_of(self.model) if hasattr(each, "initial_scale")]
        scales = [optimizer.dynamic_scale for optimizer in scaling if optimizer.built]
        variables = [*self.model.metrics_variables, *scales]
        before = [(variable, self._host(variable.value)) for variable in variables]
        self.model.reset_metrics()
        for variable in scales:
            variable.assign(min(_SCALE, float(self._host(variable.value))))
        with ExitStack() as stack:
            for optimizer in scaling:
                small = min(_SCALE, float(optimizer.initial_scale))
                stack.enter_context(replaced(optimizer, "initial_scale", small))
            try:
                yield
            finally:
                for variable, value in before:
                    variable.assign(value)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Within the block a step may be taken; afterwards, the variables have their values from before.

        Those that an optimizer creates in its first update get their first values.
        """
        with random_numbers(0), unchanged(self.model), ExitStack() as stack:
            for optimizer in optimizers_of(self.model):
                if not optimizer.built:
                    stack.enter_context(replaced(optimizer, "build", self._noting(optimizer.build)))
            try:
                yield
            finally:
                self._backend.settle()
                self._program.load(None, self._before)

    def _noting(self, build: Callable[[Any], None]) -> Callable[[Any], None]:
        def built(variables: Any) -> None:
            build(variables)
            self._before = {**self._state(None), **self._before}

        return built


class _NotAloneError(Exception):
    """Plain Keras cannot compute the same parts of a step for the rows of one replica alone."""
