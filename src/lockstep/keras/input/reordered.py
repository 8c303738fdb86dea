"""A `PyDataset` in the job's order."""

from typing import Any

import keras

from lockstep.data.order import Order


class Reordered(keras.utils.PyDataset):  # type: ignore[misc]
    """A `PyDataset` whose batches are visited in the job's order."""

    def __init__(self, inner: keras.utils.PyDataset, shuffle: bool, seed: tuple[int, ...]) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.inner = inner
        self._shuffle = shuffle and inner.num_batches is not None
        self._seed = seed
        self._passes = 0
        self._order: list[int] = []

    def begin_pass(self) -> None:
        """Draw the order of the next pass."""
        if self._shuffle:
            order = Order(self.inner.num_batches, 1, True, self._seed).visit(self._passes)
            self._order = [int(index[0]) for index in order if not isinstance(index, slice)]
        self._passes += 1

    def __getitem__(self, index: int) -> Any:
        return self.inner[self._order[index] if self._shuffle else index]

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None where the dataset never ends."""
        batches: int | None = self.inner.num_batches
        return batches
