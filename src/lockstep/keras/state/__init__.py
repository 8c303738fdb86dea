"""The state of a training: its parts, saving it, and resuming from it; it computes no step."""
