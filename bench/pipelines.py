"""Pipelines of TensorFlow without tuning.

When a pipeline ends, it waits for the thread that tunes it, which takes seconds on a pinned core.
"""

from typing import Any


def without_tuning(dataset: Any) -> Any:
    """Return the dataset without automatic tuning."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    return dataset.with_options(options)


def of_arrays(x: Any, y: Any, batch: int) -> Any:
    """Return the dataset that Keras makes of arrays for `fit`, without automatic tuning."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = ArrayDataAdapter(x, y, batch_size=batch, shuffle=False)
    dataset = without_tuning(adapter.get_tf_dataset())
    return dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
