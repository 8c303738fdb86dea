"""What distributed datasets read: `fit` and a custom loop get the same shares of the same batches."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.plan import ReducePlan
from lockstep.data.batch import Batch
from lockstep.data.input_context import InputContext
from lockstep.errors import DataError, InternalError
from lockstep.keras.input.distributed_dataset import DistributedDataset
from lockstep.keras.input.fit_inputs import GlobalInput, global_input
from lockstep.keras.input.pipelines import Pipelines
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.sources import GlobalBatchSource, Source, StreamReading
from lockstep.keras.input.streams import Stream
from lockstep.topology import place
from lockstep.worker.job import Job
from thread_hub import Hub

REPLICAS = 3
ROWS = np.arange(22.0).reshape(11, 2)
BATCHES = [[ROWS[:4], ROWS[:4, 0]], [ROWS[4:9], ROWS[4:9, 0]], [ROWS[9:], ROWS[9:, 0]]]


def of_batches(job: Job, batches: Any = BATCHES) -> GlobalBatchSource:
    stream = Stream(batches)
    return GlobalBatchSource(job, stream, StreamReading(stream, REPLICAS))


def of_replicas(job: Job) -> Pipelines:
    """The dataset of each replica has a batch less than that of the one before."""

    def dataset_fn(context: InputContext) -> Any:
        return BATCHES[context.input_pipeline_id :]

    return Pipelines(job, dataset_fn, 1)


def input_of_fit(job: Job, source: Source) -> GlobalInput:
    options = {"batch_size": None, "steps": None, "shuffle": False, "seed": (), "unsplit": False}
    reader = ReadingWorker(job, 1)
    return global_input(DistributedDataset(None, source), **options, reader=reader)  # type: ignore[arg-type]


def of_fit(job: Job, source: Source) -> list[Batch]:
    return list(input_of_fit(job, source).batches())


def of_loop(source: Source) -> Iterator[Any]:
    taken: Any = source.begin()
    for number in range(1, 10):
        try:
            yield source.values(next(taken), number)
        except StopIteration:
            return


def same(some: Any, others: Any) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


@pytest.mark.parametrize("make", [of_batches, of_replicas])
def test_fit_and_a_loop_get_the_same_shares(job_of_one_worker: Job, make: Any) -> None:
    batches = of_fit(job_of_one_worker, make(job_of_one_worker))
    source = make(job_of_one_worker)
    form = source.form()
    assert form.nest == [True, True]
    assert [spec.shape for spec in form.specs] == [(None, 2), (None,)]
    values = list(of_loop(source))
    assert len(batches) == len(values) == 3
    for batch, of_replica in zip(batches, values, strict=True):
        assert of_replica.specs == form.specs
        assert of_replica.check() == batch.check()
        shares = [batch.share(replica) for replica in range(REPLICAS)]
        assert sum(share.weight for share in shares) == pytest.approx(1)
        for share in shares:
            data = share.data()
            assert isinstance(data, tuple)  # As Keras has it.
            assert (
                share.examples == of_replica.examples(share.replica) == len(of_replica.of(share.replica)[0])
            )
            if share.examples:
                assert same(data, of_replica.of(share.replica))
                assert same([of_replica.leaf(1, share.replica)], data[1:])
            elif make is of_replicas:
                # A replica without examples shows the form of the others' shares.
                assert len(data[0]) > 0


def test_a_pass_that_was_looked_at_is_the_next_one(job_of_one_worker: Job) -> None:
    source = of_batches(job_of_one_worker, iter(BATCHES))
    assert same(source.peek(), BATCHES[0])
    assert same(source.sample(), BATCHES[0])
    source.form()
    taken = source.begin()
    taken.skip()
    assert same(next(taken).whole(), BATCHES[1])
    assert [len(batch.whole()[0]) for batch in taken] == [2]
    with pytest.raises(StopIteration):
        taken.skip()
    assert source.form() == taken.form()


def test_workers_try_the_same_example(job_of_one_worker: Job) -> None:
    """It is that of the first replica that has examples, which another worker may compute."""

    def dataset_fn(context: InputContext) -> Any:
        rows = ROWS[: 4 * context.input_pipeline_id]
        return [(rows, np.array([b"text"] * len(rows), object), None)]

    view = place(REPLICAS, (0, 1, 2))
    hub = Hub(ReducePlan.of(view))

    def example(worker: int) -> Any:
        context = replace(job_of_one_worker.context, worker=worker)
        return Pipelines(Job(context, (view, hub.member(worker))), dataset_fn, 1).shared_example()

    with ThreadPoolExecutor(REPLICAS) as pool:
        examples = list(pool.map(example, view.workers))
    alone = Pipelines(job_of_one_worker, dataset_fn, 1).shared_example()
    for rows, texts, weights in [*examples, alone]:
        assert same([rows, texts], [ROWS[:4], [b"text"] * 4])
        assert weights is None
        assert rows.flags.writeable


def test_an_example_that_cannot_be_read_is_an_error_of_the_data(job_of_one_worker: Job) -> None:
    """A trial, which goes on after other errors, would leave the other workers waiting."""

    class Failing:
        def __iter__(self) -> Iterator[Any]:
            raise ValueError("no such file")

    source = Pipelines(job_of_one_worker, lambda context: Failing(), 1)
    read_by_trials = (source.shared_example, lambda: input_of_fit(job_of_one_worker, source).weighs)
    for read in read_by_trials:
        with pytest.raises(DataError, match=r"dataset of replica 0: ValueError\('no such file'\)"):
            read()


def test_an_empty_dataset_has_no_form(job_of_one_worker: Job) -> None:
    source = of_batches(job_of_one_worker, [])
    assert source.peek() is None
    with pytest.raises(DataError, match="is empty"):
        source.form()


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([np.zeros((4, 2)), np.zeros(3)], r"batch 2 of the dataset has arrays of shapes \[4, 2\], \[3\]"),
        ([np.zeros((0, 2)), np.zeros(0)], "batch 2 of the dataset has no rows"),
        ([np.zeros(3), np.zeros(())], "batch 2 of the dataset has a value without an axis of examples"),
    ],
)
def test_a_batch_that_cannot_be_split_is_named(job_of_one_worker: Job, leaves: Any, message: str) -> None:
    values = of_loop(of_batches(job_of_one_worker, [BATCHES[0], leaves]))
    next(values)
    with pytest.raises(DataError, match=message):
        next(values)


def test_a_loop_does_not_know_how_many_examples_the_others_have(job_of_one_worker: Job) -> None:
    source = of_replicas(job_of_one_worker)
    batch = next(source.begin())
    assert math.isnan(batch.share(1).weight)
    with pytest.raises(InternalError):
        assert batch.examples
    assert batch.is_here(1)
    del batch.nests[1]
    with pytest.raises(DataError, match=r"replica 1 are on another worker: .*strategy\.gather"):
        source.values(batch, 1).leaf(0, 1)
    # A worker that computes the replica after a loss reads its examples then.
    assert same(source.values(batch, 1).of(1), BATCHES[1])
