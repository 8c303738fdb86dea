"""The state of training: its parts, and how it is saved and resumed. `lockstep.checkpoint` has the files."""
