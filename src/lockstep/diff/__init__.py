"""The first difference of two runs, from their digest logs, and the repetition of runs. It changes no run."""
