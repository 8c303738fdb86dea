"""Distributed datasets within graphs of TensorFlow."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import lockstep

ROWS = 70
X = np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32")
Y = X.sum(axis=1)
TRACES: list[int] = []

strategy = lockstep.MultiWorkerMirroredStrategy()


class Lists:
    """An iterable that has several passes."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[X[start : start + 16], Y[start : start + 16]] for start in range(0, ROWS, 16)])


def pipeline(context: Any) -> Any:
    """The replicas' pipelines end one after the other."""
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(3 + context.input_pipeline_id)


def without_length(context: Any) -> Any:
    return pipeline(context).filter(lambda x, y: True)


def main() -> None:
    for data in (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), Lists(), Computed(Lists())):
        graphs(strategy.experimental_distribute_dataset(data), 5)
    for make in (pipeline, without_length):
        graphs(strategy.distribute_datasets_from_function(make), 8)
    fits()


def fits() -> None:
    """`fit` visits a shuffled dataset in the same order if it is distributed, also after an evaluation."""

    def trained(distribute: Callable[[Any], Any]) -> list[Any]:
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        data = distribute(tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=3).batch(16))
        losses = [model.fit(data, epochs=2, verbose=0).history["loss"]]
        return [*losses, model.evaluate(data, verbose=0), model.fit(data, verbose=0).history["loss"]]

    assert trained(strategy.experimental_distribute_dataset) == trained(lambda data: data)


class Computed:
    """An iterable whose elements are computed by functions of TensorFlow, which need a thread to run on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.inner:
            yield (looped(tf.constant(x)), y)


@tf.function  # type: ignore[misc]
def looped(x: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + 0.0), (0, x))[1]


def graphs(dataset: Any, elements: int) -> None:
    """Every kind of iteration visits all rows, each time that it is used."""
    whole = float(Y.sum())

    def total(element: Any) -> Any:
        sums = strategy.run(lambda element: tf.reduce_sum(element[1]), args=(element,))
        return strategy.reduce("SUM", sums, axis=None)

    @tf.function  # type: ignore[misc]
    def counted(iterator: Any, count: Any) -> Any:
        TRACES.append(1)
        found = 0.0
        for _ in tf.range(count):
            found += total(next(iterator))
        return found

    @tf.function  # type: ignore[misc]
    def over_iterator(iterator: Any) -> Any:
        found = 0.0
        for element in iterator:
            found += total(element)
        return found

    @tf.function  # type: ignore[misc]
    def over_dataset() -> Any:
        found = 0.0
        for element in dataset:
            found += total(element)
        return found

    TRACES.clear()
    for _ in range(2):
        iterator = iter(dataset)
        first = counted(iterator, tf.constant(2))
        eagerly = total(iterator.get_next())
        rest = counted(iterator, tf.constant(elements - 3))
        np.testing.assert_allclose(first + eagerly + rest, whole, rtol=1e-4)
        assert iterator.position.taken == elements
        ends(lambda iterator=iterator: counted(iterator, tf.constant(1)))
        ends(iterator.get_next)
        np.testing.assert_allclose(over_iterator(iter(dataset)), whole, rtol=1e-4)
        np.testing.assert_allclose(over_dataset(), whole, rtol=1e-4)
    assert len(TRACES) == 1
    kept = iter(dataset)

    @tf.function  # type: ignore[misc]
    def closed_over() -> Any:
        return total(next(kept))

    found = sum(float(closed_over()) for _ in range(elements))
    np.testing.assert_allclose(found, whole, rtol=1e-4)
    ends(closed_over)

    @tf.function(input_signature=[dataset.element_spec])  # type: ignore[misc]
    def specified(element: Any) -> Any:
        return total(element)

    np.testing.assert_allclose(sum(float(specified(e)) for e in dataset), whole, rtol=1e-4)


def ends(act: Callable[[], Any]) -> None:
    try:
        act()
    except tf.errors.OutOfRangeError:
        return
    raise AssertionError("the dataset has not ended")


if __name__ == "__main__":
    main()
