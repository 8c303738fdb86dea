"""Trains with two optimizers in each step, on TensorFlow or PyTorch, and prints the digest."""

from typing import Any

import keras
import numpy as np

import lockstep


class Two(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = keras.layers.Dense(6, "tanh"), keras.layers.Dense(1)
        self.optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))

    def loss_of(self, x: Any, y: Any) -> Any:
        return keras.ops.mean(keras.ops.square(self(x) - y))

    def train_step(self, data: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        for optimizer, layer in zip(self.optimizers, (self.first, self.second), strict=True):
            variables = layer.trainable_variables
            if keras.backend.backend() == "torch":
                import torch

                self.zero_grad()
                loss = self.loss_of(x, y)
                loss.backward()
                with torch.no_grad():
                    optimizer.apply([variable.value.grad for variable in variables], variables)
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.loss_of(x, y)
                optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
        return {"error": loss}


random = np.random.default_rng(0)
x = random.normal(size=(64, 8)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
keras.utils.set_random_seed(3)
model = Two()
model(x[:1])
for optimizer, layer in zip(model.optimizers, (model.first, model.second), strict=True):
    optimizer.build(layer.trainable_variables)
model.compile(keras.optimizers.SGD(0.0))
history = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
print("result", lockstep.digest(model), history)
