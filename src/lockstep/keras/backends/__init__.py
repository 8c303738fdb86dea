"""What differs between the backends: one file per backend, behind one contract."""
