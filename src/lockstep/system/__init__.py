"""Thin wrappers of the operating system, and texts; nothing that knows of jobs."""
