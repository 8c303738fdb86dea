"""The private parts of Keras and its backends in use, one file each. Lockstep makes no decisions here."""
