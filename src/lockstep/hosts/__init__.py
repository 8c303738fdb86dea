"""How a job gets its hosts: which ones, how their agents start, what they have in common; no decisions."""
