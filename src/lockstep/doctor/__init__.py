"""`lockstep doctor`: whether this machine can run a job, and what to do where it cannot.

Each check looks at one thing and returns findings. What judges is pure; what looks takes the places where it
looks as arguments. No framework is imported into the command: what needs one runs in a process of its own.
"""
