"""Wrappers of the operating system, the environment and the run folder, and texts for messages. No jobs."""
