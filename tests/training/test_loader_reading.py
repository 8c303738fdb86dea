"""Map-style DataLoaders are read divided: the batches are those of plain PyTorch on any worker."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.collectives.plan import ReducePlan
from lockstep.data.batch import GlobalBatch
from lockstep.errors import DataError
from lockstep.keras.input import loader_reading as loader_readings
from lockstep.keras.input.fit_inputs import GlobalInput, global_input
from lockstep.keras.input.loader_reading import LoaderReading, loader_reading
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.sources import GlobalBatchSource, StreamReading
from lockstep.keras.input.streams import Stream, host_nest
from lockstep.keras.randomness import random_states, same_states
from lockstep.protocol.job_spec import JobSettings
from lockstep.topology import View, place
from lockstep.worker.job import Job, JobContext
from thread_hub import Hub

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

REPLICAS = 4
FORKS = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""JAX warns of every fork; the processes of a loader use PyTorch and NumPy only."""


class Rows(data.Dataset):  # type: ignore[misc]
    """Rows with their numbers, which count how often they are read in this process."""

    def __init__(self, count: int = 22, draw: Callable[[], float] = float) -> None:
        self.count = count
        self.draw = draw
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self.read.append(int(index))
        return torch.full((3,), float(index)) + self.draw(), int(index)


class Groups(Rows):
    """Reads several rows at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        return [self[index] for index in indices]


def all_draws() -> float:
    return random.random() + np.random.normal() + float(torch.rand(()))


class Worker:
    """A worker of a job of `REPLICAS` replicas, in this process."""

    def __init__(self, worker: int, workers: int, base: JobContext, replicas: int = REPLICAS) -> None:
        view = place(replicas, tuple(range(workers)))
        context = JobContext(
            worker, base.events, JobSettings(workers=workers, seed=base.settings.seed, threads=1)
        )
        self.job = Job(context, (view, Hub(ReducePlan.of(view)).member(0)))
        self.reader = ReadingWorker(self.job, 77)

    def enter(self, view: View) -> None:
        self.job._entered = view, self.job.communicator

    def reading(self, loader: Any) -> LoaderReading:
        found = loader_reading(loader, self.reader)
        assert isinstance(found, LoaderReading), found
        return found

    def own(self, batch: GlobalBatch) -> Any:
        rows = self.reader.own_rows(batch.examples)
        return batch.read(rows) if rows.stop > rows.start else None


@pytest.fixture
def worker(job_of_one_worker: Job) -> Callable[..., Worker]:
    return lambda number=0, workers=1, replicas=REPLICAS: Worker(
        number, workers, job_of_one_worker.context, replicas
    )


Make = Callable[..., Worker]


def whole(batches: Iterator[GlobalBatch]) -> list[tuple[np.ndarray, ...]]:
    return [batch.read(slice(0, batch.examples)) for batch in batches]


def equal(one: Any, other: Any) -> bool:
    leaves = keras.tree.flatten(one), keras.tree.flatten(other)
    return len(leaves[0]) == len(leaves[1]) and all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(*leaves, strict=True)
    )


def by_steps(count: int) -> Iterator[list[int]]:
    """Batches of different sizes, of indices that are drawn when a batch is."""
    for size in (5, 2, 6, 1):
        yield [int(torch.randint(count, ())) for _ in range(size)]


class Drawn(data.Sampler):  # type: ignore[misc]
    def __iter__(self) -> Iterator[list[int]]:
        return by_steps(22)

    def __len__(self) -> int:
        return 4


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: data.DataLoader(Rows(), batch_size=6),
    "shuffled": lambda: data.DataLoader(Rows(), batch_size=6, shuffle=True),
    "groups": lambda: data.DataLoader(Groups(), batch_size=6, shuffle=True),
    "no remainder": lambda: data.DataLoader(Rows(), batch_size=6, shuffle=True, drop_last=True),
    "own generator": lambda: data.DataLoader(
        Rows(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "weighted": lambda: data.DataLoader(
        Rows(), batch_size=6, sampler=data.WeightedRandomSampler([1.0] * 11 + [3.0] * 11, 22)
    ),
    "own batches": lambda: data.DataLoader(Rows(), batch_sampler=Drawn()),
    "subset": lambda: data.DataLoader(
        data.ConcatDataset([data.Subset(Rows(), [3, 5, 7]), Rows(9)]), batch_size=5, shuffle=True
    ),
    "tensors": lambda: data.DataLoader(
        data.TensorDataset(torch.arange(10.0)[:, None], torch.arange(10)), batch_size=4, shuffle=True
    ),
    "dicts": lambda: data.DataLoader(
        [({"a": np.float32(i), "b": [i, i * 2.0]}, (i, np.full(2, i))) for i in range(9)], batch_size=4
    ),
    "small last batch": lambda: data.DataLoader(Rows(13), batch_size=6),
}


@FORKS
@pytest.mark.parametrize(
    ("kind", "processes"),
    [*((kind, 0) for kind in LOADERS), ("shuffled", 2), ("own batches", 2), ("small last batch", 2)],
)
def test_the_batches_are_those_of_pytorch(worker: Make, kind: str, processes: int) -> None:
    keras.utils.set_random_seed(3)
    torch.manual_seed(3)
    loader = LOADERS[kind]()
    read = data.DataLoader(
        loader.dataset, batch_sampler=loader.batch_sampler, generator=loader.generator, num_workers=processes
    )
    torch.manual_seed(5)
    if loader.generator is not None:
        loader.generator.manual_seed(4)
    before = random_states()
    expected = []
    for _ in range(2):
        expected.append([keras.tree.map_structure(np.asarray, tuple(batch)) for batch in read])
    after = random_states()

    torch.manual_seed(5)
    if loader.generator is not None:
        loader.generator.manual_seed(4)
    assert same_states(random_states(), before)
    reading = worker().reading(read)
    assert same_states(random_states(), before), "deciding draws nothing"
    first, second = expected
    assert equal(whole(reading.begin()), first)
    # With local steps, batches are taken before the first of them is read.
    assert equal(whole(iter(list(reading.begin()))), second)
    assert same_states(random_states(), after)


@FORKS
def test_processes_start_once_after_a_loss_between_batches_and_their_reading(
    worker: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a loss within an outer step, whose batches were all read before."""
    member, first_steps = worker(0, 2), list[int]()
    loader = data.DataLoader(Rows(22), batch_size=6, num_workers=2)
    batches = list(itertools.islice(member.reading(loader).begin(), 3))
    for batch in batches:
        member.own(batch)
    begin = loader_readings._ReadAhead.__init__

    def counted(self: Any, current: Any, batch: Any) -> None:
        first_steps.append(batch.step)
        begin(self, current, batch)

    monkeypatch.setattr(loader_readings._ReadAhead, "__init__", counted)
    member.enter(replace(place(REPLICAS, (0,)), number=2))
    rows = [member.own(batch)[1] for batch in batches]
    assert [row.tolist() for row in rows] == [[*range(k, k + 6)] for k in (0, 6, 12)]
    assert len(first_steps) == 1


@pytest.mark.slow("float")
@pytest.mark.ci("all_draws")
@FORKS
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("draw", [float, all_draws])
def test_workers_read_the_same_rows_in_any_view(
    worker: Make, draw: Callable[[], float], processes: int
) -> None:
    def loader() -> Any:
        torch.manual_seed(2)
        return data.DataLoader(Rows(21, draw), batch_size=6, shuffle=True, num_workers=processes)

    reading = worker().reading(loader())
    alone = [list(map(_held, reading.begin())) for _ in range(2)]
    # Starting processes takes long, and they do not know the number of workers.
    for workers in (3,) if processes else (2, 3):
        for number in range(workers):
            member = worker(number, workers)
            read = member.reading(loader())
            for expected in alone:
                for batch, (rows, check) in zip(read.begin(), expected, strict=True):
                    own = member.reader.own_rows(batch.examples)
                    if own.stop > own.start:
                        assert equal(batch.read(own), [leaf[own] for leaf in rows])
                    assert batch.check() == check


def test_items_draw_by_the_call_and_its_passes_whichever_calls_a_worker_has_skipped(worker: Make) -> None:
    """A worker that joins begins no pass in the calls that it skips, such as validations."""

    def reading(*calls: int) -> list[Any]:
        """Return the items of one pass in each of the calls; the loader is given in the first."""
        torch.manual_seed(2)
        member, current = worker(), [1]
        member.reader = replace(member.reader, call=lambda: current[0])
        read = member.reading(data.DataLoader(Rows(6, all_draws), batch_size=6))
        passes = []
        for current[0] in calls:
            ((rows, _),) = whole(read.begin())
            passes.append(rows.tolist())
        return passes

    member = reading(1, 1, 2, 2, 3, 3)
    assert len({*map(str, member)}) == 6
    assert reading(2, 2, 3) == member[2:5]
    assert reading(3, 3) == member[4:]


def _held(batch: GlobalBatch) -> tuple[Any, bytes]:
    return batch.read(slice(0, batch.examples)), batch.check()


@FORKS
@pytest.mark.parametrize("processes", [0, 2])
def test_a_view_may_change_at_any_step_and_batches_may_be_skipped(worker: Make, processes: int) -> None:
    def loader() -> Any:
        torch.manual_seed(2)
        return data.DataLoader(Rows(65, all_draws), batch_size=6, shuffle=True, num_workers=processes)

    expected = list(map(_held, worker().reading(loader()).begin()))
    changes = {2: place(REPLICAS, (1,)), 5: place(REPLICAS, (1, 2, 3)), 8: place(REPLICAS, (0, 2, 1))}
    member = worker(1, 2)
    for step, batch in enumerate(member.reading(loader()).begin()):
        if step in (3, 7):
            continue
        rows, check = expected[step]
        assert equal(
            batch.read(member.reader.own_rows(batch.examples)),
            [leaf[member.reader.own_rows(batch.examples)] for leaf in rows],
        )
        if step in changes:  # In the middle of the step: replicas of a lost worker are read now.
            member.enter(changes[step])
            own = member.reader.own_rows(batch.examples)
            assert equal(batch.read(own), [leaf[own] for leaf in rows])
        assert batch.check() == check


def test_a_worker_reads_the_items_of_its_replicas_only(worker: Make) -> None:
    rows = Rows(400)
    member = worker(1, 2)
    reading = member.reading(data.DataLoader(rows, batch_size=8, shuffle=True))
    rows.read.clear()
    for batch in reading.begin():
        member.own(batch)
        batch.check()
    checks = sum(member.reader.compared_replica(0, step) is not None for step in range(50))
    assert 200 <= len(rows.read) <= 200 + 2 * checks
    rows.read.clear()
    assert len(list(reading.begin())) == 50
    assert not rows.read, "a batch that is skipped costs no item"


class Drifting(Rows):
    """Holds a generator."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(1)
        self.transforms = [lambda value: value + rng.normal()]

    def __getitem__(self, index: int) -> Any:
        return self.transforms[0](torch.full((3,), float(index))), index


class Counted(Rows):
    """Counts its reads."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.full((3,), float(self.calls)), index


class Kept(Rows):
    """Keeps what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.kept:
            self.kept[index] = torch.rand(3)
        return self.kept[index], index


class Words(Rows):
    """Has a string."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3), "word"


class Endless(data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(3)


class Raising(Rows):
    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError(f"row {object()}")


class OwnLoader(data.DataLoader):  # type: ignore[misc]
    def __iter__(self) -> Any:
        return super().__iter__()


MODULE_GENERATOR = random.Random(3)


def augmented(row: Any) -> Any:
    return row * MODULE_GENERATOR.random()


class Augmented(Rows):
    def __getitem__(self, index: int) -> Any:
        return augmented(torch.ones(3)), index


class Flipping(Rows):
    """Holds a layer of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.flip = keras.layers.RandomFlip()


def centred(samples: list[Any]) -> Any:
    x, y = data.default_collate(samples)
    return x - x.mean(), y


def mixed(samples: list[Any]) -> Any:
    x, y = data.default_collate(samples)
    return x * np.random.beta(0.4, 0.4), y


def seeding(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)
    random.seed(torch.initial_seed() % 2**32)


def opening(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.file = object()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (lambda: data.DataLoader(Drifting(), 6), "a numpy.random._generator.Generator"),
    "module": (lambda: data.DataLoader(Augmented(), 6), "MODULE_GENERATOR is a random.Random"),
    "layer": (lambda: data.DataLoader(Flipping(), 6), "SeedGenerator"),
    "counter": (lambda: data.DataLoader(Counted(), 6), "an item differs"),
    "kept": (lambda: data.DataLoader(Kept(), 6), "keeps values that it has drawn"),
    "words": (lambda: data.DataLoader(Words(), 6), "reading some items fails with"),
    "iterable": (lambda: data.DataLoader(Endless(), 6), "IterableDataset"),
    "no batches": (lambda: data.DataLoader(Rows(), batch_size=None), "batch_size=None"),
    "own loader": (lambda: OwnLoader(Rows(), 6), "OwnLoader has its own iteration"),
    "error": (lambda: data.DataLoader(Raising(), 6), "reading some items fails with"),
    "collate": (lambda: data.DataLoader(Rows(), 6, collate_fn=centred), "collate_fn combines rows"),
    "mixed": (lambda: data.DataLoader(Rows(), 6, collate_fn=mixed), "collate_fn draws"),
    "opening": (
        lambda: data.DataLoader(Rows(), 6, num_workers=1, worker_init_fn=opening),
        "worker_init_fn calls get_worker_info",
    ),
    "empty": (lambda: data.DataLoader(Rows(), batch_sampler=[]), "it has no batches"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_may_depend_on_the_reader_is_read_jointly(worker: Make, kind: str) -> None:
    make, reason = REFUSED[kind]
    loader = make()
    before = random_states()
    why = loader_reading(loader, worker().reader)
    assert isinstance(why, str)
    assert reason in why
    assert same_states(random_states(), before)


@FORKS
def test_the_process_of_a_program_does_not_read_what_processes_of_a_loader_read(worker: Make) -> None:
    """A file that an item opens would be shared by the processes that are forked later."""
    rows = Rows(12)
    member = worker(0, 2)
    batches = member.reading(data.DataLoader(rows, 6, num_workers=1)).begin()
    first = next(batches)
    first.read(slice(0, 6))
    assert equal(
        next(batches).read(slice(3, 6)),
        [np.repeat([[9.0], [10.0], [11.0]], 3, 1).astype("float32"), np.arange(9, 12)],
    )
    assert not rows.read


@FORKS
def test_the_usual_worker_init_fn_is_accepted(worker: Make) -> None:
    loader = data.DataLoader(Rows(12, all_draws), 6, num_workers=1, worker_init_fn=seeding)
    plain = data.DataLoader(Rows(12, all_draws), 6)
    batches = whole(worker().reading(loader).begin())
    assert equal(batches, whole(worker().reading(plain).begin()))


def padded(samples: list[Any]) -> Any:
    """Pads to the longest row."""
    rows = [torch.ones(2 + index // 12) for _, index in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([i for _, i in samples])


def test_rows_that_depend_on_the_batch_are_found_in_the_step(worker: Make) -> None:
    def batches(number: int, workers: int) -> list[GlobalBatch]:
        return [*worker(number, workers).reading(data.DataLoader(Rows(), 8, collate_fn=padded)).begin()]

    alone, first, second = batches(0, 1), batches(0, 2), batches(1, 2)
    assert alone[0].check() == first[0].check() == second[0].check()
    assert first[1].check() != second[1].check()
    with pytest.raises(DataError, match=r"collate_fn.*--input joint"):
        alone[1].check()


def test_an_input_that_the_user_reads_jointly(worker: Make) -> None:
    def reading(**options: Any) -> GlobalInput:
        loader = data.DataLoader(Rows(), 6)
        return global_input(
            loader, batch_size=None, steps=None, shuffle=False, seed=None, unsplit=False, **options
        )

    member = worker()
    joint = ReadingWorker(member.job, 1, joint=True)
    assert "rows of its replicas" in reading(reader=member.reader).facts()["data reading"]
    assert "whole dataset" in reading(reader=joint).facts()["data reading"]


@pytest.mark.slow
@FORKS
def test_processes_may_be_spawned(worker: Make) -> None:
    loader = data.DataLoader(Rows(12, all_draws), 6, num_workers=1, multiprocessing_context="spawn")
    batches = whole(worker().reading(loader).begin())
    assert equal(batches, whole(worker().reading(data.DataLoader(Rows(12, all_draws), 6)).begin()))


def test_a_distributed_loader_gives_each_replica_its_rows(worker: Make) -> None:
    def loader() -> Any:
        torch.manual_seed(4)
        return data.DataLoader(Rows(21), batch_size=6, shuffle=True)

    member = worker(1, 2)
    reading = loader_reading(loader(), member.reader, host_nest)
    assert isinstance(reading, LoaderReading)
    stream = Stream(loader())
    joint = GlobalBatchSource(member.job, stream, StreamReading(stream, REPLICAS))
    divided = GlobalBatchSource(member.job, Stream(loader()), reading)
    torch.manual_seed(4)
    expected = [[*elements(joint, joint.begin())] for _ in range(2)]
    torch.manual_seed(4)
    form = divided.form()
    assert form == joint.form()
    first, second = divided.begin(), divided.begin()
    assert equal([*elements(divided, first)], expected[0])
    for _ in range(2):
        second.skip()
    assert equal([*elements(divided, second)], expected[1][2:])
    short = divided.begin()
    for _ in range(4):
        short.skip()
    with pytest.raises(StopIteration):
        short.skip()


def elements(source: GlobalBatchSource, batches: Iterator[GlobalBatch]) -> Iterator[list[Any]]:
    """The rows of each replica of the remaining elements."""
    for number, batch in enumerate(batches, 1):
        values = source.values(batch, number)
        yield [values.of(replica) for replica in range(REPLICAS)]


def results(run: Any, workers: int, ended: int, *marks: str) -> set[tuple[str, ...]]:
    """The results of the workers that ended; a job that resumes has no weights of finished calls."""
    assert run.status == 0, run.stderr
    logs = [run.log(worker) for worker in range(workers)]
    finished = [log for log in logs if "end" in log]
    assert len(finished) == ended
    return {tuple(line for line in log if line.startswith(("result ", *marks))) for log in finished}


@pytest.mark.ci
# The tests above run on one backend; on PyTorch, Keras begins a pass at another time.
@pytest.mark.parametrize(
    "backend",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow")), "torch"],
    indirect=True,
)
def test_any_number_of_workers_reads_the_same(
    launch: Callable[..., Any], undisturbed_run: Callable[..., Any], backend: str
) -> None:
    alone = undisturbed_run("-n 1 --replicas 4", "dividing_loaders.py", backend=backend)
    expected = results(alone, 1, 1, "weights ")
    (everything,) = alone.marked(0, "reads ")
    lost = launch(
        "-n 4 --replicas 4 --max-restarts 0", "dividing_loaders.py", "lost", "2", "8", backend=backend
    )
    assert results(lost, 4, 3, "weights ") == expected
    for worker in range(4):
        (reads,) = lost.marked(worker, "reads ")
        # Every worker reads the items that decide, and the sample with which Keras builds the model.
        assert int(reads.split()[1]) < int(everything.split()[1]) / 2


@pytest.mark.slow
@pytest.mark.ci
def test_a_loader_resumes_in_the_middle_of_a_pass_and_a_worker_joins_there(
    launch: Callable[..., Any], undisturbed_run: Callable[..., Any], thorough_backend: str, tmp_path: Any
) -> None:
    backend = thorough_backend
    expected = results(undisturbed_run("-n 1 --replicas 4", "dividing_loaders.py", backend=backend), 1, 1)
    keeping = f"--checkpoint {tmp_path / 'kept'} --checkpoint-every 2"
    killed = launch(f"-n 3 --replicas 4 {keeping}", "dividing_loaders.py", "all", "0", "9", backend=backend)
    assert killed.status == 137
    resumed = launch(f"-n 2 {keeping}", "dividing_loaders.py", "all", "0", "9", backend=backend)
    assert "resuming from" in resumed.stderr
    assert results(resumed, 2, 2) == expected
    joined = launch(
        "-n 2 --replicas 4 --min-workers 2", "dividing_loaders.py", "lost", "1", "8", backend=backend
    )
    assert results(joined, 3, 2) == expected
