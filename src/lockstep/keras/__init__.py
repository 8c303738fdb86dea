"""The only place that imports Keras or a backend: one file per backend, behind one contract."""
