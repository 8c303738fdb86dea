"""Durable checkpoints on disk: their contents, when they are written, and how they are read. No framework."""
