"""Runs a function in a job instead of a script: how the function travels, its result, errors and output."""
