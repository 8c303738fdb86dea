"""Durable checkpoints on disk: what is in them, when they are written, and reading them; no framework."""
