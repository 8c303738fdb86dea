"""Which examples each replica reads: pure arithmetic, without Keras."""
