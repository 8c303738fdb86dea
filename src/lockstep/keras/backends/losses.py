"""Combines replicas' losses into the loss of the global batch, even if they are not means over examples."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np

from lockstep.errors import ModelError
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import DENSITY, GRADIENTS, METRICS, StepKind
from lockstep.keras.backends.growth import LIKE_LOSS, growths_of, means
from lockstep.keras.backends.logs import MetricResults, recorded_results
from lockstep.keras.backends.whole_batch import StepGathers, computing_with
from lockstep.keras.private.common import (
    ADDITIONAL_LOSS,
    REDUCE_VALUES,
    REDUCE_WEIGHTED_VALUES,
    SCALE_LOSS,
    TRAINER,
    UNSCALE_LOSS,
    apply_mask,
    loss_total,
    weighted_metrics,
)
from lockstep.keras.variables import flat_metrics
from lockstep.system.thread_value import ThreadValue
from lockstep.worker import job
from lockstep.worker.patch_registry import definer, replaced

MEANS = ("mean", "sum_over_batch_size")
"""Reductions of losses that are means over the unmasked elements."""
_WEIGHTED_MEAN = "mean_with_sample_weight"
_SCALED = "scaled weights"
"""The name of the array in a partial which shows that the loss has scaled the weights of the batch."""


@contextmanager
def replica_step(
    model: Any, kind: StepKind, weight: Any, gathers: StepGathers
) -> Iterator[tuple[list[Any], MetricResults]]:
    """Within the block, a replica's step computes losses and metrics that can be combined over replicas.

    Yields (the densities of its losses, the results of its metrics).

    Raises:
        ModelError: a step of Keras has a loss that is a vector.
    """
    refuse_vectors(model, kind)
    growths = growths_of(model)
    divisor = growths.divisor if kind == "train" else 1
    # A worker of parameter servers trains with a whole batch.
    trains_whole_batch = kind == "train" and job.current().context.has_servers
    whole = growths.whole if kind == "test" else growths.whole - {"test_step"}
    with (
        computing_with(model, None if trains_whole_batch else gathers, whole),
        scaled_losses(divisor) if divisor > 1 else nullcontext(),
        replica_losses(model, weight) as densities,
        weighted_means(weight),
        recorded_results(model) as results,
    ):
        yield densities, results


@contextmanager
def replica_losses(model: Any, weight: Any) -> Iterator[list[Any]]:
    """Within the block, a replica's losses can be combined. Yields their densities.

    The density of a loss is its denominator divided by the number of elements, if the denominator is a number
    of unmasked elements or a sum of weights; None if it is the number of elements.
    """
    densities: list[Any] = []
    observed = _observed(lambda *reduction: densities.append(_density(*reduction)), _thinning.value)
    with observed, means(model, weight):
        yield densities


@contextmanager
def observed_denominators() -> Iterator[list[bool]]:
    """Within the block, note for each loss of Keras whether its denominator is not the number of elements."""
    differences: list[bool] = []
    with _observed(lambda *reduction: differences.append(_has_own_denominator(*reduction))):
        yield differences


def _has_own_denominator(sample_weight: Any, mask: Any, reduction: Any) -> bool:
    if reduction == _WEIGHTED_MEAN:
        return mask is not None or sample_weight is not None
    return mask is not None and reduction in MEANS


Reduction = tuple[Any, Any, Any, Any]
"""What a loss of Keras reduces: its values, the weights, the mask and the name of the reduction."""

_LARGER = 4.0
"""The factor of the losses of rows whose denominators are thinned."""


@contextmanager
def thinned_denominators(start: int, count: int, rows: int) -> Iterator[None]:
    """Within the block, the denominators of replicas' losses leave out elements of some first rows.

    The losses of these rows are larger, too. So the mean of a loss over the examples differs clearly from the
    mean over the remaining elements.

    Args:
        start: the place in the batch of the first row of the block.
        count: the number of first rows of the batch from which elements are left out.
        rows: the number of rows of the block.
    """

    def changed(leaf: Any, change: Callable[[Any, Any, Any], Any]) -> Any:
        """Return `change(leaf, whether it is in the first rows, whether it is kept)`, by elements."""
        leaf = keras.ops.convert_to_tensor(leaf)
        if not leaf.shape or leaf.shape[0] % rows:
            return leaf
        # The rows of an array may be the elements of the examples.
        elements = leaf.shape[0] // rows
        indices = np.indices(tuple(leaf.shape), sparse=True)
        first = np.broadcast_to(indices[0] < (count - start) * elements, leaf.shape)
        return change(leaf, first, ~first | (sum(indices, np.zeros((), int)) % 2 == 0))

    def larger(leaf: Any, first: Any, _: Any) -> Any:
        return leaf * keras.ops.cast(np.where(first, _LARGER, 1.0), leaf.dtype)

    def thinned(leaf: Any, _: Any, kept: Any) -> Any:
        return keras.ops.where(kept, leaf, keras.ops.zeros_like(leaf))

    def thin(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> Reduction:
        if _has_own_denominator(sample_weight, mask, reduction):
            values = changed(values, larger)
            if mask is not None:
                mask = changed(mask, thinned)
            else:
                sample_weight = changed(sample_weight, thinned)
        return values, sample_weight, mask, reduction

    with _thinning.within(thin):
        yield


_thinning: ThreadValue[Callable[[Any, Any, Any, Any], Reduction] | None] = ThreadValue(None)


@contextmanager
def _observed(
    note: Callable[[Any, Any, Any], object],
    change: Callable[[Any, Any, Any, Any], Reduction] | None = None,
) -> Iterator[None]:
    """Within the block, call `note` with the weights, the mask and the reduction of each loss of Keras.

    Args:
        note: receives these.
        change: returns the values that losses reduce instead.
    """
    reduce = getattr(*REDUCE_WEIGHTED_VALUES)

    def observed(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        if change is not None:
            values, sample_weight, mask, reduction = change(values, sample_weight, mask, reduction)
        note(sample_weight, mask, reduction)
        return reduce(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)

    with replaced(*REDUCE_WEIGHTED_VALUES, observed):
        yield


def by_density(
    model: Any,
    kind: StepKind,
    partial: dict[str, Any],
    densities: list[Any],
    weight: Any,
    *,
    scaled: bool = False,
) -> dict[str, Any]:
    """Weight the values proportional to the loss by the replica's share of the loss's denominator.

    A replica's loss is its sum divided by its own denominator. Losses and gradients that are weighted by the
    denominators, and divided by the sum of the denominators, are those of the global batch. This requires a
    single denominator. If there are several losses and one has a density, the numbers of examples remain the
    weights.

    Args:
        model: the model of the step.
        kind: the kind of the step.
        partial: the replica's partial, weighted by examples.
        densities: the densities of the step's losses.
        weight: the replica's share of the examples.
        scaled: whether the loss has scaled the weights of the batch.
    """
    if len(densities) != 1 or densities[0] is None:
        return partial
    density = densities[0]
    share = density * keras.ops.cast(weight, "float32")
    partial = {**partial, DENSITY: share, **({_SCALED: share} if scaled else {})}
    followers = {
        name: partial[name] * keras.ops.cast(density, keras.backend.standardize_dtype(partial[name].dtype))
        for name in names_like_loss(model, kind, partial)
    }
    return {**partial, **followers}


def divided(model: Any, kind: StepKind, total: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a total of NumPy or JAX arrays, divided by the densities that weighted its partials, if any."""
    if DENSITY not in total:
        return total
    density = total[DENSITY]
    # With a density of zero, the values that are proportional to the loss are zero.
    density = density + (density == 0)
    followers = {
        name: total[name] / density.astype(total[name].dtype) for name in names_like_loss(model, kind, total)
    }
    return {**total, **followers}


def names_like_loss(model: Any, kind: StepKind, arrays: Mapping[str, Any]) -> list[str]:
    """Return the names of the arrays that are proportional to the loss, or to weights that it has scaled."""
    metrics = flat_metrics(weighted_metrics(model)) if _SCALED in arrays else []
    scaled = {id(variable) for metric in metrics for variable in metric.variables}
    states = {f"{METRICS}{i}" for i, v in enumerate(model.metrics_variables) if id(v) in scaled}
    return [name for name in arrays if name in states or is_proportional_to_loss(model, kind, name)]


def is_proportional_to_loss(model: Any, kind: StepKind, name: str) -> bool:
    """Whether the array with a name in a partial of a step is proportional to the loss."""
    if name.startswith(GRADIENTS):
        return True
    if growths_of(model).steps.get(kind, {}).get((0, name)) == LIKE_LOSS:
        return True
    if not name.startswith(METRICS) or (total := loss_total(model)) is None:
        return False
    return model.metrics_variables[int(name.removeprefix(METRICS))] is total


def _density(sample_weight: Any, mask: Any, reduction: Any) -> Any:
    if reduction in MEANS and mask is not None:
        weights = mask
    elif reduction == _WEIGHTED_MEAN and mask is None and sample_weight is None:
        # A step must have a density in every call or in none.
        weights = 1.0
    elif reduction == _WEIGHTED_MEAN:
        weights = apply_mask(sample_weight, mask, dtype="float32", reduction=reduction)
    else:
        return None
    return keras.ops.stop_gradient(keras.ops.mean(keras.ops.cast(weights, "float32")))


def refuse_vectors(model: Any, kind: StepKind) -> None:
    """Raise ModelError if a step of Keras gets a loss that is a vector.

    Backends compute its gradient in different ways.
    """
    if has_own(model, f"{kind}_step"):
        return
    if {getattr(loss, "reduction", "mean") for loss in keras.tree.flatten(model.loss)} & {None, "none"}:
        raise ModelError(
            "a loss has reduction=None: it is a vector, and the meaning of its gradient differs between "
            'backends; give it reduction="sum" or a mean'
        )


@contextmanager
def weighted_means(weight: Any) -> Iterator[None]:
    """Within the block, a `Mean` that gets a single number weights it by the replica's weight.

    Keras gives each such number the weight 1 for any number of examples. This includes the losses of single
    outputs, and the results of functions that return one number for a batch. So the numbers of all replicas
    together have the weight 1.
    """
    update = keras.metrics.Mean.update_state

    def weighted(self: Any, values: Any, sample_weight: Any = None) -> Any:
        single = sample_weight is None and keras.ops.ndim(values) == 0
        return update(self, values, sample_weight=weight if single else sample_weight)

    with replaced(keras.metrics.Mean, "update_state", weighted):
        yield


@contextmanager
def weighted_gradients(model: Any, weight: Any) -> Iterator[bool]:
    """Within the block, Keras's `train_step` computes gradients times `weight`; yield False if it does not.

    Multiplying the loss before the backward pass costs less than multiplying all gradients, and gradients in
    half precision overflow no earlier than those of one process. A custom step may compute other gradients.
    """
    optimizer = model.optimizer
    if has_own(model, "train_step"):
        yield False
        return
    scale = optimizer.scale_loss

    def weighted(loss: Any) -> Any:
        scaled = scale(loss)
        return scaled * keras.ops.cast(weight, keras.backend.standardize_dtype(scaled.dtype))

    with replaced(optimizer, "scale_loss", weighted):
        yield True


@contextmanager
def scaled_losses(replicas: int) -> Iterator[None]:
    """Within the block, the sum of the losses of `replicas` is the loss of the global batch.

    Programs for `tf.distribute` rely on this: Keras's losses, `tf.nn.scale_regularization_loss` and
    `tf.nn.compute_average_loss` divide means by the number of replicas of TensorFlow's strategy.
    """
    reduce = getattr(*REDUCE_VALUES)

    def reduced(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        # Keras returns a vector without elements unchanged. In graphs, it returns the vector's sum, which is
        # zero.
        if tuple(values.shape) == (0,) and reduction not in (None, "none"):
            return keras.ops.sum(values)
        return reduce(values, sample_weight, reduction)

    def scaled(value: Any) -> Any:
        return value / keras.ops.cast(replicas, value.dtype)

    with (
        replaced(*REDUCE_VALUES, reduced),
        replaced(*SCALE_LOSS, scaled),
        replaced(*UNSCALE_LOSS, lambda value: value * keras.ops.cast(replicas, value.dtype)),
        (_scaled_by_tensorflow if keras.backend.backend() == "tensorflow" else _scaled_by_models)(replicas),
    ):
        yield


@contextmanager
def _scaled_by_models(replicas: int) -> Iterator[None]:
    """Within the block, models scale other losses too, and track them unscaled. On TensorFlow, Keras does.

    The program may have bound Keras's steps before the block, or wrapped them, so they are not replaced.
    """
    owner = definer(keras.Model, ADDITIONAL_LOSS)
    aggregate, update = vars(owner)[ADDITIONAL_LOSS], keras.metrics.Mean.update_state

    def aggregated(model: Any, loss: Any) -> Any:
        return aggregate(model, loss) / replicas

    def update_state(metric: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return update(metric, values * replicas if _is_from_trainer() else values, *args, **kwargs)

    with (
        replaced(owner, ADDITIONAL_LOSS, aggregated),
        replaced(keras.metrics.Mean, "update_state", update_state),
    ):
        yield


def _is_from_trainer() -> bool:
    """Whether a step of Keras has called the caller, possibly through other replacements of Lockstep."""
    frame = sys._getframe(2)
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith("lockstep."):
        frame = frame.f_back
    return frame.f_globals is TRAINER


@contextmanager
def _scaled_by_tensorflow(replicas: int) -> Iterator[None]:
    from lockstep.keras.private.tensorflow import DISTRIBUTION_OF_LOSSES

    strategy = SimpleNamespace(num_replicas_in_sync=replicas)
    library = SimpleNamespace(has_strategy=lambda: False, get_strategy=lambda: strategy)
    with replaced(*DISTRIBUTION_OF_LOSSES, library):
        yield
