"""Fits, evaluates and predicts with models that these calls build, then fits a last one. Prints digests.

one_after_another.py [WORKER ...]

These workers are killed in the last fit, unless they have taken the state from elsewhere.
"""

import sys

import keras
import numpy as np
from unbuilt import killed_here, unbuilt

import lockstep

X = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
KILLED = sys.argv[1:]

keras.utils.set_random_seed(1)
fitted, evaluated, predicted, last = map(unbuilt, ("fitted", "evaluated", "predicted", "last"))
history = fitted.fit(X, X[:, :1], batch_size=16, verbose=0).history
figures = evaluated.evaluate(X, X[:, :1], batch_size=16, verbose=0)
outputs = predicted.predict(X, batch_size=16, verbose=0).sum()
killer = keras.callbacks.LambdaCallback(
    on_train_batch_begin=lambda batch, logs: killed_here(KILLED if batch == 2 else [])
)
last.fit(X, X[:, :1], batch_size=8, verbose=0, callbacks=[killer])
# With one replica on TensorFlow, Keras evaluates without the slots of the optimizer. A model that is built
# for a finished call has them. So only the weights of such models count.
weights = [float(np.abs(each).sum()) for model in (evaluated, predicted) for each in model.get_weights()]
outputs_now = [float(keras.ops.sum(model(X))) for model in (fitted, evaluated, predicted)]
print("end", history, figures, outputs, lockstep.digest(fitted), lockstep.digest(last), weights, outputs_now)
