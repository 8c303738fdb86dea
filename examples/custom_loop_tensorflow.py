"""TensorFlow's tutorial "Custom training loop with Keras and MultiWorkerMirroredStrategy", on digits.

Only the import differs from a tf.distribute program. The program saves its state every ten steps with
tf.train.CheckpointManager, and resumes from it when it is restarted:

    lockstep run -n 2 examples/custom_loop_tensorflow.py saved
"""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tensorflow as tf

import lockstep as distribute
from digits import load_digits

BATCH_SIZE_PER_WORKER = 64
EPOCHS = 3
STEPS_PER_EPOCH = 20
STEPS_BETWEEN_CHECKPOINTS = 10

strategy = distribute.MultiWorkerMirroredStrategy()
global_batch_size = BATCH_SIZE_PER_WORKER * strategy.num_replicas_in_sync


def dataset_fn(input_context):
    (images, labels), _ = load_digits()
    dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype("int64")))
    dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    batch_size = input_context.get_per_replica_batch_size(global_batch_size)
    return dataset.shuffle(1000, seed=1).repeat().batch(batch_size)


def build_cnn_model():
    regularizer = tf.keras.regularizers.L2(1e-4)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Reshape((28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu", kernel_regularizer=regularizer),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


with strategy.scope():
    model = build_cnn_model()
    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    optimizer = tf.keras.optimizers.RMSprop(learning_rate=0.001)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    compute_loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


@tf.function
def train_step(iterator):
    def step_fn(inputs):
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = tf.nn.compute_average_loss(compute_loss(labels, predictions))
            if model.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    losses = strategy.run(step_fn, args=(next(iterator),))
    return strategy.reduce(distribute.ReduceOp.SUM, losses, axis=None)


def is_chief(task_type, task_id, cluster):
    return task_type in (None, "chief") or (
        task_type == "worker" and task_id == 0 and "chief" not in cluster.as_dict()
    )


def folder_to_write(folder, task_type, task_id, cluster):
    """Only the files of the chief are used; the other workers delete theirs."""
    if is_chief(task_type, task_id, cluster):
        return folder
    return f"{folder}/of_worker_{task_id}"


resolver = strategy.cluster_resolver
task = resolver.task_type, resolver.task_id, resolver.cluster_spec()
folder = sys.argv[1] if len(sys.argv) > 1 else "saved"
own_folder = folder_to_write(folder, *task)

epoch = tf.Variable(0, dtype=tf.int64, name="epoch")
step_in_epoch = tf.Variable(0, dtype=tf.int64, name="step_in_epoch")
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch, step_in_epoch=step_in_epoch)
manager = tf.train.CheckpointManager(checkpoint, directory=own_folder, max_to_keep=1)
latest = tf.train.latest_checkpoint(folder)
if latest:
    checkpoint.restore(latest)
    print(f"resuming at step {int(step_in_epoch)} of epoch {int(epoch)}")

while epoch.numpy() < EPOCHS:
    iterator = iter(dataset)
    total_loss, batches = 0.0, 0
    while step_in_epoch.numpy() < STEPS_PER_EPOCH:
        total_loss += float(train_step(iterator))
        batches += 1
        step_in_epoch.assign_add(1)
        if step_in_epoch.numpy() % STEPS_BETWEEN_CHECKPOINTS == 0:
            manager.save()
            if own_folder != folder:
                tf.io.gfile.rmtree(own_folder)
    if batches:
        print(f"epoch {int(epoch)}: accuracy {float(accuracy.result()):.4f}, loss {total_loss / batches:.4f}")
    accuracy.reset_state()
    epoch.assign_add(1)
    step_in_epoch.assign(0)

print("digest:", distribute.digest(model))
