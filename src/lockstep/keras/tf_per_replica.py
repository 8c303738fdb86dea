"""`PerReplica` for TensorFlow, which graphs can take and return: the handle of stored values."""

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.per_replica import DistributedValues, Spec, Values, ValueStore, format_values
from lockstep.worker.job import current


class SymbolicPerReplica(tf.experimental.ExtensionType, DistributedValues):  # type: ignore[misc]
    """One leaf of stored values, without the values themselves.

    Attributes:
        handle: the handle of the values in their store: a scalar of int64.
        store: the number of the store.
        leaf: the position of the leaf in the values.
        dtype: the dtype of the leaf.
        shape: the shape of the leaf.
    """

    handle: tf.Tensor
    store: int
    leaf: int
    dtype: tf.DType
    shape: tf.TensorShape

    def __repr__(self) -> str:
        if not isinstance(self.handle, tf.__internal__.EagerTensor):
            return f"PerReplica({self.dtype.name}, shape={self.shape}, in a graph)"
        replicas = current().view.replicas_of(current().worker)
        return format_values(
            replicas, lambda replica: tf.convert_to_tensor(self.source.leaf(self.leaf, replica))
        )

    __str__ = __repr__

    @property
    def source(self) -> Values:
        """The values; not available in a graph.

        Raises:
            DataError: the values are no longer stored.
        """
        stored = vars(self).get("_stored")
        return (stored or ValueStore.numbered(self.store).find(int(self.handle))).values

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in the replicas' order."""
        replicas = current().view.replicas_of(current().worker)
        if tf.executing_eagerly():
            return tuple(tf.convert_to_tensor(self.source.leaf(self.leaf, replica)) for replica in replicas)

        def read(handle: Any) -> list[Any]:
            values = ValueStore.numbered(self.store).find(int(handle)).values
            return [values.leaf(self.leaf, replica) for replica in replicas]

        tensors = tf.py_function(read, [self.handle], [self.dtype] * len(replicas))
        for tensor in tensors:
            tensor.set_shape(self.shape)
        return tuple(tensors)


class CompositePerReplica(tf.experimental.ExtensionType, DistributedValues):  # type: ignore[misc]
    """One leaf of stored values that consists of several tensors: a ragged or a sparse tensor.

    Attributes:
        parts: its tensors.
        spec_number: the number of its `tf.TypeSpec`.
    """

    parts: tuple[SymbolicPerReplica, ...]
    spec_number: int

    @classmethod
    def of(cls, spec: Any, parts: Sequence[SymbolicPerReplica]) -> "CompositePerReplica":
        """Return the leaf with this `tf.TypeSpec` and these tensors."""
        if spec not in _specs:
            _specs.append(spec)
        return cls(tuple(parts), _specs.index(spec))

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in the replicas' order."""
        return tuple(map(self.joined, zip(*(part.values for part in self.parts), strict=True)))

    def joined(self, tensors: Sequence[Any]) -> Any:
        """Return the ragged or sparse tensor of a replica, given its tensors."""
        return tf.nest.pack_sequence_as(_specs[self.spec_number], list(tensors), expand_composites=True)

    def refuse(self, operation: str) -> NoReturn:
        """Raise ModelError: an operation, such as `all_reduce`, combines only dense tensors."""
        tensor_class = type(_specs[self.spec_number]).__name__.removesuffix("Spec")
        raise ModelError(
            f"{operation} combines dense tensors, not a {tensor_class} of each replica: make it dense in the "
            "function of strategy.run, as with ragged.to_tensor() or tf.sparse.to_dense(sparse), or get "
            "those of this worker with strategy.experimental_local_results"
        )

    def __repr__(self) -> str:
        return f"PerReplica({_specs[self.spec_number]})"

    __str__ = __repr__


_specs: list[Any] = []
"""The specs of ragged and sparse results; a field of an extension type cannot hold one."""


def parts_of_leaf(leaf: Any) -> Sequence[Any]:
    """Return the parts of a leaf of arguments. Each replica may have its own value of a part."""
    return leaf.parts if isinstance(leaf, CompositePerReplica) else (leaf,)


def per_replica(values: Values, store: ValueStore) -> list[SymbolicPerReplica]:
    """Store `values`, and return one PerReplica for each leaf, which keep the values alive."""
    handle = store.put(values)
    leaves = symbolic(tf.constant(handle, tf.int64), store, values.specs)
    for leaf in leaves:
        leaf.__dict__["_stored"] = store.find(handle)
    return leaves


def symbolic(handle: Any, store: ValueStore, specs: Sequence[Spec]) -> list[SymbolicPerReplica]:
    """Return one PerReplica for each of `specs`, the leaves of the values with `handle`, a tensor."""
    return [
        SymbolicPerReplica(handle, store.number, leaf, tf.as_dtype(spec.dtype), tf.TensorShape(spec.shape))
        for leaf, spec in enumerate(specs)
    ]


def spec_of(tensor: Any) -> Spec:
    """Return the spec of a tensor, which may be symbolic.

    Raises:
        ModelError: the number of its axes is unknown.
    """
    if tensor.shape.rank is None:
        raise ModelError(
            f"strategy.run's function returns {tensor.name}, whose shape is unknown: set it first, "
            "as in tensor.set_shape(()) for one number, or tensor.set_shape([None, 3])"
        )
    return Spec(tensor.dtype.name, tuple(tensor.shape))


def to_numpy(array: Any) -> Any:
    """Return an array as a NumPy array, which shares its memory on a CPU and is a copy otherwise."""
    # TensorFlow returns a scalar of a dtype that NumPy lacks, such as bfloat16, not as an array.
    scalar = isinstance(array, tf.Tensor) and array.shape.rank == 0
    return np.asarray(array.numpy() if scalar else array)
