"""Trains a model whose state changes in every step, perhaps with a fault of one worker; prints its digest.

    verified.py [FAULT WORKER STEP [loop | batches | pair | fit | validation | last | dataset | generator]...]

With `loop`, the script has a loop of `strategy.steps`.

With `batches`, the script has a loop of its own, which calls `train_on_batch` and others: with `fit`, `fit`
once; with `pair`, `train_on_batch` of another model by turns.
With `validation`, `fit` has validation data, and a fault is in steps of the validation of the second epoch,
which is not the last one without `last`. With `dataset`, examples are in a `PyDataset`, which workers divide;
with `generator`, those of the validation are from a generator.

`flip`: WORKER gets a wrong bit in a gradient of every replica that it computes, from STEP on. `host`: all
workers of the host node2 do, and WORKER is -1. `once`: only the first time that it computes one in STEP or
later. `sum`: once in the total, as it has it. `adding`: in each total, and in each sum that it checks, from
STEP on. `summing`: the first process that is WORKER sums its slices of totals wrongly, and checks sums
wrongly, from STEP on; the model is larger, as with `large`. `rounding`: in an integer to which it rounds a
change, from STEP on. `total`: once in the total that hosts have summed. `update`: once in a weight, in an
update; `updates`: in each one from STEP on. `memory`: once in a weight, before STEP. `row`: in a row of the
examples, in its memory, before STEP. `evaluation`: once in a metric, in STEP of an evaluation; `evaluations`:
in all steps of it from STEP on. `prediction`: once in an output of `predict`, in STEP of it; `predictions`:
in all steps of it from STEP on.
`random`: from step 3 on, the loss of all workers depends on a number that no seed determines. `long`: trains
10,000 steps. `unlike`: the host node2 computes with fewer instructions; `alike-program`: likewise, but not in
Lockstep's own program.
"""

import importlib
import itertools
import os
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

import lockstep
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.collectives.shared.slice_reduce import SliceReduce
from lockstep.keras import host_report
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.round_verification import TotalPart
from lockstep.keras.rounds import PartialLayout, Round
from lockstep.keras.verification import verifications_of
from lockstep.worker import job

FAULT = sys.argv[1] if sys.argv[1:] else ""
FAULTS = (
    *("flip", "host", "once", "sum", "update", "updates", "memory", "evaluation", "row"),
    *("adding", "summing", "rounding", "total", "evaluations", "prediction", "predictions"),
)
WORKER, STEP = (int(text) for text in sys.argv[2:4]) if FAULT in FAULTS else (-1, 0)
BATCHES, VALIDATION, DATASET = (mode in sys.argv[4:] for mode in ("batches", "validation", "dataset"))
flips = 0


class Watching(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds up what validations report.

    Attributes:
        epoch: the epoch in progress, from 0.
        batches: the number of the batches of validations.
        errors: the sum of a metric after each of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch, self.batches, self.errors = 0, 0, 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.epoch = epoch

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count a batch."""
        self.batches += 1

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Add the metric so far."""
        self.errors += float(logs["mae"])


watching = Watching()


def begin(round_: Round, replicas: Iterable[int], original: Any = Round.begin) -> PartialLayout:
    """Flip a bit of the first number of a gradient, as faulty memory would."""
    global flips
    # A graph of TensorFlow computes before this call.
    before = vars(round_).setdefault("seen", {})
    layout: PartialLayout = original(round_, replicas)
    own = job.current()
    verifications = verifications_of(own)
    once, part = ("once", "gradient/2") if verifications.trains else ("evaluation", "metric/0")
    for replica in [r for r, partial in round_.started.items() if partial is not before.get(r)]:
        outputs = getattr(round_, "outputs", {})
        if replica in outputs and (always("predictions") or (not flips and always("prediction"))):
            flips += 1
            outputs[replica] = -outputs[replica]
        lasts = FAULT in ("flip", "host") or (FAULT == "evaluations" and not verifications.trains)
        is_due = verifications.step >= STEP and (lasts or (once == FAULT and not flips))
        is_due = is_due and (not VALIDATION or watching.epoch == 1)
        is_guilty = own.context.host == "node2" if FAULT == "host" else own.worker == WORKER
        # A step of `predict` has no partial.
        if is_guilty and is_due and round_.started[replica]:
            flips += 1
            arrays = {name: np.array(round_.to_numpy(a)) for name, a in round_.started[replica].items()}
            parts = round_.parts(arrays)
            # With local steps, the parts are changes of variables; in a loop, they are those of a function.
            named = next((name for name in sorted(parts) if "out/kernel" in name), min(parts))
            named = part if part in parts else named
            parts[named].reshape(-1).view("uint32")[0] ^= 1 << 20
            if not isinstance(next(iter(round_.started[replica].values())), np.ndarray):
                arrays = {name: keras.ops.convert_to_tensor(a) for name, a in arrays.items()}
            round_.started[replica] = arrays
    before |= round_.started
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
    verifications = verifications_of(own)
    if VALIDATION and (verifications.trains or watching.epoch == 0):
        return False
    return fault == FAULT and own.worker == WORKER and verifications.step >= STEP


def always_sums_wrongly() -> bool:
    """Whether this process does, by now."""
    if not always("summing"):
        return False
    assert job.current().context.folder is not None
    mark = job.current().context.folder / "summing"
    if not mark.exists():
        mark.write_text(str(os.getpid()))
    return mark.read_text() == str(os.getpid())


def sum_slice(reduce: SliceReduce, *given: Any, original: Any = SliceReduce.sum) -> None:
    """Flip a bit of the slice of the total that this worker sums."""
    original(reduce, *given)
    if reduce.total and always_sums_wrongly():
        max(reduce.total, key=lambda slot: slot.out.nbytes).out.reshape(-1).view("uint8")[:1] ^= 1


def add(reduce: PackedReduce, adder: Any, original: Any = PackedReduce.sum) -> None:
    """Flip a bit of the total, as a faulty processor would."""
    original(reduce, adder)
    if has("sum") or always("adding"):
        reduce.total[0].out.view("uint32")[3] ^= 1 << 20


def add_again(part: TotalPart, *given: Any, original: Any = TotalPart.sum) -> Any:
    """Flip a bit of a sum that this worker checks."""
    summed = original(part, *given)
    if always("adding") or always_sums_wrongly():
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
    # With an assignment in this file, each worker of all jobs would import Keras by itself.
    os.environ.__setitem__("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=SSE4_2")
if FAULT == "alike-program":
    host_report.computed_bits = lambda: "equal"
Round.begin = begin  # type: ignore[method-assign]
Round.sum = sum_partials  # type: ignore[method-assign]
Round.summands = summands  # type: ignore[method-assign]
PackedReduce.sum = add  # type: ignore[method-assign]
SliceReduce.sum = sum_slice  # type: ignore[method-assign]
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
        keras.layers.Dense(4096 if FAULT in ("summing", "large") else 16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        *([counting := Counting()] if FAULT in ("update", "updates") else ()),
        keras.layers.Dense(1, name="out"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), Noisy(), metrics=["mae"], run_eagerly=FAULT == "random")
if "loop" in sys.argv:
    strategy = lockstep.MultiWorkerMirroredStrategy()
    line = keras.Variable(np.zeros((8, 1), "float32"), name="line")
    optimizer, noise = keras.optimizers.Adam(0.01), keras.random.SeedGenerator(3)
    means = keras.metrics.Mean()

    def step(inputs: Any, labels: Any) -> Any:
        """Fit a line to examples with noise."""
        inputs = inputs + keras.random.normal(keras.ops.shape(inputs), seed=noise)
        error = inputs @ line - labels
        means.update_state(error**2)
        optimizer.apply([keras.ops.transpose(inputs) @ error], [line])
        return keras.ops.sum(error**2)

    batches = [(rows[i : i + 16], targets[i : i + 16]) for i in range(0, 96, 16)] * 2
    elements = iter(strategy.experimental_distribute_dataset(batches))
    state = {"line": line, "optimizer": optimizer, "noise": noise.state, "means": means}
    state |= {"elements": elements, "losses": (losses := list[float]())}
    for _ in strategy.steps(12, state):
        inputs, labels = next(elements)
        shift = float(np.random.normal())
        summed = strategy.run(step, args=(inputs, labels))
        losses.append(shift + float(strategy.reduce("SUM", summed, axis=None)))
    print("digest:", keras.ops.convert_to_numpy(line).tobytes().hex(), losses, float(means.result()))
    sys.exit()
if BATCHES:
    figures = []
    other = keras.Sequential([keras.layers.Dense(16), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    other.compile("adam", "mse")
    for number in range(12):
        batch = slice(number % 6 * 16, number % 6 * 16 + 16)
        if number == 6:
            model.reset_metrics()
        if number % 3 == 0:
            model.optimizer.learning_rate = 0.01 / (number + 1)
        shift = sum(float(np.abs(weight).mean()) for weight in model.get_weights())
        figures += model.train_on_batch(rows[batch] + shift, targets[batch])
        if "pair" in sys.argv:
            shift += sum(float(np.abs(weight).mean()) for weight in model.get_weights())
            figures.append(other.train_on_batch(rows[batch] + shift, targets[batch]))
        if number % 4 == 2:
            figures += model.test_on_batch(rows[batch], targets[batch])
        if number == 3:
            figures.append(float(model.predict(rows, batch_size=16, verbose=0).mean()))
        if number == 4 and "fit" in sys.argv:
            figures += model.fit(rows, targets, batch_size=20, verbose=0).history["mae"]
        if number == 8:
            figures += model.evaluate(rows, targets, batch_size=16, verbose=0)
    print("digest:", lockstep.digest(model), figures)
    sys.exit()


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of 16 rows."""

    def __len__(self) -> int:
        """Return the number of batches."""
        return 6

    def __getitem__(self, index: int) -> Any:
        """Return a batch."""
        batch = slice(16 * index, 16 * index + 16)
        return rows[batch], targets[batch]


def generated() -> Iterator[Any]:
    """Yield batches, other ones in each validation of five steps."""
    for number in itertools.count():
        yield Batches()[number % 6]


data: dict[str, Any] = {"x": Batches()} if DATASET else {"x": rows, "y": targets, "batch_size": 16}
if VALIDATION:
    validation_data: Any = Batches() if DATASET else (rows[8:88], targets[8:88])
    if "generator" in sys.argv:
        validation_data, data["validation_steps"] = generated(), 5
    data |= {"validation_data": validation_data, "callbacks": [watching, keras.callbacks.SwapEMAWeights()]}
    model.compile(keras.optimizers.Adam(0.01, use_ema=True), Noisy(), metrics=["mae"])
if FAULT == "memory":
    data["callbacks"] = [keras.callbacks.CSVLogger(f"{job.current().context.folder}/log.csv")]
epochs = 3 if VALIDATION and "last" not in sys.argv else {"long": 1667, "unlike": 40}.get(FAULT, 2)
history = model.fit(**data, epochs=epochs, verbose=0)
if VALIDATION:
    print("digest:", history.history, watching.batches, watching.errors)
print("digest:", lockstep.digest(model), repr(history.history["mae"][-1]))
if FAULT in ("update", "updates"):
    print("counted:", int(counting.counter) if hasattr(counting, "counter") else counting.calls)
if FAULT in ("evaluation", "evaluations", "evaluated") and not VALIDATION:
    evaluated = model.evaluate(rows, targets, batch_size=16, verbose=0, callbacks=[watching])
    print("digest:", evaluated, watching.batches, watching.errors)
    model.fit(rows, targets, batch_size=16, verbose=0)
    print("digest:", lockstep.digest(model))
if FAULT in ("prediction", "predictions", "predicted"):
    print("digest:", model.predict(rows, batch_size=16, verbose=0).tobytes().hex())
print("verified:", verifications_of(job.current()).count, verifications_of(job.current()).up_to)
