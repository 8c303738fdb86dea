"""The batches of a `grain.MapDataset`, which are found by their indices."""

import sys
from typing import Any

import keras
import numpy as np

from lockstep.errors import DataError

_DROP = ("FilterMapDataset", "FlatMapMapDataset")
"""The datasets that have no element, but None, at some of their indices."""


class GrainBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """The elements of a dataset as batches of Keras, read by as many threads as Grain has.

    Args:
        dataset: a `grain.MapDataset` whose elements are batches.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(workers=sys.modules["grain"].ReadOptions().num_threads)
        self._dataset = dataset

    @property
    def num_batches(self) -> int | None:
        """The length of the dataset, or None if it repeats without end."""
        count = len(self._dataset)
        return None if count == sys.maxsize else count

    def __getitem__(self, index: int) -> Any:
        batch = self._dataset[index]
        if batch is None:
            raise DataError(
                f"the grain dataset has no batch {index}: filter examples before they are batched, after "
                "to_iter_dataset()"
            )
        return batch if isinstance(batch, tuple | list | dict | np.ndarray) else (batch,)


def grain_batches(dataset: Any) -> "GrainBatches | str":
    """Return the batches of a Grain dataset or loader, or why they do not have indices."""
    if not isinstance(dataset, sys.modules["grain"].MapDataset):
        return "grain reads it in its own order; a grain.MapDataset of batches returns any of them"
    waiting = [dataset]
    while waiting:
        parent = waiting.pop()
        if type(parent).__name__ in _DROP:
            return "it drops batches, whose places are not known: filter examples, after to_iter_dataset()"
        waiting.extend(getattr(parent, "parents", ()))
    return GrainBatches(dataset)
