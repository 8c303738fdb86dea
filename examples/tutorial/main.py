"""TensorFlow's tutorial "Multi-worker training with Keras", without a reference to Lockstep.

    lockstep run --tf-distribute -n 2 examples/tutorial/main.py

With `--backend jax`, the same program computes on JAX and reads with tf.data.
"""

import json
import os

import mnist
import tensorflow as tf

per_worker_batch_size = 64
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()

global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist.mnist_dataset(global_batch_size)

with strategy.scope():
    multi_worker_model = mnist.build_and_compile_cnn_model()

multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=70)
