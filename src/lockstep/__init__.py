"""Train a single-process Keras program on any number of workers, with the same result to the last bit."""

__version__ = "0.1.0.dev0"
