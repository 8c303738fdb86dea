"""Functions of the program's own that replicas compute: `strategy.run`, and loops that Lockstep drives."""
