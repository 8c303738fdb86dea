"""The command line `lockstep`: it parses options, composes objects and calls them. It contains no logic."""
