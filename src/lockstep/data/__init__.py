"""Which examples a replica sees: pure arithmetic, without Keras."""
