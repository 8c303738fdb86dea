"""Arrays on disk: a worker reads the rows that it needs, with the values of arrays in memory."""

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

import lockstep
from lockstep.keras.input.fit_inputs import ArrayInput, GlobalInput, global_input, split_validation
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.stored_arrays import StoredArray, stored
from lockstep.worker import job

ROWS, BATCH = 4096, 64
X = np.random.default_rng(0).normal(size=(ROWS, 128))
Y = (X[:, :1] > 0).astype("int64")
OPTIONS: dict[str, Any] = {"batch_size": BATCH, "steps": None, "seed": (0, 0, 1), "unsplit": False}


def input_of(*data: Any, shuffle: Any) -> GlobalInput:
    return global_input(*data, **OPTIONS, shuffle=shuffle, reader=ReadingWorker(job.current(), 0))


@pytest.fixture(params=["map", "rows of a map", "array on a map", "h5py"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any]:
    """X and Y on disk."""
    for name, array in (("x", X), ("y", Y)):
        np.save(tmp_path / name, array)
        np.save(tmp_path / f"{name}-more", np.concatenate([array[:5], array]))
    if request.param == "h5py":
        with h5py.File(tmp_path / "data.h5", "w") as file:
            for name, array in (("x", X), ("y", Y)):
                file.create_dataset(name, data=array, chunks=(64, array.shape[1]))
        file = h5py.File(tmp_path / "data.h5")
        return file["x"], file["y"]
    more = "-more" if request.param == "rows of a map" else ""
    maps = [np.load(tmp_path / f"{name}{more}.npy", mmap_mode="r") for name in "xy"]
    views = {"rows of a map": lambda array: array[5:], "array on a map": np.asarray}
    return tuple(map(views.get(request.param, lambda array: array), maps))


@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_only_rows_that_are_needed_are_read(opened: tuple[Any, Any], shuffle: Any) -> None:
    expected = input_of(X, Y, shuffle=shuffle)
    assert expected.held == X.nbytes // 2 + Y.nbytes
    tracemalloc.start()
    try:
        source = input_of(*opened, shuffle=shuffle)
        assert source.facts() == expected.facts()
        assert source.held == 0
        found = [
            (batch.read(slice(7, 40)), batch.check())
            for batch, _ in zip(source.batches(), range(9), strict=False)
        ]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < X.nbytes // 4
    for (rows, check), batch in zip(found, expected.batches(), strict=False):
        for one, other in zip(rows, batch.read(slice(7, 40)), strict=True):
            assert type(one) is np.ndarray
            assert (one.dtype, one.tolist()) == (other.dtype, other.tolist())
        assert check == batch.check()


def test_validation_rows_are_split_off_without_reading(opened: tuple[Any, Any]) -> None:
    expected = split_validation(X, Y, None, 0.3)
    found = split_validation(*opened, None, 0.3)
    for half, other in zip(found, expected, strict=True):
        assert half[2] is None
        for array, rows in zip(half[:2], other[:2], strict=True):
            assert isinstance(array, StoredArray)
            assert len(array) == array.shape[0] == len(rows)
            assert array.ndim == 2
            np.testing.assert_array_equal(array[3:50], rows[3:50], strict=True)
            np.testing.assert_array_equal(array[np.array([9, 2, 9])], rows[[9, 2, 9]], strict=True)
            np.testing.assert_array_equal(np.asarray(array), rows, strict=True)
    # Splitting again, as a program may do with validation data.
    assert stored(found[0][0]) is found[0][0]
    assert split_validation(*found[0], 0.5)[1][0][:3].tolist() == expected[0][0][1433:1436].tolist()


@pytest.mark.ci
def test_training_is_that_on_arrays_in_memory(opened: tuple[Any, Any]) -> None:
    digests = set()
    for x, y in ((X, Y), opened):
        keras.utils.set_random_seed(1)
        with lockstep.MultiWorkerMirroredStrategy().scope():
            model = keras.Sequential(
                [keras.layers.Input((128,)), keras.layers.Dense(1, activation="sigmoid")]
            )
            model.compile("sgd", "binary_crossentropy")
        options: dict[str, Any] = {
            "validation_split": 0.25,
            "class_weight": {0: 1.0, 1: 3.0},
            "batch_size": 512,
        }
        history = model.fit(x, y, verbose=0, **options).history
        figures = model.evaluate(x, y, batch_size=512, verbose=0), history["val_loss"]
        digests.add((lockstep.digest(model), str(figures), model.predict(x, verbose=0).tobytes()))
    assert len(digests) == 1


def test_other_arrays_are_those_of_keras() -> None:
    assert stored(X) is stored(None) is stored(np.float32(1)) is None
    assert isinstance(input_of(X, shuffle=False), ArrayInput)
