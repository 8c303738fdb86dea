"""`lockstep.launch`, which runs a function on several workers. `lockstep run` does not use this package."""
