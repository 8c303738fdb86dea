"""How a job gets its hosts: which ones, how their agents start or join, what they must share; no decisions."""
