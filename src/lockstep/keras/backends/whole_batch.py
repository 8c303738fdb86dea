"""Values of the whole batch in the step of a replica: for losses and metrics that compare examples.

`gather` joins the rows of all replicas. Each call takes a round: the step runs up to the call and ends there,
and the rows of all replicas are joined in their order. In later rounds the step runs again, and the call
returns the joined rows: the replica's own rows as the step has computed them, the others as constants. Random
generators, statistics and metrics of a round that ends at a call change nothing. (On PyTorch, Keras's own
step does not run again up to the loss if its forward pass was kept: `ForwardPass` in `torch.py`.)

Each replica computes the loss of the joined rows, with equal values up to rounding. Its gradient goes only
through the replica's own rows, and the sum of these gradients is the gradient of one process. Replicas
combine gradients by a mean with their shares of the examples as weights (`lockstep.keras.backends.growth`),
so `gather` divides the gradient of the rows by the weight. Variables that the loss itself uses, such as a
temperature, have the whole gradient on each replica. Losses that layers add, and regularizers, are not
gathered: their means do not change.

Metrics do not need a further round, because they have no gradient. The arguments of `compute_metrics` travel
with the last round, and each worker updates the metrics once with the joined rows (`MetricArguments`). So do
those of `update_state` if a step, or a layer, updates a metric of the program itself. The loss of Keras's own
`test_step` does not need one either: each worker computes it once, with the metrics. Meanwhile, a replica's
loss is zero.

`lockstep.keras.fit.trials` finds out which models need this.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import keras
import numpy as np

from lockstep.errors import InternalError, ModelError
from lockstep.keras.backends.common import has_own
from lockstep.keras.backends.contract import GATHERED, Total, WholePart
from lockstep.keras.backends.multi_update import EndOfRound
from lockstep.keras.private.common import (
    kept_losses,
    layers_of,
    loss_tracker,
    mask_of,
    set_mask,
    track_loss,
    wrapped_function,
)
from lockstep.keras.variables import flat_metrics
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.patch_registry import replaced

Nest = Any

_ROUND = f"{GATHERED}0/"
_METRICS = f"{GATHERED}0/metrics/"


def is_gather(total: Mapping[str, Any]) -> bool:
    """Whether a total comes from a round that ended at a call of `gather`."""
    return bool(total) and all(name.startswith(_ROUND) and not name.startswith(_METRICS) for name in total)


def updating(totals: Sequence[Total]) -> list[Total]:
    """Return the totals of the rounds that did not end at a call of `gather`, without empty ones."""
    return [total for total in totals if total and not is_gather(total)]


class StepGathers:
    """The calls of `gather` in the computation of one replica, in one round of a step.

    Args:
        earlier: the totals of the earlier rounds.
        start: the place of the replica's first row among the rows of all replicas.
        weight: the replica's share of the examples.
        rows: the number of the replica's rows; None in a graph for any number.

    Attributes:
        arrays: the arrays of the round, by their names in a partial.
        ended: whether a call has ended the round.
        metrics: the arguments of the calls that update metrics, if the whole batch updates them.
        postponed: whether the loss is computed with the metrics.
    """

    def __init__(self, earlier: Sequence[Total], start: Any, weight: Any, rows: int | None) -> None:
        self._earlier = [total for total in earlier if is_gather(total)]
        self._start, self._weight, self._rows = start, weight, rows
        self._calls = 0
        self.arrays: dict[str, Any] = {}
        self.ended = False
        self.metrics: MetricArguments | None = None
        self.postponed = False

    def gather(self, nest: Nest) -> Nest:
        """Return the rows of all replicas, or end the round; see `lockstep.gather`.

        A leaf without a row for each example remains the replica's.

        Raises:
            EndOfRound: the round ends here.
        """
        leaves = _leaves(nest)
        if not any(map(self.has_rows, leaves)):
            # Without arrays, the round would be repeated forever.
            return nest
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self._earlier):
            self.arrays = self._constants(leaves, _ROUND)
            self.ended = True
            raise EndOfRound
        joined = self._earlier[number]
        merged = [self._merged(leaf, joined, f"{_ROUND}{i}") for i, leaf in enumerate(leaves)]
        return keras.tree.pack_sequence_as(nest, merged)

    @contextmanager
    def shared_means(self) -> Iterator[None]:
        """Within the block, a `Mean` that gets a number of rows as weight gets the replica's share of it.

        Keras passes the number of rows of a compiled loss's outputs if it is known: in a trial, but not in a
        TensorFlow graph for any number of rows. Each replica has all rows.
        """
        update = keras.metrics.Mean.update_state

        def shared(metric: Any, values: Any, sample_weight: Any = None) -> Any:
            weight = sample_weight * self._weight if isinstance(sample_weight, int) else sample_weight
            return update(metric, values, sample_weight=weight)

        with replaced(keras.metrics.Mean, "update_state", shared):
            yield

    def write_back(self, nest: Nest, joined: Nest) -> None:
        """Copy the replica's rows of `joined`, which a loss with a mask has scaled in place, to `nest`.

        Keras scales weights in place only on PyTorch, and metrics get them afterwards.
        """
        for leaf, rows in zip(keras.tree.flatten(nest), keras.tree.flatten(joined), strict=True):
            if leaf is rows or not self.has_rows(leaf) or leaf.requires_grad:
                continue
            written = rows[self._start : self._start + leaf.shape[0]]
            # A write would invalidate a graph that has kept them.
            if (written != leaf).any():
                leaf.copy_(written)

    def keep_metrics(self, compute: Callable[[Any, Nest], Any], nest: Nest) -> None:
        """Let the arguments of a call that updates metrics travel with the round.

        Args:
            compute: makes the call, given the model and the arguments.
            nest: the arguments, whose tensors have a row for each example.
        """
        leaves = _leaves(nest)
        calls = self.metrics.calls if self.metrics else ()
        prefix = f"{_METRICS}{len(calls)}/"
        arguments = [
            _Argument(f"{prefix}{i}") if leaf is None or keras.ops.is_tensor(leaf) else leaf
            for i, leaf in enumerate(leaves)
        ]
        self.arrays |= self._constants(leaves, prefix)
        self.metrics = MetricArguments((*calls, (compute, keras.tree.pack_sequence_as(nest, arguments))))

    def postpone_loss(self, losses: Sequence[Any]) -> None:
        """Let the losses of layers and weights, which are means over examples, travel with the round."""
        dtype = keras.backend.floatx()
        self.postponed = True
        if losses:
            added = sum(keras.ops.sum(keras.ops.cast(loss, dtype)) for loss in losses)
            self.arrays[_ADDED.name] = added * keras.ops.cast(self._weight, dtype)

    def all_have_rows(self, nest: Nest) -> bool:
        """Whether a nest has tensors, and each of them has a row for each example of the replica."""
        tensors = [leaf for leaf in _leaves(nest) if keras.ops.is_tensor(leaf)]
        return bool(tensors) and all(map(self.has_rows, tensors))

    def has_rows(self, leaf: Any) -> bool:
        """Whether a leaf of a nest has a row for each example of the replica."""
        if not keras.ops.is_tensor(leaf) or not len(leaf.shape):
            return False
        return leaf.shape[0] is None or leaf.shape[0] == self._rows

    def _constants(self, leaves: Sequence[Any], prefix: str) -> dict[str, Any]:
        arrays = {}
        for i, leaf in enumerate(leaves):
            if self.has_rows(leaf):
                arrays[f"{prefix}{i}"] = keras.ops.stop_gradient(leaf)
                if (mask := mask_of(leaf)) is not None:
                    arrays[f"{prefix}{i}/mask"] = keras.ops.stop_gradient(mask)
        return arrays

    def _merged(self, leaf: Any, joined: Total, name: str) -> Any:
        if name not in joined:
            return leaf
        rows = _tensor(joined[name], leaf)
        if keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype)):
            rows = self._placed(leaf, rows)
        if f"{name}/mask" in joined:
            set_mask(rows, _tensor(joined[f"{name}/mask"], mask_of(leaf)))
        return rows

    def _placed(self, leaf: Any, rows: Any) -> Any:
        """Return `rows` with the replica's rows replaced by `leaf`, through which the gradient flows."""
        ops = keras.ops
        count = ops.shape(leaf)[0]
        # The index of each row among the replica's own.
        indices = ops.arange(ops.shape(rows)[0], dtype="int32") - ops.cast(self._start, "int32")
        is_own = ops.logical_and(indices >= 0, indices < count)
        spread = ops.take(self._scaled_gradient(leaf), ops.clip(indices, 0, count - 1), axis=0)
        return ops.where(ops.reshape(is_own, [-1] + [1] * (len(leaf.shape) - 1)), spread, rows)

    def _scaled_gradient(self, leaf: Any) -> Any:
        """Return a tensor with the same values, and the gradient of `leaf` divided by the weight."""
        ops = keras.ops
        # The difference of two infinite values is not a number.
        finite = ops.where(ops.isfinite(leaf), leaf, ops.zeros_like(leaf))
        weight = ops.cast(self._weight, keras.backend.standardize_dtype(leaf.dtype))
        return ops.stop_gradient(leaf) + (finite - ops.stop_gradient(finite)) / weight


@dataclass(frozen=True)
class _Argument:
    """Represents an argument with a row for each example, or the sum of the additions to the loss.

    Attributes:
        name: the name of its array in a total. An argument that is None, such as sample weights in some calls
            of `fit`, has no array.
    """

    name: str


_ADDED = _Argument("added losses")


@dataclass(frozen=True)
class MetricArguments:
    """The arguments of the calls that update metrics from the whole batch.

    Attributes:
        calls: for each call, the function that makes it, given the model and the arguments, and the
            arguments.
    """

    calls: tuple[tuple[Callable[[Any, Nest], Any], Nest], ...]

    def computed(self, model: Any, total: Mapping[str, Any], tensor: Callable[[Any], Any]) -> dict[str, Any]:
        """Make the calls with the joined rows, and return the figures that `compute_metrics` returns.

        Args:
            model: the model of the step.
            total: the total of the step's last round.
            tensor: converts an array to a tensor of the backend.
        """

        def filled(leaf: Any) -> Any:
            if not isinstance(leaf, _Argument):
                return leaf
            if leaf.name not in total:
                return None
            rows = tensor(total[leaf.name])
            if f"{leaf.name}/mask" in total:
                set_mask(rows, tensor(total[f"{leaf.name}/mask"]))
            return rows

        figures: dict[str, Any] = {}
        for compute, arguments in self.calls:
            figures |= compute(model, keras.tree.map_structure(filled, arguments)) or {}
        return figures


def with_figures(logs: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs with those figures of `compute_metrics` that the replicas' logs also have."""
    return {**logs, **{name: value for name, value in figures.items() if name in logs}}


def _leaves(nest: Nest) -> list[Any]:
    """Return the leaves of a nest, arrays as tensors: steps that are not compiled get NumPy examples."""
    leaves = keras.tree.flatten(nest)
    return [keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]


def _tensor(array: Any, like: Any) -> Any:
    dtype = keras.backend.standardize_dtype(like.dtype)
    tensor = keras.ops.convert_to_tensor(array, dtype)
    device = getattr(like, "device", None)
    return tensor.to(device) if keras.backend.backend() == "torch" and device is not None else tensor


_gathers: ThreadValue["StepGathers | _NoGathers | None"] = ThreadValue(None)


@contextmanager
def computing_with(model: Any, gathers: StepGathers | None, parts: frozenset[WholePart]) -> Iterator[None]:
    """Within the block, a replica's step computes some parts of a model from the whole batch.

    `gather` in the step calls `gathers`; None if the replica has the whole batch.
    """
    with _gathers.within(gathers), ExitStack() as stack:
        if gathers is None:
            yield
            return
        if "loss" in parts:
            stack.enter_context(_whole_loss(model, gathers, parts))
            # A step that ends within `compute_loss` leaves the losses that layers have added.
            stack.enter_context(kept_losses(layers_of(model)))
        if parts & {"metrics", "test_step"}:
            stack.enter_context(_whole_metrics(model, gathers, parts))
        yield


def _whole_loss(
    model: Any, gathers: StepGathers, parts: frozenset[WholePart]
) -> AbstractContextManager[None]:
    compute_loss, has_own_loss = model.compute_loss, has_own(model, "compute_loss")

    def whole(
        x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, **options: Any
    ) -> Any:
        named = _named_arguments(parts, x, y, y_pred, sample_weight)
        if "test_step" in parts and gathers.all_have_rows(named):
            losses = model.losses
            # The program's own loss may use losses of single layers.
            if not (losses and has_own_loss):
                gathers.postpone_loss(losses)
                return keras.ops.zeros(())
        joined = gathers.gather(named)
        with gathers.shared_means():
            arguments = [joined[name] for name in _ARGUMENTS]
            loss = compute_loss(*arguments, **options)
        if keras.backend.backend() == "torch":
            gathers.write_back(sample_weight, joined["sample_weight"])
        return loss

    return replaced(model, "compute_loss", whole)


_ARGUMENTS = ("x", "y", "y_pred", "sample_weight")
"""The first arguments of `compute_loss` and `compute_metrics`."""


def _named_arguments(parts: frozenset[WholePart], *arguments: Any) -> dict[str, Any]:
    """Return the arguments for the whole batch by their names."""
    named = dict(zip(_ARGUMENTS, arguments, strict=True))
    return named if "inputs" in parts else {**named, "x": None}


@contextmanager
def _whole_metrics(model: Any, gathers: StepGathers, parts: frozenset[WholePart]) -> Iterator[None]:
    compute_metrics, tracker = model.compute_metrics, loss_tracker(model)
    computing = False

    def kept(x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        nonlocal computing
        if "metrics" not in parts and not gathers.postponed:
            return compute_metrics(x, y, y_pred, sample_weight)
        named = _named_arguments(parts, x, y, y_pred, sample_weight)
        if not gathers.all_have_rows(named):
            raise InternalError("an argument of compute_metrics has no row for each example")
        end = _end_test_step if gathers.postponed else _compute_metrics
        gathers.keep_metrics(end, named | {"added": _ADDED})
        # The result shows which logs exist. Its values do not count, and do not change any metric.
        before = [(variable, keras.ops.copy(variable.value)) for variable in model.metrics_variables]
        computing = True
        try:
            logs = compute_metrics(x, y, y_pred, sample_weight)
        finally:
            computing = False
        for variable, value in before:
            variable.assign(value)
        return logs

    def update(metric: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if computing or (metric is tracker and gathers.postponed):
            return None
        compares = "metrics" in parts and may_compare_examples(metric)
        if not (compares and gathers.all_have_rows((args, kwargs))):
            return original(*args, **kwargs)
        gathers.keep_metrics(lambda _, joined: metric.update_state(*joined[0], **joined[1]), (args, kwargs))
        return None

    metrics = [*flat_metrics(model.metrics), *([] if tracker is None else [tracker])]
    with replaced(model, "compute_metrics", kept), replaced_updates(metrics, update):
        yield


def _compute_metrics(model: Any, arguments: Mapping[str, Any]) -> Any:
    return model.compute_metrics(*(arguments[name] for name in _ARGUMENTS))


def _end_test_step(model: Any, arguments: Mapping[str, Any]) -> Any:
    """Do what Keras's own `test_step` does after its forward pass."""
    ops, weights = keras.ops, arguments["sample_weight"]
    # On PyTorch, a loss with a mask scales the weights in place, and these belong to a total.
    weights = keras.tree.map_structure(lambda leaf: None if leaf is None else ops.copy(leaf), weights)
    arguments = {**arguments, "sample_weight": weights}
    rows = next(ops.shape(leaf)[0] for leaf in keras.tree.flatten(arguments["y_pred"]) if leaf is not None)
    track_loss(model, arguments["added"], rows, *(arguments[name] for name in _ARGUMENTS))
    return _compute_metrics(model, arguments)


@contextmanager
def replaced_updates(metrics: Iterable[Any], update: Callable[..., Any]) -> Iterator[None]:
    """Within the block, `metric.update_state(...)` is `update(metric, original, ...)` for some metrics."""

    def replacement(metric: Any) -> Callable[..., Any]:
        before = vars(metric).get("update_state")

        def replaced_update(*args: Any, **kwargs: Any) -> Any:
            # That of a class may be replaced meanwhile.
            return update(metric, before or partial(type(metric).update_state, metric), *args, **kwargs)

        return replaced_update

    with ExitStack() as stack:
        for metric in {id(metric): metric for metric in metrics}.values():
            stack.enter_context(replaced(metric, "update_state", replacement(metric)))
        yield


_ACROSS_EXAMPLES = ("circle", "dice", "tversky")
"""Keras's losses that compare the examples of a batch, or normalize over all of them."""


def may_compare_examples(function: Any) -> bool:
    """Whether a loss or metric is the program's own, or one of Keras's that compares examples.

    Args:
        function: a loss or a metric of Keras, perhaps with a function of the program.
    """
    inner, options = wrapped_function(function)
    parts = [function] if inner is None else [function, inner]
    modules = [getattr(part, "__module__", None) or type(part).__module__ for part in parts]
    modules.append(type(function).__module__)
    if not all(module.startswith(("keras.", "builtins")) for module in modules):
        return True
    name = getattr(inner or type(function), "__name__", "").lower()
    return name in _ACROSS_EXAMPLES or options.get("axis", -1) != -1


def refusing_to_gather() -> AbstractContextManager[None]:
    """Within the block, a replica predicts, and cannot gather."""
    return _gathers.within(_NoGathers())


class _NoGathers:
    def gather(self, nest: Nest) -> NoReturn:
        raise ModelError(
            "lockstep.gather in predict_step: each replica returns the outputs of its own rows, and predict "
            "joins them; compare the examples of a batch after predict"
        )


def gather(values: Nest) -> Nest:
    """See `lockstep.gather`; for the replicas of Keras's loops."""
    gathers = _gathers.value
    if gathers is None:
        return values
    if isinstance(gathers, StepGathers):
        for leaf in _leaves(values):
            if leaf is not None and not gathers.has_rows(leaf):
                _refuse_rows(leaf)
    return gathers.gather(values)


def refuse_other_rows(partial: Mapping[str, Any], rows: int) -> None:
    """Raise ModelError if a round has gathered other numbers of rows; graphs do not know them earlier."""
    for name, array in partial.items():
        if is_gather({name: array}) and array.shape[0] != rows:
            _refuse_rows(array)


def _refuse_rows(value: Any) -> NoReturn:
    raise ModelError(
        f"lockstep.gather got a value of the shape {list(getattr(value, 'shape', ()))}, which has no row for "
        "each example of the replica: give it values with the examples along their first axis, for example "
        "two views of the examples as two values"
    )
