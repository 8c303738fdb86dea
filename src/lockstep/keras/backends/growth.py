"""How replicas combine a value: by its growth, its dependence on the number of examples.

Replicas combine values by the mean, weighted by their shares of the examples. For a mean over examples, whose
growth is 0, that is the value of the whole batch. A sum over examples, even if it is divided by a constant,
grows with their number: its growth is 1. A mean that is divided once more by the number of examples has the
growth -1. Each of them, multiplied by `weight ** -growth`, where the weight is the replica's share, has a
weighted mean that is the value of the whole batch. `lockstep.keras.fit.trials` measures the growth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.errors import ModelError
from lockstep.keras.backends.contract import GRADIENTS, StepKind, WholePart
from lockstep.keras.choices import Choices
from lockstep.keras.private.common import (
    CHOICES,
    FLAT_LOSSES,
    compiled_loss,
    compiled_metrics,
    flat_losses,
    layers_of,
)
from lockstep.keras.variables import flat_metrics
from lockstep.worker.patch_registry import replaced

MEAN, SUM = 0, 1

LIKE_LOSS = 2
"""Marks a value that is proportional to a loss with its own denominator: weighted by it, it is a mean.

`lockstep.keras.backends.losses` weights it as it weights the loss.
"""

GROWTHS = (MEAN, SUM, -1)
"""The growths that a value may have, in the order in which they are tried."""

TOLERANCE = 1e-4
"""The tolerance, relative to the largest element: equal formulas differ by less in single precision."""

HALF_TOLERANCE = 5e-2
"""The tolerance for values that are computed in half precision."""

Array = npt.NDArray[Any]


def tolerance_of(array: Array) -> float:
    """Return the tolerance for an array of a dtype."""
    return HALF_TOLERANCE if array.dtype.itemsize < 4 else TOLERANCE


@dataclass(frozen=True)
class Growths:
    """The results of trials of a compiled model, above all the growths of the values in its steps.

    They decide how replicas combine values, so they are the same on all workers. Trials with other rows may
    have other results, so a worker that joins, or a job that resumes, takes these over.

    Attributes:
        losses: the growths of the compiled losses, by their positions.
        layers: the growths of the values that layers pass to `add_loss`, by the layers' ids.
        steps: the growths of the arrays in the partials of a kind of step, by the number of updates before
            the round and the array's name. Growths that are `MEAN` are left out.
        whole: the parts of a step that are computed from the whole batch; see
            `lockstep.keras.backends.whole_batch`.
        divisor: the divisor of the losses in training. It is R if a step of the program adds up the gradients
            of R replicas, as programs for `tf.distribute` do; otherwise it is 1.
        tried: the number of the call that has read rows to try a kind of step; 0 if no rows were needed.
        parts: the `parts_digest` of the model that was tried.
        unweighted: whether parts of the program may use sample weights, which the rows that were tried lack.
        names: the names of the parts of the model that are computed per replica.
        exact: the names of those that are computed from the whole batch.
        choices: the result of `choices_of` for the model when it was tried.
        others: the results of trials with other choices, by the choices.
        traced: the choices of the program before its first compiled step of a kind.
    """

    losses: Mapping[int, int] = field(default_factory=dict)
    layers: Mapping[int, int] = field(default_factory=dict)
    steps: Mapping[StepKind, Mapping[tuple[int, str], int]] = field(default_factory=dict)
    divisor: int = 1
    whole: frozenset[WholePart] = frozenset()
    tried: Mapping[StepKind, int] = field(default_factory=dict)
    parts: str = ""
    unweighted: bool = False
    names: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    choices: str = ""
    others: Mapping[str, "Growths"] = field(default_factory=dict)
    traced: Mapping[StepKind, str] = field(default_factory=dict)

    def packed(self, model: Any) -> dict[str, Any]:
        """Return plain values for `unpacked`, in which a layer is its position in the model."""
        positions = {id(layer): position for position, layer in enumerate(layers_of(model))}
        # The program may have removed a layer since the trial.
        layers = {positions[each]: growth for each, growth in self.layers.items() if each in positions}
        steps = {
            kind: [(number, name, growth) for (number, name), growth in growths.items()]
            for kind, growths in self.steps.items()
        }
        return {
            "losses": dict(self.losses),
            "layers": layers,
            "steps": steps,
            "divisor": self.divisor,
            "whole": sorted(self.whole),
            "tried": dict(self.tried),
            "parts": self.parts,
            "unweighted": self.unweighted,
            "names": self.names,
            "exact": self.exact,
            "choices": self.choices,
            "others": {choices: growths.packed(model) for choices, growths in self.others.items()},
            "traced": dict(self.traced),
        }

    @classmethod
    def unpacked(cls, model: Any, values: Mapping[str, Any]) -> "Growths":
        """Return the growths that `packed` has packed, for the same model in another process."""
        layers = layers_of(model)
        return cls(
            losses=dict(values["losses"]),
            layers={id(layers[position]): growth for position, growth in values["layers"].items()},
            steps={
                kind: {(number, name): growth for number, name, growth in growths}
                for kind, growths in values["steps"].items()
            },
            divisor=values["divisor"],
            whole=frozenset(values["whole"]),
            tried=dict(values["tried"]),
            parts=values["parts"],
            unweighted=values["unweighted"],
            names=tuple(values["names"]),
            exact=tuple(values["exact"]),
            # Checkpoints of an earlier version do not have these.
            choices=values.get("choices", ""),
            others={key: cls.unpacked(model, growths) for key, growths in values.get("others", {}).items()},
            traced=dict(values.get("traced", {})),
        )

    def has_tried(self, model: Any, kind: StepKind) -> bool:
        """Whether a trial has measured a kind of step of the model as it is now."""
        return kind in self.tried and self.parts == parts_digest(model)

    def digest(self, kind: StepKind) -> bytes:
        """Return bytes that are equal on workers that combine the values of a kind of step alike."""
        values = [sorted(self.losses.items()), sorted(self.layers.values()), self.divisor, sorted(self.whole)]
        values.append(sorted(self.steps.get(kind, {}).items()))
        return xxhash.xxh3_64_digest(repr(values).encode())


def parts_digest(model: Any) -> str:
    """Return a text that changes if the program adds or removes layers or metrics; equal on all workers.

    The metrics of `compile` do not count: they exist from the first training or evaluation on.
    """
    compiled = {id(metric) for metric in flat_metrics(compiled_metrics(model))}
    added = [metric for metric in flat_metrics(model.metrics) if id(metric) not in compiled]
    parts = [*layers_of(model), None, *added]
    return xxhash.xxh3_64_hexdigest(repr([type(part).__qualname__ for part in parts]).encode())


_measured: WeakKeyDictionary[Any, Growths] = WeakKeyDictionary()


def growths_of(model: Any) -> Growths:
    """Return the measured growths of a model; without a measurement, those that its losses declare."""
    return _measured.get(model) or declared_growths(model)


def set_growths(model: Any, growths: Growths) -> None:
    """Combine the values of replicas by these growths from the next trace of a step on."""
    _measured[model] = growths


def forget_growths(model: Any) -> None:
    """Forget a model's measured growths and the program's choices, because it is compiled again."""
    _measured.pop(model, None)
    vars(model)[CHOICES] = Choices(model, vars(model).get(CHOICES))


def forget_trace(model: Any, kind: StepKind) -> None:
    """Forget the choices with which a kind of step was compiled, because it is compiled again."""
    made_choices(model).traced.pop(kind, None)
    if kind in (growths := growths_of(model)).traced:
        others = {each: key for each, key in growths.traced.items() if each != kind}
        set_growths(model, replace(growths, traced=others))


def choices_of(model: Any, kind: StepKind, growths: Growths) -> str:
    """Return a text of the Python values on which a step of a compiled model depends.

    It is equal for equal values; see `lockstep.keras.choices.Choices`. A compiled step uses those of its
    first call.
    """
    if not runs_python(model) and kind in growths.traced:
        return growths.traced[kind]
    return made_choices(model).look(model)


def refuse_other_trace(
    model: Any, kind: StepKind, beginning: Callable[[], AbstractContextManager[object]]
) -> None:
    """Refuse to compile a step with other Python values than those with which the job has compiled it.

    A process that joins or resumes the job has skipped the code that set these values, and cannot take them
    over. This function is called before each step, and compares the values with which this process compiles
    the step.

    Args:
        model: the model.
        kind: the kind of the step.
        beginning: see `lockstep.keras.backends.traces.Traces.beginning`.

    Raises:
        ModelError: the values differ.
    """
    traced = growths_of(model).traced.get(kind)
    if runs_python(model) or traced is None:
        return
    choices = made_choices(model)
    if kind not in choices.traced:
        with beginning():
            choices.traced[kind] = choices.look(model)
    for place, own, others in choices.differences(kind, traced):
        raise ModelError(
            f"model {model.name!r}: the job has compiled its {kind} step with {place} = {others}, and this "
            f"process, which joins or resumes, has {place} = {own}. A callback, or an earlier call, has set "
            "it there: set it in the model's __init__ or before the first fit, or keep it in a variable "
            "(add_weight)"
        )


def made_choices(model: Any) -> Choices:
    """Return the Python values that may decide which code of a compiled model runs."""
    if CHOICES not in vars(model):  # It was compiled before the job began.
        vars(model)[CHOICES] = Choices(model)
    choices: Choices = vars(model)[CHOICES]
    return choices


def runs_python(model: Any) -> bool:
    """Whether Python runs in each step of a model, so that the step uses Python values that change."""
    return bool(model.run_eagerly) or keras.backend.backend() == "torch"


def declared_growths(model: Any) -> Growths:
    """Return the growths of Keras's losses, which follow from their `reduction`."""
    declared = {
        i: SUM for i, loss in enumerate(flat_losses(model)) if getattr(loss, "reduction", "") == "sum"
    }
    return Growths(declared)


@contextmanager
def means(model: Any, weight: Any) -> Iterator[None]:
    """Within the block, the compiled losses and the values that layers add are means over examples.

    Args:
        model: the model whose step on a replica the block computes.
        weight: the replica's share of the examples.
    """
    growths = growths_of(model)
    with ExitStack() as stack:
        if any(growths.losses.values()):

            def scaled_loss(position: int, value: Any) -> Any:
                growth = growths.losses.get(position, MEAN)
                return scaled(value, growth, weight) if growth else value

            stack.enter_context(_changed_losses(model, scaled_loss))
        for layer in layers_of(model) if any(growths.layers.values()) else ():
            if growth := growths.layers.get(id(layer), MEAN):
                stack.enter_context(_scaled_additions(layer, growth, weight))
        yield


def combinable(
    model: Any, kind: StepKind, number: int, partial: dict[str, Any], weight: Any
) -> dict[str, Any]:
    """Return the partial of a replica's round, so that its sum over the replicas is the total.

    Args:
        model: the model of the step.
        kind: the kind of the step.
        number: the number of updates that the earlier rounds of the step make.
        partial: arrays that are multiplied by `weight` as means are.
        weight: the replica's share of the examples.
    """
    measured = growths_of(model)
    growths = measured.steps.get(kind, {})
    if kind == "train" and measured.divisor > 1:
        gradients = {(number, name): SUM for name in partial if name.startswith(GRADIENTS)}
        growths = {**growths, **gradients}
    return {
        name: scaled(array, growths[number, name], weight)
        if growths.get((number, name), LIKE_LOSS) != LIKE_LOSS
        else array
        for name, array in partial.items()
    }


def scaled(value: Any, growth: int, weight: Any) -> Any:
    """Return `value * weight ** -growth`."""
    weight = keras.ops.cast(weight, keras.backend.standardize_dtype(value.dtype))
    return value / weight if growth == SUM else value * weight


@contextmanager
def _changed_losses(model: Any, change: Callable[[int, Any], Any]) -> Iterator[None]:
    """Within the block, each compiled loss returns `change(position, value)` instead of its value."""
    compiled = compiled_loss(model)
    before = getattr(compiled, FLAT_LOSSES)

    def changed(position: int, loss: Any) -> Any:
        def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return change(position, loss(y_true, y_pred, sample_weight))

        return call

    replaced = [entry._replace(loss=changed(i, entry.loss)) for i, entry in enumerate(before)]
    vars(compiled)[FLAT_LOSSES] = replaced
    try:
        yield
    finally:
        vars(compiled)[FLAT_LOSSES] = before


@contextmanager
def observed_losses(model: Any, note: Any) -> Iterator[None]:
    """Within the block, call `note(position, value)` with the value of each compiled loss."""

    def observed(position: int, value: Any) -> Any:
        note(position, value)
        return value

    with _changed_losses(model, observed):
        yield


@contextmanager
def _scaled_additions(layer: Any, growth: int, weight: Any) -> Iterator[None]:
    add = layer.add_loss

    def add_scaled(loss: Any) -> None:
        add(keras.tree.map_structure(lambda value: scaled(value, growth, weight), loss))

    with replaced(layer, "add_loss", add_scaled):
        yield


def measured_growth(
    whole: Array, parts: Sequence[Array], weights: Sequence[float], tolerance: float
) -> int | None:
    """Return the growth of a value, or None if it is neither a sum nor a mean over examples.

    Args:
        whole: the value for some examples.
        parts: the values for parts of them.
        weights: the parts' shares of the examples.
        tolerance: the largest difference, relative to the largest element.
    """
    return next((g for g in GROWTHS if _distance(whole, parts, weights, g) <= tolerance), None)


def nearest_growth(whole: Array, parts: Sequence[Array], weights: Sequence[float]) -> int:
    """Return `SUM` for a value without a growth that is closer to a sum than to a mean, otherwise `MEAN`.

    For a single number, each part must show the growth, because a number that is nearly 0, such as the
    logarithm of an error, is close to any value. Some elements of an array may come from only one part.
    """
    nearest = min((MEAN, SUM), key=lambda g: _distance(whole, parts, weights, g))
    if np.size(whole) == 1:
        distances = [_distance(whole, [part / w], [1], MEAN) for part, w in zip(parts, weights, strict=True)]
        return nearest if max(distances) < 0.75 else MEAN
    return nearest


def _distance(whole: Array, parts: Sequence[Array], weights: Sequence[float], growth: int) -> float:
    whole = np.asarray(whole, np.float64)
    combined = sum(
        np.asarray(part, np.float64) * weight ** (1 - growth)
        for part, weight in zip(parts, weights, strict=True)
    )
    if not np.array_equal(np.isfinite(whole), np.isfinite(combined)):
        return np.inf
    finite = np.isfinite(whole)
    largest = np.max(np.abs(whole), where=finite, initial=0)
    return float(np.max(np.abs(whole - combined), where=finite, initial=0) / (largest or 1))
