"""Callbacks for a program's own `fit`."""

from lockstep.keras.state.checkpoint_callback import Checkpoint

__all__ = ["Checkpoint"]
