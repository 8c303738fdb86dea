"""Durable checkpoints on disk: their contents, writing and reading; independent of any framework."""
