import os

# Before anything imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
