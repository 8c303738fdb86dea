"""Random numbers that the items of a dataset draw while they are read.

An item draws from states that depend only on a seed, the pass and the position of the item in the pass: not
on the process that reads it, on the items read before, or on the number of replicas. An item that a pass
reads twice has two positions, so it draws twice.

The states are those of Python, NumPy, PyTorch (except for its devices), Keras's operations without a seed,
and TensorFlow's eager operations. The states of the program stay as they are.
"""

import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import xxhash

from lockstep.keras.randomness import (
    TENSORFLOW,
    OperationNumbers,
    current_states,
    imported_frameworks,
    restore_states,
    set_global_generator,
    tensorflow_context,
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class ItemDraws:
    """Reads items, each with random states that depend on the seed, the pass and its position.

    Comparing random states costs less than seeding them for each item: items are read several at a time until
    one of them draws. An instance can be pickled, and belongs to one thread at a time.

    Args:
        seed: 64 bits.

    Attributes:
        drawn: whether an item has drawn random numbers.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.drawn = False

    def read(
        self, number: int, items: Mapping[int, Item], fetch: Callable[[list[Item]], Sequence[Result]]
    ) -> list[Result]:
        """Return what `fetch` returns for the items, in their order.

        Args:
            number: of the pass, from 0.
            items: by their positions in the pass, from 0.
            fetch: returns a result for each of the items that it gets; is called again for each item alone
                if one of them draws, and again if one of them imports a framework, which could not be seeded
                before.
        """
        while True:
            known = imported_frameworks()
            results = self._read(number, items, fetch)
            if imported_frameworks() == known:
                return results

    def _read(
        self, number: int, items: Mapping[int, Item], fetch: Callable[[list[Item]], Sequence[Result]]
    ) -> list[Result]:
        if not self.drawn:
            with _apart() as draws:
                results = list(fetch(list(items.values())))
                self.drawn = draws.drawn()
            if not self.drawn:
                return results
        results = []
        with _apart() as draws:
            for position, item in items.items():
                draws.seed(xxhash.xxh3_64_intdigest(struct.pack("<3Q", self._seed, number, position)))
                results.extend(fetch([item]))
        return results


@contextmanager
def states_kept() -> Iterator[dict[str, Any]]:
    """Restore the program's random states after the block; return them."""
    before = current_states()
    try:
        yield before
    finally:
        restore_states(_after_imports(before))


@contextmanager
def _apart() -> Iterator["_Draws"]:
    """Keep the program's random states; return those within the block."""
    before = current_states()
    draws = _Draws(before)
    try:
        with draws.tensorflow():
            yield draws
    finally:
        if draws.changed:
            restore_states(_after_imports(before))
        else:
            draws.leave()


def _after_imports(before: dict[str, Any]) -> dict[str, Any]:
    """Return states with those of frameworks that were imported since, as they were after the import."""
    if TENSORFLOW in sys.modules and "tensorflow" not in before:
        seed = tensorflow_context()._seed
        before["tensorflow"] = seed, random.Random(seed)
    if (torch := sys.modules.get("torch")) is not None and "torch" not in before:
        before["torch"] = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return before


class _Draws:
    """The random states while items are read: those of the program, until they are seeded.

    Attributes:
        changed: whether the program's states may have changed.
    """

    def __init__(self, before: Mapping[str, Any]) -> None:
        self._before = before
        self._keras = OperationNumbers()
        self._operation_seeds: _OperationSeeds | None = None
        self._eager: Any = None
        self.changed = True
        set_global_generator(self._keras)

    @contextmanager
    def tensorflow(self) -> Iterator[None]:
        """Replace TensorFlow's operations within the block by ones that these states determine."""
        if TENSORFLOW not in sys.modules:
            yield
            return
        from lockstep.keras.tf_random_ops import EagerDraws, drawn_from

        self._eager, self._operation_seeds = EagerDraws(0), _OperationSeeds(0)
        tensorflow_context()._rng = self._operation_seeds
        with drawn_from(self._eager):
            yield

    def drawn(self) -> bool:
        """Whether numbers have been drawn from states that are not seeded."""
        self.changed = self._differ()
        return self.changed

    def leave(self) -> None:
        """Give the program its generators if nothing else has changed, which is faster than restoring."""
        set_global_generator(self._before["keras"][1])
        if self._eager is not None:
            tensorflow_context()._rng = self._before["tensorflow"][1]

    def _differ(self) -> bool:
        if self._keras.draws:
            return True
        seeds = self._operation_seeds
        if seeds is not None and (self._eager.used or seeds.draws or tensorflow_context()._rng is not seeds):
            return True
        before, now = self._before, current_states()
        return not (
            (now["python"] is before["python"] or now["python"] == before["python"])
            and (now["numpy"] is before["numpy"] or _same(now["numpy"], before["numpy"]))
            and ("torch" not in before or now["torch"].equal(before["torch"]))
            and now["keras"] == (before["keras"][0], self._keras)
        )

    def seed(self, seed: int) -> None:
        """Set all states to ones derived from 64 bits."""
        random.seed(seed)
        np.random.seed([seed % 2**32, seed >> 32])
        if (torch := sys.modules.get("torch")) is not None:
            torch.default_generator.manual_seed(seed)
        self._keras.seed(seed)
        set_global_generator(self._keras)
        if self._operation_seeds is not None:
            self._eager.reset(seed)
            self._operation_seeds.seed(seed)
            context = tensorflow_context()
            context._seed, context._rng = seed, self._operation_seeds


class _OperationSeeds(random.Random):
    """The numbers from which TensorFlow seeds its eager operations; counts its draws."""

    draws = 0

    def getrandbits(self, k: int, /) -> int:
        self.draws += 1
        return super().getrandbits(k)


def _same(one: Any, other: Any) -> bool:
    """Whether two states of NumPy are equal."""
    return isinstance(one, tuple) and all(map(np.array_equal, one, other))
