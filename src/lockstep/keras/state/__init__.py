"""The state of a training: its parts, saving it, and resuming from it; files are in `lockstep.checkpoint`."""
