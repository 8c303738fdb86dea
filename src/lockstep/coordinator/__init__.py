"""The coordinator of a job applies decisions of supervision and answers commands. It starts no processes."""
