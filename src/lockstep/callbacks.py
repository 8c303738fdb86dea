"""Callbacks for a program's own `fit`."""

from lockstep.keras.keeping import Checkpoint

__all__ = ["Checkpoint"]
