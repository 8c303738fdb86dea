"""All that uses Keras or a backend, and the only room that does; nothing that starts or watches workers."""

# Keras first: in a worker, its import ends with that of `patches` and most modules of this room, which
# must not be partly imported at that time.
import keras as keras
