"""Threads that train an ensemble, predict parts, make models, and evaluate when the last line has run.

ensembles.py plain|whole|lost: plain for plain Keras; with lost, worker 1 is killed in a call of the ensemble.
"""

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

HOW = sys.argv[1]
X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class KillWorker(keras.callbacks.Callback):
    """Kills worker 1, once."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        from lockstep.worker.job import current

        if HOW == "lost" and current().worker == 1 and epoch == 2 and self.model.name == "member_2":
            os.kill(os.getpid(), signal.SIGKILL)


def member(number: int) -> Any:
    kernel = keras.initializers.GlorotUniform(seed=number)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=kernel)], name=f"member_{number}"
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def train(model: Any) -> float:
    # Longer than the others, so that the turns of workers would differ.
    history = model.fit(
        *(X, Y), batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[KillWorker()]
    ).history
    return float(history["loss"][-1])


def figure(value: float) -> None:
    print("figure", float(value), flush=True)


def main() -> None:
    in_job = HOW != "plain"
    keras.utils.set_random_seed(1)
    models = [member(number) for number in (1, 2, 3)]
    with ThreadPoolExecutor(3) as threads:
        for loss in threads.map(train, models):
            figure(loss)
        # Plain Keras fails on JAX if two threads predict with one model.
        each = threads.map if in_job else map
        for part in each(lambda rows: models[0].predict(rows, verbose=0), np.array_split(X, 3)):
            figure(part.sum())
        # A model that a thread makes is the same on all workers only if its seeds are.
        for loss in threads.map(lambda number: train(member(number)), [4, 5]):
            figure(loss)
    last = threading.Thread(target=lambda: figure(models[1].evaluate(X, Y, verbose=0)))
    last.start()
    if not in_job:
        # Keras starts threads, which Python refuses at its end.
        last.join()


if __name__ == "__main__":
    main()
