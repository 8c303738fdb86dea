"""Runs a function in a job instead of a script: sends it, and returns its result, errors and output."""
