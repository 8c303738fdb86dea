"""`lockstep.launch`, which runs a function on several workers; `lockstep run` uses nothing of it."""
