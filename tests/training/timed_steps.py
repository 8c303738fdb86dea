"""Training with a subscriber to its steps: prints the digest without and with a subscriber, and the steps.

Worker 1 delays worker 0 after a step of the first epoch until the event log says that worker 0 waits. A loop
of `strategy.steps` follows, whose examples get another shape after two steps.
"""

import dataclasses
import json
import time
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.observability.measurements import StepEnded
from lockstep.worker import job

OWN = job.current()
OWN.policy.report_every = 0.2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 6)).astype("float32")
HELD = 1
"""The batch, from 0, after which worker 1 delays the others."""


@dataclasses.dataclass
class Hold(keras.callbacks.Callback):
    """Makes worker 0 wait."""

    epoch: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if OWN.worker == 1 and (self.epoch, batch) == (0, HELD):
            begun = time.perf_counter()
            while not waits() and time.perf_counter() < begun + 120:
                time.sleep(0.01)
            print("held", time.perf_counter() - begun)


def waits() -> bool:
    """Whether the event log says that worker 0 waits in the call with a subscriber."""
    assert OWN.context.folder is not None
    events = [json.loads(line) for line in (OWN.context.folder / "events.jsonl").read_text().splitlines()]
    return any(
        event["event"] == "wait" and event["worker"] == 0 and "of fit 2" in event["what"] for event in events
    )


def train(strategy: lockstep.Strategy) -> str:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, X[:, :1], batch_size=8, epochs=2, validation_split=0.2, verbose=0, callbacks=CALLBACKS)
    return lockstep.digest(model)


def loop(strategy: lockstep.Strategy) -> None:
    with strategy.scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 6))

    def replica(rows: Any) -> Any:
        return keras.ops.sum(layer(rows))

    batches = iter(
        strategy.experimental_distribute_dataset([*X[:16].reshape(2, 8, 6), *X[:32].reshape(2, 8, 2, 6)])
    )
    for _ in strategy.steps(4, {"layer": layer}):
        strategy.run(replica, args=(next(batches),))


strategy = lockstep.MultiWorkerMirroredStrategy()
CALLBACKS: list[Any] = []
print("without", train(strategy))
feed = OWN.events.feed(StepEnded)
CALLBACKS.append(Hold())
print("with", train(strategy))
loop(strategy)
feed.close()
events, lost = feed.take(0)
print("lost", lost)
for published in events:
    step = published.event
    assert isinstance(step, StepEnded)
    assert published.worker == OWN.worker
    fields = {name: getattr(step, name) for name in step.__struct_fields__ if name != "logs"}
    if step.logs is None:
        print("loop", json.dumps(fields))
    else:
        print("step", json.dumps({**fields, "loss": float(keras.ops.convert_to_numpy(step.logs["loss"]))}))
