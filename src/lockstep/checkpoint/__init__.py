"""Durable checkpoints on disk, and copies of them and of run folders in object stores. No framework."""
