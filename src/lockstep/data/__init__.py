"""The examples that each replica reads: pure arithmetic, without Keras."""
