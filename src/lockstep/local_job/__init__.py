"""A job on this host: the process of its coordinator and agent, and their composition. No decisions."""
