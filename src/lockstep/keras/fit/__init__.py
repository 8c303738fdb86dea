"""What replaces the methods of `keras.Model`, and the loops within; never the replicas of `strategy.run`."""
