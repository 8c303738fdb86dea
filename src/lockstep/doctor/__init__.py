"""`lockstep doctor`: whether this machine can run a job, and how to fix it if not.

Each check examines one thing and returns findings. Functions that judge are pure; functions that examine take
the paths to examine as arguments. The command imports no framework: checks that need one run in a separate
process.
"""
