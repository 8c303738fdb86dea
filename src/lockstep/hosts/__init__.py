"""How a job gets its hosts: their choice, the start of their agents, and their comparison. No decisions."""
