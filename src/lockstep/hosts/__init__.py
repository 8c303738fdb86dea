"""How a job gets its hosts: which hosts, the start of their agents, and their comparison. No decisions."""
