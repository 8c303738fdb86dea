"""The only place that imports Keras or a backend: one file a backend, behind one contract."""
