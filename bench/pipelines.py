"""Pipelines of TensorFlow that do not idle.

The thread that tunes a pipeline is awaited where the pipeline ends, which takes seconds on a pinned core.
"""

from typing import Any


def without_tuning(dataset: Any) -> Any:
    """Return the dataset, which is left as it is while it is read."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    return dataset.with_options(options)


def of_arrays(x: Any, y: Any, batch: int) -> Any:
    """Return what Keras makes of arrays for `fit`, without tuning."""
    import tensorflow as tf
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = ArrayDataAdapter(x, y, batch_size=batch, shuffle=False)
    dataset = without_tuning(adapter.get_tf_dataset())
    return dataset.apply(tf.data.experimental.assert_cardinality(adapter.num_batches))
