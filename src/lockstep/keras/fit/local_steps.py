"""Local steps: a replica takes several training steps by itself, and then the replicas' changes are averaged.

    inner step   a replica's own: the step that one process would take on the replica's share of a batch
    outer step   H inner steps of each replica, and the update from the mean of their changes

An outer step is a function of the state and of H global batches, as a step is of one batch. So it is a step
of a `Program` whose partial is the change of a replica's state, and everything else is as for other programs:
the sum along the tree, checkpoints, joins, digests, verification. No state belongs to a replica between outer
steps.

    weights                       their mean change, through the outer optimizer; perhaps rounded, see
                                  `lockstep.keras.scaled_sums`
    other floating-point state    the mean change: the inner optimizer's slots, BatchNormalization's averages
    slots that are reset          their initial values: each outer step has another inner optimizer
    integers, random generators   the value of the replicas that took the most steps, which must be equal
    metrics                       the sum of the increments of all inner steps
    figures that a step logs      the mean over all inner steps, of those of whole batches

Means are weighted by numbers of examples: changes by those of an outer step, figures by those of inner steps.
A replica without examples in an inner step does not take it.

A new inner optimizer also counts from zero: Adam corrects its averages for the number of steps so far. With
the count of all steps, its first steps from slots of zero would be up to six times as long. Slots do not stay
with their replica, because if the worker is lost, another worker, perhaps on another host, needs them.
Sending them there takes as many bytes as their average.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import numpy.typing as npt

from lockstep.data.batch import Share
from lockstep.errors import ModelError
from lockstep.keras.backends.contract import (
    EQUAL,
    GATHERED,
    GRADIENTS,
    LOGS,
    METRICS,
    RARE,
    SCALED,
    Backend,
    Partial,
    Program,
    Total,
)
from lockstep.keras.backends.growth import LIKE_LOSS, MEAN, growths_of
from lockstep.keras.backends.losses import divided
from lockstep.keras.backends.whole_batch import updating
from lockstep.keras.private.common import rate_object, trained_by
from lockstep.keras.seeds import seed_at
from lockstep.keras.variables import OUTER_MOMENTUM, momentum_of, optimizers_of
from lockstep.protocol.local_steps import LocalSteps

Array = npt.NDArray[Any]

_CHANGE = "change/"
"""The prefix of names of weighted changes in a partial. The name of a variable follows."""
_FIGURES = (METRICS, LOGS)
_LARGE = 1 << 14
"""Bytes of an array that are worth another exchange, to find out whether it changes at all."""
_ROUNDING = 32
"""The largest error of the sum of weighted changes, as a multiple of a dtype's precision."""

_WHOLE_BATCH = (
    "local steps: a loss or metric of model {!r} compares the examples of the whole batch, but a replica "
    "takes its steps by itself; replace it, or train without local steps"
)


# Pure.


def weighted_change(before: Array, after: Array, weight: float) -> Array:
    """Return the change of an array of floating-point numbers times `weight`, in the array's dtype."""
    # The difference of two infinite values is not a number.
    with np.errstate(invalid="ignore", over="ignore"):
        change = np.asarray((after - before) * before.dtype.type(weight), before.dtype)
        unknown = np.isnan(change)
        return np.where(after == before, np.zeros_like(change), change) if unknown.any() else change


def changed(before: Array, change: Array) -> Array:
    """Return the array after a mean change. A change of sign that is only rounding makes a value zero.

    So an average of squares stays valid, even if the inner steps have reduced it to almost nothing.
    """
    after = np.asarray(before + change, before.dtype)
    flipped = np.signbit(after) != np.signbit(before)
    if flipped.any():
        rounding = np.abs(before) * before.dtype.type(_ROUNDING * float(ml_dtypes.finfo(before.dtype).eps))
        after = np.where(flipped & (np.abs(after) <= rounding), np.zeros_like(after), after)
    return after


def outer_update(weight: Array, momentum: Array, change: Array, local: LocalSteps) -> tuple[Array, Array]:
    """Return a weight and its momentum after a step of SGD with Nesterov momentum along the mean change."""
    dtype = weight.dtype.type
    momentum = dtype(local.momentum) * momentum + change
    return weight + dtype(local.learning_rate) * (change + dtype(local.momentum) * momentum), momentum


# The program of an outer step.


class LocalProgram:
    """The `lockstep.keras.backends.contract.Program` whose steps are outer steps of another program.

    Args:
        program: the program that trains `model`. It takes the inner steps.
        backend: the backend of both.
        model: the model, whose variables exist.
        local: the setting: the number of inner steps, and the outer optimizer.

    Raises:
        ModelError: the model cannot train with local steps.
    """

    def __init__(self, program: Program, backend: Backend, model: Any, local: LocalSteps) -> None:
        self._program = program
        self._backend = backend
        self._model = model
        self._local = local
        self._last = 0
        _refuse(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        if local.outer == "nesterov":
            momentum_of(model, creates=True)
        names = {id(variable): name for name, variable in program.lasting_variables().items()}
        self._weights = {names[id(weight)] for weight in model.trainable_variables}
        self._initial: dict[str, Array] = {}
        self._counts: set[str] = set()
        if local.slots == "reset":
            # On JAX, a step has the state of one optimizer.
            used = [each for each in optimizers_of(model) if id(each.iterations) in names]
            for optimizer in used:
                self._counts.add(names[id(optimizer.iterations)])
                for variable, value in initial_slots(model, optimizer):
                    self._initial[names[id(variable)]] = np.array(backend.to_numpy(value))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner program: its state is that of the outer one."""
        return getattr(self._program, name)

    def compute(self, state: Any, share: Share, earlier: Sequence[Total]) -> Partial:
        """Take the inner steps of a replica; return its partial. Afterwards, the state is as before."""
        _refuse_sums(self._model)
        program, before = self._program, self._values(state)
        batches = [_of_step(share, number, data) for number, data in enumerate(share.data())]
        examples = sum(batch.examples for batch in batches)
        figures: dict[str, Array] = {}
        start = before | self._initial | {name: np.zeros_like(before[name]) for name in self._counts}
        kept = before if state is not None else before | self._copies(None, self._initial)
        try:
            inner = program.load(state, start) if state is not None or self._counts else None
            for batch, size in zip(batches, share.batches, strict=True):
                if batch.examples:
                    inner, step_figures = self._inner_step(inner, batch, batch.examples / size)
                    part = share.weight * batch.examples / examples
                    for name, value in step_figures.items():
                        summand = value * value.dtype.type(part) if name.startswith(LOGS) else value
                        figures[name] = figures[name] + summand if name in figures else summand
            after = self._values(inner)
        finally:
            if state is None:
                program.load(None, kept)
        changes: dict[str, Array] = {}
        for number, name in enumerate(self._lasting()):
            if _is_float(before[name]):
                change = weighted_change(before[name], after[name], share.weight)
                changes[f"{self._way(name, change)}{_CHANGE}{name}"] = change
            else:
                # If the count begins at zero, it has not wrapped, and its sum is that of all steps.
                new = before[name] + after[name] if name in self._counts else after[name]
                changes[f"{EQUAL}{number}/{name}"] = new
        return {**changes, **figures}

    def _inner_step(self, state: Any, share: Share, weight: float) -> tuple[Any, dict[str, Array]]:
        """Take a step of a replica by itself; return (the state, metrics and logged figures).

        Args:
            state: the state before the step.
            share: the replica's examples, as those of the step's only replica.
            weight: the replica's part of the examples of all replicas. The mean of the figures over the
                replicas is the figure of the whole batch, even if that is a sum over examples.
        """
        program, to_numpy = self._program, self._backend.to_numpy
        totals: list[Total] = []
        while not totals or not program.is_last(len(totals) - 1):
            partial = program.compute(state, share, totals)
            if any(name.startswith(GATHERED) for name in partial):
                raise ModelError(_WHOLE_BATCH.format(self._model.name))
            totals.append({name: to_numpy(value) for name, value in partial.items()})
        self._last = len(totals) - 1
        named = divided(self._model, "train", program.parts(self._last, totals[-1]))
        growths, number = growths_of(self._model).steps.get("train", {}), len(updating(totals[:-1]))
        figures = {
            name: _grown(np.array(value), growths.get((number, name), MEAN), weight)
            for name, value in named.items()
            if name.startswith(_FIGURES)
        }
        _, state = program.apply(state, totals)
        # The update reads the totals in place.
        self._backend.settle()
        return state, figures

    def apply(self, state: Any, totals: Sequence[Total]) -> tuple[Any, Any]:
        """Apply the mean change of the replicas; return (logs, new state)."""
        (total,) = totals
        values = self._values(state) | self._initial
        if self._local.outer == "nesterov":
            names = {id(variable): name for name, variable in self._program.lasting_variables().items()}
            pairs = zip(self._model.trainable_variables, momentum_of(self._model), strict=True)
            momenta = {names[id(weight)]: names[id(momentum)] for weight, momentum in pairs}
        else:
            momenta = {}
        for name, array in total.items():
            name = name.removeprefix(SCALED).removeprefix(RARE)
            variable = name.removeprefix(_CHANGE)
            if variable in momenta:
                of_weight = momenta[variable]
                values[variable], values[of_weight] = outer_update(
                    values[variable], values[of_weight], array, self._local
                )
            elif name.startswith(_CHANGE):
                values[variable] = changed(values[variable], array)
            elif name.startswith(EQUAL):
                values[name.split("/", 2)[2]] = array
        figures = {name: np.array(array) for name, array in total.items() if name.startswith(_FIGURES)}
        logs, state = self._program.finish(self._program.load(state, values), [figures])  # type: ignore[attr-defined]
        self._backend.settle()
        return logs, state

    def is_last(self, number: int) -> bool:
        """Whether a round is the step's last one; an outer step has one round."""
        return True

    def form(self, number: int) -> str:
        """Return the form of the inner steps."""
        return self._program.form(self._last)

    def parts(self, number: int, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arrays, which are not packed."""
        return arrays

    def block_update(self, state: Any, totals: Sequence[Total], replicas: int) -> str:
        """Return why the update cannot be divided into blocks."""
        return "with local steps, an update averages the whole state"

    def _values(self, state: Any) -> dict[str, Array]:
        """Return copies of the arrays of the state, without slots that are reset."""
        return self._copies(state, self._program.named_state(state).keys() - self._initial.keys())

    def _copies(self, state: Any, names: Collection[str]) -> dict[str, Array]:
        to_numpy, named = self._backend.to_numpy, self._program.named_state(state)
        return {name: np.array(to_numpy(value)) for name, value in named.items() if name in names}

    def _lasting(self) -> list[str]:
        """Return the names of the state that an outer step changes, besides metrics and momentum."""
        names = self._program.lasting_variables()
        return [name for name in names if not name.startswith(OUTER_MOMENTUM) and name not in self._initial]

    def _way(self, name: str, change: Array) -> str:
        """Return the prefix of the name of a change, which shows how the change is sent."""
        if name in self._weights:
            return SCALED if self._local.changes == "int8" else ""
        # Weights of frozen layers do not change.
        return RARE if change.nbytes >= _LARGE else ""


def _of_step(share: Share, number: int, data: Any) -> Share:
    """Return a replica's share of an inner step as the share of a step with one replica."""
    rows = next((leaf.shape[0] for leaf in keras.tree.flatten(data) if leaf is not None), 0)
    return Share(share.replica, rows, 1.0, seed_at(share.seed, 0, number), lambda: data)


def _grown(value: Array, growth: int, weight: float) -> Array:
    """Return `value * weight ** -growth`; see `lockstep.keras.backends.growth`."""
    if growth in (MEAN, LIKE_LOSS):
        return value
    return np.asarray(value * value.dtype.type(weight**-growth), value.dtype)


def _is_float(array: Array) -> bool:
    return "float" in array.dtype.name


def _refuse(model: Any) -> None:
    """Raise ModelError for optimizers whose state cannot be averaged, or is not known yet."""
    for optimizer in optimizers_of(model):
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ModelError(
                f"local steps: model {model.name!r} scales its loss (mixed_float16), and replicas would "
                "change the scale differently; use mixed_bfloat16, or train without local steps"
            )
        if not optimizer.built and optimizer is not model.optimizer:
            raise ModelError(
                f"local steps: the optimizer {optimizer.name!r} of model {model.name!r} has no variables "
                "before the first step; call its build(variables) first"
            )


def initial_slots(model: Any, optimizer: Any) -> list[tuple[Any, Any]]:
    """Return the slots of an optimizer, and their initial values.

    Raises:
        ModelError: the optimizer cannot begin again in each outer step.
    """
    schedule = isinstance(rate_object(optimizer), keras.optimizers.schedules.LearningRateSchedule)
    reasons = {
        "has a LearningRateSchedule, which would begin again in each outer step; use the callback "
        "LearningRateScheduler": schedule,
        "averages weights (use_ema)": optimizer.use_ema,
        "accumulates gradients (gradient_accumulation_steps)": optimizer.gradient_accumulation_steps,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        raise ModelError(
            f"local steps: the optimizer of model {model.name!r} {reason}: omit 'reset' from --local-steps"
        )
    try:
        fresh = type(optimizer).from_config(optimizer.get_config())
        fresh.build(trained_by(optimizer))
        pairs = [(old, new.value) for old, new in zip(optimizer.variables, fresh.variables, strict=True)]
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"local steps: another optimizer like {optimizer.name!r} of model {model.name!r} cannot be made "
            f"from its get_config, and so its initial slots are not known ({error}): leave out 'reset' of "
            "--local-steps"
        ) from error
    kept = optimizer.iterations, rate_object(optimizer)
    return [(slot, value) for slot, value in pairs if all(slot is not variable for variable in kept)]


def _refuse_sums(model: Any) -> None:
    """Raise ModelError for losses that are not means over examples: a replica's loss would be smaller."""
    growths = growths_of(model)
    gradients = [
        growth for (_, name), growth in growths.steps.get("train", {}).items() if name.startswith(GRADIENTS)
    ]
    if growths.divisor > 1 or any(
        growth != MEAN for growth in (*growths.losses.values(), *growths.layers.values(), *gradients)
    ):
        raise ModelError(
            f"local steps: a loss of model {model.name!r} is a sum over examples, and a replica would take "
            "smaller steps with its share of them; make it a mean, or train without local steps"
        )
    if growths.whole:
        raise ModelError(_WHOLE_BATCH.format(model.name))
