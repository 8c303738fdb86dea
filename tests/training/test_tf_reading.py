"""Pipelines of `tf.data` whose maps are divided among the workers: their rows, and what is not divided."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.data.batch import GlobalBatch
from lockstep.data.digest import digest_arrays
from lockstep.errors import DataError
from lockstep.keras.input.fit_inputs import global_input
from lockstep.keras.input.readings import ReadingWorker, whole_batch
from lockstep.keras.input.streams import Stream
from lockstep.topology import View, place

tf = pytest.importorskip("tensorflow")

from lockstep.keras.input.tf_order import in_order, yields_any_order  # noqa: E402
from lockstep.keras.input.tf_reading import MappedReading, tf_reading  # noqa: E402

Launch = Callable[..., Any]
REPLICAS = 4
ROWS = 45
"""Batches of 8 leave 5 rows."""

IMAGES = np.random.default_rng(0).integers(0, 256, (ROWS, 8, 6, 3), np.uint8)
LABELS = np.arange(ROWS)


class Alone:
    """A job, as far as reading needs it; the test sets the view."""

    joins = False

    def __init__(self, worker: int = 0, workers: tuple[int, ...] = (0,)) -> None:
        self.worker = worker
        self.view: View = place(REPLICAS, workers)


def source() -> Any:
    return tf.data.Dataset.from_tensor_slices((IMAGES, LABELS))


def scaled(image: Any, label: Any) -> Any:
    return tf.cast(image, tf.float32) / 255.0, label


def centred(image: Any, label: Any) -> Any:
    return (image - 0.45) / 0.225 * 3.0 * 7.0, label


def augmented(image: Any, label: Any) -> Any:
    image = tf.image.adjust_contrast(tf.image.adjust_hue(image, 0.1), 1.3)
    return tf.image.resize(tf.image.rgb_to_yiq(image), (5, 7)), label


def jpegs() -> Any:
    encoded = [tf.io.encode_jpeg(image).numpy() for image in IMAGES]
    return tf.data.Dataset.from_tensor_slices((encoded, LABELS))


def decoded(text: Any, label: Any) -> Any:
    return (
        tf.image.resize(tf.io.decode_jpeg(text, channels=3), (6, 6)) / 255.0,
        label,
        tf.cast(label, "float32"),
    )


def words(image: Any, label: Any) -> Any:
    return {"text": tf.strings.join(["row ", tf.strings.as_string(label)]), "none": None, "image": image[0]}


def chosen(image: Any, label: Any) -> Any:
    return tf.cond(label % 2 == 0, lambda: tf.cast(image, tf.float32), lambda: tf.zeros((8, 6, 3))), label


def table() -> Any:
    values = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2], tf.int64), tf.constant([5, 6], tf.int64))
    return tf.lookup.StaticHashTable(values, 0)


def lookup() -> Callable[..., Any]:
    found = table()
    return lambda image, label: (image, found.lookup(label))


def pure(image: Any, label: Any) -> Any:
    sums = tf.numpy_function(lambda array: array.sum(dtype="int64"), [image], tf.int64, stateful=False)
    return image, tf.ensure_shape(sums, ())


PURE: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: source().shuffle(20).map(scaled).batch(8),
    "seeded": lambda: source().shuffle(20, seed=3).map(scaled).batch(8, drop_remainder=True).prefetch(3),
    "parallel": lambda: (
        source().map(scaled, num_parallel_calls=2).map(centred, num_parallel_calls=tf.data.AUTOTUNE)
    ).batch(8, num_parallel_calls=2),
    "maps": lambda: source().map(scaled).prefetch(2).map(centred).map(augmented).batch(8).repeat(2).skip(1),
    "jpeg": lambda: jpegs().shuffle(50).repeat(2).map(decoded).batch(8, drop_remainder=True).take(9),
    "words": lambda: source().map(words).batch(8),
    "counted": lambda: source().map(scaled).repeat(2).take(61).skip(3).map(centred).batch(8),
    "earlier": lambda: source().map(scaled).shuffle(10).map(centred, num_parallel_calls=2).batch(8),
    "cached": lambda: source().cache().map(scaled).batch(8),
    "cond": lambda: source().map(chosen).batch(8),
    "lookup": lambda: source().map(lookup()).batch(8),
    "python": lambda: source().map(pure).batch(8),
    "zipped": lambda: (
        tf.data.Dataset.zip((source(), tf.data.Dataset.range(99)))
        .map(lambda pair, number: (pair[0], number))
        .batch(8)
    ),
}


def divided(dataset: Any, job: Alone) -> MappedReading:
    found = tf_reading(dataset, ReadingWorker(job, 7), weighed=False)  # type: ignore[arg-type]
    assert isinstance(found, MappedReading), found
    return found


def digest(nest: Any) -> bytes:
    leaves = [np.array(0) if leaf is None else leaf for leaf in keras.tree.flatten(nest)]
    return digest_arrays(map(np.ascontiguousarray, leaves))


def passes(dataset: Any, count: int = 2) -> list[list[bytes]]:
    """Return hashes of the share of each replica of each batch, as plain iteration yields them."""
    return [
        [shares(whole_batch(data, REPLICAS)) for data in dataset.as_numpy_iterator()] for _ in range(count)
    ]


def shares(batch: GlobalBatch) -> Any:
    return [digest(batch.share(replica).data()) for replica in range(REPLICAS)]


@pytest.mark.ci(*[*PURE][::2])
@pytest.mark.parametrize("name", PURE)
def test_rows_are_those_of_plain_iteration_however_the_view_changes(name: str) -> None:
    tf.random.set_seed(3)
    plain = passes(PURE[name]())
    for job in (Alone(), Alone(0, (0, 1)), Alone(2, (0, 1, 2))):
        tf.random.set_seed(3)
        reading = divided(PURE[name](), job)
        for number in range(2):
            found = []
            for step, batch in enumerate(reading.begin()):
                if step == 2 and number:
                    job.view = place(REPLICAS, (job.worker,))
                if step == 4 and number:
                    job.view = place(REPLICAS, (job.worker, 9))
                own = job.view.replicas_of(job.worker)
                order = sorted(range(REPLICAS), key=lambda replica, own=own: replica not in own)
                parts = {replica: digest(batch.share(replica).data()) for replica in order}
                found.append([parts[replica] for replica in range(REPLICAS)])
            assert found == plain[number]


def flipped(image: Any, label: Any) -> Any:
    image = tf.image.random_flip_left_right(tf.cast(image, tf.float32), seed=4)
    return image + tf.random.normal((8, 6, 3)), tf.image.random_flip_left_right(image, seed=4)


def seen(image: Any, label: Any) -> Any:
    return tf.random.uniform((2,)), tf.random.uniform((2,)), label


@tf.function  # type: ignore[untyped-decorator]
def noise() -> Any:
    return tf.random.uniform(())


def called(image: Any, label: Any) -> Any:
    return noise(), noise(), tf.cond(label >= 0, noise, noise)


def looped(image: Any, label: Any) -> Any:
    rows = tf.map_fn(lambda _: tf.map_fn(lambda _: noise(), tf.zeros(2)), tf.zeros(3))
    total = tf.TensorArray(tf.float32, 3)
    for index in tf.range(3):
        total = total.write(index, tf.random.uniform(()))
    return rows, total.stack()


FLIP = keras.layers.RandomFlip()
MASKS = [keras.layers.RandomFlip(seed=4), keras.layers.RandomFlip(seed=4)]
ZOOM = keras.layers.RandomZoom(0.3, seed=4)
BRIGHTNESS = [keras.layers.RandomBrightness(0.3, seed=seed) for seed in (1, 2, None)]


def layered(image: Any, label: Any) -> Any:
    image = tf.cast(image, tf.float32)
    return [layer(image, training=True) for layer in (FLIP, *MASKS, ZOOM, MASKS[1])], label


def lit(image: Any, label: Any) -> Any:
    """Return the numbers that layers draw."""
    return [
        layer(tf.fill((1, 1, 3), 128.0), training=True)[0, 0, 0] for layer in (*BRIGHTNESS, BRIGHTNESS[0])
    ]


RANDOM: dict[str, Callable[[], Any]] = {
    "layers": lambda: source().map(lit, num_parallel_calls=4).batch(8),
    "more layers": lambda: (
        source().map(lit).map(lambda *row: (*lit(None, None), *row), num_parallel_calls=2).batch(8)
    ),
    "draws": lambda: source().map(seen).batch(8),
    "maps": lambda: (
        source()
        .map(scaled)
        .map(lambda *row: (*seen(*row), *seen(*row)))
        .map(lambda *row: (*row, tf.random.uniform(())))
        .batch(8)
    ),
    "called": lambda: source().map(called, num_parallel_calls=2).batch(8),
    "looped": lambda: source().map(looped).batch(8),
    "repeated": lambda: source().take(10).map(seen).repeat(2).batch(8),
}


OF_IMAGES = {"flipped": flipped, "layered": layered}


@pytest.mark.slow("more layers")
@pytest.mark.ci("layered", "looped", "maps", "repeated", "layers")
@pytest.mark.parametrize("name", [*RANDOM, *OF_IMAGES])
def test_random_numbers_depend_on_the_place_of_a_row_and_not_on_its_reader(name: str) -> None:
    dataset = source().map(OF_IMAGES[name]).batch(8) if name in OF_IMAGES else RANDOM[name]()
    states = [np.random.get_state()[1].tolist(), tf.random.get_global_generator().state.numpy().tolist()]
    found = []
    for job in (Alone(), Alone(1, (0, 1)), Alone(2, (0, 1, 2))):
        reading = divided(dataset, job)
        found.append([[shares(batch) for batch in reading.begin()] for _ in range(2)])
    assert found == [found[0]] * 3
    assert states == [
        np.random.get_state()[1].tolist(),
        tf.random.get_global_generator().state.numpy().tolist(),
    ]
    if name in OF_IMAGES:
        return
    reading = divided(dataset, Alone())
    numbers = [
        leaf.tobytes()
        for _ in range(2)
        for batch in reading.begin()
        for part in keras.tree.flatten(batch.read(slice(0, batch.examples)))
        if part.dtype == np.float32
        for leaf in part.reshape(-1)
    ]
    repeats = len(numbers) - len(set(numbers))
    assert len(numbers) > 100
    assert repeats <= 1  # Of numbers with 23 random bits.


def test_operations_of_one_seed_draw_the_same_numbers() -> None:
    image = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).map(
        lambda image, _: (tf.random.uniform((2,), seed=1), tf.random.uniform((2,), seed=1))
    )
    for batch in divided(image.batch(8), Alone()).begin():
        one, other = batch.read(slice(0, batch.examples))
        np.testing.assert_array_equal(one, other)


def generator_of(layer: Any) -> Any:
    """Return the generator from which a layer draws in `tf.data`."""
    return getattr(layer, "_backend_generators", {"tensorflow": layer.generator})["tensorflow"]


def test_layers_of_one_seed_draw_the_same_numbers() -> None:
    differing = [0, 0]
    for batch in divided(source().map(layered, num_parallel_calls=2).batch(8), Alone()).begin():
        images, _ = batch.read(slice(0, batch.examples))
        flip, one, other, _, again = np.moveaxis(images, 1, 0)
        np.testing.assert_array_equal(one, other)
        for number, image in enumerate((flip, again)):
            differing[number] += int((one != image).any(axis=(1, 2, 3)).sum())
    assert min(differing) > 10
    # Reading does not advance the generators.
    for layer in MASKS:
        assert generator_of(layer).state.value.numpy().tolist() == [4, 0]


def mixed(images: Any, labels: Any) -> Any:
    """Return numbers that a batch draws; a Python number is known only of full batches."""
    numbers = tf.random.uniform((images.shape[0] or tf.shape(images)[0], 2))
    return numbers, labels, ZOOM(tf.cast(images, tf.float32), training=True), FLIP(images, training=True)


def views(images: Any, labels: Any) -> Any:
    light = BRIGHTNESS[0](tf.fill((2 * tf.shape(images)[0], 1, 1, 3), 128.0), training=True)
    return light[:, 0, 0, 0], tf.repeat(labels, 2)


def noisy(row: Any) -> Any:
    return tf.cast(row, tf.float32) + tf.random.gamma([], 0.7, seed=2)


def from_keras() -> Callable[[Any], Any]:
    generator = keras.random.SeedGenerator(4)
    return lambda row: tf.cast(row, tf.float32) + keras.random.uniform((), seed=generator)


def from_tensorflow() -> Callable[[Any], Any]:
    generator = tf.random.Generator.from_seed(4)
    return lambda row: tf.cast(row, tf.float32) + generator.normal(())


def numbers() -> Any:
    return tf.data.Dataset.range(60)


def noisy_four(row: Any, calls: int | None) -> Any:
    return tf.data.Dataset.from_tensors(row).repeat(4).map(noisy, num_parallel_calls=calls)


DRAWING: dict[str, Callable[[int | None], Any]] = {
    "zipped": lambda calls: tf.data.Dataset.zip((numbers().shuffle(9).batch(2), numbers().batch(2))).map(
        lambda one, two: noisy(one) - noisy(two), num_parallel_calls=calls
    ),
    "shuffled": lambda calls: numbers().map(noisy, num_parallel_calls=calls).shuffle(9).batch(8),
    "cached": lambda calls: numbers().map(noisy, num_parallel_calls=calls).cache().batch(8),
    "filtered": lambda calls: (
        numbers().map(noisy, num_parallel_calls=calls).filter(lambda row: row > 3).prefetch(2)
    ),
    "in a function": lambda calls: numbers().flat_map(lambda row: noisy_four(row, calls)),
    "interleaved": lambda calls: numbers().interleave(
        lambda row: noisy_four(row, None), cycle_length=8, num_parallel_calls=calls
    ),
    "generator of TensorFlow": lambda calls: numbers().map(from_tensorflow(), num_parallel_calls=calls),
}
if keras.backend.backend() == "tensorflow":
    DRAWING["generator of Keras"] = lambda calls: numbers().map(from_keras(), num_parallel_calls=calls)


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_in_parallel_is_in_order(name: str) -> None:
    found = []
    for calls in (8, None):
        tf.random.set_seed(3)
        dataset = DRAWING[name](calls)
        ordered = in_order(dataset)
        assert (ordered is dataset) == (calls is None)
        # Later, the program may pass the same dataset to another call.
        passes = [list(each.as_numpy_iterator()) for each in (ordered, ordered, in_order(dataset))]
        found.append([[row.tobytes() for row in rows] for rows in passes])
        assert int(ordered.cardinality()) == int(dataset.cardinality())
    assert found[0] == found[1]


def test_the_pipeline_of_a_replica_draws_in_order() -> None:
    found = []
    for calls in (8, None):
        tf.random.set_seed(3)
        stream = Stream(DRAWING["shuffled"](calls))
        found.append([[rows.tobytes() for rows in stream.begin()] for _ in range(2)])
    assert found[0] == found[1]


def first_waits_for_second() -> Callable[[Any], Any]:
    """A function whose result for 0 is ready only after that for 1."""
    second = threading.Event()

    def wait(number: Any) -> Any:
        if number == 0:
            assert second.wait(600)
        elif number == 1:
            second.set()
        return number

    return lambda number: tf.numpy_function(wait, [number], tf.int64, stateful=False)


UNORDERED: dict[str, Callable[[Any], Any]] = {
    "option": lambda slow: with_option(tf.data.Dataset.range(6).map(slow, num_parallel_calls=4)),
    "map": lambda slow: tf.data.Dataset.range(6).map(slow, num_parallel_calls=4, deterministic=False),
    "map within": lambda slow: tf.data.Dataset.range(1).flat_map(
        lambda _: tf.data.Dataset.range(6).map(slow, num_parallel_calls=4, deterministic=False)
    ),
    # TensorFlow runs Python functions within an interleave one after the other.
    "interleave": lambda _: tf.data.Dataset.range(6).interleave(
        tf.data.Dataset.from_tensors,
        cycle_length=4,
        num_parallel_calls=4,
        deterministic=False,
    ),
}


def with_option(dataset: Any) -> Any:
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


@pytest.mark.parametrize("name", UNORDERED)
def test_elements_come_in_their_order_without_determinism(name: str) -> None:
    dataset = UNORDERED[name](first_waits_for_second())
    assert yields_any_order(dataset)
    assert [int(number) for number in in_order(dataset)] == list(range(6))
    assert not yields_any_order(tf.data.Dataset.range(6).map(lambda number: number, num_parallel_calls=4))


def test_what_draws_no_numbers_stays_parallel() -> None:
    for dataset in (
        source().map(scaled, num_parallel_calls=8).shuffle(9),
        source().map(lookup(), num_parallel_calls=8),
        numbers().interleave(lambda row: tf.data.Dataset.from_tensors(row), num_parallel_calls=8),
    ):
        assert in_order(dataset) is dataset


BATCHED: dict[str, Callable[[], Any]] = {
    "batches": lambda: source().batch(8).map(mixed, num_parallel_calls=4).prefetch(2),
    "full": lambda: source().batch(8, drop_remainder=True).map(mixed, num_parallel_calls=4),
    "counted": lambda: (
        source().shuffle(9, seed=2).batch(8).map(mixed, num_parallel_calls=4).repeat(2).skip(1)
    ),
    "rows, too": lambda: (
        source()
        .map(lambda image, label: (tf.image.random_brightness(image, 0.3), label), num_parallel_calls=4)
        .batch(8)
        .map(mixed, num_parallel_calls=4)
        .map(lambda *parts: (*parts, tf.random.uniform((tf.shape(parts[0])[0],))))
    ),
    "views": lambda: source().map(scaled).batch(8).map(views, num_parallel_calls=4),
}


@pytest.mark.ci("rows, too", "batches", "counted", "full")
@pytest.mark.parametrize("name", BATCHED)
def test_maps_of_batches_draw_by_the_place_of_the_batch(name: str) -> None:
    found = []
    for worker, workers in ((0, (0,)), (1, (0, 1))):
        tf.random.set_seed(3)
        reading = divided(BATCHED[name](), Alone(worker, workers))
        assert reading.way.how == "every worker reads the whole dataset"
        assert "call .map before .batch" in reading.way.why
        passes = [[batch.read(slice(0, batch.examples)) for batch in reading.begin()] for _ in range(2)]
        found.append([[digest(nest) for nest in batches] for batches in passes])
    assert found[0] == found[1]
    tf.random.set_seed(3)
    dataset = BATCHED[name]()
    plain = [list(dataset.as_numpy_iterator()) for _ in range(2)]
    for batches, expected in zip(passes, plain, strict=True):
        for batch, other in zip(batches, expected, strict=True):
            assert [part.shape for part in batch] == [part.shape for part in other]
            np.testing.assert_array_equal(batch[1], other[1])
    numbers = [number for batches in passes for batch in batches for number in batch[0].reshape(-1).tolist()]
    assert len(numbers) - len(set(numbers)) <= 1


def with_variable() -> Any:
    variable = tf.Variable(1.0)
    return source().map(lambda image, label: variable * tf.cast(label, tf.float32))


def with_generator() -> Any:
    generator = tf.random.Generator.from_seed(1)
    return source().map(lambda image, label: generator.uniform(()))


def with_state() -> Any:
    """A map that reads the state of a generator of Keras, besides drawing from it."""
    layer = keras.layers.RandomFlip(seed=1)

    def flipped(image: Any, label: Any) -> Any:
        flipped = layer(image, training=True)
        return flipped, generator_of(layer).state.value + 1

    return source().map(flipped)


def with_counter() -> Any:
    variable = tf.Variable(0)
    return source().map(lambda image, label: variable.assign_add(1))


def unordered() -> Any:
    options = tf.data.Options()
    options.deterministic = False
    return source().map(scaled).batch(8).with_options(options)


def uneven() -> Any:
    spec = tf.TensorSpec((None,), tf.float32)
    return tf.data.Dataset.from_generator(lambda: iter([np.zeros(3)]), output_signature=spec)


def rebound() -> Any:
    for factor in (2.0, 3.0):
        dataset = source().map(lambda *_: factor * tf.random.uniform(()))  # noqa: B023
        if factor == 2:
            kept = dataset
    return kept.batch(8)


JOINT: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: source().shuffle(9).batch(8), "no .map before .batch"),
    "batched": (lambda: source().batch(8).map(scaled), "call .map before .batch"),
    "shuffled": (lambda: source().map(scaled).shuffle(9).batch(8), "call .map after .shuffle"),
    "filtered": (lambda: source().map(scaled).filter(lambda *_: True).batch(8), "call .map after .filter"),
    "cached": (lambda: source().map(scaled).cache().batch(8), ".cache keeps the mapped examples"),
    "cached batches": (lambda: source().map(scaled).batch(8).cache(), "caches batches"),
    "shuffled batches": (lambda: source().map(scaled).batch(8).shuffle(9), "shuffles batches"),
    "padded": (lambda: source().map(scaled).padded_batch(8), ".padded_batch"),
    "ragged": (lambda: source().map(scaled).ragged_batch(8), ".dense_to_ragged"),
    "unbatched": (lambda: source().map(scaled).batch(8).unbatch(), ".unbatch"),
    "unordered": (unordered, "remove deterministic=False"),
    "unordered map": (
        lambda: source().map(scaled, num_parallel_calls=2, deterministic=False).batch(8),
        "remove deterministic=False",
    ),
    "shapes": (lambda: uneven().map(lambda row: row[0]).batch(8), "fixed shapes"),
    "python": (
        lambda: source().map(lambda *row: tf.numpy_function(sum, row, tf.int64)).batch(8),
        "stateful=False",
    ),
    "eager python": (
        lambda: source().map(lambda *row: tf.py_function(sum, row, tf.int64)).batch(8),
        "stateful=False",
    ),
    "variable": (lambda: with_variable().batch(8), "Variable"),
    "counter": (lambda: with_counter().batch(8), "Variable"),
    "generator": (lambda: with_generator().batch(8), "instead of tf.random.Generator"),
    "state": (lambda: with_state().batch(8), "uses the variable seed_generator"),
    "vectorized": (
        lambda: (
            source().map(lambda *_: tf.vectorized_map(lambda _: tf.random.uniform(()), tf.zeros(3))).batch(8)
        ),
        "tf.vectorized_map",
    ),
    "crops": (
        lambda: (
            source()
            .map(lambda *_: tf.image.sample_distorted_bounding_box((9, 9, 3), [[[0.0, 0.0, 1.0, 1.0]]])[0])
            .batch(8)
        ),
        "SampleDistortedBoundingBoxV2",
    ),
    "rebound": (rebound, "changes when it is traced again"),
    "ragged rows": (
        lambda: source().map(lambda image, _: tf.RaggedTensor.from_tensor(image)).batch(8),
        "make them dense",
    ),
    "traced": (
        lambda: source().map(lambda *_: tf.random.uniform(()) + np.random.uniform()).batch(8),
        "changes when it is traced again",
    ),
}


@pytest.mark.parametrize("name", JOINT)
def test_the_reason_for_joint_reading_is_given(name: str) -> None:
    make, reason = JOINT[name]
    dataset = make()
    state = np.random.get_state()[1].tolist()
    found = tf_reading(dataset, ReadingWorker(Alone(), 7), weighed=False)  # type: ignore[arg-type]
    assert isinstance(found, str)
    assert reason in found
    assert np.random.get_state()[1].tolist() == state


def counted(calls: list[int]) -> Any:
    """Return a pipeline that counts the rows that are mapped."""

    def count(label: Any) -> Any:
        calls.append(int(label))
        return label

    def mapped(_: Any, label: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(count, [label], tf.int64, stateful=False), ())

    return source().map(mapped).batch(8, drop_remainder=True)


def test_a_worker_maps_its_own_rows_and_those_that_are_compared() -> None:
    calls: list[int] = []
    job = Alone(1, (0, 1))
    for batch in divided(counted(calls), job).begin():
        for replica in job.view.replicas_of(1):
            batch.share(replica).data()
        batch.check()
    own = {row for row in range(40) if row % 8 >= 4}
    assert own <= set(calls)
    assert len(calls) == len(set(calls))
    reader = ReadingWorker(job, 7)  # type: ignore[arg-type]
    compared = [reader.compared_replica(0, step) for step in range(5)]
    assert len(set(calls) - own) == 2 * sum(replica in (0, 1) for replica in compared)


def test_batches_that_are_skipped_are_not_mapped() -> None:
    calls: list[int] = []
    for step, batch in enumerate(divided(counted(calls), Alone()).begin()):
        if step == 3:
            np.testing.assert_array_equal(batch.read(slice(2, 4)), [26, 27])
    assert min(calls) == 24


def test_a_joiner_maps_only_the_batch_that_it_computes_alone() -> None:
    calls: list[int] = []
    job = Alone()
    job.joins = True
    reading = divided(counted(calls), job)
    batches = reading.begin()
    shares(next(batches))
    batches.close()  # type: ignore[attr-defined]
    assert sorted(calls) == list(range(8))


def test_the_error_of_a_map_is_raised_where_its_rows_are_read() -> None:
    def failing(_: Any, label: Any) -> Any:
        tf.debugging.assert_none_equal(label, tf.constant(13, tf.int64), message="row 13 is broken")
        return label

    first, second, third, *_ = divided(source().map(failing).batch(8), Alone()).begin()
    assert first.read(slice(0, 8)).tolist() == list(range(8))
    with pytest.raises(DataError, match="row 13 is broken"):
        second.read(slice(0, 8))
    with pytest.raises(DataError, match="see the first error"):
        second.read(slice(0, 8))
    assert third.read(slice(0, 8)).tolist() == list(range(16, 24))


def test_a_pass_that_is_not_finished_is_freed_while_a_graph_is_built() -> None:
    batches = divided(source().map(scaled, num_parallel_calls=2).batch(8), Alone()).begin()
    next(batches).read(slice(0, 3))
    garbage: list[Any] = [batches]
    garbage.append(garbage)
    del batches, garbage

    @tf.function  # type: ignore[untyped-decorator]
    def step(number: Any) -> Any:
        gc.collect()
        return number + 1

    graph = step.get_concrete_function(tf.constant(1)).graph
    assert not [operation for operation in graph.get_operations() if "Queue" in operation.type]


def test_weights_of_classes_are_added_to_own_rows() -> None:
    options: dict[str, Any] = {"batch_size": None, "steps": None, "shuffle": False, "seed": (0, 0, 1)}
    options |= {"class_weight": {label: label / 4 for label in range(ROWS)}, "unsplit": False}
    alone: Any = Alone(1, (0, 1))
    readers = [ReadingWorker(alone, 7, joint=is_joint) for is_joint in (True, False)]
    for drop in (False, True):
        dataset = source().map(scaled).batch(8, drop_remainder=drop)
        joint, own = (global_input(dataset, **options, reader=reader) for reader in readers)
        assert "each worker reads the rows of its replicas" in own.facts()["data reading"]
        pairs = zip(joint.batches(), own.batches(), strict=True)
        for one, other in pairs:
            assert shares(one) == shares(other)
            assert [leaf.dtype for leaf in one.read(slice(0, 2))] == [
                leaf.dtype for leaf in other.read(slice(0, 2))
            ]


MARKS = ("fit ", "loop ", "evaluate ", "predict ")


def results(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return [line for mark in MARKS for line in run.marked(worker, mark)]


@pytest.fixture
def undisturbed(undisturbed_run: Launch) -> Callable[[str], Any]:
    """A run on one worker."""
    return lambda backend: undisturbed_run("-n 1 --replicas 4", "tf_pipelines.py", backend=backend)


def rows_mapped(run: Any, worker: int) -> int:
    (line,) = run.marked(worker, "rows ")
    return int(line.split()[1])


@pytest.mark.slow
@pytest.mark.ci
def test_a_lost_worker_does_not_change_a_training(
    launch: Launch, thorough_backend: str, undisturbed: Callable[[str], Any]
) -> None:
    backend = thorough_backend
    options = "-n 3 --replicas 4 --max-restarts 0"
    run, whole = launch(options, "tf_pipelines.py", "lost1", backend=backend), undisturbed(backend)
    assert len(results(whole, 0)) == (19 if backend == "tensorflow" else 13)
    for worker in (0, 2):
        assert results(run, worker) == results(whole, 0)
    # Worker 2 has one replica of four, and two after the loss.
    assert rows_mapped(run, 2) < 0.6 * rows_mapped(whole, 0)


@pytest.mark.slow
def test_a_joiner_reads_on_in_the_middle_of_a_pass(
    launch: Launch, thorough_backend: str, undisturbed: Callable[[str], Any]
) -> None:
    options = "-n 2 --replicas 4 --min-workers 2"
    run = launch(options, "tf_pipelines.py", "lost1", backend=thorough_backend)
    for worker in (0, 2):
        assert results(run, worker) == results(undisturbed(thorough_backend), 0)


# In quick tests, a job resumes in the middle of a pass in test_loader_reading.py and test_dividing.py.
@pytest.mark.slow
def test_a_job_resumes_in_the_middle_of_a_pass(
    launch: Launch, thorough_backend: str, undisturbed: Callable[[str], Any], tmp_path: Path
) -> None:
    keeping = f"--checkpoint {tmp_path} --checkpoint-every 1"
    options = f"-n 4 --replicas 4 {keeping}"
    assert launch(options, "tf_pipelines.py", "killed", backend=thorough_backend).status == 137
    run = launch(f"-n 2 {keeping}", "tf_pipelines.py", "killed", backend=thorough_backend)
    assert "resuming from" in run.stderr
    for worker in (0, 1):
        assert results(run, worker) == results(undisturbed(thorough_backend), 0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_number_of_workers_does_not_change_a_training(
    launch: Launch, backend: str, workers: int, undisturbed: Callable[[str], Any]
) -> None:
    run = launch(f"-n {workers} --replicas 4", "tf_pipelines.py", backend=backend)
    for worker in range(workers):
        assert results(run, worker) == results(undisturbed(backend), 0)


UNFINISHED = """
import sys
import tensorflow as tf
from lockstep.keras.input.readings import ReadingWorker
from lockstep.keras.input.tf_reading import tf_reading
from lockstep.topology import place

class Job:
    joins, worker, view = False, 0, place(2, (0, 1))

dataset = tf.data.Dataset.range(10**6).map(lambda row: row + 1, num_parallel_calls=int(sys.argv[1]) or None)
reading = tf_reading(dataset.batch(8).repeat(), ReadingWorker(Job(), 7), weighed=False)
passes = [reading.begin(), reading.begin()]
first = [next(batches).read(slice(0, 4)).tolist() for batches in passes]
print(first, flush=True)
if sys.argv[2] == "raise":
    raise SystemExit(3)
"""


@pytest.mark.slow
def test_a_process_ends_in_the_middle_of_a_pass() -> None:
    environment = os.environ | {"KERAS_BACKEND": keras.backend.backend(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    commands = [[sys.executable, "-c", UNFINISHED, calls, end] for calls, end in (("0", "raise"), ("-1", ""))]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for command in commands
    ]
    for process, status in zip(running, (3, 0), strict=True):
        output, _ = process.communicate(timeout=180)
        assert output.strip() == "[[1, 2, 3, 4], [1, 2, 3, 4]]"
        assert process.returncode == status
