"""What replaces the methods of `keras.Model`, `fit` and the like, on replicas; nothing of `strategy.run`."""
