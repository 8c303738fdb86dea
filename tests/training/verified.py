"""Trains a model whose state changes in every step, perhaps with a fault of one worker; prints its digest.

    verified.py [FAULT WORKER STEP [batches]]

With `batches`, the script has a loop of its own, which calls `train_on_batch`, `test_on_batch` and `predict`.

`flip`: WORKER gets a wrong bit in a gradient of every replica that it computes, from STEP on. `host`: all
workers of the host node2 do, and WORKER is -1. `once`: only the first time that it computes one in STEP or
later. `sum`: once in the total, as it has it. `adding`: in each total, and in each sum that it checks, from
STEP on. `rounding`: in an integer to which it rounds a change, from STEP on. `total`: once in the total that
hosts have summed. `update`: once in a weight, in an update; `updates`: in each one from STEP on. `memory`:
once in a weight, before STEP. `row`: in a row of the examples, in its memory, before STEP.
`evaluation`: once in a metric, in STEP of an evaluation; `evaluations`: in all steps of it from STEP on.
`random`: from step 3 on, the loss of all workers depends on a number that no seed determines. `long`: trains
10,000 steps. `unlike`: the host node2 computes with fewer instructions; `alike-program`: likewise, but not in
Lockstep's own program.
"""

import importlib
import os
import random
import sys
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.keras import host_report
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.verification import TotalPart, verifications_of
from lockstep.worker import job

FAULT = sys.argv[1] if sys.argv[1:] else ""
FAULTS = (
    *("flip", "host", "once", "sum", "update", "updates", "memory", "evaluation", "row"),
    *("adding", "rounding", "total", "evaluations"),
)
WORKER, STEP = (int(text) for text in sys.argv[2:4]) if FAULT in FAULTS else (-1, 0)
BATCHES = sys.argv[4:] == ["batches"]
flips = 0


def begin(round_: Round, replicas: Iterable[int], original: Any = Round.begin) -> PartialLayout:
    """Flip a bit of the first number of a gradient, as faulty memory would."""
    global flips
    before = dict(round_.started)
    layout: PartialLayout = original(round_, replicas)
    own = job.current()
    verifications = verifications_of(own)
    once, part = ("once", "gradient/2") if verifications.trains else ("evaluation", "metric/0")
    for replica in round_.started.keys() - before.keys():
        lasts = FAULT in ("flip", "host") or (FAULT == "evaluations" and not verifications.trains)
        is_due = verifications.step >= STEP and (lasts or (once == FAULT and not flips))
        is_guilty = own.context.host == "node2" if FAULT == "host" else own.worker == WORKER
        if is_guilty and is_due:
            flips += 1
            arrays = {name: np.array(round_.to_numpy(a)) for name, a in round_.started[replica].items()}
            parts = round_.parts(arrays)
            # With local steps, the parts are changes of variables.
            named = part if part in parts else next(name for name in sorted(parts) if "out/kernel" in name)
            parts[named].reshape(-1).view("uint32")[0] ^= 1 << 20
            round_.started[replica] = {name: keras.ops.convert_to_tensor(a) for name, a in arrays.items()}
    return layout


def has(fault: str) -> bool:
    """Whether this worker has this fault now, which it has once, also if the job starts again."""
    own = job.current()
    if (
        fault != FAULT
        or own.worker != WORKER
        or verifications_of(own).step < STEP - (fault in ("memory", "row"))
    ):
        return False
    assert own.context.folder is not None
    mark = own.context.folder / "flipped"
    if mark.exists():
        return False
    mark.touch()
    return True


def always(fault: str) -> bool:
    """Whether this worker has this fault in each step by now."""
    own = job.current()
    return fault == FAULT and own.worker == WORKER and verifications_of(own).step >= STEP


def add(reduce: PackedReduce, adder: Any, original: Any = PackedReduce.sum) -> None:
    """Flip a bit of the total, as a faulty processor would."""
    original(reduce, adder)
    if has("sum") or always("adding"):
        reduce.total[0].out.view("uint32")[3] ^= 1 << 20


def add_again(part: TotalPart, *given: Any, original: Any = TotalPart.sum) -> Any:
    """Flip a bit of a sum that this worker checks."""
    summed = original(part, *given)
    if always("adding"):
        summed[:1] ^= 1
    return summed


def summands(round_: Round, *given: Any, original: Any = Round.summands) -> Any:
    """Add one to an integer to which this worker rounds, as a faulty processor would."""
    of_replicas = original(round_, *given)
    if always("rounding") and round_.layout.scaled:
        for arrays in of_replicas.values():
            arrays[round_.summed.index(round_.layout.scaled[0])].reshape(-1)[:1] += 1
    return of_replicas


def sum_partials(round_: Round, *given: Any, original: Any = Round.sum) -> Any:
    """Flip a bit of a total, of which all workers of a host have the same bits."""
    total = original(round_, *given)
    if has("total"):
        round_.sums = [array.copy() for array in round_.sums]
        max(round_.sums, key=lambda array: array.nbytes).reshape(-1).view("uint32")[0] ^= 1 << 20
        total = round_.total_of(round_.sums, round_.limits, job.current().view.replicas)
    return total


def flipped(step: GlobalStep, state: Any) -> Any:
    """Flip a bit of a weight in a state."""
    arrays = {
        name: np.array(step.backend.to_numpy(value))
        for name, value in step.program.named_state(state).items()
    }
    name = next(name for name in arrays if "out/kernel" in name)
    arrays[name].reshape(-1).view("uint32")[0] ^= 1 << 20
    return step.program.load(state, arrays)


_apply = GlobalStep._apply


def apply(step: GlobalStep, state: Any, totals: Any, divided: Any = None) -> Any:
    """Make an update, perhaps a wrong one."""
    logs, state = _apply(step, state, totals, divided)
    return logs, flipped(step, state) if always("updates") or has("update") else state


def take(step: GlobalStep, state: Any, element: Any, original: Any = GlobalStep.take) -> Any:
    """Take a step, perhaps with a state that has changed in memory since the last one."""
    if step.kind == "train" and FAULT == "memory" and step.calls.taken + 1 == STEP and has("memory"):
        state = flipped(step, state)
    if FAULT == "row" and step.calls.taken + 1 == STEP and has("row"):
        rows[50].view("uint32")[0] ^= 1 << 20
    return original(step, state, element)


class Noisy(keras.losses.Loss):  # type: ignore[misc]
    """A loss with an unseeded factor."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Return the squared differences."""
        # Before step 3, Lockstep computes replica 0 twice, and finds this without a second worker.
        noisy = FAULT == "random" and verifications_of(job.current()).step > 2
        noise = random.SystemRandom().random() if noisy else 1.0
        return noise * keras.ops.mean((y_true - y_pred) ** 2, -1)


class Counting(keras.layers.Layer):  # type: ignore[misc]
    """Counts the steps of training outside of Keras's variables: in an attribute, or in a `tf.Variable`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls = 0
        if keras.backend.backend() == "tensorflow":
            self.counter = importlib.import_module("tensorflow").Variable(0.0, trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the inputs."""
        if training and keras.backend.backend() == "torch":
            self.calls += 1
        elif training and keras.backend.backend() == "tensorflow":
            self.counter.assign_add(1.0)
        return inputs


if FAULT in ("unlike", "alike-program") and job.current().context.host == "node2":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=SSE4_2"
if FAULT == "alike-program":
    host_report.computed_bits = lambda: "equal"
Round.begin = begin  # type: ignore[method-assign]
Round.sum = sum_partials  # type: ignore[method-assign]
Round.summands = summands  # type: ignore[method-assign]
PackedReduce.sum = add  # type: ignore[method-assign]
TotalPart.sum = add_again  # type: ignore[method-assign]
GlobalStep._apply = apply  # type: ignore[method-assign]
GlobalStep.take = take  # type: ignore[method-assign]
keras.utils.set_random_seed(1)
numbers = np.random.default_rng(0)
rows = numbers.normal(size=(96, 8)).astype("float32")
targets = rows[:, :1] * 2
model = keras.Sequential(
    [
        *([] if BATCHES else [keras.Input((8,))]),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        *([counting := Counting()] if FAULT in ("update", "updates") else ()),
        keras.layers.Dense(1, name="out"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), Noisy(), metrics=["mae"], run_eagerly=FAULT == "random")
if BATCHES:
    figures = []
    for number in range(12):
        batch = slice(number % 6 * 16, number % 6 * 16 + 16)
        if number == 6:
            model.reset_metrics()
        if number % 3 == 0:
            model.optimizer.learning_rate = 0.01 / (number + 1)
        # A worker that joins has right weights only after a call for a single batch.
        weights = model.get_weights() if number != 4 else ()
        shift = sum(float(np.abs(weight).mean()) for weight in weights)
        figures += model.train_on_batch(rows[batch] + shift, targets[batch])
        if number % 4 == 2:
            figures += model.test_on_batch(rows[batch], targets[batch])
        if number == 3:
            figures.append(float(model.predict(rows, batch_size=16, verbose=0).mean()))
    print("digest:", lockstep.digest(model), figures)
    sys.exit()
history = model.fit(
    rows,
    targets,
    batch_size=16,
    epochs={"long": 1667, "unlike": 40}.get(FAULT, 2),
    callbacks=[keras.callbacks.CSVLogger(f"{job.current().context.folder}/log.csv")] * (FAULT == "memory"),
    verbose=0,
)
print("digest:", lockstep.digest(model), repr(history.history["mae"][-1]))
if FAULT in ("update", "updates"):
    print("counted:", int(counting.counter) if hasattr(counting, "counter") else counting.calls)
if FAULT in ("evaluation", "evaluations", "evaluated"):
    print("digest:", model.evaluate(rows, targets, batch_size=16, verbose=0))
    model.fit(rows, targets, batch_size=16, verbose=0)
    print("digest:", lockstep.digest(model))
print("verified:", verifications_of(job.current()).count, verifications_of(job.current()).up_to)
