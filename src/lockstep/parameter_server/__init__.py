"""Asynchronous training: tasks, shards, assignments of steps, orders of arrival; only orders are files."""
