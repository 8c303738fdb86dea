"""`lockstep doctor`: whether this machine can run a job, and if not, how to fix it.

`checkup` has the table of checks. A row has the name of its subject, a look, which only reads, and a
judgement, which is pure and has a remedy for a problem. The file of a subject has its looks and judgements,
based on `lockstep.system`. The command imports no framework: checks that need one run in a separate process.
"""
