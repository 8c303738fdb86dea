"""Devices by the names that `tf.distribute` gives them."""

from contextlib import AbstractContextManager
from typing import Any

import keras

from lockstep.errors import ConfigError


def on_device(name: str) -> AbstractContextManager[Any]:
    """Return a context in which Keras makes variables and computes on the device `name`.

    Raises:
        ConfigError: Keras's backend does not have such a device.
    """
    short = name.lower().removeprefix("/").removeprefix("job:localhost/").removeprefix("device:")
    try:
        with keras.device(short):
            made = keras.ops.zeros(())
    except Exception as error:
        # Each backend raises its own exceptions.
        raise ConfigError(f"{name!r} is not a device that Keras can use here: {error}") from None
    # TensorFlow silently uses another device if there is none of this name.
    if keras.backend.backend() == "tensorflow" and not made.device.lower().endswith(short):
        raise ConfigError(f"{name!r} is not a device that Keras can use here: TensorFlow uses {made.device}")
    device: AbstractContextManager[Any] = keras.device(short)
    return device
