"""Examples come in Keras's own order if the script has set a seed, otherwise in the job's."""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

import lockstep
from lockstep import show_input
from lockstep.keras.input.fit_inputs import AN_ITERATOR, global_input
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.visits import OrderSeed, ReorderedDataset, draw_as_a_loader, order_seed, visits
from lockstep.keras.randomness import script_seeds
from lockstep.worker import job, script_seed
from lockstep.worker.patch_registry import PATCHES

ROWS = np.arange(20, dtype="float32")
Source = Callable[[], Any]


class Rows(keras.utils.PyDataset):  # type: ignore[misc]
    """A batch for each row."""

    def __init__(self) -> None:
        super().__init__()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> Any:
        return ROWS[index : index + 1]


def passes(x: Any, shuffle: Any, seed: OrderSeed) -> list[list[float]]:
    """The rows that Keras reads before the first pass, and those of two passes."""
    reader = ReadingWorker(job.current(), 0, joint=True)
    options: dict[str, Any] = {"batch_size": 6, "steps": None, "shuffle": shuffle, "seed": seed}
    source = global_input(x, **options, unsplit=False, reader=reader)
    looked = [] if keras.backend.backend() == "tensorflow" else np.asarray(source.first()).tolist()
    visited = [looked]
    for _ in range(2):
        visited.append([row for batch in source.batches() for row in batch.read(slice(0, batch.examples))])
        # Keras begins another pass when one ends.
        draw_as_a_loader()
    return visited


@pytest.mark.slow("tensorflow", "torch")
@pytest.mark.ci
def test_one_replica_has_the_random_order_of_plain_keras(plain: Callable[..., str], backend: str) -> None:
    printed = [line.split(maxsplit=1) for line in plain("ordering.py", backend=backend).splitlines()]
    alone, with_lockstep = (
        [line[1] for line in printed if line[0] == kind] for kind in ("plain", "lockstep")
    )
    assert len(alone) == 12
    assert with_lockstep == alone


@pytest.mark.parametrize("shuffle", [True, "batch"])
@pytest.mark.parametrize("make", [lambda: ROWS, Rows], ids=["arrays", "dataset"])
def test_only_the_seed_of_the_script_decides(make: Source, shuffle: Any) -> None:
    found = []
    for seed in (1, 2, 1):
        keras.utils.set_random_seed(seed)
        # Neither the job's seed nor the number of the call counts.
        assert order_seed(job_seed=len(found), call=len(found)) is None
        found.append(passes(make(), shuffle, None))
    assert found[0] == found[2] != found[1]
    for rows in found[0][1:]:
        assert sorted(rows) == ROWS.tolist()


def test_a_sample_draws_for_the_batch_that_keras_reads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    # Where Keras reads ahead depends on its version and the device; it does on GPUs.
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    keras.utils.set_random_seed(1)
    first, _ = np.random.permutation(6), np.random.permutation(6)
    following = np.random.random()
    keras.utils.set_random_seed(1)
    assert np.array_equal(visits(len(ROWS), 6, "batch", None).sample(), first)
    assert np.random.random() == following


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_sample_of_a_dataset_reads_the_batch_that_keras_reads_ahead(
    monkeypatch: pytest.MonkeyPatch, shuffle: bool
) -> None:
    read: list[int] = []

    class Noted(Rows):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return index

    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    order = list(range(len(ROWS)))
    keras.utils.set_random_seed(3)
    if shuffle:
        random.shuffle(order)
    keras.utils.set_random_seed(3)
    assert ReorderedDataset(Noted(), shuffle, None).first() == order[0]
    assert read == order[:2]


class Changing(keras.utils.PyDataset):  # type: ignore[misc]
    """Has another number of batches after each epoch, with other contents."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.counts = list(counts)
        self.epoch = 0

    def __len__(self) -> int:
        return self.counts[self.epoch]

    def __getitem__(self, index: int) -> Any:
        return np.array([100.0 * self.epoch + index])

    def on_epoch_end(self) -> None:
        self.epoch += 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("counts", [(3, 4, 5, 6), (6, 4, 3, 2), (2, 5, 1, 4)])
def test_a_dataset_that_changes_between_epochs_is_visited_as_by_keras(
    counts: tuple[int, ...], shuffle: bool
) -> None:
    options: dict[str, Any] = {"batch_size": None, "steps": None, "shuffle": shuffle, "unsplit": False}
    keras.utils.set_random_seed(4)
    adapter = PyDatasetAdapter(Changing(*counts), shuffle=shuffle)
    expected = []
    for _ in counts:
        adapter.on_epoch_begin()
        expected.append([float(x[0]) for (x,) in adapter.get_numpy_iterator()])
        if len(expected) < len(counts):
            adapter.on_epoch_end()
    after = random.random()
    assert list(map(len, expected)) == list(counts)

    keras.utils.set_random_seed(4)
    reader = ReadingWorker(job.current(), 0, joint=True)
    source = global_input(Changing(*counts), seed=None, reader=reader, **options)
    found = []
    for _ in counts:
        source.on_epoch_begin()
        assert source.num_batches == counts[len(found)]
        found.append([float(batch.read(slice(0, 1))[0][0]) for batch in source.batches()])
        if len(found) < len(counts):
            source.on_epoch_end()
    assert found == expected
    assert random.random() == after


def test_keras_forgets_the_seed_of_the_script_but_not_the_states() -> None:
    """As in cross-validation, which calls clear_session between models."""
    had = PATCHES.has(script_seed.__name__)
    script_seed.note_script_seed()
    try:
        keras.utils.clear_session()
        assert order_seed(job_seed=1, call=1) is not None
        keras.utils.set_random_seed(5)
        seeds = script_seeds(job_seed=1)
        keras.utils.clear_session()
        assert order_seed(job_seed=1, call=1) is None
        assert script_seeds(job_seed=1) == seeds
        script_seed.forget_script_seed()
        assert order_seed(job_seed=1, call=1) is not None
    finally:
        script_seed.forget_script_seed()
        if not had:
            PATCHES.give_back(script_seed.__name__)


def test_seeds_are_the_same_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    keras.utils.set_random_seed(3)
    seeds = script_seeds(job_seed=7)
    monkeypatch.delitem(sys.modules, "tensorflow.python.eager.context")
    assert script_seeds(job_seed=7) == seeds


@pytest.mark.parametrize("make", [lambda: ROWS, Rows], ids=["arrays", "dataset"])
def test_without_a_seed_each_call_and_pass_has_its_own_order(make: Source) -> None:
    keras.utils.clear_session()
    seeds = [order_seed(job_seed=1, call=call) for call in (1, 2, 1)]
    assert None not in seeds
    found = []
    for seed in seeds:
        found.append(passes(make(), True, seed)[1:])
        random.random(), np.random.random()
    assert found[0] == found[2] != found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("shuffle", [True, "batch", False])
@pytest.mark.parametrize("make", [lambda: ROWS, Rows], ids=["arrays", "dataset"])
def test_the_order_is_known_before_it_is_drawn(make: Source, shuffle: Any) -> None:
    keras.utils.set_random_seed(5)
    x: Any = make()
    table = show_input(x, batch_size=6, shuffle=shuffle, steps=20, replicas=1, epoch=2)
    *_, second = passes(x, shuffle, None)
    readings = [reading.rows for reading in table]
    shown = [n for rows in readings for n in (rows.numbers if rows.batch is None else [rows.batch])]
    assert shown == second


def stream() -> Iterator[Any]:
    yield ROWS[:4], ROWS[:4]


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: ROWS, "each worker reads the rows of its replicas: arrays"),
        (stream, f"every worker reads the whole dataset: {AN_ITERATOR}"),
    ],
    ids=["arrays", "generator"],
)
def test_the_table_says_how_an_input_is_read(make: Source, way: str) -> None:
    table = show_input(make(), batch_size=4, shuffle=False, replicas=2, steps=1)
    assert str(table).splitlines()[0] == table.way == way
    assert [list(reading.rows.numbers) for reading in table] == [[0, 1], [2, 3]]


class OwnLoss(keras.Model):
    """Never calls the compiled loss, which Keras therefore never counts as built."""

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *args: Any, **options: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - y))


@pytest.mark.ci
def test_a_sample_batch_is_drawn_once(job_of_one_worker: job.Job) -> None:
    x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    histories = []
    for loss in (None, "mae"):
        keras.utils.set_random_seed(1)
        with lockstep.MultiWorkerMirroredStrategy().scope():
            inputs = keras.Input((3,))
            model = OwnLoss(inputs, keras.layers.Dense(1)(inputs))
            model.compile(keras.optimizers.SGD(0.5), loss=loss, metrics=["mse"], run_eagerly=True)
        histories.append(model.fit(x, x[:, :1], batch_size=4, verbose=0).history)
    assert histories[0] == histories[1]
