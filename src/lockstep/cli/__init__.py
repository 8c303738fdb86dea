"""The command line: one file a command, which parses, composes and calls; no logic."""
