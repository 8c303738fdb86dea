"""Where two runs part, from their digest logs: it reads and compares, and never runs or changes anything."""
