"""Thin wrappers of the operating system, and text helpers; independent of jobs."""
