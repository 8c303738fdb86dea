"""`lockstep.launch`: runs a function on several workers from a notebook; other jobs do not use this."""
