"""A job on this host: the process of its coordinator and agent, and what they share in it; no decisions."""
