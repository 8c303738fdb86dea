"""What replicas have returned, made into one value: sums, means and joined rows, on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.collectives.contract import Span
from lockstep.collectives.plan import halves
from lockstep.errors import DataError
from lockstep.keras.per_replica import Returned, Values, lost
from lockstep.keras.replica_run.replica import Op
from lockstep.keras.replica_run.run_rounds import RunRounds, refuse_sum_of_booleans
from lockstep.keras.synchronization import GATHERED, Round

Array = npt.NDArray[Any]


class Results:
    """Brings the values of all replicas together.

    Args:
        exchange: between the workers.
        concrete: shows an array of the backend to NumPy.
        replicas: R.
    """

    def __init__(self, exchange: RunRounds, concrete: Any, replicas: int) -> None:
        self._exchange = exchange
        self._concrete = concrete
        self._replicas = replicas

    def reduce(self, op: Op, source: Values, leaf: int, axis: int | None) -> Array:
        """Return the sum or the mean over the replicas of one leaf, and over one of its axes.

        Without an axis the mean divides by the number of replicas; with one, by the number of values.

        Raises:
            PeerLostError: a worker that had some of the values was lost.
            DataError: likewise, and the others go on.
            ModelError: booleans are to be added up.
        """
        return self.reduce_all(op, [(source, leaf)], axis)[0]

    def reduce_all(self, op: Op, leaves: Sequence[tuple[Values, int]], axis: int | None) -> list[Array]:
        """Reduce several leaves as `reduce` does one; the workers meet once at most."""
        known = [self._known(source, leaf) for source, leaf in leaves]
        apart = [origin for origin, one in zip(leaves, known, strict=True) if len(one) < self._replicas]
        totals = iter(self._summed(op, apart, axis))
        reduced = []
        for (source, leaf), one in zip(leaves, known, strict=True):
            if len(one) < self._replicas:
                total, count = next(totals), next(totals)
            else:
                parts = [_along(op, one[replica], axis) for replica in range(self._replicas)]
                total, count = (tree_sum([part[j] for part in parts]) for j in (0, 1))
            divisor = self._replicas if axis is None else int(count)
            dtype = dtype_of(op, source.specs[leaf].dtype)
            reduced.append(total if op == "sum" else np.asarray(total / divisor).astype(dtype))
        return reduced

    def gather(self, source: Values, leaf: int, axis: int) -> Array:
        """Return one leaf of all replicas, joined along an axis in their order.

        Raises:
            PeerLostError: a worker that had some of the values was lost.
            DataError: likewise, and the others go on.
        """
        if not source.specs[leaf].shape:
            raise DataError("strategy.gather joins values along an axis; single numbers have none")
        known = self._known(source, leaf)
        if len(known) == self._replicas:
            return np.concatenate([known[replica] for replica in sorted(known)], axis=axis)
        name = f"{GATHERED}{axis}/0"
        this = Round("strategy.gather", lambda replica: {name: self._own(source, leaf, replica)}, np.asarray)
        return self._exchange.synchronize(this)[name]

    def _summed(self, op: Op, leaves: Sequence[tuple[Values, int]], axis: int | None) -> list[Array]:
        """Return the sums of leaves that are on several workers, each followed by the number of values."""
        if not leaves:
            return []

        def of(replica: int) -> dict[str, Array]:
            parts = [array for origin in leaves for array in _along(op, self._own(*origin, replica), axis)]
            return {str(i): array for i, array in enumerate(parts)}

        sources = list({id(source): source for source, _ in leaves}.values())
        total = self._exchange.synchronize(self._exchange.round("strategy.reduce", of, sources))
        return [total[str(i)].copy() for i in range(2 * len(leaves))]

    def _own(self, source: Values, leaf: int, replica: int) -> Array:
        """Return what a replica of this worker has."""
        if isinstance(source, Returned):
            array: Array = self._concrete(source.brought(leaf, replica))
            return array
        if replica not in (known := self._known(source, leaf)):
            lost(replica)
        return known[replica]

    def _known(self, source: Values, leaf: int) -> Mapping[int, Array]:
        known = {}
        for replica in range(self._replicas):
            try:
                known[replica] = self._concrete(source.leaf(leaf, replica))
            except DataError:
                continue
        return known


def tree_sum(parts: list[Array]) -> Array:
    """Add up one array a replica along the tree along which workers add."""

    def total(span: Span) -> Array:
        if span.stop - span.start == 1:
            return parts[span.start]
        left, right = halves(span)
        return np.asarray(total(left) + total(right))

    return total(Span(0, len(parts)))


def dtype_of(op: Op, dtype: str) -> str:
    """Return the dtype of a sum or a mean of values of a dtype; of integers' mean, that of the backend.

    Raises:
        ModelError: booleans are to be added up.
    """
    if op == "sum" and dtype == "bool":
        refuse_sum_of_booleans("strategy.reduce")
    if op == "sum" or not _is_exact(dtype):
        return dtype
    return "float64" if keras.backend.backend() == "tensorflow" else str(keras.config.floatx())


def along(op: Op, tensor: Any, axis: int) -> Any:
    """Return the sum or the mean of a tensor along an axis, where there is nothing to bring together."""
    tensor = keras.ops.convert_to_tensor(tensor)
    dtype = str(keras.backend.standardize_dtype(tensor.dtype))
    tensor = keras.ops.cast(tensor, dtype_of(op, dtype))
    return keras.ops.cast((keras.ops.sum if op == "sum" else keras.ops.mean)(tensor, axis), tensor.dtype)


def _is_exact(dtype: str) -> bool:
    return dtype == "bool" or dtype.startswith(("int", "uint"))


def _along(op: Op, value: Array, axis: int | None) -> list[Array]:
    """Return the sum of an array along an axis, ready for a mean, and how many values that were."""
    dtype_of(op, value.dtype.name)
    if op == "mean" and _is_exact(value.dtype.name):
        value = value.astype("float64")
    if axis is None:
        return [value, np.array(1, "int64")]
    if not -value.ndim <= axis < value.ndim:
        raise DataError(f"strategy.reduce over axis {axis} of a value of shape {list(value.shape)}")
    return [np.asarray(value.sum(axis=axis, dtype=value.dtype)), np.array(value.shape[axis], "int64")]
