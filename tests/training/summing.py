"""Steps of programs for `tf.distribute`, on the mean of (w x)^2 over 16 rows: w and x are 1.

Prints w after each step. On two virtual CPUs, TensorFlow's own MirroredStrategy gives the same.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS = 16
X, Y = np.ones((ROWS, 1), "float32"), np.zeros((ROWS, 1), "float32")
strategy = tf.distribute.MirroredStrategy()


def average(_: Any, errors: Any) -> Any:
    return tf.nn.compute_average_loss(errors, global_batch_size=ROWS)


def constant(_: Any, errors: Any) -> Any:
    return tf.reduce_sum(errors) / ROWS


def scaled(_: Any, errors: Any) -> Any:
    return tf.reduce_mean(errors) / tf.distribute.get_strategy().num_replicas_in_sync


def by_strategy(_: Any, errors: Any) -> Any:
    return tf.reduce_mean(errors) / strategy.num_replicas_in_sync


def by_model(model: Any, errors: Any) -> Any:
    return tf.reduce_mean(errors) / model.distribute_strategy.num_replicas_in_sync


def by_keras(model: Any, errors: Any) -> Any:
    return model.compute_loss(y=tf.zeros_like(errors)[:, None], y_pred=tf.sqrt(errors)[:, None])


def unscaled(_: Any, errors: Any) -> Any:
    return tf.reduce_mean(errors)


class Stepping(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.reduce_sum(tf.square(self(x, training=True) - y), axis=1)
            loss = LOSSES[self.name](self, errors)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own": loss}


LOSSES = {
    function.__name__: function
    for function in (average, constant, scaled, by_strategy, by_model, by_keras, unscaled)
}
for name in LOSSES:
    with strategy.scope():
        layers = [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        model = Stepping(layers, name=name)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert model.distribute_strategy is strategy
    model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)
    print("weight", name, round(float(model.get_weights()[0][0, 0]), 4), flush=True)
