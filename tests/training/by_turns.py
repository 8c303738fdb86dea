"""Trains two models by turns, one batch each; the first batch of each builds it. Prints figures and digests.

by_turns.py [WORKER ...]

These workers are killed after a batch of the second model, unless the job resumes.
"""

import sys

import keras
import numpy as np
from unbuilt import killed_here, unbuilt

import lockstep

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
KILLED = sys.argv[1:]

keras.utils.set_random_seed(1)
first, second = unbuilt("first"), unbuilt("second")
figures = []
for number in range(6):
    shift = sum(float(np.abs(weight).mean()) for weight in first.get_weights())
    figures += first.train_on_batch(X + shift, X[:, :1])
    shift = sum(float(np.abs(weight).mean()) for weight in first.get_weights())
    figures += second.train_on_batch(X + shift, X[:, 1:2])
    if number == 2:
        killed_here(KILLED)
print("end", figures, lockstep.digest(first), lockstep.digest(second))
