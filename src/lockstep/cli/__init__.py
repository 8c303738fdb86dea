"""The command line `lockstep` parses, composes and calls. No logic."""
