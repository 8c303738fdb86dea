"""The private parts of Keras and its backends in use, one file each; no decision of Lockstep's."""
