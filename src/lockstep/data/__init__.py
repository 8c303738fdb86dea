"""Which examples each replica gets: pure arithmetic, without Keras."""
