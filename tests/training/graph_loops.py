"""Custom loops on TensorFlow, in graphs: each case prints a digest of its results, and its logged values.

graph_loops.py [--figures] [--unequal] [CASE...]: all cases, unless some are named.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import TrackableSaver

import lockstep
from lockstep.worker import job

BATCH = 8
ROWS = np.random.default_rng(0).normal(size=(27, 6)).astype("float32")  # The last batch has three rows.
LABELS = (ROWS.sum(1) > 0).astype("int64")

written: list[str] = []
write = TrackableSaver.save


def counted(saver: Any, prefix: str, **how: Any) -> Any:
    written.append(prefix)
    return write(saver, prefix, **how)


TrackableSaver.save = counted
strategy = lockstep.MultiWorkerMirroredStrategy()
# Before the strategy does anything else: variables of Keras begin as in one process, also in a metric.
with strategy.scope():
    counter = keras.Variable(1.0, trainable=False, synchronization="on_read", aggregation="sum")
    with keras.StatelessScope():
        late = keras.Variable(
            keras.initializers.Ones(), (), trainable=False, synchronization="on_read", aggregation="sum"
        )
assert (float(counter), float(late)) == (1, 1)


def dataset(rows: int = len(ROWS), batch: int = BATCH) -> Any:
    data = tf.data.Dataset.from_tensor_slices((ROWS[:rows], LABELS[:rows])).batch(batch)
    return strategy.experimental_distribute_dataset(data)


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


class Plain:
    """A model without parts that are per replica: its results are those of one process."""

    def __init__(self, *between: Any) -> None:
        self.model = keras.Sequential(
            [keras.layers.Dense(5, activation="relu"), *between, keras.layers.Dense(2)]
        )
        self.optimizer = keras.optimizers.Adam(0.05)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.mean = keras.metrics.Mean()

    def step(self, inputs: Any) -> Any:
        rows, labels = inputs
        with tf.GradientTape() as tape:
            predictions = self.model(rows, training=True)
            losses = cross_entropy()(labels, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(labels, predictions)
        self.mean.update_state(losses)
        return loss

    def result(self, losses: list[float]) -> dict[str, Any]:
        figures = {"accuracy": float(self.accuracy.result()), "mean": float(self.mean.result())}
        weights = [weight.tolist() for weight in self.model.get_weights()]
        return {"losses": losses, "weights": weights, "steps": int(self.optimizer.iterations), **figures}


def plain() -> Any:
    made = Plain()

    @tf.function
    def train_step(iterator: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(made.step, args=(next(iterator),)), axis=None)

    losses = []
    for _ in range(2):
        iterator = iter(data_of_plain)
        losses += [float(train_step(iterator)) for _ in range(4)]
    # A new iterator does not cause a new graph; creating variables takes an additional trace.
    assert train_step.experimental_get_tracing_count() <= 2
    return made.result(losses)


def stateful() -> Any:
    """Arguments that change with each step; statistics and random numbers per replica."""
    made = Plain(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))

    @tf.function
    def train_step(inputs: Any) -> Any:
        return strategy.reduce(lockstep.ReduceOp.SUM, strategy.run(made.step, args=(inputs,)), axis=None)

    return made.result([float(train_step(inputs)) for inputs in dataset()])


def without_function() -> Any:
    """A program without a tf.function: each run is traced separately."""
    made = Plain(keras.layers.Dropout(0.3))
    return made.result(
        [float(strategy.reduce("SUM", strategy.run(made.step, args=(inputs,)))) for inputs in dataset()]
    )


def few_rows() -> Any:
    """Batches of fewer rows than replicas."""
    made = Plain()
    run = tf.function(lambda inputs: strategy.reduce("SUM", strategy.run(made.step, args=(inputs,))))
    losses = [float(run(inputs)) for inputs in dataset(rows=5, batch=2)]
    last = list(dataset(rows=5, batch=2))[-1]
    doubled = strategy.run(lambda inputs: 2 * inputs[0], args=(last,))
    np.testing.assert_array_equal(strategy.gather(doubled, axis=0), 2 * ROWS[4:5])
    np.testing.assert_array_equal(strategy.reduce("MEAN", doubled, axis=0), 2 * ROWS[4])
    return made.result(losses)


def zero_rows() -> Any:
    """A replica without examples computes too; means of integers; printed values."""
    run, data = strategy.run, tf.data.Dataset.range(9).map(lambda row: tf.cast(row, tf.float32)).batch(4)
    found = []

    @tf.function
    def figures(rows: Any) -> Any:
        means = [strategy.reduce("MEAN", run(tf.size, args=(rows,)), axis=None)]
        means.append(
            run(lambda x: lockstep.get_replica_context().all_reduce("MEAN", tf.size(x)), args=(rows,))
        )
        own = [run(function, args=(rows,)) for function in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max)]
        return [strategy.reduce("SUM", one, axis=None) for one in own], means

    for rows in strategy.experimental_distribute_dataset(data):
        sums, (mean, same) = figures(rows)
        assert mean.dtype == strategy.experimental_local_results(same)[0].dtype
        assert strategy.num_replicas_in_sync == 1 or mean.dtype == tf.float64
        found.append([float(mean), *map(float, sums)])
        assert "[" in str(rows)
    if strategy.num_replicas_in_sync > 1:
        assert np.isnan(found[-1][2])
        assert found[-1][3] == -np.inf
    return found[:2], found[-1][:2]


def two_updates() -> Any:
    """The second update uses the weights of the first."""
    first, second = Plain(), Plain()

    def step(inputs: Any) -> Any:
        loss = first.step(inputs)
        rows, _ = inputs
        with tf.GradientTape() as tape:
            distance = tf.reduce_sum((second.model(rows) - first.model(rows)) ** 2) / BATCH
        gradients = tape.gradient(distance, second.model.trainable_variables)
        second.optimizer.apply_gradients(zip(gradients, second.model.trainable_variables, strict=True))
        return {"loss": loss, "distance": distance}

    @tf.function
    def train_step(inputs: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(inputs,)))

    figures = [train_step(inputs) for inputs in dataset()]
    weights = [weight.tolist() for weight in second.model.get_weights()]
    return [{name: float(value) for name, value in figure.items()} for figure in figures], weights


def together() -> Any:
    """Merges, and results of replicas."""
    count = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    seen = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def step(inputs: Any, factor: Any) -> Any:
        rows, labels = inputs
        context = lockstep.get_replica_context()
        assert not lockstep.in_cross_replica_context()
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        total = context.all_reduce("SUM", tf.reduce_sum(rows))
        mean = context.all_reduce("MEAN", {"a": rows[0]})
        gathered = context.all_gather(labels, axis=0)
        count.assign_add(1)
        seen.assign_add(tf.cast(tf.shape(rows)[0], tf.float32))
        return {
            "id": context.replica_id_in_sync_group,
            "total": total * factor,
            "mean": mean["a"],
            "labels": gathered,
            "rows": rows,
        }

    @tf.function
    def look(inputs: Any) -> Any:
        found = strategy.run(step, args=(inputs,), kwargs={"factor": tf.constant(2.0)})
        return {
            "ids": strategy.reduce("SUM", found["id"]),
            "total": strategy.reduce("MEAN", found["total"]),
            "mean": strategy.reduce("MEAN", found["mean"]),
            "labels": strategy.reduce("MEAN", found["labels"]),
            "rows": strategy.gather(found["rows"], axis=0),
            "sums": strategy.reduce("SUM", found["rows"], axis=0),
            "means": strategy.reduce("MEAN", found["rows"], axis=0),
        }, found

    batch, left = next(iter(dataset(rows=8))), ROWS[:8]
    with strategy.scope():
        assert lockstep.in_cross_replica_context()
        figures, found = look(batch)
    replicas = strategy.num_replicas_in_sync
    assert figures["ids"] == sum(range(replicas))
    np.testing.assert_allclose(figures["total"], 2 * left.sum(), rtol=1e-5)
    np.testing.assert_array_equal(figures["rows"], left)
    np.testing.assert_array_equal(figures["labels"], LABELS[:8])
    np.testing.assert_allclose(figures["sums"], left.sum(0), rtol=1e-5)
    np.testing.assert_allclose(figures["means"], left.mean(0), rtol=1e-5)
    assert (int(count), float(seen)) == (1, 8.0)
    local = strategy.experimental_local_results(found["rows"])
    own = strategy.experimental_local_results(found["id"])
    starts = np.cumsum([0, *(len(part) for part in np.array_split(left, replicas))])
    for replica, rows in zip(own, local, strict=True):
        np.testing.assert_array_equal(rows, left[starts[int(replica)] : starts[int(replica) + 1]])
    return {name: np.asarray(value).tolist() for name, value in figures.items()}


def through() -> Any:
    """First and second derivatives through merges."""
    weight = tf.Variable(tf.reshape(tf.range(12.0), (6, 2)) / 12)
    share = 1 / strategy.num_replicas_in_sync

    def contrast(rows: Any) -> Any:
        own = tf.math.l2_normalize(rows @ weight, axis=1)
        found = lockstep.get_replica_context().all_gather({"rows": own, "size": tf.shape(own)[:1]}, axis=0)
        assert found["rows"].shape[1] == 2
        looked_up = tf.gather(found["rows"], [0, 0, 1])
        return tf.reduce_sum(tf.exp(own @ tf.transpose(found["rows"]))) + share * tf.reduce_sum(looked_up**3)

    def steep(rows: Any) -> Any:
        context = lockstep.get_replica_context()
        with tf.GradientTape(persistent=True) as tape:
            total = context.all_reduce("SUM", tf.reduce_sum(tf.tanh(rows @ weight)))
        whole = context.all_reduce("MEAN", [tape.gradient(total, weight), tf.shape(rows)[0]])[0]
        return share * tf.reduce_sum((whole + tf.stop_gradient(whole)) ** 3)

    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = contrast(inputs[0]) + steep(inputs[0])
        return tape.gradient(loss, weight)

    def known() -> Any:
        """The official semantics in numbers: 1 + 10 R + 100 R for each replica."""
        with tf.GradientTape() as tape:
            rows = tf.reduce_sum(weight) * tf.ones([1])
            context = lockstep.get_replica_context()
            gathered, total = context.all_gather(rows, axis=0), context.all_reduce("SUM", rows)
            loss = tf.reduce_sum(rows) + 10 * tf.reduce_sum(gathered) + 100 * tf.reduce_sum(total)
        return tape.gradient(loss, weight)[0, 0]

    wanted = 1 + 110 * strategy.num_replicas_in_sync
    assert float(strategy.reduce("MEAN", strategy.run(known))) == wanted
    run = tf.function(lambda inputs: strategy.reduce("SUM", strategy.run(step, args=(inputs,))))
    return [(run(inputs) / 1000).numpy().tolist() for inputs in dataset()]


def meeting_in_a_loop() -> Any:
    """Replicas cannot merge in a loop or condition of the graph."""

    def step(inputs: Any) -> Any:
        total = tf.constant(0.0)
        if tf.reduce_sum(inputs[0]) > 0:
            total = lockstep.get_replica_context().all_reduce("SUM", total)
        return total

    errors = []
    try:
        strategy.run(step, args=(next(iter(dataset())),))
    except lockstep.errors.ModelError as error:
        errors.append(str(error))
    assert strategy.num_replicas_in_sync == 1 or "within a condition, a loop" in errors.pop()
    return errors


def variables() -> Any:
    """Assignments to TensorFlow's variables, as under `tf.distribute`."""
    kinds = tf.VariableAggregation
    found: dict[str, list[float]] = {}
    changes: list[Callable[[Any, Any], Any]] = [
        lambda variable, value: variable.assign(value + 5),
        lambda variable, value: variable.assign_add(delta=value + 1),
        lambda variable, value: variable.assign_sub(value),
    ]
    replicas = strategy.num_replicas_in_sync
    mean = (replicas - 1) / 2
    wanted = {
        "SUM": [replicas * (mean + 5), 1e8 + replicas * (mean + 1), 1e8 - replicas * mean],
        "MEAN": [mean + 5, 1e8 + mean + 1, 1e8 - mean],
        "ONLY_FIRST_REPLICA": [5, 1e8 + 1, 1e8],
    }
    for name in wanted:
        for change in changes:
            variable = tf.Variable(1e8, aggregation=kinds[name], dtype=tf.float64)

            def step(variable: Any = variable, change: Any = change) -> Any:
                number = lockstep.get_replica_context().replica_id_in_sync_group
                before = variable.read_value()
                change(variable, tf.cast(number, tf.float64))
                return before, variable.read_value()

            before, after = strategy.run(step)
            assert float(strategy.reduce("MEAN", before)) == 1e8
            found.setdefault(name, []).append(float(variable))
            assert float(strategy.reduce("MEAN", after)) == float(variable)
    assert found == wanted
    scattered = tf.Variable([1.0, 2.0], aggregation=kinds.SUM)

    def scatter() -> None:
        scattered.scatter_nd_add([[0]], [1.0])

    def twice() -> None:
        scattered.assign(2 * scattered)

    errors = []
    for eager in (False, True):
        tf.config.run_functions_eagerly(eager)
        try:
            strategy.run(twice if eager else scatter)
        except lockstep.errors.ModelError as error:
            errors.append(str(error))
    tf.config.run_functions_eagerly(False)
    assert replicas == 1 or "or remove tf.config.run_functions_eagerly(True)" in errors.pop()
    assert replicas == 1 or "use assign, assign_add or assign_sub" in errors.pop()
    return [list(found.values()), errors]


class Accumulating(tf.Module):
    """TensorFlow's own variables and functions; the gradients of two batches are summed before an update."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.zeros((6, 2)))
        self.total = tf.Variable(
            tf.zeros((6, 2)),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        self.optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def add(self, inputs: Any) -> None:
        rows, labels = inputs
        with tf.GradientTape() as tape:
            losses = cross_entropy()(labels, rows @ self.weight)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=2 * BATCH)
        self.total.assign_add(tape.gradient(loss, self.weight))

    def reset(self, when: Any) -> None:
        if when > 0.5:  # A tensor: it takes AutoGraph.
            self.total.assign(tf.zeros_like(self.total))

    @tf.function
    def apply(self) -> None:
        self.optimizer.apply_gradients([(self.total + 0.0, self.weight)])


def accumulating() -> Any:
    made = Accumulating()
    for number, inputs in enumerate(dataset()):
        strategy.run(made.add, args=(inputs,))
        if number % 2:
            strategy.run(made.apply)
            strategy.run(made.reset, args=(tf.constant(float(number)),))
    assert not np.any(made.total)
    return made.weight.numpy().tolist(), int(made.optimizer.iterations)


class Limiting(keras.optimizers.SGD):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        limited = [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in grads]
        super().apply(limited, trainable_variables)


class LimitingPairs(keras.optimizers.SGD):
    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        pairs = [(tf.clip_by_value(gradient, -0.01, 0.01), weight) for gradient, weight in grads_and_vars]
        return super().apply_gradients(pairs, **options)


def limiting() -> Any:
    """Updates of the program's own get the sums of the gradients."""
    results = []
    for kind in (Limiting, LimitingPairs):
        made = Plain()
        made.optimizer = kind(0.1)

        @tf.function
        def train_step(inputs: Any, made: Plain = made) -> Any:
            return strategy.reduce("SUM", strategy.run(made.step, args=(inputs,)), axis=None)

        results.append(made.result([float(train_step(inputs)) for inputs in dataset()]))
    return results


def generator() -> Any:
    """Numbers of a TensorFlow generator, which differ between replicas and steps."""
    made = tf.random.Generator.from_seed(1)

    def draw() -> Any:
        return made.normal([4])

    numbers = [strategy.gather(strategy.run(draw), axis=0) for _ in range(3)]
    drawn = np.concatenate(numbers).tolist()
    assert len(set(drawn)) == len(drawn)
    return drawn


def optional() -> Any:
    """A loop in the graph over optional elements."""

    @tf.function
    def total_of(iterator: Any) -> Any:
        total, rows = 0.0, iterator.get_next_as_optional()
        while rows.has_value():
            sums = strategy.run(lambda inputs: tf.reduce_sum(inputs[0]), args=(rows.get_value(),))
            total += strategy.reduce("SUM", sums)
            rows = iterator.get_next_as_optional()
        return total

    return float(total_of(iter(dataset())))


def returning() -> Any:
    """Functions that use and return tables, Python's numbers, dtypes that NumPy lacks, and texts."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1], [5, 7]), -1)

    def step(inputs: Any) -> Any:
        found = table.lookup(tf.cast(inputs[1], tf.int32))
        return {
            "found": tf.reduce_sum(found),
            "half": tf.constant(0.5, tf.bfloat16),
            "one": 1,
            "text": tf.constant("a"),
        }

    made = strategy.run(step, args=(next(iter(dataset())),))
    assert strategy.experimental_local_results(made["text"])[0].numpy() == b"a"
    assert float(strategy.reduce("MEAN", made["half"])) == 0.5
    assert int(strategy.reduce("SUM", made["one"])) == strategy.num_replicas_in_sync
    return int(strategy.reduce("SUM", made["found"]))


def saving() -> Any:
    """All workers save to the same path; one of them writes, and all can read it."""
    made, again = Plain(), Plain()
    again.model.build((None, ROWS.shape[1]))
    folder = lockstep.worker.job.current().context.folder
    assert folder is not None
    checkpoint = tf.train.Checkpoint(model=made.model, optimizer=made.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, folder / "checkpoints", max_to_keep=2)
    for inputs in dataset():
        strategy.run(made.step, args=(inputs,))
        manager.save()
        tf.train.Checkpoint(model=again.model).restore(manager.latest_checkpoint).expect_partial()
        np.testing.assert_equal(again.model.get_weights(), made.model.get_weights())
    print(f"written: {len(written)}")
    return manager.latest_checkpoint.split("/")[-1]


def refused() -> Any:
    """What replicas cannot do is refused by name."""
    made = Plain()

    def slower(inputs: Any) -> None:
        made.optimizer.learning_rate.assign(0.01)
        made.step(inputs)

    def clipping(inputs: Any) -> Any:
        made.optimizer.apply_gradients = lambda pairs: original(
            [(tf.clip_by_norm(gradient, 1.0), weight) for gradient, weight in pairs]
        )
        try:
            return made.step(inputs)
        finally:
            del made.optimizer.apply_gradients

    def merged() -> Any:
        return lockstep.get_replica_context().merge_call(lambda strategy: None)

    def nested() -> Any:
        return strategy.reduce("SUM", tf.constant(1.0))

    errors, original = [], made.optimizer.apply_gradients
    inputs = next(iter(data_of_plain))
    strategy.run(made.step, args=(inputs,))
    for function, args in ((clipping, (inputs,)), (slower, (inputs,)), (merged, ()), (nested, ())):
        try:
            strategy.run(function, args=args)
        except lockstep.errors.ModelError as error:
            errors.append(str(error))
    assert "strategy.reduce is called in" in errors.pop()
    assert "merge_call" in errors.pop()
    assert strategy.num_replicas_in_sync == 1 or "learning_rate:0' itself" in errors.pop()
    assert strategy.num_replicas_in_sync == 1 or "has set apply_gradients of" in errors.pop()
    return errors


def unequal() -> Any:
    """Worker 1 begins with other weights."""
    made = Plain()
    made.model.build((None, ROWS.shape[1]))
    kernel = made.model.layers[0].kernel
    kernel.assign(kernel + job.current().worker)
    return [float(strategy.reduce("SUM", strategy.run(made.step, args=(inputs,)))) for inputs in dataset()]


data_of_plain = dataset()
CASES: list[Callable[[], Any]] = [
    plain,
    stateful,
    without_function,
    few_rows,
    zero_rows,
    two_updates,
    together,
    through,
    meeting_in_a_loop,
    variables,
    accumulating,
    limiting,
    generator,
    optional,
    returning,
    saving,
    refused,
]

named = [case for case in CASES if case.__name__ in sys.argv]
for case in [unequal] if "--unequal" in sys.argv else named or CASES:
    # Earlier cases, which may be omitted, have drawn numbers.
    keras.utils.set_random_seed(1)
    result = json.dumps(case())
    print(f"{case.__name__}: {hashlib.sha256(result.encode()).hexdigest()}", flush=True)
    if "--figures" in sys.argv:
        print(f"figures of {case.__name__}: {result}")
