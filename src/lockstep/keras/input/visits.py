"""The order in which passes visit items: Keras's own if the script has set a seed, otherwise the job's.

After `keras.utils.set_random_seed`, Keras's own order is a function of the script. Every worker then draws it
as Keras does, from the same random states and at the same times, so that these also match plain Keras.

With one replica, all random numbers of the script are therefore those of plain Keras. Workers compare the
random states before a call in which the order follows from them; if only some workers draw, the job ends with
a message that says so. Snapshots contain the random states with which the pass in progress began. A worker
that joins, or a job that resumes in the middle of a pass, sets them where that pass begins, and so visits the
rest of it in the same order.

Without a seed of the script, the order is a function of the job's seed, the number of the call and the pass.
Only calls that the script itself makes are numbered, so a call that failed midway does not shift the others.
The script's seed is noted when it is set (`worker/script_seed.py`).
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import keras
import numpy as np

from lockstep.data.order import Indices, Order, Shuffle
from lockstep.errors import DataError
from lockstep.keras.input.streams import easily_freed, on_host
from lockstep.keras.private.common import ArrayDataAdapter
from lockstep.keras.randomness import digest_of_states, seed_of_script

Batch = TypeVar("Batch")
OrderSeed = tuple[int, ...] | None
"""The numbers that determine the job's own order; None for the order that Keras draws."""
NO_EXAMPLES = "the input has no examples"


class Visits(Protocol):
    """The order in which passes visit items."""

    def begin(self) -> Iterator[Indices]:
        """Begin the next pass; yield the items of each batch."""

    def sample(self) -> Indices:
        """Return the items of the sample batch that Keras reads before the first pass; make Keras's draws."""

    def fact(self) -> str:
        """Describe the source of the order; equal on all workers that have the same order."""


def order_seed(job_seed: int, call: int) -> OrderSeed:
    """Return the numbers that determine the order of the examples in a call of the script.

    None if the script has called `keras.utils.set_random_seed`, even before `keras.utils.clear_session`.
    """
    return (job_seed, call) if seed_of_script() is None else None


def visits(count: int, batch_size: int, shuffle: Shuffle, seed: OrderSeed) -> Visits:
    """Return the order of `count` examples; see `lockstep.data.order.Order`."""
    if seed is not None or not shuffle:
        return _JobsVisits(Order(count, batch_size, shuffle, seed or ()))
    return _keras_visits(count, batch_size, shuffle)


def draw_as_a_loader() -> None:
    """Draw the random numbers that PyTorch draws at the start of an iteration over a `DataLoader`."""
    if keras.backend.backend() == "torch":
        from torch.utils.data import DataLoader

        iter(DataLoader([None]))


def first_of_pass(batches: Iterator[Batch]) -> Batch:
    """Return the first batch of a pass; read as many batches as Keras reads before it returns that.

    Raises:
        DataError: the pass has no batch.
    """
    first = [*itertools.islice(batches, _batches_of_a_sample())]
    if not first:
        raise DataError(NO_EXAMPLES)
    return first[0]


def _batches_of_a_sample() -> int:
    """Return the number of batches that Keras reads from an input to get its first one."""
    if keras.backend.backend() != "jax":
        return 1
    from lockstep.keras.private.jax import batches_read_for_the_first

    return batches_read_for_the_first()


class _JobsVisits:
    """The job's own order: different in each pass, independent of the random states."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._passes = 0

    def begin(self) -> Iterator[Indices]:
        number = self._passes
        self._passes += 1
        return self._order.visit(number)

    def sample(self) -> Indices:
        """Return the first items, without draws."""
        return slice(0, min(self._order.count, self._order.batch_size))

    def fact(self) -> str:
        order = self._order
        return f"batches of {order.batch_size}, shuffle {order.shuffle}, seed {order.seed}"


@dataclass(frozen=True)
class _KerasVisits:
    """An order that Keras's own adapter draws, applied to the indices of the examples.

    Attributes:
        about: a description of it.
        states: the random states that determine it, by their names in `random_states`.
        draw: draws the next pass; yields the items of each batch.
    """

    about: str
    states: tuple[str, ...]
    draw: Callable[[], Iterator[Indices]]

    def begin(self) -> Iterator[Indices]:
        return self.draw()

    def sample(self) -> Indices:
        return first_of_pass(self.begin())

    def fact(self) -> str:
        return f"{self.about}, random states {digest_of_states(self.states)}"


def _keras_visits(count: int, batch_size: int, shuffle: Shuffle) -> _KerasVisits:
    """Return the order that Keras draws: a whole pass when its first batch is read, or each batch by itself.

    The graphs of TensorFlow draw the same order in each pass if the script has set a seed.
    """
    about, examples = f"batches of {batch_size}, shuffle {shuffle}", np.arange(count)
    if (backend := keras.backend.backend()) == "tensorflow":
        # The batch size does not matter if all examples are shuffled, and a single batch is faster to read.
        size = batch_size if shuffle == "batch" else count
        adapter = ArrayDataAdapter(examples, batch_size=size, shuffle=shuffle)
        drawn = [on_host(indices) for indices in easily_freed(adapter.get_tf_dataset())]
        batches: list[Any] = [
            indices[start : start + batch_size]
            for indices in drawn
            for start in range(0, len(indices), batch_size)
        ]
        return _KerasVisits(about, (), lambda: iter(batches))
    adapter = ArrayDataAdapter(examples, batch_size=batch_size, shuffle=shuffle)

    def by_numpy() -> Iterator[Indices]:
        yield from adapter.get_numpy_iterator()

    def by_torch() -> Iterator[Indices]:
        for indices in adapter.get_torch_dataloader().batch_sampler:
            yield np.array(indices)

    return (
        _KerasVisits(about, ("numpy",), by_numpy)
        if backend == "jax"
        else _KerasVisits(about, ("torch",), by_torch)
    )


class BatchVisits:
    """The shuffled order of the batches of a `PyDataset`, whose passes may have different numbers of batches.

    Keras's own is drawn by Python when the first batch of a pass is read.
    """

    def __init__(self, seed: OrderSeed) -> None:
        self._seed = seed
        self._passes = 0

    def begin(self, count: int) -> Sequence[int]:
        """Begin the next pass over `count` batches; return their order."""
        if self._seed is None:
            order = list(range(count))
            random.shuffle(order)
            return order
        number = self._passes
        self._passes += 1
        batches = Order(count, 1, True, self._seed).visit(number)
        return [int(indices[0]) for indices in batches if not isinstance(indices, slice)]

    def sample(self, count: int) -> Sequence[int]:
        """Return the order of a pass from which Keras reads a sample batch; make Keras's draws."""
        return range(count) if self._seed is not None else self.begin(count)

    def fact(self, count: int | None) -> str:
        """Describe the source of the order; equal on all workers that have the same order."""
        source = f"random states {digest_of_states(('python',))}" if self._seed is None else self._seed
        return f"{count} batches, {source}"


class ReorderedDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """A `PyDataset` whose batches come in an order of this module.

    Like Keras, it asks the dataset for the number of its batches at the beginning of each pass: the dataset
    may change between epochs.

    Attributes:
        inner: the dataset itself.
        visits: the order of the batches; None for the order of the dataset itself, which a dataset that never
            ends always keeps.
    """

    def __init__(self, inner: keras.utils.PyDataset, shuffle: bool, seed: OrderSeed) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self.inner = inner
        self.visits = BatchVisits(seed) if shuffle else None
        self._order: Sequence[int] = ()

    def begin_pass(self) -> Sequence[int]:
        """Draw the order of the next pass; return the batches in this order, or nothing for their own."""
        count = self.num_batches
        self._order = () if self.visits is None or count is None else self.visits.begin(count)
        return self._order

    def first(self) -> Any:
        """Return the first batch of a pass that Keras begins to read a sample."""
        count = self.num_batches
        order: Iterable[int] = itertools.count() if count is None else range(count)
        if self.visits is not None and count is not None:
            order = self.visits.sample(count)
        return first_of_pass(self.inner[index] for index in order)

    def fact(self) -> str | None:
        """A description of the source of the order, or None for the dataset's own."""
        count = self.num_batches
        return None if self.visits is None or count is None else self.visits.fact(count)

    def __getitem__(self, index: int) -> Any:
        return self.inner[self._order[index] if self._order else index]

    @property
    def num_batches(self) -> int | None:
        """The number of batches, or None if the dataset never ends."""
        batches: int | None = self.inner.num_batches
        return batches
