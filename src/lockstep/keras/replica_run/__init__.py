"""Functions of the program that replicas compute: `strategy.run` and `strategy.steps`; nothing of `fit`."""
