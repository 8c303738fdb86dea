"""What stands in TensorFlow's programs for a value that each replica has its own of."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from lockstep.errors import ModelError
from lockstep.keras.per_replica import DistributedValues, Shelf, Spec, Values, text_of
from lockstep.worker.job import current


class SymbolicPerReplica(tf.experimental.ExtensionType, DistributedValues):  # type: ignore[misc]
    """One leaf of what each replica has: the number of the ticket for it, and where it lies.

    It can be given to functions of TensorFlow and returned by them, and never holds the values themselves.
    """

    ticket: tf.Tensor
    shelf: int
    leaf: int
    dtype: tf.DType
    shape: tf.TensorShape

    def __repr__(self) -> str:
        if not isinstance(self.ticket, tf.__internal__.EagerTensor):
            return f"PerReplica({self.dtype.name}, shape={self.shape}, in a graph)"
        own = current().view.replicas_of(current().worker)
        return text_of(own, lambda replica: tf.convert_to_tensor(self.source.leaf(self.leaf, replica)))

    __str__ = __repr__

    @property
    def source(self) -> Values:
        """What the leaf is of; not within a graph.

        Raises:
            DataError: it is gone.
        """
        kept = vars(self).get("_kept")
        return (kept or Shelf.numbered(self.shelf).kept(int(self.ticket))).values

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in their order."""
        own = current().view.replicas_of(current().worker)
        if tf.executing_eagerly():
            return tuple(tf.convert_to_tensor(self.source.leaf(self.leaf, replica)) for replica in own)

        def read(ticket: Any) -> list[Any]:
            values = Shelf.numbered(self.shelf).kept(int(ticket)).values
            return [values.leaf(self.leaf, replica) for replica in own]

        tensors = tf.py_function(read, [self.ticket], [self.dtype] * len(own))
        for tensor in tensors:
            tensor.set_shape(self.shape)
        return tuple(tensors)


def per_replica(values: Values, shelf: Shelf) -> list[SymbolicPerReplica]:
    """Return one PerReplica for each leaf of `values`; they keep the values alive."""
    ticket = shelf.put(values)
    made = symbolic(tf.constant(ticket, tf.int64), shelf, values.specs)
    for one in made:
        one.__dict__["_kept"] = shelf.kept(ticket)
    return made


def symbolic(ticket: Any, shelf: Shelf, specs: Sequence[Spec]) -> list[SymbolicPerReplica]:
    """Return one PerReplica for each of `specs` of the values whose ticket a tensor has."""
    return [
        SymbolicPerReplica(ticket, shelf.number, leaf, tf.as_dtype(spec.dtype), tf.TensorShape(spec.shape))
        for leaf, spec in enumerate(specs)
    ]


def spec_of(tensor: Any) -> Spec:
    """Return what is known of a tensor, which may be one of a graph.

    Raises:
        ModelError: not even its number of axes is known.
    """
    if tensor.shape.rank is None:
        raise ModelError(
            f"strategy.run's function returns {tensor.name}, whose shape is unknown: set it first, "
            "as in tensor.set_shape(()) for one number, or tensor.set_shape([None, 3])"
        )
    return Spec(tensor.dtype.name, tuple(tensor.shape))


def concrete(array: Any) -> Any:
    """View a tensor in place (on a CPU), or copy it to the host."""
    # A single number of a dtype that NumPy does not have itself, as bfloat16, comes as no array.
    single = isinstance(array, tf.Tensor) and array.shape.rank == 0
    return np.asarray(array.numpy() if single else array)
