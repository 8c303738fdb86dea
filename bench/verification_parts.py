"""What the parts of a verification cost: processor time of the first of two workers in a step, by part.

    lockstep run -n 2 --replicas 2 --backend jax --witness off [--verify-every 1 [--verify-replicas all]]
        bench/verification_parts.py [MODEL]

The rows are the medians of groups of 20 steps, with the 10th and 90th percentiles. Both workers check equally
often. `step` is the time of the whole process. The cost of the gradient is what the other parts do not
explain of the difference between two runs with other options.
"""

import sys
import time
from collections import Counter

import keras

from lockstep.keras.round_verification import Verifier
from lockstep.keras.state_verification import StateVerifier
from models import MODELS
from report import print_row

STEPS, GROUP = 420, 20
METHODS = ((Verifier, "_verified_total"), (StateVerifier, "begin"), (StateVerifier, "end"))
LABELS = ("sum", "state before the step", "state after the step")
spent = Counter()


def measure(kind, method, label):
    original = getattr(kind, method)

    def measured(*given):
        begun = time.process_time()
        try:
            return original(*given)
        finally:
            spent[label] += time.process_time() - begun

    setattr(kind, method, measured)


class Groups(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        if batch % GROUP == GROUP - 1:
            self.times.append({"step": time.process_time(), **spent})


for (kind, method), label in zip(METHODS, LABELS, strict=True):
    measure(kind, method, label)
work = MODELS[sys.argv[1] if sys.argv[1:] else "cnn"]
x, y = work.examples(2 * work.batch * STEPS)
model = work.layers(keras)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(), loss)
groups = Groups()
model.fit(x, y, batch_size=2 * work.batch, verbose=0, callbacks=[groups])
for label in groups.times[-1]:
    pairs = zip(groups.times, groups.times[1:], strict=False)
    print_row(label, [(after[label] - before.get(label, 0)) / GROUP for before, after in pairs], "ms")
