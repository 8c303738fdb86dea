"""One pipeline for all replicas, whose batches they take in turn, as under `tf.distribute.MirroredStrategy`.

Each replica reads the whole pipeline, and keeps its own batches. So any worker can read for any replica.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from lockstep.data.input_context import InputContext
from lockstep.keras.input.streams import is_tensorflow, read


def batches_in_turn(dataset_fn: Callable[[InputContext], Any]) -> Callable[[InputContext], Any]:
    """Return a function that creates the dataset of a replica: each R-th batch of the one that `dataset_fn`
    creates for all replicas.

    If the shapes of the batches are fixed, a pass ends with the last batch of the last replica, as in
    `tf.distribute`; otherwise some replicas have no examples in the last step.
    """

    def of_replica(context: InputContext) -> Any:
        replicas, replica = context.num_replicas_in_sync, context.input_pipeline_id
        dataset = dataset_fn(InputContext(num_replicas_in_sync=replicas))
        if not is_tensorflow(dataset):
            return _EachNth(dataset, replica, replicas)
        if has_fixed_shapes(dataset):
            return _of_fixed_shapes(dataset, replica, replicas)
        return dataset.shard(replicas, replica)

    return of_replica


def has_fixed_shapes(dataset: Any) -> bool:
    """Whether all elements of a `tf.data.Dataset` have the same shapes, which it declares."""
    import tensorflow as tf

    specs = tf.nest.flatten(dataset.element_spec)
    return all(isinstance(spec, tf.TensorSpec) and spec.shape.is_fully_defined() for spec in specs)


def _of_fixed_shapes(dataset: Any, replica: int, replicas: int) -> Any:
    import tensorflow as tf

    def batch_of_replica(*element: Any) -> Any:
        nest = element[0] if len(element) == 1 else element
        return tf.nest.map_structure(lambda batches: batches[replica], nest)

    return dataset.batch(replicas, drop_remainder=True).map(batch_of_replica)


class _EachNth:
    """The elements of a dataset, from the one at `start` with the index, in steps of `step`."""

    def __init__(self, dataset: Any, start: int, step: int) -> None:
        self._dataset, self._start, self._step = dataset, start, step

    def __iter__(self) -> Iterator[Any]:
        return islice(read(self._dataset), self._start, None, self._step)

    def __len__(self) -> int:
        batches = getattr(self._dataset, "num_batches", None)
        length = len(self._dataset) if batches is None else batches
        return max(0, -(-(length - self._start) // self._step))
