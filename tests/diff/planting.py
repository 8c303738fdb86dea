"""Trains a small model many times in one process, each time with another fault, and compares the digest logs.

    planting.py FOLDER [quick]

Prints a JSON object per plant: its name, the expected step and cause, and what the comparison found.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.collectives.plan import ReducePlan
from lockstep.diff.comparison import compare
from lockstep.diff.recording import read_recording
from lockstep.diff.wording import as_data
from lockstep.keras import patches
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.observability.bus import Bus
from lockstep.observability.event_log import recorded
from lockstep.observability.events import JobFinished, JobStarted
from lockstep.protocol.job_spec import JobSettings, JobSpec
from lockstep.system.clock import SystemClock
from lockstep.system.paths import RunPaths
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext
from lockstep.worker.seeding import seed_everything

sys.path.insert(0, str(Path(__file__).parents[1]))

from thread_hub import Hub

REPLICAS = 3
BATCH = 12
STEPS = 10
EPOCHS = 2
ALL = STEPS * EPOCHS
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(BATCH * STEPS, 6)).astype("float32")
Y = (X[:, :1] * X[:, 1:2]).astype("float32")

Change = Callable[[Any], Any]


@dataclass
class Program:
    """What a run does; a plant changes some of it.

    Attributes:
        job_seed, script_seed: seeds.
        threads: that the job claims to use.
        data: changes (x, y).
        optimizer, loss, rate, units, activation: of the model.
        fit: arguments of `fit`.
        callbacks: returns its callbacks for a model.
        generates: whether the examples come from a generator, which calls `element(step, x, y)`.
        on_partial, on_total, on_state, on_apply: change the named thing in each step.
        edits: change the records of the digest log afterwards.
    """

    job_seed: int = 0
    script_seed: int | None = 1
    threads: int = 1
    data: Callable[[Any, Any], tuple[Any, Any]] = lambda x, y: (x, y)
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)
    loss: str = "mse"
    rate: float = 0.25
    units: int = 8
    activation: str = "relu"
    extra_layer: Callable[[], Any] | None = None
    metrics: tuple[str, ...] = ()
    fit: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Any], list[Any]] = lambda model: []
    generates: bool = False
    element: Callable[[int, Any, Any], tuple[Any, Any]] = lambda step, x, y: (x, y)
    on_partial: Callable[[int, int, dict[str, Any]], dict[str, Any]] | None = None
    on_total: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None
    on_state: Callable[[int, Any], Any] | None = None
    after_fit: Callable[[Any], None] = lambda model: None
    before_fit: Callable[[Any], None] = lambda model: None
    edit: Callable[[dict[str, Any]], None] = lambda record: None


@dataclass(frozen=True)
class Plant:
    """A program with a fault, and what a comparison with `base` must find: None for no difference."""

    name: str
    program: Program
    step: int | None
    cause: str | None
    base: str = "base"


class Touch(keras.callbacks.Callback):
    """Changes something at the end of a step."""

    def __init__(self, step: int, act: Callable[[Any], None]) -> None:
        super().__init__()
        self.step, self.act, self.count = step, act, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.count == self.step:
            self.act(self.model)


class Idle(keras.callbacks.Callback):
    """Does nothing."""


class Watch(keras.callbacks.Callback):
    """Does nothing either."""


class Noise(keras.layers.Layer):
    """A layer that is different each time that it is compiled."""

    def call(self, x: Any) -> Any:
        return x * (1.0 + 1e-3 * float(time.perf_counter_ns() % 997 + 1))


def train(folder: Path, program: Program) -> None:
    """Train in `folder` as a job of one worker."""
    patches.uninstall()
    keras.utils.clear_session()
    view = place(REPLICAS, (0,))
    bus = Bus(SystemClock(), 0)
    with recorded(bus, RunPaths(folder), print):
        bus.publish(_started(program))
        seed_everything(program.job_seed)
        context = JobContext(0, bus, JobSettings(seed=program.job_seed, threads=program.threads))
        own = Job(context, (view, Hub(ReducePlan.of(view)).member(0)))
        job.enter(own)
        with patches.install(own).scope(nullcontext), _faults(program):
            model = _model(program)
            _fit(program, model)
            keras_digest = __import__("lockstep").digest(model)
        own.exit()
        bus.publish(_finished(program, model, keras_digest))
    for path in sorted(RunPaths(folder).digests.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            program.edit(record)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _model(program: Program) -> Any:
    if program.script_seed is not None:
        keras.utils.set_random_seed(program.script_seed)
    layers = keras.layers
    extra = [program.extra_layer()] if program.extra_layer else []
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(program.units, activation=program.activation),
            *extra,
            layers.Dropout(program.rate),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )
    model.compile(program.optimizer(), program.loss, metrics=list(program.metrics))
    return model


def _fit(program: Program, model: Any) -> None:
    x, y = program.data(X.copy(), Y.copy())
    program.before_fit(model)
    given = {"epochs": EPOCHS, "verbose": 0, "callbacks": program.callbacks(model)} | program.fit
    if program.generates:
        model.fit(_elements(program, x, y), steps_per_epoch=STEPS, **given)
    else:
        model.fit(x, y, **({"batch_size": BATCH, "shuffle": False} | given))
    program.after_fit(model)


def _elements(program: Program, x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    for step in itertools.count(1):
        rows = slice((step - 1) % STEPS * BATCH, ((step - 1) % STEPS + 1) * BATCH)
        yield program.element(step, x[rows].copy(), y[rows].copy())


@contextmanager
def _faults(program: Program) -> Iterator[None]:
    """Within the block, steps have the program's faults."""
    with ExitStack() as stack:
        from lockstep.keras.backends.jax import JaxProgram
        from lockstep.keras.rounds import Round

        steps = itertools.count(1)
        now = [0]

        def replace_method(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            original = getattr(owner, name)
            setattr(owner, name, make(original))
            stack.callback(setattr, owner, name, original)

        def counted(original: Any) -> Any:
            def step(self: Any, state: Any, *rest: Any, **options: Any) -> Any:
                now[0] = next(steps)
                return original(self, state, *rest, **options)

            return step

        def computing(original: Any) -> Any:
            def compute(self: Any, state: Any, share: Any, earlier: Any) -> Any:
                found = original(self, state, share, earlier)
                if program.on_partial is None:
                    return found
                parts = self.parts(0, {name: np.array(array) for name, array in found.items()})
                return program.on_partial(now[0], share.replica, dict(parts))

            return compute

        def summing(original: Any) -> Any:
            def summed(self: Any, view: Any, communicator: Any) -> Any:
                found = original(self, view, communicator)
                if program.on_total is None:
                    return found
                found = {name: array.copy() for name, array in found.items()}
                parts = self.parts(found)
                for name, array in program.on_total(now[0], dict(parts)).items():
                    parts[name][...] = array
                return found

            return summed

        def applying(original: Any) -> Any:
            def apply(self: Any, state: Any, totals: Any) -> Any:
                logs, state = original(self, state, totals)
                return logs, program.on_state(now[0], state) if program.on_state else state

            return apply

        replace_method(GlobalStep, "_step", counted)
        replace_method(JaxProgram, "compute", computing)
        replace_method(JaxProgram, "apply", applying)
        replace_method(Round, "sum", summing)
        yield


def _started(program: Program) -> JobStarted:
    spec = JobSpec(target="training.py", run_dir=Path("run"), seed=program.job_seed, replicas=REPLICAS)
    return JobStarted(versions={}, script=None, cores=1, host="", directory="", job=spec.recorded())


def _finished(program: Program, model: Any, digest: str) -> JobFinished:
    steps = int(np.asarray(model.optimizer.iterations))
    return JobFinished(
        status=0, message="", seconds=1.0, lost=0, joined=0, checkpoints=0, verified=0, before=0, steps=steps,
        model="model", digest=digest,
    )  # fmt: skip


def flipped(array: Any, at: int = 0, bit: int = 12) -> Any:
    """Return an array of float32 with one bit flipped."""
    found = np.array(array)
    found.reshape(-1).view(np.uint32)[at] ^= np.uint32(1 << bit)
    return found


def plants() -> Iterator[Plant]:
    """Yield all plants."""
    import jax.numpy as jnp

    def at(step: int, act: Callable[[Any], Any]) -> Callable[[int, Any], Any]:
        return lambda now, value: act(value) if now == step else value

    for s in (1, 2, 7, 10):
        first = (s - 1) * BATCH

        def swap(x: Any, y: Any, i: int, k: int) -> tuple[Any, Any]:
            for array in (x, y):
                array[[i, k]] = array[[k, i]]
            return x, y

        def in_x(x: Any, y: Any, i: int) -> tuple[Any, Any]:
            x[i] = flipped(x[i], 3)
            return x, y

        def in_y(x: Any, y: Any, i: int) -> tuple[Any, Any]:
            y[i] += 1
            return x, y

        yield Plant(
            f"rows of a replica swapped in {s}",
            Program(data=lambda x, y, f=first: swap(x, y, f + 1, f + 2)), s, "input",
        )  # fmt: skip
        yield Plant(
            f"rows of two replicas swapped in {s}",
            Program(data=lambda x, y, f=first: swap(x, y, f + 1, f + 11)), s, "input",
        )  # fmt: skip
        yield Plant(
            f"one bit of an example in {s}", Program(data=lambda x, y, f=first: in_x(x, y, f + 5)), s, "input"
        )
        yield Plant(f"a label in {s}", Program(data=lambda x, y, f=first: in_y(x, y, f + 9)), s, "input")

    def late(now: int, x: Any, y: Any, s: int) -> tuple[Any, Any]:
        return (x + np.float32(time.time_ns() % 999 + 1), y) if now == s else (x, y)

    for s in (1, 3, 11, 20):
        read = Program(generates=True, element=lambda now, x, y, s=s: late(now, x, y, s))
        yield Plant(f"clock in the input of {s}", read, s, "input", base="generator")
    for seed in (1, 2, 3):
        unseeded = Program(job_seed=seed, script_seed=None)
        yield Plant(f"seed {seed} of the job", unseeded, 1, "seed", base="unseeded")
        yield Plant(f"seed {seed + 1} of the script", Program(script_seed=seed + 1), 1, "seed")
    optimizers = keras.optimizers
    for rate in (0.02, 0.001, 0.0100001):
        yield Plant(
            f"learning rate {rate}",
            Program(optimizer=lambda rate=rate: optimizers.Adam(rate)),
            1,
            "configuration",
        )
    for name, value in (
        ("beta_1", 0.8),
        ("beta_2", 0.99),
        ("epsilon", 1e-3),
        ("weight_decay", 0.01),
        ("clipnorm", 1e-3),
    ):
        yield Plant(
            f"{name} of the optimizer",
            Program(optimizer=lambda name=name, value=value: optimizers.Adam(0.01, **{name: value})),
            1, "configuration",
        )  # fmt: skip
    yield Plant("another optimizer", Program(optimizer=lambda: optimizers.RMSprop(0.01)), 1, "configuration")
    yield Plant("another loss", Program(loss="mae"), 1, "configuration")
    for rate in (0.3, 0.5):
        yield Plant(f"dropout {rate}", Program(rate=rate), 1, "configuration")
    yield Plant("another activation", Program(activation="tanh"), 1, "configuration")
    yield Plant("more units", Program(units=9), 1, "configuration")
    for size in (11, 6):
        yield Plant(f"batches of {size}", Program(fit={"batch_size": size}), 1, "configuration")
    yield Plant("shuffled", Program(fit={"shuffle": True}), 1, "configuration")
    yield Plant("three epochs", Program(fit={"epochs": 3}), 21, "configuration")
    yield Plant("one epoch", Program(fit={"epochs": 1}), 11, "configuration")
    yield Plant(
        "a schedule of the learning rate",
        Program(callbacks=lambda model: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.005)]),
        1, "configuration",
    )  # fmt: skip
    yield Plant(
        "a schedule from the second epoch",
        Program(
            callbacks=lambda model: [
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.005 if epoch else rate)
            ]
        ),
        11, "configuration",
    )  # fmt: skip

    def gradient(now: int, replica: int, found: dict[str, Any], s: int, r: int, i: int) -> dict[str, Any]:
        if now == s and replica == r:
            found[f"gradient/{i}"] = jnp.asarray(flipped(found[f"gradient/{i}"]))
        return found

    for s, r, i in itertools.product((1, 2, 9, 20), (0, 1, 2), (0, 3)):
        if (s + r + i) % 2:
            fault = Program(
                on_partial=lambda now, replica, found, s=s, r=r, i=i: gradient(now, replica, found, s, r, i)
            )
            yield Plant(f"a bit of gradient {i} of replica {r} in {s}", fault, s, "gradient")

    def total(found: dict[str, Any], i: int) -> dict[str, Any]:
        found[f"gradient/{i}"] = flipped(found[f"gradient/{i}"])
        return found

    for s, i in itertools.product((1, 2, 9, 20), (0, 2)):
        yield Plant(
            f"a bit of total {i} in {s}",
            Program(on_total=at(s, lambda found, i=i: total(found, i))),
            s,
            "reduction",
        )

    def state(groups: Any, group: int, i: int) -> Any:
        found = [list(some) for some in groups]
        found[group][i] = jnp.asarray(flipped(found[group][i]))
        return tuple(found)

    for s, (group, i) in itertools.product((1, 2, 9, 19), ((0, 0), (1, 1), (2, 3))):
        yield Plant(
            f"a bit of variable {group}.{i} after the update of {s}",
            Program(on_state=at(s, lambda groups, group=group, i=i: state(groups, group, i))),
            s, "update",
        )  # fmt: skip

    def touch(model: Any) -> None:
        weights = model.get_weights()
        weights[0] = flipped(weights[0])
        model.set_weights(weights)

    def assign(model: Any) -> None:
        variable = model.layers[-1].bias
        variable.assign(variable.value + 1.0)

    for s, (name, act) in itertools.product((1, 5, 10, 18), (("set_weights", touch), ("assign", assign))):
        yield Plant(
            f"a callback with {name} after {s}",
            Program(callbacks=lambda model, s=s, act=act: [Touch(s, act)]),
            s + 1, "state",
        )  # fmt: skip
    yield Plant("weights loaded before", Program(before_fit=touch), 1, "state")
    yield Plant("weights assigned before", Program(before_fit=assign), 1, "state")

    def perturbed(now: int, replica: int, found: dict[str, Any], s: int) -> dict[str, Any]:
        if now >= s:
            found["gradient/0"] = jnp.asarray(flipped(found["gradient/0"], bit=1))
        return found

    def edits(**changes: Any) -> Callable[[dict[str, Any]], None]:
        def edit(record: dict[str, Any]) -> None:
            if record["event"] == "program":
                for name, value in changes.items():
                    record[name] = record[name] | value if isinstance(value, dict) else value

        return edit

    others = (
        ("versions", {"versions": {"jaxlib": "0.0.1"}}),
        ("versions", {"versions": {"numpy": "9.0"}}),
        ("processor", {"features": "sse2"}),
        ("processor", {"processor": "Another"}),
        ("configuration", {"threads": 2}),
        ("configuration", {"flags": {"XLA_FLAGS": "--another"}}),
        ("script", {"sources": {"layers.py": "0" * 64}}),
    )
    for s, (cause, changes) in itertools.product((1, 6, 15), others):
        fault = Program(
            on_partial=lambda now, replica, found, s=s: perturbed(now, replica, found, s),
            edit=edits(**changes),
        )
        yield Plant(f"{cause} {changes} from {s} on", fault, s, cause)
    for number in (1, 2):
        yield Plant(
            f"a layer that depends on the clock, {number}",
            Program(extra_layer=Noise),
            1,
            "gradient",
            base="noise",
        )
    yield Plant("the same", Program(), None, None)
    yield Plant("a seed of the job that the script replaces", Program(job_seed=1), None, None)
    yield Plant("the same from a generator", Program(generates=True), None, None, base="generator")
    yield Plant("another version without effect", Program(edit=edits(versions={"numpy": "9.0"})), None, None)
    yield Plant("another script without effect", Program(edit=edits(sources={"a.py": "0"})), None, None)
    yield Plant("other threads without effect", Program(edit=edits(threads=2)), None, None)
    yield Plant("one callback", Program(callbacks=lambda model: [Idle()]), None, None)
    yield Plant(
        "callbacks in another order",
        Program(callbacks=lambda model: [Watch(), Idle()]),
        None,
        None,
        base="callbacks",
    )
    yield Plant("one more metric", Program(metrics=("mae",)), None, None)


BASES = {
    "base": Program(),
    "generator": Program(generates=True),
    "unseeded": Program(script_seed=None),
    "noise": Program(extra_layer=Noise),
    "callbacks": Program(callbacks=lambda model: [Idle(), Watch()]),
}


def main() -> None:
    assert keras.backend.backend() == "jax"
    folder = Path(sys.argv[1])
    some = list(plants())
    if "quick" in sys.argv[2:]:
        quick = {
            "rows of a replica swapped in 7",
            "a bit of gradient 0 of replica 1 in 2",
            "a bit of total 0 in 9",
            "a bit of variable 0.0 after the update of 9",
            "a callback with assign after 5",
        }
        some = [plant for plant in some if plant.name in quick]
    bases = {}
    for name in dict.fromkeys(plant.base for plant in some):
        (folder / f"run-{name}").mkdir()
        train(folder / f"run-{name}", BASES[name])
        bases[name] = read_recording(folder / f"run-{name}")
    for number, plant in enumerate(some):
        own = folder / f"run-{number}"
        own.mkdir()
        train(own, plant.program)
        found = as_data(compare(bases[plant.base], read_recording(own)), [plant.base, plant.name])
        print(json.dumps({"plant": plant.name, "wanted": [plant.step, plant.cause], **found}), flush=True)


if __name__ == "__main__":
    main()
