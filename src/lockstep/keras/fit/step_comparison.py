"""Compares a step of replicas with that of plain Keras, part by part, and finds which names explain it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import GRADIENTS, METRICS, STATE_CHANGES
from lockstep.keras.backends.growth import MEAN, SUM, Growths, growths_of, runs_python
from lockstep.keras.fit.compared_step import EPSILONS, ComparedStep
from lockstep.keras.fit.deviations import Deviation, deviation
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.fit.kept_steps import StepOutcome
from lockstep.keras.fit.layer_calls import rows_are_equal
from lockstep.keras.fit.part_names import DRAWS, LATER, UNTRIED
from lockstep.keras.fit.plain_function import moved_bits, rounded_outputs

Array = npt.NDArray[Any]

ROUNDINGS = 2
"""Computations of plain Keras from inputs that differ in the last bits."""


class StepComparison:
    """One comparison: the deviations of the parts of a step, and where they begin.

    Args:
        step: the step, whose reference plain Keras has computed.
        replicas: the number of replicas.
        replicated: returns the step that replicas compute.
    """

    def __init__(self, step: ComparedStep, replicas: int, replicated: Callable[[], GlobalStep]) -> None:
        self._step = step
        self._model, self._kind, self._epsilon = step.model, step.kind, step.epsilon
        self._replicas = replicas
        self._replicated = replicated

    def follow(self) -> None:
        """Let the model be tried again if Python values have changed, and Python runs in each step."""
        if self._kind != "predict" and runs_python(self._model):
            self._replicated().follow(self._step.whole)

    def deviations(self, names: Callable[[str], Sequence[str]]) -> dict[str, Deviation | None]:
        """Return the results of the step, by names of its parts, and how replicas deviate.

        Args:
            names: returns the names in notes that explain a deviation of a part.
        """
        reference, global_step = self._step.reference, self._replicated()
        self._step.program = global_step.program
        with self._step.neutral(), self._step.first_values():
            # A trial may have created variables.
            self._step.before = {**self._step.state(None), **self._step.before}
            replicas = self._step.of_replicas(global_step)
            rounded = [self._step.rounded(number) for number in range(ROUNDINGS)]
            expected = self._step.expected_update(replicas)
            counting = self._counting_on(global_step)
            deviations = self._deviations(reference, replicas, rounded, expected, counting)
            if not all(difference is None or names(part) for part, difference in deviations.items()):
                # Equal rows may be rounded differently at different places of a batch. Outputs that cannot be
                # moved do not hide deviations.
                with contextlib.suppress(Exception):
                    for size in (2 * self._epsilon, -2 * self._epsilon):
                        with rounded_outputs(self._model, size):
                            rounded.append(self._step.nearer(self._step.plain(anew=True)))
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
        """Return the differing parts that no name explains, and why.

        Either their values are not those of plain Keras for the rows of each replica, or these values add up
        to those of the whole batch, so that replicas could have combined them. Parts that replicas do not
        combine as means over the examples are not returned.

        Raises:
            _NotAloneError: the rows of a replica cannot be computed alone, so names explain everything.
        """
        growths = growths_of(self._model)
        # A second update follows from the first one, and so from the rows of all replicas.
        if self._step.exchanges or growths.whole or self._step.updates > 1:
            return {}
        parts = {part for part in parts if not self._is_no_mean(part, growths)}
        if not parts:
            return {}

        expected, summed = (self._of_shares(growth=growth) for growth in (MEAN, SUM))
        gradients = {part for part in parts if part.startswith("gradient ")}
        if gradients and not untried:
            deviations = self.gradients(self._step.reference, summed, rounded)
            if all(difference is None for difference in deviations.values()):
                return dict.fromkeys(gradients, "although it is the sum over the replicas")
        suspects = parts & self._uncombined(
            expected, summed, replicas, (rounded, rounded), self._step.reference
        )
        if suspects:
            others = tuple(
                [self._of_shares(moved_bits(number, self._epsilon), growth) for number in range(ROUNDINGS)]
                for growth in (MEAN, SUM)
            )
            suspects &= self._uncombined(expected, summed, replicas, others, None)
        return dict.fromkeys(suspects, "and from the values for the rows of each replica")

    def _is_no_mean(self, part: str, growths: Growths) -> bool:
        """Whether replicas do not combine a part of the step as a mean over the examples."""
        combined = [name for (_, name), growth in growths.steps.get(self._kind, {}).items() if growth != MEAN]
        if part.startswith("gradient ") or "loss" in part:
            # States of layers and of metrics do not depend on how the losses are used.
            of_losses = (*growths.losses.values(), *growths.layers.values())
            summed = growths.divisor != 1 or any(growth != MEAN for growth in of_losses)
            return summed or any(name.startswith(GRADIENTS) for name in combined)
        if part.startswith("state ") and not part.startswith("state of "):
            return any(name.startswith(STATE_CHANGES) for name in combined)
        states = self._model.metrics_variables
        counted = {id(states[int(name.partition("/")[2])]) for name in combined if name.startswith(METRICS)}
        variables = self._step.variables()
        owners = {owner for name, owner in self._step.metrics().items() if id(variables[name]) in counted}
        return part.removeprefix("state of ") in owners

    def _uncombined(
        self,
        means: StepOutcome,
        sums: StepOutcome,
        replicas: StepOutcome,
        others: Sequence[Sequence[StepOutcome]],
        base: StepOutcome | None,
    ) -> set[str]:
        """Return the parts that replicas have not combined from steps with the rows of each replica.

        Args:
            means: combined from these steps, as means over the examples.
            sums: the same with sums over the replicas.
            replicas: what the replicas compute.
            others: roundings of both.
            base: the outcome whose roundings are `others`, if that is not `means` and `sums`.
        """
        figures = self.figures(means, replicas, others[0], base)
        deviations = {name: figures[name] for name in means.figures}
        deviations |= self.gradients(means, replicas, others[0], base)
        owners = self._step.metrics()
        for name, mean in means.state.items():
            # A metric has a sum over rows, or a mean of single numbers.
            values = zip((mean, sums.state[name]) if name in owners else (mean,), others, strict=False)
            ways = [self._state_deviation(name, value, replicas, alike, base) for value, alike in values]
            if name not in owners:
                deviations[f"state {name}"] = ways[0]
            elif None not in ways:
                deviations[f"state of {owners[name]}"] = ways[0]
                deviations.setdefault(owners[name], ways[0])
        return {part for part, difference in deviations.items() if difference is not None}

    def _of_shares(
        self, change: Callable[[Any], Any] = lambda array: array, growth: int = MEAN
    ) -> StepOutcome:
        """Return plain Keras's results for the rows of each replica, if replicas combine them.

        Args:
            change: changes the weights and the inputs.
            growth: the growth by which gradients and the states of metrics are combined.

        Raises:
            _NotAloneError: the program fails with the rows of one replica, or computes other parts.
        """
        # This is independent of how training divides a batch.
        examples = self._step.whole.examples
        shares = np.array_split(np.arange(examples), min(self._replicas, examples))

        def rows_of(share: Array) -> Any:
            return keras.tree.map_structure(
                lambda array: None if array is None else array[share], self._step.batch
            )

        batches = [rows_of(share) for share in shares]
        try:
            outcomes = [self._step.plain(change, batch=batch) for batch in batches]
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
                # Outputs that are not rows, and rows of different lengths, are not joined.
                if all(value.ndim and value.shape[1:] == values[0].shape[1:] for value in values):
                    figures[name] = np.concatenate(values)
            elif name == "loss" and not has_own(self._model, f"{self._kind}_step"):
                figures[name] = combined(values, MEAN)
        gradients = {
            key: combined([outcome.gradients[key] for outcome in outcomes], growth) for key in first.gradients
        }
        owners = self._step.metrics()
        of_layers = {id(variable) for variable in self._model.non_trainable_variables}
        held = [
            name for name, each in self._step.variables().items() if name in owners or id(each) in of_layers
        ]
        state = {}
        for name in held:
            if name in first.state and first.state[name].dtype.kind == "f":
                changes = [self._step.change(name, outcome.state[name]) for outcome in outcomes]
                state[name] = self._step.before[name] + combined(changes, growth if name in owners else MEAN)
        return StepOutcome(figures, gradients, state)

    def _deviations(
        self,
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        expected: Mapping[str, Array],
        counting: tuple[StepOutcome, StepOutcome],
    ) -> dict[str, Deviation | None]:
        figures = self.figures(reference, replicas, rounded)
        states = self._states(expected, reference, replicas, rounded)
        counted = self._states({}, *counting, rounded, self._step.reference)
        states |= {part: states.get(part) or difference for part, difference in counted.items()}
        for name, difference in figures.items():
            if difference is not None:
                # The figure shows it already.
                states.pop(f"state of {name}", None)
        return {
            **figures,
            **self.gradients(reference, replicas, rounded),
            **self.updated_variables(expected, replicas.state),
            **states,
        }

    def _counting_on(self, global_step: GlobalStep) -> tuple[StepOutcome, StepOutcome]:
        """Return plain Keras's and the replicas' metric states, after counting on from before the batch.

        The states are those after the step, without what was counted before.
        """
        metrics, before = self._step.metrics(), self._step.before
        first = {name: array for name, array in self._step.reference.state.items() if name in metrics}
        if self._kind == "predict" or not first:
            return StepOutcome({}, {}, {}), StepOutcome({}, {}, {})
        self._step.before = {**before, **first}
        try:
            self._step.program.load(None, self._step.before)
            outcomes = self._step.plain(), self._step.of_replicas(global_step)
        finally:
            self._step.before = before
            self._step.program.load(None, before)

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
        replicas = self._replicas
        shares = [self._step.whole.share(replica) for replica in range(replicas)]
        parts = [share.data() for share in shares if share.examples]
        try:
            with self._step.constant():
                whole, *others = [self._step.layer_calls(data) for data in (self._step.batch, *parts)]
        except Exception:
            return ""
        counts = [self._step.whole.examples, *(share.examples for share in shares if share.examples)]
        for layer, calls in whole.items():
            records = [calls, *(other[layer] for other in others if layer in other)]
            for inputs_and_outputs in zip(*records, strict=False):
                inputs, outputs = zip(*inputs_and_outputs, strict=True)
                if rows_are_equal(inputs, counts) and not rows_are_equal(outputs, counts):
                    return f"layer {layer.name}"
        return ""

    # Comparing.

    def figures(
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

    def gradients(
        self,
        reference: StepOutcome,
        replicas: StepOutcome,
        rounded: Sequence[StepOutcome],
        exact: StepOutcome | None = None,
    ) -> dict[str, Deviation | None]:
        """Return the deviations of gradients; `rounded` are roundings of `exact` or else the reference."""
        deviations: dict[str, Deviation | None] = {}
        largest = [float(np.max(np.abs(array), initial=0)) for array in reference.gradients.values()]
        for (number, position), value in reference.gradients.items():
            path = self._step.function.updated[number].variables[position].path
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

    def updated_variables(
        self, expected: Mapping[str, Array], after: Mapping[str, Array]
    ) -> dict[str, Deviation | None]:
        """Return the deviations of the variables after an update from those of Keras's own update."""
        deviations: dict[str, Deviation | None] = {}
        for name, value in expected.items():
            # A fused kernel rounds differently from Keras; updates of single precision compute in it.
            single = value.dtype.itemsize > 2
            epsilon = 4 * EPSILONS["float32"] if single else self._epsilon
            size = (
                float(np.max(np.abs(self._step.before[name]), initial=0)) if value.dtype.kind == "f" else 0.0
            )
            pair = self._step.change(name, value), self._step.change(name, after[name])
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
        owners = self._step.metrics()
        deviations: dict[str, Deviation | None] = {}
        for name, value in reference.state.items():
            pair = value, replicas.state[name]
            if name in expected or all(np.array_equal(array, self._step.before[name]) for array in pair):
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
            self._step.change(name, value),
            self._step.change(name, replicas.state[name]),
            [self._step.change(name, outcome.state[name]) for outcome in rounded],
            self._epsilon,
            float(np.max(np.abs(value), initial=0)) if value.dtype.kind == "f" else 0.0,
            base=None if exact is None else self._step.change(name, exact.state[name]),
        )


class _NotAloneError(Exception):
    """Plain Keras cannot compute the same parts of a step for the rows of one replica alone."""
