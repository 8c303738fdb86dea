"""Wrappers of the operating system, the environment and the run folder; texts in messages; no jobs."""
