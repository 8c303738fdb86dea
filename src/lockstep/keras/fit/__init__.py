"""Keras's built-in loops over replicas: `fit`, `evaluate` and `predict`; nothing of `strategy.run`."""
