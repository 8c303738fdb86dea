"""Values of all replicas combined into one: `strategy.reduce` and `strategy.gather`."""

from collections.abc import Mapping, Sequence
from math import prod
from operator import index
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Span
from lockstep.collectives.plan import halves
from lockstep.errors import DataError
from lockstep.keras.backends.contract import GATHERED
from lockstep.keras.per_replica import ReturnedValues, Values, refuse_lost_value
from lockstep.keras.replica_run.merges import Op, refuse_sum_of_booleans
from lockstep.keras.replica_run.run_rounds import FunctionRound, RunRounds
from lockstep.keras.rounds import Round

Array = npt.NDArray[Any]
Axis = int | Sequence[int] | None
"""The axes that `strategy.reduce` reduces besides the replicas; None for no axis."""


class ResultCombiner:
    """Combines values of all replicas into one: sums, means and joined rows.

    Args:
        rounds: sum over the workers.
        to_numpy: returns an array of the backend as NumPy sees it.
        replicas: R.
    """

    def __init__(self, rounds: RunRounds, to_numpy: Any, replicas: int) -> None:
        self._rounds = rounds
        self._to_numpy = to_numpy
        self._replicas = replicas

    def reduce(self, op: Op, source: Values, leaf: int, axis: Axis) -> Array:
        """Return the sum or the mean of one leaf over the replicas, and over some of its axes.

        Without an axis, the mean divides by the number of replicas; with one, by the number of values.

        Raises:
            PeerLostError: a worker that had some of the values was lost, and the loop ends.
            DataError: a worker that had some of the values was lost, and the loop continues.
            ModelError: the sum is one of booleans.
        """
        return self.reduce_all(op, [(source, leaf)], axis)[0]

    def reduce_all(self, op: Op, leaves: Sequence[tuple[Values, int]], axis: Axis) -> list[Array]:
        """Reduce several leaves like `reduce`, with one round at most."""
        arrays = [self._here(source, leaf) for source, leaf in leaves]
        unknown = [
            origin
            for origin, by_replica in zip(leaves, arrays, strict=True)
            if len(by_replica) < self._replicas
        ]
        totals = iter(self._summed(op, unknown, axis))
        reduced = []
        for (source, leaf), by_replica in zip(leaves, arrays, strict=True):
            if len(by_replica) < self._replicas:
                total, count = next(totals), next(totals)
            else:
                parts = [_sum_and_count(op, by_replica[replica], axis) for replica in range(self._replicas)]
                total, count = (tree_sum([part[j] for part in parts]) for j in (0, 1))
            divisor = self._replicas if axis is None else int(count)
            dtype = dtype_of(op, source.specs[leaf].dtype)
            reduced.append(total if op == "sum" else np.asarray(total / divisor).astype(dtype))
        return reduced

    def gather(self, source: Values, leaf: int, axis: int) -> Array:
        """Return one leaf of all replicas, joined along an axis in the replicas' order.

        Raises:
            PeerLostError: a worker that had some of the values was lost, and the loop ends.
            DataError: the leaf is a single number; or a worker that had some of the values was lost, and the
                loop continues.
        """
        if not source.specs[leaf].shape:
            raise DataError("strategy.gather joins values along an axis; single numbers have none")
        by_replica = self._here(source, leaf)
        if len(by_replica) == self._replicas:
            return np.concatenate([by_replica[replica] for replica in sorted(by_replica)], axis=axis)
        (joined,) = self._rounds.merged(GatherRound(self._rounds, self, source, leaf, axis)).values()
        return joined

    def _summed(self, op: Op, leaves: Sequence[tuple[Values, int]], axis: Axis) -> list[Array]:
        """Return the sums of leaves that are on several workers, each followed by the number of values."""
        if not leaves:
            return []
        total = self._rounds.merged(ReduceRound(self._rounds, self, op, leaves, axis))
        return [total[str(i)].copy() for i in range(2 * len(leaves))]

    def owned(self, source: Values, leaf: int, replica: int) -> Array:
        """Return one leaf of a replica that this worker owns."""
        if isinstance(source, ReturnedValues):
            array: Array = self._to_numpy(source.owned_leaf(leaf, replica))
            return array
        if replica not in (by_replica := self._here(source, leaf)):
            refuse_lost_value(replica)
        return by_replica[replica]

    def _here(self, source: Values, leaf: int) -> Mapping[int, Array]:
        """Return one leaf of the replicas whose values this worker has."""
        return {
            replica: self._to_numpy(source.leaf(leaf, replica))
            for replica in range(self._replicas)
            if source.is_here(replica)
        }


class ReduceRound(FunctionRound):
    """The round of a `strategy.reduce` of leaves that are on several workers."""

    def __init__(
        self,
        rounds: RunRounds,
        combiner: ResultCombiner,
        op: Op,
        leaves: Sequence[tuple[Values, int]],
        axis: Axis,
    ) -> None:
        super().__init__(
            rounds, "strategy.reduce", list({id(source): source for source, _ in leaves}.values())
        )
        self._combiner = combiner
        self._op: Op = op
        self._leaves = leaves
        self._axis = axis

    def compute(self, replica: int) -> dict[str, Array]:
        """Return the sum of each leaf, followed by the number of its values."""
        origins = (self._combiner.owned(*origin, replica) for origin in self._leaves)
        pairs = (_sum_and_count(self._op, array, self._axis) for array in origins)
        return {str(i): array for i, array in enumerate(array for pair in pairs for array in pair)}


class GatherRound(Round):
    """The round of a `strategy.gather` of a leaf that is on several workers."""

    def __init__(
        self, rounds: RunRounds, combiner: ResultCombiner, source: Values, leaf: int, axis: int
    ) -> None:
        super().__init__("strategy.gather", rounds.job.worker)
        self._combiner = combiner
        self._source = source
        self._leaf = leaf
        self._axis = axis

    def compute(self, replica: int) -> dict[str, Array]:
        """Return the leaf of a replica."""
        return {f"{GATHERED}{self._axis}/0": self._combiner.owned(self._source, self._leaf, replica)}


def tree_sum(parts: list[Array]) -> Array:
    """Sum one array a replica along the tree along which workers sum."""

    def total(span: Span) -> Array:
        if span.stop - span.start == 1:
            return parts[span.start]
        left, right = halves(span)
        return np.asarray(total(left) + total(right))

    return total(Span(0, len(parts)))


def dtype_of(op: Op, dtype: str) -> str:
    """Return the dtype of the sum or the mean of values of `dtype`.

    Raises:
        ModelError: the sum is one of booleans.
    """
    if op == "sum" and dtype == "bool":
        refuse_sum_of_booleans("strategy.reduce")
    if op == "sum" or not _is_exact(dtype):
        return dtype
    return "float64" if keras.backend.backend() == "tensorflow" else str(keras.config.floatx())


def reduced_along(op: Op, tensor: Any, axis: int | Sequence[int]) -> Any:
    """Return the sum or the mean of one tensor along one axis or several.

    Raises:
        DataError: the tensor has no such axis.
    """
    tensor = keras.ops.convert_to_tensor(tensor)
    dtype = str(keras.backend.standardize_dtype(tensor.dtype))
    tensor = keras.ops.cast(tensor, dtype_of(op, dtype))
    if not (axes := axes_within(axis, tensor.shape, "strategy.reduce")):
        return tensor
    return keras.ops.cast((keras.ops.sum if op == "sum" else keras.ops.mean)(tensor, axes), tensor.dtype)


def reduced_plain(op: Op, value: Any, axis: Axis, replicas: int) -> Any:
    """Return the sum or the mean of a value that replicas share, such as a number or a tensor of the script.

    Raises:
        ValueError: it is a sum without an axis, as in `tf.distribute`: the caller may mean the value, or the
            sum of R equal values.
    """
    if axis is not None:
        reduced = reduced_along(op, value, axis)
        return reduced * keras.ops.cast(replicas, reduced.dtype) if op == "sum" else reduced
    if op == "sum" and not (isinstance(value, int | float | np.ndarray) and np.all(value == 0)):
        raise ValueError(
            f'strategy.reduce("SUM", value) of a value of type {type(value).__name__}, which all {replicas} '
            f"replicas share: the sum can mean the value, or {replicas} times the value. Reduce what "
            "strategy.run returns; use the value itself, or multiply it with strategy.num_replicas_in_sync"
        )
    return keras.ops.convert_to_tensor(value)


def axes_within(axis: int | Sequence[int], shape: Sequence[int | None], what: str) -> tuple[int, ...]:
    """Return the indices, from 0, of axes that a value of this shape has.

    Raises:
        DataError: it does not have one of them.
    """
    rank = len(shape)
    axes = (axis,) if isinstance(axis, int) else tuple(index(each) for each in axis)
    if any(not -rank <= each < rank for each in axes):
        raise DataError(f"{what} over axis {axis} of a value of shape {list(shape)}")
    return tuple(each % rank for each in axes)


def _is_exact(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def _sum_and_count(op: Op, value: Array, axis: Axis) -> tuple[Array, Array]:
    """Return the sum of an array along axes, of a dtype for a mean, and the number of its values.

    Raises:
        DataError: the array has no such axis.
        ModelError: the sum is one of booleans.
    """
    dtype_of(op, value.dtype.name)
    if op == "mean" and _is_exact(value.dtype.name):
        value = value.astype("float64")
    if axis is None:
        return value, np.array(1, "int64")
    axes = axes_within(axis, value.shape, "strategy.reduce")
    count = prod(value.shape[each] for each in axes)
    return np.asarray(value.sum(axis=axes, dtype=value.dtype)), np.array(count, "int64")
