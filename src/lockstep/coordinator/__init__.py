"""The coordinator of a job: applies the decisions of supervision and answers commands; starts no process."""
