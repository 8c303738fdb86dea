"""`lockstep doctor`: whether this machine can run a job, and if not, how to fix it.

Each check returns findings. Functions that judge are pure; functions that inspect the machine take the paths
as arguments. The command imports no framework: checks that need one run in a separate process.
"""
