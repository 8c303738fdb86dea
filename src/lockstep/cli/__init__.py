"""The command line `lockstep`: parses, composes and calls; no logic."""
