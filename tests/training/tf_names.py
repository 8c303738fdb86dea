"""The names that a script finds under `tf.distribute`: run with `--tf-distribute` and two replicas."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow import distribute
from tensorflow.distribute.cluster_resolver import TFConfigClusterResolver
from tensorflow.distribute.coordinator import ClusterCoordinator
from tensorflow.distribute.experimental import CollectiveCommunication
from tensorflow.distribute.experimental import MultiWorkerMirroredStrategy as Experimental

import lockstep
from lockstep.errors import ConfigError

ROWS = 70


def facts() -> tuple[object, ...]:
    """The position of the program under TensorFlow's names."""
    context = tf.distribute.get_replica_context()
    return (
        tf.distribute.has_strategy(),
        tf.distribute.in_cross_replica_context(),
        tf.distribute.get_strategy().num_replicas_in_sync,
        context and context.num_replicas_in_sync,
    )


def begin_too_early() -> None:
    """Configure and use devices, which must follow TensorFlow's own strategy."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()])
    options = tf.compat.v1.ConfigProto(gpu_options=tf.compat.v1.GPUOptions(allow_growth=True))
    with tf.compat.v1.Session(config=options, graph=tf.Graph()) as session:
        print("computed:", session.run(tf.constant(1) + tf.constant(1)))
    print("computed:", int(tf.constant(1) + tf.constant(2)))


def one_file() -> tf.data.Dataset:
    """Rows from a single file, whose last batch is smaller than the others; nothing repeats them."""
    path = Path(tempfile.mkdtemp(), "rows.tfrecord")
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32"):
            writer.write(row.tobytes())
    rows = tf.data.TFRecordDataset(str(path)).map(
        lambda text: tf.ensure_shape(tf.io.decode_raw(text, "float32"), (3,))
    )
    return rows.map(lambda row: (row, tf.reduce_sum(row) > 0)).batch(16)


class Probe(keras.callbacks.Callback):
    """Asks for the strategy of a model as Keras itself does, and as a script does."""

    def on_train_end(self, logs: object = None) -> None:
        if keras.backend.backend() == "tensorflow":
            asked = "model.distribute_strategy"
            of_keras = eval(asked, {"__name__": "keras.asking", "model": self.model})
            for who, found in (("keras", of_keras), ("the script", self.model.distribute_strategy)):
                print(f"{who} finds:", type(found).__module__.split(".")[0], found.num_replicas_in_sync)


def double(value: object) -> object:
    """Asks in a function that TensorFlow may convert to a graph."""
    context = tf.distribute.get_replica_context()
    if tf.distribute.in_cross_replica_context():
        raise AssertionError("a replica's function is in the context of its replica")
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


begin_too_early()
assert tf.distribute is distribute
assert ClusterCoordinator is lockstep.ClusterCoordinator
assert TFConfigClusterResolver is lockstep.cluster_resolver.TFConfigClusterResolver
assert tf.distribute.Server is lockstep.Server
assert tf.distribute.DistributedDataset is lockstep.DistributedDataset
assert tf.distribute.HierarchicalCopyAllReduce.__module__.startswith("tensorflow.")
assert "ParameterServerStrategy" in dir(tf.distribute)
for refused, given in (
    (tf.distribute.TPUStrategy, ()),
    (tf.distribute.experimental.CentralStorageStrategy, ()),
    (tf.distribute.experimental_set_strategy, (None,)),
):
    try:
        refused(*given)
    except ConfigError as error:
        print("refused:", error)
strategy = Experimental(CollectiveCommunication.RING)
assert isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
assert isinstance(strategy, lockstep.Strategy)
assert not isinstance(strategy, tf.distribute.TPUStrategy)
print("outside:", *facts())
with strategy.scope():
    print("inside:", *facts())
    assert tf.distribute.get_strategy() is strategy
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy", metrics=["accuracy"])
model.fit(one_file(), epochs=2, verbose=0, callbacks=[Probe()])
counted = [int(variable) for variable in model.metrics_variables if variable.name == "count"]
print("trained:", int(model.optimizer.iterations), *counted, lockstep.digest(model))
total = strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(double, (np.float32(3),)), axis=None)
print("in run:", float(total))
