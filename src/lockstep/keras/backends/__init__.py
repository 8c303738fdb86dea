"""How a step is computed on each backend, behind one contract; nothing of inputs or of saving."""
