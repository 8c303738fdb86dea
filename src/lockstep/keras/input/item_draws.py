"""Random numbers that the items of a dataset draw while they are read.

An item draws from states that depend only on a seed, the pass and the position of the item in the pass: not
on the process that reads it, on the items read before, or on the number of replicas. An item that a pass
reads twice has two positions, so it draws twice.

The states are those of Python, NumPy, PyTorch (except for its devices), Keras's operations without a seed,
and TensorFlow's eager operations. The program's states do not change.

Comparing the states before and after a fetch costs less than seeding them for each item: only if they have
changed are the items read again, each with its own states.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from lockstep.keras.private.common import set_global_generator
from lockstep.keras.randomness import OperationNumbers, current_states, imported_frameworks, restore_states
from lockstep.keras.seeds import seed_at
from lockstep.worker.private_modules import (
    TENSORFLOW_CONTEXT,
    set_tensorflow_random_state,
    tensorflow_random_state,
)

Item = TypeVar("Item")
Result = TypeVar("Result")


class ItemDraws:
    """Reads items, each with random states that depend on the seed, the pass and its position.

    Items are read several at a time until one of them draws. An instance can be pickled, and belongs to one
    thread at a time.

    Args:
        seed: 64 bits.

    Attributes:
        drawn: whether an item has drawn random numbers.
    """

    _kept: "_Draws | None" = None

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.drawn = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    def read(
        self,
        number: int,
        positions: Iterable[int],
        items: list[Item],
        fetch: Callable[[list[Item]], Sequence[Result]],
    ) -> list[Result]:
        """Return the results of `fetch` for the items, in their order.

        Args:
            number: the number of the pass, from 0.
            positions: the positions of the items in the pass, from 0, which may be iterated more than once.
            items: the items to read.
            fetch: returns a result for each of its items. It is called again for each item alone if one of
                them draws, and again if one of them imports a framework, which could not be seeded before the
                import.
        """
        while True:
            frameworks = imported_frameworks()
            results = self._read(number, positions, items, fetch)
            if imported_frameworks() == frameworks:
                return results

    def _read(
        self,
        number: int,
        positions: Iterable[int],
        items: list[Item],
        fetch: Callable[[list[Item]], Sequence[Result]],
    ) -> list[Result]:
        apart = self._kept = self._kept or _Draws()
        if not self.drawn:
            with apart:
                results = list(fetch(items))
                self.drawn = apart.drawn()
            if not self.drawn:
                return results
        results = []
        with apart:
            for position, item in zip(positions, items, strict=True):
                apart.seed(seed_at(self._seed, number, position))
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


def _after_imports(before: dict[str, Any]) -> dict[str, Any]:
    """Return states with those of frameworks imported since then, as they were after the import."""
    if TENSORFLOW_CONTEXT in sys.modules and "tensorflow" not in before:
        seed, _ = tensorflow_random_state()
        before["tensorflow"] = seed, random.Random(seed)
    if (torch := sys.modules.get("torch")) is not None and "torch" not in before:
        before["torch"] = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return before


class _Draws:
    """The random states in a block in which items are read: those of the program, until they are seeded.

    After the block, the program's states have their old values. An object can serve several blocks in turn.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._changed = True
        self._keras = OperationNumbers()
        self._operations: _Operations | None = None

    def __enter__(self) -> None:
        self._before = current_states()
        self._changed = True
        if TENSORFLOW_CONTEXT in sys.modules:
            self._operations = self._operations or _Operations()
            self._operations.begin()
        self._keras.draws = 0
        set_global_generator(self._keras)

    def __exit__(self, *raised: object) -> None:
        before = self._before
        if "tensorflow" in before and self._operations is not None:
            self._operations.end()
        if self._changed:
            restore_states(_after_imports(before))
            return
        # This takes less time than comparing all states once more.
        set_global_generator(before["keras"][1])
        if "tensorflow" in before:
            set_tensorflow_random_state(tensorflow_random_state()[0], before["tensorflow"][1])

    def drawn(self) -> bool:
        """Whether numbers have been drawn from states that are not seeded."""
        self._changed = self._differ()
        return self._changed

    def _differ(self) -> bool:
        before = self._before
        if self._keras.draws:
            return True
        if "tensorflow" in before and (self._operations is None or self._operations.used):
            return True
        now = current_states()
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
        if "tensorflow" in self._before and self._operations is not None:
            self._operations.seed(seed)


class _Operations:
    """TensorFlow's operations in a block: replacements that draw from the states of the block."""

    def __init__(self) -> None:
        from lockstep.keras import tf_random_ops

        self._draw_from = tf_random_ops.draw_from
        self._eager = tf_random_ops.EagerDraws(0)
        self._seeds = _OperationSeeds(0)
        self._outside: tf_random_ops.Draws | None = None

    def begin(self) -> None:
        """Begin a block."""
        if self._eager.used:
            self._eager.reset(0)
        self._seeds.draws = 0
        self._outside = self._draw_from(self._eager)
        set_tensorflow_random_state(tensorflow_random_state()[0], self._seeds)

    def end(self) -> None:
        """End the block."""
        self._draw_from(self._outside)

    @property
    def used(self) -> bool:
        """Whether an operation has drawn, or the program has set TensorFlow's seed."""
        return bool(self._eager.used or self._seeds.draws or tensorflow_random_state()[1] is not self._seeds)

    def seed(self, seed: int) -> None:
        """Set the states to ones derived from 64 bits."""
        self._eager.reset(seed)
        self._seeds.seed(seed)
        set_tensorflow_random_state(seed, self._seeds)


class _OperationSeeds(random.Random):
    """The numbers from which TensorFlow seeds its eager operations; counts its draws."""

    draws = 0

    def getrandbits(self, k: int, /) -> int:
        self.draws += 1
        return super().getrandbits(k)


def _same(state: Any, other: Any) -> bool:
    """Whether two states of NumPy are equal."""
    return isinstance(state, tuple) and all(map(np.array_equal, state, other))
