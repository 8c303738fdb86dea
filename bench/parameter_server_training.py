"""A process of a job with parameter servers, or of a synchronous one; the chief prints batches per second.

    parameter_server_training.py MODEL servers | mirrored | tf_keras [slow | no-standby | server-table ...]
    parameter_server_training.py embedding loop | tf_keras_loop [no-standby]
    parameter_server_training.py table-ROWS servers | loop | tf_keras | tf_keras_loop [server-table]

MODEL is `tutorial`, the model of TensorFlow's tutorial on parameter servers (one dense layer of 10 units,
batches of 2 examples), or `mlp`, batches of 64. With `slow`, the last worker sleeps in each step of a batch.
With `no-standby`, no server keeps what another one processes.
`embedding` is the custom loop of that tutorial: 7 words with an embedding of 16 values, batches of 32.
`table-ROWS` looks up 20 rows of 8 values for each of 64 examples in a table, with `server-table` in a
`ServerEmbedding`, in a custom loop or in `fit`, in which worker 1 of Lockstep also prints the bytes of the
arrays that it exchanges in a step, and each process the memory that it has used at most, and the seconds of
its cores in `fit` for each step.
"""

import os
import resource
import sys
import time
from functools import partial
from typing import Any

import numpy as np

MODEL, KIND = sys.argv[1:3]
SLOW, ALONE, ON_SERVERS = (option in sys.argv[3:] for option in ("slow", "no-standby", "server-table"))
STEPS, BATCH = (200, 2) if MODEL == "tutorial" else (200, 64)
EPOCHS = 6
SLOWDOWN = 9
ROWS = int(MODEL.removeprefix("table-")) if MODEL.startswith("table-") else 0
LOOKUPS = 20
WIDTH, CLASSES = (10, 1) if MODEL == "tutorial" else (784, 10)


def model_of(keras: Any) -> Any:
    layers = keras.layers
    if MODEL == "tutorial":
        model = keras.Sequential([layers.Input((10,)), layers.Dense(10)])
        model.compile(keras.optimizers.SGD(), "mse", steps_per_execution=10)
        return model
    dense = layers.Dense
    if ROWS:
        table = embedding_of(layers)(ROWS, 8, embeddings_initializer="zeros")
        mean = layers.GlobalAveragePooling1D()
        model = keras.Sequential([layers.Input((LOOKUPS,), dtype="int32"), table, mean, dense(1)])
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
        return model
    model = keras.Sequential([layers.Input((WIDTH,)), dense(64, "relu"), dense(64, "relu"), dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def embedding_of(layers: Any) -> Any:
    if not ON_SERVERS:
        return layers.Embedding
    import lockstep

    return partial(lockstep.ServerEmbedding, standbys=not ALONE)


def examples(count: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    if ROWS:
        x = generator.integers(0, ROWS, (count, LOOKUPS)).astype("int32")
        return x, (x % 7).mean(axis=1, dtype="float32")
    x = generator.random((count, WIDTH), dtype=np.float32)
    return x, generator.random((count, 10), dtype=np.float32) if MODEL == "tutorial" else np.arange(
        count
    ) % 10


def callback_of(keras: Any) -> Any:
    class Speed(keras.callbacks.Callback):
        """Prints the batches per second of the epochs after the first two."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                self.begun = time.perf_counter()

        def on_train_end(self, logs: Any = None) -> None:
            self.seconds = time.perf_counter() - self.begun

    return Speed()


def train_in_tf_keras() -> None:
    import tensorflow as tf
    import tf_keras

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc", start=True
        )
        server.join()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    x, y = examples(STEPS * BATCH)

    def dataset(context: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)

    if KIND == "tf_keras_loop":
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        print("speed", loop(tf_keras, strategy, coordinator), flush=True)
        os._exit(0)
    with strategy.scope():
        model = model_of(tf_keras)
    speed = callback_of(tf_keras)
    data = tf_keras.utils.experimental.DatasetCreator(dataset)
    model.fit(data, steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0, callbacks=[speed])
    print("speed", STEPS * (EPOCHS - 2) / speed.seconds, flush=True)
    os._exit(0)


def slow_down(keras: Any, model: Any, worker: int, slow: int) -> None:
    """Let the steps of a worker take ten times as long."""
    if worker != slow:
        return
    from lockstep.keras.backends.jax import JaxProgram

    compute, fastest = JaxProgram.compute, [float("inf")]

    def slowly(self: Any, *given: Any) -> Any:
        begun = time.perf_counter()
        partial = compute(self, *given)
        for value in partial.values():
            value.block_until_ready()
        fastest[0] = min(fastest[0], time.perf_counter() - begun)
        time.sleep(SLOWDOWN * fastest[0])
        return partial

    JaxProgram.compute = slowly  # type: ignore[method-assign]


def keep_nothing() -> None:
    """Let servers have no standbys."""
    from lockstep.parameter_server.tasks import ServerPlace, Tasks

    places = Tasks.places

    def alone(self: Any, *given: Any) -> Any:
        return tuple(ServerPlace(place.process, None) for place in places(self, *given))

    Tasks.places = alone  # type: ignore[method-assign]


def count_bytes() -> list[int]:
    """Return a list of the bytes of arrays in all messages of this process, and of its steps so far."""
    from lockstep.protocol.parameter_server import Push
    from lockstep.transport.array_channel import AskingChannel

    counted = [0, 0]
    send, receive = AskingChannel.send, AskingChannel.receive

    def sent(self: Any, message: Any, arrays: Any = ()) -> None:
        counted[0] += sum(array.nbytes for array in arrays)
        counted[1] += isinstance(message, Push)
        send(self, message, arrays)

    def received(self: Any, asked: Any) -> Any:
        answer, arrays = receive(self, asked)
        counted[0] += sum(array.nbytes for array in arrays)
        return answer, arrays

    AskingChannel.send, AskingChannel.receive = sent, received  # type: ignore[method-assign]
    return counted


def loop(keras: Any, strategy: Any, coordinator: Any) -> float:
    """Train with a custom loop on TensorFlow; return functions per second."""
    import tensorflow as tf

    if ROWS:
        return loop_with_table(keras, strategy, coordinator)
    generator = np.random.default_rng(0)
    words = generator.integers(0, 7, (200, 3))
    labels = (words == 0).any(axis=1, keepdims=True).astype("float32")
    with strategy.scope():
        inputs = keras.layers.Input((3,), dtype="int64")
        embedded = keras.layers.Embedding(7, 16)(inputs)
        mean = keras.layers.Lambda(lambda x: tf.reduce_mean(x, axis=1))(embedded)
        model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(mean))
        optimizer = keras.optimizers.RMSprop(0.1)
        accuracy = keras.metrics.BinaryAccuracy()

    @tf.function
    def step(batches: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                predicted = model(x, training=True)
                losses = tf.keras.losses.binary_crossentropy(y, predicted)
                loss = tf.nn.compute_average_loss(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            accuracy.update_state(y, predicted)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica, args=next(batches)), axis=None)

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices((words, labels)).shuffle(200).repeat().batch(32)

    batches = iter(coordinator.create_per_worker_dataset(dataset))
    for epoch in range(EPOCHS):
        if epoch == 2:
            begun = time.perf_counter()
        accuracy.reset_state()
        for _ in range(STEPS):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
    seconds = time.perf_counter() - begun
    if float(accuracy.result()) < 0.95:
        sys.exit(f"accuracy {float(accuracy.result())}")
    return STEPS * (EPOCHS - 2) / seconds


def loop_with_table(keras: Any, strategy: Any, coordinator: Any) -> float:
    """Train a table with a custom loop on TensorFlow; return functions per second."""
    import tensorflow as tf

    x, y = examples(STEPS * BATCH)
    with strategy.scope():
        model = model_of(keras)
        optimizer = keras.optimizers.Adagrad(0.1)

    @tf.function
    def step(batches: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True)[:, 0] - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return strategy.reduce("SUM", strategy.run(replica, args=next(batches)), axis=None)

    def dataset() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH)

    batches = iter(coordinator.create_per_worker_dataset(dataset))
    for epoch in range(EPOCHS):
        if epoch == 2:
            begun = time.perf_counter()
        for _ in range(STEPS):
            coordinator.schedule(step, args=(batches,))
        coordinator.join()
    return STEPS * (EPOCHS - 2) / (time.perf_counter() - begun)


def train_in_lockstep() -> None:
    import keras

    import lockstep
    from lockstep.worker import job

    if ALONE:
        keep_nothing()
    servers = KIND != "mirrored"
    strategy = lockstep.ParameterServerStrategy() if servers else lockstep.MultiWorkerMirroredStrategy()
    if KIND == "loop":
        speed = loop(keras, strategy, lockstep.ClusterCoordinator(strategy))
        if lockstep.is_chief():
            print("speed", speed, flush=True)
        return
    with strategy.scope():
        model = model_of(keras)
    own = job.current()
    if SLOW:
        slow_down(keras, model, own.worker, 3 if servers else 2)
    replicas = strategy.num_replicas_in_sync
    x, y = examples(STEPS * BATCH * replicas)
    timer, counted = callback_of(keras), count_bytes() if ROWS else []
    begun = time.process_time()
    model.fit(x, y, BATCH * replicas, EPOCHS, verbose=0, callbacks=[timer])
    used = (time.process_time() - begun) / (STEPS * EPOCHS)
    if lockstep.is_chief():
        print("speed", STEPS * replicas * (EPOCHS - 2) / timer.seconds, flush=True)
    elif ROWS and own.worker == 1:
        print("bytes", counted[0] / counted[1], flush=True)
    if ROWS:
        print("cores", used, flush=True)
        print("memory", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, flush=True)


train_in_tf_keras() if KIND.startswith("tf_keras") else train_in_lockstep()
