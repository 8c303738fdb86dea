"""`lockstep doctor`: whether this machine can run a job, and if not, how to fix it.

`checkup` has the table of checks. A row names what it examines, a look, which only reads, and a judgement,
which is pure and says what to do about a problem. The file of a subject has its looks and judgements, over
what `lockstep.system` tells. The command imports no framework: what needs one runs in a separate process.
"""
