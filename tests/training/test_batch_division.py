"""Batches of a `PyDataset` that workers divide among them; each worker is a thread.

Every replica gets the rows of plain iteration, in any view, at any loss and join, and all members make the
same calls of the exchange.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.collectives.contract import Communicator, WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.data.batch import GlobalBatch, replica_rows
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError, PeerLostError
from lockstep.keras.input import batch_division
from lockstep.keras.input.batch_division import BatchDivision, HeldRows, decoded, division, encoded
from lockstep.keras.input.fit_inputs import global_input
from lockstep.keras.input.item_draws import ItemDraws
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.visits import ReorderedDataset
from lockstep.keras.nests import leaves_of
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.protocol.worker import Notice
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.peers import Alone, EnteredView
from thread_hub import Hub

SEED = 5
PASSES = 2
PATIENCE = 120.0


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches that differ; the last one has fewer rows than there are replicas. Counts the calls."""

    def __init__(self, batches: int = 7, size: int = 6, last: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.batches, self.size, self.last = batches, size, last
        self.made: Counter[int] = Counter()
        self.fail: Callable[[int], None] = lambda index: None

    @property
    def num_batches(self) -> int | None:
        return self.batches

    def __getitem__(self, index: int) -> Any:
        self.made[index] += 1
        self.fail(index)
        rows = self.last if index + 1 == self.batches else self.size
        x = np.arange(rows * 3, dtype="float32").reshape(rows, 3) + 100 * index
        return {"a": x, "b": [x.astype("int16")[:, ::2], None]}, np.array([f"row {i}" for i in range(rows)])


def job_of(view: View) -> Job:
    context = JobContext(0, Bus(SystemClock(), 0), JobSettings(threads=1))
    return Job(context, (view, by_itself(view)))


def reader_in(view: View) -> ReadingWorker:
    return ReadingWorker(job_of(view), SEED)


def rows_of(data: Any, replica: int, replicas: int) -> str:
    leaves = leaves_of(data)
    examples = len(leaves[0])
    return digest_arrays(leaf[replica_rows(examples, replica, replicas)] for leaf in leaves).hex()


@pytest.fixture(autouse=True)
def _threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job, each worker is a process with its own random states and its own counter of readers."""
    # Two threads that are the first to read would both create the counter.
    batch_division.OrderedEnqueuer(Batches(), 1, False, 1)
    lock, read = threading.RLock(), ItemDraws.read

    def locked(self: ItemDraws, *args: Any) -> Any:
        with lock:
            return read(self, *args)

    monkeypatch.setattr(ItemDraws, "read", locked)
    monkeypatch.setattr(batch_division, "HAND_OVER_SECONDS", 0.0)
    monkeypatch.setattr(batch_division, "HAND_OVER_SECONDS_PER_BYTE", 0.0)


class KilledError(BaseException):
    """Ends the thread of a worker that is lost."""


class World:
    """A job whose workers are threads; the coordinator's part is played by those that cause a change.

    Attributes:
        join_after: the number of steps after which the members let `joiner` join.
    """

    def __init__(self, replicas: int, workers: tuple[int, ...], join_after: int | None = None) -> None:
        self.replicas = replicas
        self.join_after = join_after
        self.joiner = max(workers) + 1
        self.steps = 0
        self.waits = threading.Event()
        self._changed = threading.Condition()
        self._open(workers, 1)

    def _open(self, workers: tuple[int, ...], number: int) -> None:
        self.view = place(self.replicas, workers, number)
        self.hub = Hub(ReducePlan.of(self.view), WaitPolicy(timeout=PATIENCE))

    def change(self, workers: tuple[int, ...], reason: str) -> None:
        with self._changed:
            before = self.hub
            self._open(workers, self.view.number + 1)
            self._changed.notify_all()
        before.abort(reason)

    def lose(self, worker: int) -> None:
        self.change(tuple(w for w in self.view.workers if w != worker), f"worker {worker} is lost")
        raise KilledError

    def place_of(self, worker: int, after: int = 0) -> EnteredView:
        """Wait for a view of this worker with a higher number."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.view.number > after and worker in self.view.workers, PATIENCE
            )
            return self.view, self.hub.member(self.view.workers.index(worker))


class ViewOfWorld(Alone):
    """The `Membership` of one worker of a world."""

    def __init__(self, world: World, worker: int, faults: "Faults") -> None:
        self._world, self._worker, self._faults = world, worker, faults
        self.number = 1

    def entered(self, found: EnteredView) -> EnteredView:
        self.number = found[0].number
        return found[0], self._faults.around(found[1])

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        return self.entered(self._world.place_of(self._worker, self.number))

    def hand_over(self, contents: Any, *, whole: bool) -> None:
        world = self._world
        world.steps = contents
        world.change((*world.view.workers, world.joiner), "workers join")

    def join(self) -> Any:
        self._world.waits.set()
        found = self._world.place_of(self._worker)
        return self._world.steps, self.entered(found)


class Faults:
    """Loses a worker before or after one of its calls of the exchange, or at one of its batches."""

    def __init__(self, world: World, worker: int, at: tuple[str, int] | None = None) -> None:
        self._world, self._worker, self._at = world, worker, at
        self.passed: Counter[str] = Counter()

    def passing(self, place: str) -> None:
        self.passed[place] += 1
        if (place, self.passed[place]) == self._at:
            self._world.lose(self._worker)

    def around(self, communicator: Communicator) -> Any:
        faults = self

        class Faulty:
            def __getattr__(self, name: str) -> Any:
                found = getattr(communicator, name)
                if name not in ("all_to_all", "gather", "barrier"):
                    return found

                def call(*args: Any, **options: Any) -> Any:
                    faults.passing(f"before {name}")
                    result = found(*args, **options)
                    faults.passing(f"after {name}")
                    return result

                return call

        return Faulty()


class Worker:
    """A worker that trains: it reads, exchanges a check in each step, and keeps what its replicas got."""

    def __init__(
        self, world: World, worker: int, dataset: Any, shuffle: bool, at: tuple[str, int] | None = None
    ) -> None:
        self.world, self.worker, self.dataset, self.shuffle = world, worker, dataset, shuffle
        self.faults = Faults(world, worker, at)
        self.got: dict[tuple[int, int], str] = {}
        self.before_step: Callable[[int], None] = lambda step: None
        self.fail: Callable[[int], None] = lambda index: self.faults.passing("batch")

    def run(self, steps: int | None = None) -> None:
        world, joins = self.world, self.worker not in self.world.view.workers
        membership = ViewOfWorld(world, self.worker, self.faults)
        if joins:
            view = place(world.replicas, (self.worker,))
            found: EnteredView = view, by_itself(view)
        else:
            found = membership.entered(world.place_of(self.worker))
        context = JobContext(self.worker, Bus(SystemClock(), self.worker), JobSettings(threads=1))
        self.job = Job(context, found, membership, joins=joins)
        visited = ReorderedDataset(self.dataset, self.shuffle, (SEED,))
        source = division(visited, lambda batch: batch, ReadingWorker(self.job, SEED))
        assert isinstance(source, BatchDivision), source
        self.dataset.made.clear()
        self.dataset.fail = self.fail
        taken, skipped = 0, max(1, (world.join_after or 1) - 1) if joins else 0
        for _ in range(PASSES):
            for batch in source.begin():
                if taken == steps:
                    return
                taken += 1
                if taken <= skipped:
                    if taken == skipped and self.job.joins:
                        self._take(batch.read(nullcontext), self.job.view, 0)
                        skipped = self.job.join()
                    continue
                self.before_step(taken)
                self._step(batch.read(nullcontext), taken)
                self.job.between_steps(lambda whole, taken=taken: taken)
            source.note_epoch()

    def _step(self, batch: GlobalBatch, step: int) -> None:
        if self.job.is_chief and step == self.world.join_after:
            assert self.world.waits.wait(PATIENCE)
            self.world.hub.post_notice(Notice.CHANGE)

        def act(view: View, communicator: Communicator) -> list[bytes]:
            self._take(batch, view, step)
            return communicator.gather(batch.check(), what=f"step {step}")

        assert len(set(self.job.exchange(act))) == 1

    def _take(self, batch: GlobalBatch, view: View, step: int) -> None:
        for replica in view.replicas_of(self.worker):
            share = batch.share(replica)
            if share.examples and step:
                data = share.data()
                self.got[step, replica] = digest_arrays(leaves_of(data)).hex()


def run(workers: list[Worker], steps: int | None = None) -> None:
    def one(worker: Worker) -> None:
        try:
            worker.run(steps)
        except KilledError:
            pass
        except BaseException as error:
            worker.world.hub.abort(f"worker {worker.worker}: {error!r}")
            raise

    with ThreadPoolExecutor(len(workers)) as threads:
        for done in [threads.submit(one, worker) for worker in workers]:
            done.result(PATIENCE)


def wanted(dataset: Any, shuffle: bool, replicas: int, steps: int | None = None) -> dict[Any, str]:
    """What each replica gets by plain iteration, in the job's order."""
    visited = ReorderedDataset(dataset, shuffle, (SEED,))
    found: dict[Any, str] = {}
    step = 0
    for _ in range(PASSES):
        visited.begin_pass()
        for index in count() if visited.num_batches is None else range(visited.num_batches):
            if step == steps:
                return found
            step += 1
            data = visited[index]
            for replica in range(replicas):
                rows = replica_rows(len(data[0]["a"]), replica, replicas)
                if rows.start < rows.stop:
                    found[step, replica] = rows_of(data, replica, replicas)
    return found


def members(
    world: World, shuffle: bool = True, lost: int = -1, at: Any = None, **options: Any
) -> list[Worker]:
    joiner = () if world.join_after is None else (world.joiner,)
    return [
        Worker(world, worker, Batches(**options), shuffle, at if worker == lost else None)
        for worker in (*world.view.workers, *joiner)
    ]


def together(workers: list[Worker]) -> dict[Any, str]:
    """All that replicas got; all workers that computed a replica in a step got the same."""
    found: dict[Any, str] = {}
    for worker in workers:
        for key, rows in worker.got.items():
            assert found.setdefault(key, rows) == rows
    return found


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("replicas", "workers"), [(2, 1), (2, 2), (4, 3), (4, 4), (5, 2)])
def test_replicas_get_the_rows_of_plain_iteration(replicas: int, workers: int, shuffle: bool) -> None:
    world = World(replicas, tuple(range(workers)))
    found = members(world, shuffle)
    run(found)
    assert together(found) == wanted(Batches(), shuffle, replicas)


def compares_nothing(reader: ReadingWorker, number: int, step: int) -> None:
    """No step compares the rows of a replica, which all workers would read."""


def test_each_batch_is_made_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadingWorker, "compared_replica", compares_nothing)
    found = members(World(4, (0, 1)), batches=8)
    run(found)
    made = found[0].dataset.made + found[1].dataset.made
    assert [sum(worker.dataset.made.values()) for worker in found] == [8, 8]
    assert made == Counter(dict.fromkeys(range(8), PASSES))


class Opened(Batches):
    """Opens its file with the first batch that is read."""

    file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or object()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 2])
def test_threads_may_open_a_file(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadingWorker, "compared_replica", compares_nothing)
    world = World(4, tuple(range(workers)))
    found = [Worker(world, worker, Opened(workers=2), True) for worker in world.view.workers]
    run(found)
    assert together(found) == wanted(Batches(), True, 4)


def test_cheap_batches_are_made_by_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_division, "HAND_OVER_SECONDS", 1e9)
    found = members(World(4, (0, 1)))
    run(found)
    assert [sum(worker.dataset.made.values()) for worker in found] == [7 * PASSES] * 2
    assert not found[0].faults.passed["before all_to_all"]
    assert together(found) == wanted(Batches(), True, 4)


def test_the_chief_decides_in_each_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_division, "DECIDE_EVERY", 1)
    coins = count()
    monkeypatch.setattr(BatchDivision, "pays", property(lambda self: next(coins) % 2 == 0))
    found = members(World(3, (0, 1, 2)))
    run(found)
    assert together(found) == wanted(Batches(), True, 3)
    handed = {worker.faults.passed["after all_to_all"] for worker in found}
    assert handed == {PASSES * 3 // 2}


CALLS = ("all_to_all", "gather")
PLACES = [*(f"{when} {name}" for name in CALLS for when in ("before", "after")), "batch"]


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_worker_may_be_lost_anywhere(
    lost: int, where: str, nth: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_division, "DECIDE_EVERY", 1)
    if threads > 1 and where == "batch":
        return  # Keras's threads make batches, and a worker is lost in its own.
    monkeypatch.setattr(ReadingWorker, "compared_replica", compares_nothing)
    found = members(World(4, (0, 1, 2)), lost=lost, at=(where, nth), workers=threads)
    run(found)
    assert len(found[0].world.view.workers) == 2
    assert together(found) == wanted(Batches(), True, 4)
    assert together([worker for worker in found if worker.worker != lost]).keys() >= {
        key for key in wanted(Batches(), True, 4) if key[0] > 12
    }


@pytest.mark.parametrize("after", range(1, 13))
@pytest.mark.parametrize("lost", [False, True])
def test_a_worker_may_join_after_any_step(after: int, lost: bool) -> None:
    world = World(4, (0, 1), join_after=after)
    found = members(world, lost=1 if lost else -1, at=("before gather", 16))
    run(found)
    expected = wanted(Batches(), True, 4)
    assert together(found) == expected
    assert {step for step, _ in found[2].got} == {
        step for step, replica in expected if step > after and replica == 3
    }


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_jobs(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(2, 5))
    workers = data.draw(st.integers(1, replicas))
    options = {"batches": data.draw(st.integers(1, 9)), "size": data.draw(st.integers(1, 7))}
    options["last"] = data.draw(st.integers(1, options["size"]))
    shuffle = data.draw(st.booleans())
    lost = data.draw(st.integers(0, workers - 1)) if workers > 1 else -1
    at = data.draw(st.sampled_from(PLACES)), data.draw(st.integers(1, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_division, "DECIDE_EVERY", data.draw(st.integers(1, 3)))
        coins = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
        calls = count()
        patch.setattr(BatchDivision, "pays", property(lambda self: coins[next(calls) % 3]))
        found = members(World(replicas, tuple(range(workers))), shuffle, lost, at, **options)
        run(found)
    assert together(found) == wanted(Batches(**options), shuffle, replicas)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_without_an_end(workers: int) -> None:
    found = members(World(2, tuple(range(workers))), batches=None)  # type: ignore[arg-type]
    run(found, steps=5)
    assert together(found) == wanted(Batches(batches=None), True, 2, steps=5)  # type: ignore[arg-type]


def test_a_batch_that_fails_raises_its_error_in_its_own_step() -> None:
    found = members(World(4, (0, 1)), shuffle=False)
    for worker in found:

        def fail(index: int, worker: Worker = worker) -> None:
            if index == 2:
                raise OSError(f"no file for batch 2 in step {len({step for step, _ in worker.got}) + 1}")

        worker.fail = fail

    def one(worker: Worker) -> str:
        with pytest.raises(OSError, match="no file") as raised:
            worker.run()
        return str(raised.value)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(one, found)) == ["no file for batch 2 in step 3"] * 2


def test_batches_that_were_made_before_a_change_are_made_again() -> None:
    """A callback may change the dataset between steps, on all workers: a batch is that of its own step."""
    found = members(World(4, (0, 1)), shuffle=False, size=4, last=4)
    for worker in found:

        def shrink(step: int, dataset: Any = worker.dataset) -> None:
            dataset.size = 8 if step >= 3 else 4

        worker.before_step = shrink
    run(found)
    sizes = {step: 8 if step >= 3 and step not in (7, 14) else 4 for step in range(1, 15)}
    for (step, replica), rows in together(found).items():
        data = Batches(size=sizes[step], last=4)[(step - 1) % 7]
        assert rows == rows_of(data, replica, 4), step


class Noisy(Batches):
    """Draws from a global random state."""

    def __getitem__(self, index: int) -> Any:
        data, words = super().__getitem__(index)
        return data, np.random.normal(size=len(words))


class SometimesNoisy(Batches):
    """Draws for one batch only, which is not the first."""

    def __getitem__(self, index: int) -> Any:
        data, words = super().__getitem__(index)
        return data, np.random.normal(size=len(words)) if index == 3 else np.zeros(len(words))


def drawn(dataset: Any, *, alone: bool = True) -> list[str]:
    """The batches of two passes, each read in its turn, or in the opposite order."""
    view = place(2, (0,))
    source = division(ReorderedDataset(dataset, False, None), lambda batch: batch, reader_in(view))
    assert isinstance(source, BatchDivision)
    found: dict[tuple[int, int], str] = {}
    for number in range(PASSES):
        pending = list(enumerate(source.begin()))
        for step, batch in pending if alone else pending[::-1]:
            read = batch.read(nullcontext)
            data = read.read(slice(0, read.examples))
            found[number, step] = digest_arrays(leaves_of(data)).hex()
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("kind", [Noisy, SometimesNoisy])
def test_draws_depend_on_the_pass_and_the_place_of_a_batch_only(kind: type[Batches]) -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index,union-attr]
    expected = drawn(kind())
    assert drawn(kind(), alone=False) == expected
    for workers in (2, 3):
        assert drawn(kind(workers=workers, max_queue_size=2)) == expected
    assert np.array_equal(np.random.get_state()[1], state) or kind is SometimesNoisy  # type: ignore[index]
    assert len(set(expected)) == (2 * 7 if kind is Noisy else 7 + 1)


def test_keras_threads_read_batches_that_draw_nothing() -> None:
    dataset = Batches(workers=2, max_queue_size=2)
    source = division(ReorderedDataset(dataset, False, None), lambda batch: batch, reader_in(place(2, (0,))))
    assert isinstance(source, BatchDivision)
    threads = set()
    dataset.fail = lambda index: threads.add(threading.current_thread())
    for batch in source.begin():
        batch.read(nullcontext)
    assert threading.main_thread() not in threads
    assert drawn(Batches(workers=2)) == drawn(Batches())


def test_a_pass_that_is_open_when_the_process_ends_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueuers = []

    class Enqueuer(batch_division.OrderedEnqueuer):  # type: ignore[misc, name-defined]
        def start(self) -> None:
            enqueuers.append(self)
            super().start()

    monkeypatch.setattr(batch_division, "OrderedEnqueuer", Enqueuer)
    dataset = Batches(workers=2, max_queue_size=2)
    source = division(ReorderedDataset(dataset, False, None), lambda batch: batch, reader_in(place(2, (0,))))
    batches: Any = source.begin()
    next(batches).read(nullcontext)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        patch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread begins"))
        batches.close()
    (enqueuer,) = enqueuers
    enqueuer.stop()


# How rows travel.

LEAVES = st.sampled_from(["float32", "int8", "bool", "bfloat16", "complex64", "<U5", "|S3", "datetime64[s]"])


def array(rows: int, dtype: str) -> Any:
    import ml_dtypes  # noqa: F401

    return np.arange(rows * 6).reshape(rows, 2, 3).astype("int64").astype(dtype)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.integers(2, 9), dtypes=st.lists(LEAVES, min_size=1, max_size=4), start=st.integers(0, 1))
def test_rows_survive_the_way(rows: int, dtypes: list[str], start: int) -> None:
    arrays = [array(rows, dtype) for dtype in dtypes]
    for nest in (tuple(arrays), arrays, {f"k{i}": a for i, a in enumerate(arrays)}, ({"z": arrays}, None)):
        held = HeldRows.whole(nest, 0, {})
        (part,) = decoded(np.concatenate(encoded({3: held.cut(slice(start, rows - 1))})), {}).values()
        whole, given = held.read(slice(start, rows - 1)), part.read(slice(start, rows - 1))
        assert keras.tree.flatten(keras.tree.map_structure(type, whole)) == keras.tree.flatten(
            keras.tree.map_structure(type, given)
        )
        for one, other in zip(leaves_of(whole), leaves_of(given), strict=True):
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert part.examples == rows
        assert not part.cover(slice(start, rows))


def test_parts_with_other_numbers_of_rows_are_cut_in_proportion() -> None:
    held = HeldRows.whole((np.arange(4), np.arange(8)), 0, {})
    (part,) = decoded(np.concatenate(encoded({0: held.cut(slice(2, 4))})), {}).values()
    first, second = part.read(slice(3, 4))
    assert (first.tolist(), second.tolist()) == ([3], [6, 7])
    with pytest.raises(DataError, match="parts of 4 and 7 rows"):
        HeldRows.whole((np.arange(4), np.arange(7)), 0, {}).cut(slice(1, 4))


class Words(Batches):
    """Batches of Python's objects, which are not handed over."""

    def __getitem__(self, index: int) -> Any:
        data, words = super().__getitem__(index)
        return data, words.astype(object)


def test_objects_are_read_by_every_worker() -> None:
    found = [Worker(world, worker, Words(), True) for world in [World(4, (0, 1))] for worker in (0, 1)]
    run(found)
    assert together(found) == wanted(Words(), True, 4)
    # The chief decides again when the second pass begins.
    assert found[0].faults.passed["after all_to_all"] == 2


# What is not divided.


class Held(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(1)


class Predicting(Batches):
    def __getitem__(self, index: int) -> Any:
        return MODEL(np.zeros((4, 1)))


MODEL = keras.Sequential([keras.Input((1,))], name="teacher")


class Counting(Batches):
    def __getitem__(self, index: int) -> Any:
        self.reads = getattr(self, "reads", 0) + 1
        return super().__getitem__(index)


numbers = count()


class Differing(Batches):
    def __getitem__(self, index: int) -> Any:
        data, words = super().__getitem__(index)
        return data, np.full(len(words), next(numbers))


class Keeping(Batches):
    """Keeps what it has drawn, in an object that all copies of the dataset share."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = np.random.normal(size=4)
        return self.kept[index]


class Failing(Batches):
    def __getitem__(self, index: int) -> Any:
        raise OSError("no file")


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Held, "dataset.numbers is a numpy.random._generator.Generator, whose numbers depend on"),
        (Predicting, "test_batch_division.MODEL is the model 'teacher', whose values may change"),
        (Counting, "its attribute 'reads' changes when a batch is read"),
        (Keeping, "it keeps random numbers that it has drawn"),
        (Differing, "its first batch differs each time it is read"),
        (Failing, "reading its first batch fails with OSError"),
        (partial(Batches, batches=0), "it has no batches"),
    ],
)
def test_a_dataset_that_depends_on_earlier_reads_is_not_divided(dataset: Any, why: str) -> None:
    made = dataset()
    found = division(ReorderedDataset(made, True, None), lambda batch: batch, reader_in(place(2, (0,))))
    assert isinstance(found, str)
    assert found.startswith(why) or f".{why}" in found
    assert not hasattr(made, "reads")


class Consuming(keras.utils.PyDataset):  # type: ignore[misc]
    """Its batches are those of a generator, whatever index they are read by."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = (np.full((4, 1), float(number)) for number in count())

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return next(self.rows), np.zeros((4, 1))


def test_a_dataset_that_holds_a_generator_is_read_no_further_than_by_keras() -> None:
    dataset = Consuming()
    options: dict[str, Any] = {"batch_size": None, "steps": None, "shuffle": True, "seed": None}
    on_tensorflow = keras.backend.backend() == "tensorflow"
    samples = 2 if on_tensorflow else 1
    for begin in (samples, 2 * samples + 3):
        source = global_input(dataset, **options, unsplit=False, reader=reader_in(place(2, (0, 1))))
        assert "dataset.rows is a generator" in source.way.why
        # As Keras, which reads samples before the first pass; a peek reads no more.
        source.get_tf_dataset() if on_tensorflow else source.first()
        source.peek()
        read = [float(batch.read(slice(0, 1))[0][0, 0]) for batch in source.batches()]
        assert read == [begin, begin + 1, begin + 2]
