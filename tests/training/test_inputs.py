"""The rows that a worker reads, and the times at which it reads them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from lockstep.data.batch import PendingBatch
from lockstep.errors import DataError
from lockstep.keras.fit.call_inputs import refuse_empty
from lockstep.keras.input.fit_inputs import ArrayInput, GlobalInput, global_input
from lockstep.keras.input.readings import ReadingWorker, read_batch, whole_batch
from lockstep.keras.input.streams import on_host
from lockstep.keras.private.common import is_grain_dataset
from lockstep.observability.bus import Bus
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext, by_itself

HANDED_OVER = "each worker makes some of the batches, and sends the others their rows"
SEED = (0, 0, 1)
OPTIONS: dict[str, Any] = {
    "batch_size": None,
    "steps": None,
    "shuffle": False,
    "seed": SEED,
    "unsplit": False,
}


def joint() -> ReadingWorker:
    """The only worker of a job with three replicas, which reads everything."""
    return ReadingWorker(job.current(), 0, joint=True)


def input_of(data: Any, **options: Any) -> GlobalInput:
    return global_input(data, **{**OPTIONS, "reader": joint(), **options})


class Noted(np.ndarray):
    """An array that records which of its rows are read."""

    reads: list[list[int]]

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(np.arange(len(self))[index].tolist())
        return np.asarray(self)[index]


def noted(count: int) -> Noted:
    array = np.arange(count * 2, dtype="float32").reshape(count, 2).view(Noted)
    array.reads = []
    return array


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_a_share_reads_its_own_rows_only(shuffle: Any) -> None:
    rows = noted(20)
    source = ArrayInput(ArrayDataAdapter(rows, batch_size=8), shuffle, SEED, joint(), unsplit=False)
    batch = next(source.batches())
    assert rows.reads == []
    whole = batch.read(slice(0, 8))
    del rows.reads[:]
    x = batch.share(1).data()
    assert [len(read) for read in rows.reads] == [3]
    np.testing.assert_array_equal(x, whole[3:6])
    del rows.reads[:]
    batch.check()
    assert [len(read) for read in rows.reads] == [1]


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("kind", ["arrays", "generator", "dataset"])
def test_a_process_that_is_apart_trains_on_the_whole_batches_of_the_input(kind: str, looks: bool) -> None:
    """In a `fit` with parameter servers, the input is made, and looked at, before the process is apart."""
    rows = np.arange(12.0).reshape(12, 1)
    if kind == "generator":
        made: Any = ((rows[start : start + 6], rows[start : start + 6]) for start in (0, 6))
    elif kind == "dataset":
        tf = pytest.importorskip("tensorflow")
        made = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(6)
    else:
        made = rows
    view = place(3, (0,))
    own = Job(JobContext(0, Bus(SystemClock(), 0)), (view, by_itself(view)))
    options = {"batch_size": 6} if kind == "arrays" else {}
    data = input_of(made, **options, reader=ReadingWorker(own, 0, joint=True))
    if looks:
        assert len(keras.tree.flatten(data.batch_to_try())[0]) == 6
    with own.apart():
        batches = [read_batch(element) for element in data.batches()]
    shares = [batch.share(0) for batch in batches]
    assert [(share.examples, share.weight) for share in shares] == [(6, 1), (6, 1)]
    read = [keras.tree.flatten(share.data())[0] for share in shares]
    assert np.concatenate(read).tolist() == rows.tolist()


def test_a_calls_facts_read_a_bounded_sample() -> None:
    rows = noted(10_000)
    source = ArrayInput(ArrayDataAdapter(rows, batch_size=8), False, SEED, joint(), unsplit=False)
    facts = source.facts()
    assert sum(map(len, rows.reads)) == 64
    assert facts["data"] == "float32[10000, 2]"


def inputs(**options: Any) -> GlobalInput:
    x = np.arange(12, dtype="float32").reshape(6, 2)
    return input_of(x, **{"batch_size": 4, "shuffle": True} | options)


class NoBatches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


def nothing() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_generator(lambda: (), output_signature=tf.TensorSpec((None, 2)))


@pytest.mark.parametrize("unsplit", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: np.zeros((0, 2)), NoBatches, nothing], ids=["array", "dataset", "late"]
)
def test_an_input_without_examples_is_refused(make: Callable[[], Any], unsplit: bool) -> None:
    def begin(method: str) -> None:
        data = input_of(make(), batch_size=4, unsplit=unsplit)
        refuse_empty(data)
        getattr(data, method)()

    for method in ("first", "peek"):
        with pytest.raises(DataError, match="the input has no examples"):
            begin(method)
    # Validation data may have none.
    assert not input_of(make(), batch_size=4, unsplit=unsplit).weighs


def test_each_pass_has_an_order_that_another_process_reproduces() -> None:
    passes = [[batch.check() for batch in source.batches()] for source in [inputs()] for _ in range(2)]
    assert passes[0] != passes[1]
    again = inputs()
    assert [[batch.check() for batch in again.batches()] for _ in range(2)] == passes
    other = inputs(seed=(1, 0, 1))
    assert [batch.check() for batch in other.batches()] != passes[0]


def test_keras_loops_see_the_size_of_the_input() -> None:
    source = inputs()
    assert (source.num_batches, source.batch_size) == (2, 4)
    assert [batch.examples for batch in source.batches()] == [4, 2]


def test_with_one_replica_keras_receives_the_input_of_plain_keras() -> None:
    batches = list(inputs(shuffle=False, unsplit=True).get_jax_iterator())
    assert [batch.tolist() for batch in batches] == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_the_check_of_a_step_depends_on_its_rows_and_their_source() -> None:
    x = np.arange(12, dtype="float32").reshape(6, 2)
    other = x.copy()
    other[2:] += 1
    for shuffle in (False, True):
        options = {"batch_size": 2, "shuffle": shuffle}
        checks, others = ([b.check() for b in input_of(a, **options).batches()] for a in (x, other))
        assert len(set(checks)) == 3
        assert sum(a == b for a, b in zip(checks, others, strict=True)) == 1


@pytest.mark.parametrize(
    "data",
    [
        (np.ones((4, 2)), np.zeros(4)),
        (np.ones((4, 2)), None, np.zeros(4)),
        ({"a": np.ones((4, 2))}, np.zeros(4)),
    ],
    ids=["flat", "without targets", "nested"],
)
def test_a_whole_batch_is_read_and_hashed_in_place(data: Any) -> None:
    batch = whole_batch(data, 2, 3)
    share = batch.share(1).data()
    keras.tree.assert_same_structure(share, data)
    for part, whole in zip(keras.tree.flatten(share), keras.tree.flatten(data), strict=True):
        assert part is whole or (np.shares_memory(part, whole) and part.shape[0] == 2)
    before = batch.check()
    assert before == whole_batch(data, 2, 3).check() != whole_batch(data, 2, 4).check()
    keras.tree.flatten(data)[0][3] += 1
    assert whole_batch(data, 2, 3).check() != before == batch.check()


def test_tensors_of_a_dataset_are_read_in_place() -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(8).reshape(4, 2), np.zeros(4))).batch(4)
    source = input_of(dataset)
    looked = [source.first(), source.peek()]
    batch = next(source.batches())
    assert {type(leaf) for data in looked for leaf in data} == {np.ndarray}
    parts = [batch.share(replica).data()[0] for replica in range(3)]
    assert np.concatenate(parts).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts[1].ctypes.data == parts[0].ctypes.data + parts[0].nbytes
    assert not parts[0].flags.writeable


def test_sparse_tensors_become_dense_as_in_keras() -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(6.0).reshape(6, 1)).batch(3)
    sparse = dataset.map(tf.sparse.from_dense)
    batches = [list(input_of(data).batches()) for data in (dataset, sparse)]
    plain, made = ([batch.share(1).data().tolist() for batch in of_kind] for of_kind in batches)
    assert made == plain == [[[1.0]], [[4.0]]]


def test_one_generator_feeds_two_inputs_in_the_order_of_keras() -> None:
    taken: list[int] = []

    def endless() -> Iterator[tuple[Any, Any]]:
        for number in count():
            taken.append(number)
            yield np.full((4, 1), number), np.zeros((4, 1))

    data = endless()
    training, validation = (input_of(data) for _ in range(2))
    assert training.facts() == validation.facts()
    assert taken == []
    assert training.num_batches is None
    batches = training.batches()
    read = [int(next(batches).read(slice(0, 1))[0][0, 0]) for _ in range(3)]
    assert read == taken == [0, 1, 2]
    # Keras asks for the number of batches where `fit` first validates.
    assert validation.num_batches is None
    batches = validation.batches()
    read = [int(next(batches).read(slice(0, 1))[0][0, 0]) for _ in range(2)]
    assert (read, taken) == ([3, 4], [0, 1, 2, 3, 4])


class Sequences:
    """A source of rows for Grain."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return np.full(2, index, "float32"), np.full(1, index, "float32")


def test_a_grain_dataset_has_the_batches_of_keras() -> None:
    grain = pytest.importorskip("grain")
    if not is_grain_dataset(grain.MapDataset.source([1])):
        pytest.skip("this version of Keras does not read datasets of Grain")
    shuffled = grain.MapDataset.source(Sequences()).seed(4).shuffle()
    for dataset in (shuffled.batch(4), shuffled.to_iter_dataset().batch(4)):
        expected = [x[:, 0].tolist() for x, _ in dataset]
        source = input_of(dataset)
        for _ in range(2):
            batches = [batch.read(slice(0, batch.examples))[0][:, 0].tolist() for batch in source.batches()]
            assert batches == expected


def noisy(element: Any, generator: np.random.Generator) -> Any:
    return tuple(part + generator.normal() for part in element)


def own_generator(element: Any, held: Any = np.random.default_rng(3)) -> Any:  # noqa: B008
    return element


GRAIN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "batches": (lambda data: data.seed(4).shuffle().batch(4), ""),
    "random": (lambda data: data.seed(4).random_map(noisy).batch(4), ""),
    "each batch alone": (lambda data: data.batch(4).map(lambda batch: batch[0]), ""),
    "repeated": (lambda data: data.batch(4).repeat(2), ""),
    "in order": (lambda data: data.to_iter_dataset().batch(4), "in its own order"),
    "without some": (lambda data: data.batch(4).filter(lambda batch: batch[0][0, 0] != 4), "drops batches"),
    "with a generator": (lambda data: data.map(own_generator).batch(4), "is a numpy.random"),
}


@pytest.mark.parametrize("kind", GRAIN)
def test_a_grain_dataset_is_divided_by_its_batches(kind: str) -> None:
    grain = pytest.importorskip("grain")
    if not is_grain_dataset(grain.MapDataset.source([1])):
        pytest.skip("this version of Keras does not read datasets of Grain")
    make, why = GRAIN[kind]
    dataset = make(grain.MapDataset.source(Sequences()))
    expected = [np.concatenate(keras.tree.flatten(batch), axis=1).tolist() for batch in dataset]
    source = input_of(dataset, reader=ReadingWorker(job.current(), 0))
    assert why in source.way.why
    assert source.way.how == ("every worker reads the whole dataset" if why else HANDED_OVER)
    assert source.num_batches is None
    for _ in range(2):
        read = []
        for pending in source.batches():
            batch = pending.read(nullcontext) if isinstance(pending, PendingBatch) else pending
            leaves = keras.tree.flatten(batch.read(slice(0, batch.examples)))
            read.append(np.concatenate(leaves, axis=1).tolist())
        assert read == expected


def test_an_endless_grain_dataset_is_divided() -> None:
    grain = pytest.importorskip("grain")
    endless = grain.MapDataset.source(Sequences()).batch(4).repeat()
    if not is_grain_dataset(endless):
        pytest.skip("this version of Keras does not read datasets of Grain")
    batches = input_of(endless, reader=ReadingWorker(job.current(), 0)).batches()
    read = [next(batches).read(nullcontext).read(slice(0, 1))[0][0, 0] for _ in range(5)]
    assert read == [0, 4, 8, 0, 4]


class SparseBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of SciPy, read by their index."""

    def __init__(self, matrix: Any) -> None:
        super().__init__()
        self.matrix = matrix

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.matrix[4 * index : 4 * index + 4], np.full((4, 1), index)


@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_sparse_batches_are_cut_into_dense_rows(kind: str) -> None:
    dense = np.random.default_rng(3).integers(0, 3, (8, 5)).astype("float32")
    dataset = SparseBatches(pytest.importorskip("scipy.sparse").csr_matrix(dense))

    def source() -> GlobalInput:
        return input_of(dataset if kind == "dataset" else (dataset[i] for i in range(2)))

    np.testing.assert_array_equal(source().first()[0], dense[:4])
    for index, pending in enumerate(source().batches()):
        batch = pending.read(nullcontext) if isinstance(pending, PendingBatch) else pending
        x, y = batch.share(2).data()
        np.testing.assert_array_equal(x, dense[4 * index + 3 : 4 * index + 4], strict=True)
        np.testing.assert_array_equal(y, [[index]])


@pytest.mark.parametrize("kind", ["dataset", "generator"])
def test_one_replica_trains_on_sparse_batches_as_they_are(kind: str) -> None:
    backend = keras.backend.backend()
    if backend == "torch":
        pytest.skip("Keras passes no sparse batches to PyTorch")
    dataset = SparseBatches(pytest.importorskip("scipy.sparse").eye(8, format="csr"))
    data = dataset if kind == "dataset" else (dataset[i] for i in range(2))
    alone = input_of(data, unsplit=True)
    read = [x for x, _ in (alone.get_jax_iterator() if backend == "jax" else alone.get_tf_dataset())]
    assert [type(x).__name__ for x in read] == 2 * ["BCOO" if backend == "jax" else "SparseTensor"]
    np.testing.assert_array_equal(on_host(read[1]), np.eye(8)[4:])
