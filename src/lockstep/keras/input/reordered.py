"""A `PyDataset` with its batches in the order in which passes visit them."""

from typing import Any

import keras

from lockstep.keras.input.visits import OrderSeed, Visits, visits_of_batches


class Reordered(keras.utils.PyDataset):  # type: ignore[misc]
    """A `PyDataset` whose batches have the order of `lockstep.keras.input.visits`.

    Attributes:
        inner: the dataset itself.
        visits: the order; None for its own.
    """

    def __init__(self, inner: keras.utils.PyDataset, shuffle: bool, seed: OrderSeed) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.inner = inner
        count = inner.num_batches
        self.visits: Visits | None = visits_of_batches(count, seed) if shuffle and count is not None else None
        self._order: list[int] = []

    def begin_pass(self) -> None:
        """Draw the order of the next pass."""
        if self.visits is not None:
            self._order = [
                int(indices[0]) for indices in self.visits.begin() if not isinstance(indices, slice)
            ]

    def first(self) -> Any:
        """Return the first batch of a pass that Keras begins to read a sample."""
        looked = slice(0, 1) if self.visits is None else self.visits.look()
        return self.inner[looked.start if isinstance(looked, slice) else int(looked[0])]

    def __getitem__(self, index: int) -> Any:
        return self.inner[index if self.visits is None else self._order[index]]

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None if the dataset never ends."""
        batches: int | None = self.inner.num_batches
        return batches
