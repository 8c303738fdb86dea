"""The command line: parsing and calls, no logic."""
