"""Makes every strategy of TensorFlow's own, in a job of two workers without `--tf-distribute`."""

from operator import attrgetter

import tensorflow as tf

from lockstep.errors import ConfigError
from lockstep.worker.tf_distribute_shim import _STRATEGIES

print("default:", tf.distribute.get_strategy().num_replicas_in_sync, tf.distribute.has_strategy())
for name in _STRATEGIES:
    try:
        attrgetter(name)(tf.distribute)()
    except ConfigError as error:
        print("refused:", error)


class Derived(tf.distribute.MirroredStrategy):
    def __init__(self) -> None:
        super().__init__(["CPU:0", "CPU:1"])


Derived()
