"""What a job needs to run a function instead of a script: how it travels, its result, errors and output."""
