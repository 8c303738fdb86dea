"""`fit`, `evaluate` and `predict` on a dataset that the program has distributed itself."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from lockstep.data.batch import GlobalBatch, JoinedBatch
from lockstep.errors import DataError
from lockstep.keras.input.batches import Element
from lockstep.keras.input.distribution import DistributedDataset
from lockstep.keras.input.inputs import GlobalInput, whole_batch
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.input.streams import Nest, packed


class DistributedInput(GlobalInput):
    """A distributed dataset, whose elements are `(x, y, sample_weight)` or what of it a loop needs.

    Args:
        dataset: of global batches, or with a pipeline for each replica.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        super().__init__(_Length(dataset), joint=False)
        self._source = dataset.source

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield the global batches of the next pass."""
        if isinstance(self._source, Pipelines):
            yield from self._joined(self._source)
            return
        current = self._source.begin()
        step = 0
        while (element := next(current, None)) is not None:
            yield whole_batch(_data(element.nest), step)
            step += 1

    def _joined(self, source: Pipelines) -> Iterator[GlobalBatch]:
        current = source.begin()
        while any(counts := current.counts()):
            element = current.element()
            yield JoinedBatch.of(counts, _reader(element), element.values.check)

    def facts(self) -> dict[str, str]:
        """Describe the number of elements; each is compared when it is read."""
        return {"data": f"a distributed dataset of {self.num_batches or 'some'} batches"}

    def first(self) -> Any:
        """Return an element to build a model with."""
        return _data(self._source.sample())

    def peek(self) -> Any:
        """Return the first element of the next pass, which begins with this."""
        return _data(self._source.peek())


class _Length:
    """What Keras asks of an adapter of its own."""

    batch_size = None

    def __init__(self, dataset: DistributedDataset) -> None:
        length = dataset.source.length
        self.num_batches = None if length is None or length == inf else int(length)

    def on_epoch_begin(self) -> None:
        """The dataset is not told."""

    def on_epoch_end(self) -> None:
        """The dataset is not told."""


def _reader(element: Element) -> Callable[[int], Any]:
    """Return what reads a replica's part; of one without examples, what such a part looks like."""

    def read(replica: int) -> Any:
        values = element.values
        return _data(packed(element.nest, values.of(replica)) if values.examples(replica) else element.nest)

    return read


def _data(nest: Nest) -> Any:
    """Return what Keras takes; it does not take a list for (x, y)."""
    return tuple(nest) if isinstance(nest, list) else nest


def distributed_input(
    x: DistributedDataset, y: Any, sample_weight: Any, class_weight: Any = None
) -> GlobalInput:
    """Turn a distributed dataset that `fit` or `evaluate` was given into global batches.

    Raises:
        DataError: it was given together with what only arrays go with.
    """
    if y is not None or sample_weight is not None or class_weight is not None:
        raise DataError(
            "with a distributed dataset, targets and weights come from the dataset itself: let its elements "
            "be (x, y) or (x, y, sample_weight), and give no class_weight"
        )
    return DistributedInput(x)
