"""The divided update: workers die at every point of every copy, and the state is that of an undivided one."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lockstep.collectives.shared import divided_state
from lockstep.collectives.shared.divided_state import BlockGroup, DividedLayout, DividedState
from lockstep.topology import View, place

Array = npt.NDArray[Any]

ELEMENTS = 16


class Killed(BaseException):
    """A worker dies here: nothing of its own runs afterwards."""


class Kills:
    """Ends the worker that runs at copies with certain numbers, when a part of the copy is written."""

    def __init__(self, points: dict[int, float]) -> None:
        self._points = points
        self.copies = 0

    def copy_all(self, targets: Sequence[Array], sources: Sequence[Array]) -> None:
        for target, source in zip(targets, sources, strict=True):
            number, self.copies = self.copies, self.copies + 1
            written = int(self._points.get(number, 1) * len(target))
            target[:written] = source[:written]
            if number in self._points:
                raise Killed


@contextmanager
def killing(points: dict[int, float]) -> Iterator[Kills]:
    kills = Kills(points)
    before, divided_state.copy_all = divided_state.copy_all, kills.copy_all
    try:
        yield kills
    finally:
        divided_state.copy_all = before


def updated(weights: Array, gradient: Array, slots: Sequence[Array]) -> list[Array]:
    """Return new weights and slots; a repeated update, or one from torn slots, has other values."""
    new = [(3 + i) * slot + gradient * (i + 1) for i, slot in enumerate(slots)]
    return [weights - 7 * gradient - sum(new, start=np.zeros_like(gradient)), *new]


class Twin:
    """The undivided update, on one array of integers for each group."""

    def __init__(self, layout: DividedLayout, seed: int) -> None:
        numbers = np.random.default_rng(seed)
        sizes = [group.blocks * ELEMENTS for group in layout.groups]
        self.weights = [numbers.integers(0, 100, n) for n in sizes]
        self.slots = [
            [numbers.integers(0, 100, n) for _ in range(group.slots)]
            for n, group in zip(sizes, layout.groups, strict=True)
        ]

    def update(self, gradients: Sequence[Array]) -> None:
        for i, gradient in enumerate(gradients):
            self.weights[i], *self.slots[i] = updated(self.weights[i], gradient, self.slots[i])


class Host:
    """The workers of a host, which take steps; a worker that dies is missing from the next view."""

    def __init__(self, layout: DividedLayout, workers: int, seed: int, in_place: bool) -> None:
        self.layout, self.in_place = layout, in_place
        self.twin = Twin(layout, seed)
        self.view = place(layout.replicas, tuple(range(workers)))
        self.weights = {worker: [w.copy() for w in self.twin.weights] for worker in range(workers)}
        # The memory outlives every worker.
        self.memory = np.zeros(layout.size, np.uint8)
        state = DividedState(layout, self.memory)
        for slots, values in zip(state.slots, self.twin.slots, strict=True):
            for slot, value in zip(slots, values, strict=True):
                np.copyto(slot, value)
        self.taken = 0

    def step(self, gradients: Sequence[Array], order: random.Random) -> None:
        self.twin.update(gradients)
        while dead := self._attempt(gradients, order):
            self.view = _without(self.view, dead)
        # All blocks are counted: every worker takes the new weights.
        state = DividedState(self.layout, self.memory)
        self.taken += 1
        for worker in self.view.workers:
            new = state.weights_after(self.taken)
            self.weights[worker] = new if self.layout.versions > 1 else [w.copy() for w in new]

    def _attempt(self, gradients: Sequence[Array], order: random.Random) -> set[int]:
        """Let the workers of a view update, one after the other; return those that died."""
        dead = set[int]()
        for worker in order.sample(self.view.workers, len(self.view.workers)):
            state, weights = DividedState(self.layout, self.memory), self.weights[worker]

            def compute(block: int, slots: Sequence[Array], weights: Any = weights) -> list[Array]:
                group, start, stop = self.layout.places[block]
                new = updated(weights[group][start:stop], gradients[group][start:stop], slots)
                if not self.in_place:
                    return new
                divided_state.copy_all(slots, new[1:])
                return [new[0], *slots]

            try:
                for replica in self.view.replicas_of(worker):
                    state.update(self.taken, replica, compute)
            except Killed:
                dead.add(worker)
        return dead

    def check(self) -> None:
        state = DividedState(self.layout, self.memory)
        for group in range(len(self.layout.groups)):
            for slot, value in zip(state.slots[group], self.twin.slots[group], strict=True):
                np.testing.assert_array_equal(slot, value)
            for worker in self.view.workers:
                np.testing.assert_array_equal(self.weights[worker][group], self.twin.weights[group])


def _without(view: View, dead: set[int]) -> View:
    return place(view.replicas, tuple(w for w in view.workers if w not in dead), view.number + 1)


def _layout(replicas: int, *blocks: int, slots: int = 2, versions: int = 1) -> DividedLayout:
    groups = tuple(BlockGroup(n, np.dtype(np.int64), slots - i % 2) for i, n in enumerate(blocks))
    return DividedLayout(groups, ELEMENTS, replicas, versions)


def _gradients(layout: DividedLayout, seed: int) -> list[Array]:
    numbers = np.random.default_rng(seed)
    return [numbers.integers(-50, 50, group.blocks * ELEMENTS) for group in layout.groups]


def _run(
    layout: DividedLayout,
    workers: int,
    steps: int,
    points: dict[int, float],
    seed: int = 0,
    *,
    in_place: bool = False,
) -> int:
    host, order = Host(layout, workers, seed, in_place), random.Random(seed)
    with killing(points) as kills:
        for step in range(steps):
            host.step(_gradients(layout, step), order)
            host.check()
    return kills.copies


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("versions", [1, 2], ids=["own weights", "shared weights"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_worker_dies_at_each_copy_and_the_state_is_that_of_the_undivided_update(
    share: float, versions: int, in_place: bool
) -> None:
    layout = _layout(3, 4, 1, versions=versions)
    steps = 1 + versions
    copies = _run(layout, 3, steps, {}, in_place=in_place)
    assert copies == steps * (4 * 5 + 3 + in_place * (4 * 2 + 1))
    for number in range(copies):
        _run(layout, 3, steps, {number: share}, in_place=in_place)


def test_two_workers_die_at_each_pair_of_copies_also_while_one_takes_over_for_the_other() -> None:
    layout = _layout(3, 2, 1)
    copies = _run(layout, 3, 1, {})
    for first in range(copies):
        for second in range(first + 1, copies + 5):
            _run(layout, 3, 1, {first: 0.5, second: 0.5})


@pytest.mark.parametrize("seed", range(60))
def test_random_jobs_with_random_losses(seed: int) -> None:
    numbers = random.Random(seed)
    replicas = numbers.randint(1, 6)
    workers = numbers.randint(1, replicas)
    blocks = [numbers.randint(0, 9) for _ in range(numbers.randint(1, 3))]
    layout = _layout(replicas, *blocks, slots=3, versions=1 + seed % 2)
    losses = numbers.randint(0, workers - 1)
    points = {numbers.randint(0, 150): numbers.random() for _ in range(losses)}
    _run(layout, workers, numbers.randint(1, 5), points, seed, in_place=numbers.random() < 0.5)


def test_the_division_depends_on_the_replicas_and_has_each_block_once() -> None:
    layout = _layout(4, 5, 2)
    assert [list(shard) for shard in layout.shards] == [[0, 1], [2, 3], [4, 5], [6]]
    assert [tuple(p) for p in layout.places][4:6] == [(0, 64, 80), (1, 0, 16)]


@pytest.mark.parametrize("fault", ["nothing is kept", "counted first"])
def test_the_simulation_notices_a_block_that_is_not_kept_and_one_that_counts_too_early(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: DividedState, number: int, replica: int, compute: Any) -> None:
        shard, counters = self.layout.shards[replica], self._counters[replica]
        for block in shard[int(counters[0]) - number * len(shard) :]:
            group, start, stop = self.layout.places[block]
            slots = [slot[start:stop] for slot in self.slots[group]]
            new = compute(block, slots)
            if fault == "counted first":
                counters[0] += 1
            divided_state.copy_all([self.weights_after(number + 1)[group][start:stop], *slots], new)
            if fault != "counted first":
                counters[0] += 1

    monkeypatch.setattr(DividedState, "update", update)
    layout = _layout(3, 4)
    copies = _run(layout, 3, 1, {})
    failures = 0
    for number in range(copies):
        try:
            _run(layout, 3, 1, {number: 0.5})
        except AssertionError:
            failures += 1
    assert failures
