"""A program of TensorFlow in which only the chief trains, and the other tasks wait in their servers."""

import keras
import numpy as np
import tensorflow as tf

import lockstep

LAYOUT = {"worker": ["localhost:20001"], "ps": ["localhost:20002"]}

# The servers of a cluster in one process, as in tutorials.
for job, addresses in LAYOUT.items():
    for index in range(len(addresses)):
        tf.distribute.Server(LAYOUT, job_name=job, task_index=index, protocol="grpc")

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, start=True
    )
    server.join()
else:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.arange(32, dtype="float32").reshape(16, 2) / 32
    model.fit(x, x.sum(1), batch_size=4, verbose=0, shuffle=False)
    print("trained", lockstep.digest(model), flush=True)
