"""Private modules of Keras and its backends, by name, and the parts of them that Lockstep uses.

The room `worker` runs before any framework is imported, and a program may never import TensorFlow. So this
file imports none. The other private parts are in `lockstep.keras.private`. The libraries give no guarantees
about these modules. `tests/training/test_private_parts.py` fails if one of them lacks a part.
"""

import sys
from typing import Any

KERAS_DOWNLOADS = "keras.src.utils.file_utils"
"""Defines `get_file`, which downloads with the `urlretrieve` of this module.

The functions of `keras.datasets` keep the `get_file` that they find when they are imported.
"""

JAX_CACHE = "jax._src.compilation_cache"
"""JAX calls the `get_file_cache` of this module to create its cache in a folder.

It takes the folder's path; it returns an object with `get(key)` and `put(key, value)`, and the path.
"""

KERAS_GLOBAL_STATE = "keras.src.backend.common.global_state"
"""Keras calls the `set_global_attribute(name, value)` of this module as its attribute."""

KERAS_SCRIPT_SEED = "global_random_seed"
"""The global attribute in which `keras.utils.set_random_seed` keeps the seed."""

TENSORFLOW_CONTEXT = "tensorflow.python.eager.context"
"""Its `context()` has the random state of TensorFlow's eager operations."""


def tensorflow_random_state() -> tuple[Any, Any]:
    """Return the sources of the seeds of TensorFlow's eager operations, if TensorFlow is imported.

    These are the seed that `tf.random.set_seed` has set, and the `random.Random` that it has seeded; each is
    None before that.
    """
    context = sys.modules[TENSORFLOW_CONTEXT].context()
    return context._seed, vars(context).get("_rng")


def set_tensorflow_random_state(seed: Any, generator: Any) -> None:
    """Set the result of `tensorflow_random_state`; TensorFlow draws `generator.randint(0, 2**31 - 1)`."""
    context = sys.modules[TENSORFLOW_CONTEXT].context()
    context._seed, context._rng = seed, generator
