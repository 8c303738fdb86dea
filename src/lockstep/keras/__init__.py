"""All code that uses Keras or a backend. It does not start or watch workers."""

# Keras comes first: in a worker, its import ends with that of `patches` and most modules of this room, which
# must not be partly imported at that time.
import keras as keras
