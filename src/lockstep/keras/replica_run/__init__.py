"""Functions and loops of the program's own, `strategy.run` and `strategy.steps`; nothing of Keras's loops."""
