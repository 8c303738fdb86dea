"""The input of `fit`, `evaluate` and `predict` on a dataset that the program has distributed itself."""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from lockstep.data.batch import GlobalBatch, JoinedBatch
from lockstep.errors import DataError
from lockstep.keras.input.batches import Element
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.inputs import GlobalInput, whole_batch
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.nests import Nest, packed


class DistributedInput(GlobalInput):
    """A distributed dataset, whose elements are `(x, y, sample_weight)` or the part that a loop needs.

    Args:
        dataset: of global batches, or with a pipeline per replica.
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
        """Describe the number of elements, which are compared when they are read."""
        return {"data": f"a distributed dataset of {self.num_batches or 'some'} batches"}

    def first(self) -> Any:
        """Return an element to build a model with."""
        return _data(self._source.sample())

    def peek(self) -> Any:
        """Return the first element of the next pass, which still yields it."""
        return _data(self._source.peek())


class _Length:
    """The interface that Keras requires of an adapter."""

    batch_size = None

    def __init__(self, dataset: DistributedDataset) -> None:
        length = dataset.source.length
        self.num_batches = None if length is None or length == inf else int(length)

    def on_epoch_begin(self) -> None:
        """Do nothing: the dataset is not notified."""

    def on_epoch_end(self) -> None:
        """Do nothing: the dataset is not notified."""


def _reader(element: Element) -> Callable[[int], Any]:
    """Return a function that reads a replica's part; for one without examples, a part with zero rows."""

    def read(replica: int) -> Any:
        values = element.values
        return _data(packed(element.nest, values.of(replica)) if values.examples(replica) else element.nest)

    return read


def _data(nest: Nest) -> Any:
    """Return the data in a form that Keras accepts: a tuple for (x, y), not a list."""
    return tuple(nest) if isinstance(nest, list) else nest


def distributed_input(
    x: DistributedDataset, y: Any, sample_weight: Any, class_weight: Any = None
) -> GlobalInput:
    """Convert a distributed dataset passed to `fit` or `evaluate` into global batches.

    Raises:
        DataError: it was passed together with arguments that only arrays allow.
    """
    if y is not None or sample_weight is not None or class_weight is not None:
        raise DataError(
            "with a distributed dataset, targets and weights come from the dataset itself: let its elements "
            "be (x, y) or (x, y, sample_weight), and give no class_weight"
        )
    return DistributedInput(x)
