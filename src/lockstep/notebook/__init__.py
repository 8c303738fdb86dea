"""`lockstep.launch`: a function on several workers from a notebook; nothing that other jobs need."""
