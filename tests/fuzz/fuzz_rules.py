"""The programs that are valid on a backend, and those that may differ from plain Keras without a note."""

from collections.abc import Mapping
from dataclasses import replace

from fuzz_specs import (
    BATCH_FUNCTIONS,
    BATCH_LAYERS,
    CHANGING,
    OWN_STEPS,
    SUM_LAYERS,
    SUMS,
    Call,
    Loop,
    Output,
    Spec,
    Training,
)

EAGER = "run_eagerly=True"


def settled(spec: Spec, backend: str) -> Spec:
    """Return the program without the features that Keras refuses on `backend`."""
    return _settled_loop(spec, backend) if isinstance(spec, Loop) else _settled_training(spec, backend)


def quicker(seed: int, spec: Spec, backend: str) -> Spec:
    """Return a program that costs less: tracing and compiling its steps take most of the time.

    On TensorFlow, the steps of one program in four are traced; on JAX, only those with Python state are
    eager. In two of three programs there, all replicas have as many examples in each step.
    """
    if backend == "torch":
        return spec
    if seed % 3:
        changes = isinstance(spec, Training) and "input" in features(spec)
        spec = replace(spec, count=12, batch=3 if changes else 6)
    if isinstance(spec, Loop):
        return replace(spec, graph=spec.graph and seed % 4 == 0, epochs=1)
    if backend == "tensorflow" and seed % 4:
        spec = replace(spec, compiling=(EAGER,))
    elif backend == "jax" and spec.compiling == (EAGER,) and not spec.memory:
        spec = replace(spec, compiling=())
    return settled(replace(spec, calls=spec.calls[:2]), backend)


def inexact(spec: Spec, backend: str) -> str | None:
    """Return why one process may compute other values, although no note names a part of the program.

    None if the values agree up to rounding, or a note says what replicas compute separately.
    """
    return _inexact_loop(spec, backend) if isinstance(spec, Loop) else _inexact_training(spec, backend)


def features(spec: Spec) -> set[str]:
    """Return what a program has of its own, in the words of `fuzz_specs.KINDS`."""
    if isinstance(spec, Loop):
        return {"loop"}
    pieces = {*spec.back}
    for output in spec.outputs:
        pieces |= {output.loss, *output.metrics, *output.weighted}
    found = {
        "state": spec.memory != "",
        "step": spec.step in OWN_STEPS,
        "input": any(call.source in CHANGING or call.validation == "shared" for call in spec.calls),
        "sum": bool(pieces & _pieces(SUM_LAYERS, SUMS))
        or any(one.reduction == "sum" for one in spec.outputs),
        "batch": bool(pieces & _pieces(BATCH_LAYERS, BATCH_FUNCTIONS)) or "root" in spec.figures,
    }
    return {name for name, has in found.items() if has}


def _pieces(layers: tuple[str, ...], functions: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {*layers, *(name for names in functions.values() for name in names)}


def tolerance(spec: Spec) -> float:
    """Return the largest relative distance of an exact program from plain Keras, in norm."""
    return 0.1 if isinstance(spec, Training) and spec.policy else 3e-4


def _settled_training(spec: Training, backend: str) -> Training:
    sequences = spec.data in ("words", "series") and not spec.pool
    if spec.data in ("table", "image") and (sequences or (spec.data == "image") != bool(spec.pool)):
        spec = replace(spec, pool="layers.Flatten()" if spec.data == "image" else "")
    if spec.data == "table":
        spec = replace(spec, front=(), pool="", masked=False)
    if spec.data == "image":
        spec = replace(spec, masked=False)
    if spec.data != "table":
        spec = replace(spec, inputs=1)
    if sequences:
        spec = replace(spec, back=(), outputs=spec.outputs[:1])
    if backend == "torch":
        spec = replace(spec, compiling=tuple(o for o in spec.compiling if "run_eagerly" in o))
    eager = backend == "torch" or EAGER in spec.compiling
    if spec.memory == "last" and (backend == "jax" or not eager):
        spec = replace(spec, memory="counter")
    if spec.memory == "layer" and sequences:
        spec = replace(spec, memory="list")
    if spec.memory == "loss" and (spec.outputs[0].task != "regression" or len(spec.outputs) > 1):
        spec = replace(spec, memory="dict")
    if spec.step == "average" and backend != "tensorflow":
        spec = replace(spec, step="scaled")
    if spec.step in OWN_STEPS:
        # It computes no other loss, and no metrics.
        first = Output("regression" if spec.outputs[0].task == "classes" else spec.outputs[0].task)
        spec = replace(spec, outputs=(first,), memory="", figures=())
    parts = spec.step or spec.figures or spec.memory not in ("", "layer", "loss")
    if spec.style in ("sequential", "lazy") and (spec.inputs > 1 or len(spec.outputs) > 1 or parts):
        spec = replace(spec, style="functional")
    if backend == "jax" and spec.step in ("own", "two", *OWN_STEPS):
        # On these, only Keras's own steps can update metrics within the loss and the layers.
        back = tuple(layer for layer in spec.back if layer != "Metered()")
        front = tuple(layer for layer in spec.front if layer != "Metered()")
        spec = replace(spec, back=back, front=front, outputs=spec.outputs[:1])
    outputs = tuple(_settled_output(output, sequences) for output in spec.outputs)
    names = [option.split("=")[0] for option in spec.options]
    options = spec.options
    if "nesterov" in names and "momentum" not in names:
        options = tuple(option for option in options if "nesterov" not in option)
    if backend == "jax" and spec.step in ("own", "two", *OWN_STEPS):
        # Keras averages weights in its own steps only.
        options = tuple(option for option in options if "use_ema" not in option)
    if spec.policy == "mixed_float16":
        options = tuple(option for option in options if "loss_scale" not in option)
    spec = replace(spec, outputs=outputs, options=options)
    calls = tuple(_settled_call(call, spec, backend) for call in spec.calls)
    strategy = spec.strategy or "scaled" in spec.step or any(call.source == "strategy" for call in calls)
    return replace(spec, calls=calls, strategy=strategy)


def _settled_output(output: Output, sequences: bool) -> Output:
    def kept(metrics: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(metric for metric in metrics if not (sequences and "R2Score" in metric))

    return replace(output, metrics=kept(output.metrics), weighted=kept(output.weighted))


def _settled_call(call: Call, spec: Training, backend: str) -> Call:
    if call.kind not in ("fit", "evaluate", "predict"):
        call = replace(Call(call.kind), weights=call.weights and call.kind.endswith("on_batch"))
    single = spec.inputs == len(spec.outputs) == 1
    if call.source == "loader" and (backend != "torch" or not single or spec.data == "words"):
        call = replace(call, source="pydataset")
    if call.source == "strategy" and (backend != "tensorflow" or call.kind != "fit"):
        call = replace(call, source="arrays")
    if call.source in ("generator", "strategy") and call.kind == "fit":
        # A generator without an end has no known length.
        call = replace(call, steps=call.steps or 2, shuffle=False)
    if call.validation == "shared" and call.source != "generator":
        call = replace(call, validation="data")
    if call.source in ("tf", "loader", "generator"):
        call = replace(call, shuffle=False)
    if call.source in ("strategy", "generator"):
        call = replace(call, class_weight=False)
    if call.source in CHANGING:
        call = replace(call, source=call.source if call.kind == "fit" else "pydataset", steps=0)
    if call.validation == "split" and call.source != "arrays":
        call = replace(call, validation="data")
    if spec.outputs[0].task not in ("classes", "binary") or len(spec.outputs) > 1 or call.weights:
        call = replace(call, class_weight=False)
    scheduled = any("schedules" in option for option in spec.options)
    callbacks = tuple(
        callback
        for callback in call.callbacks
        if not (scheduled and any(name in callback for name in ("Rate", "LROn", "Shrinks")))
        and not ("Swap" in callback and not any("use_ema" in option for option in spec.options))
    )
    if scheduled and call.kind == "rate":
        call = replace(call, kind="reset")
    return replace(call, callbacks=callbacks)


def _settled_loop(spec: Loop, backend: str) -> Loop:
    if backend != "tensorflow":
        spec = replace(spec, graph=False, loss="sum" if spec.loss == "average" else spec.loss)
    if backend == "tensorflow" and spec.source == "list":
        spec = replace(spec, source="tf")
    if not spec.trains:
        spec = replace(spec, outside=False, second=False)
    if spec.outside:
        spec = replace(spec, second=False)
    return spec


def _random(pieces: tuple[str, ...]) -> str | None:
    marks = ("Dropout", "dropout", "Noise", "RandomFlip", "Moving", "Summed", "BatchNormalization()")
    return next((piece for piece in pieces if any(mark in piece for mark in marks)), None)


def _inexact_training(spec: Training, backend: str) -> str | None:
    layers = (*spec.front, spec.pool, *spec.back)
    if spec.memory and backend != "torch" and EAGER not in spec.compiling:
        return "graphs read the Python state when they are traced, which is not in each step"
    if spec.strategy and (layer := _random(layers)):
        return f"a script with a strategy knows that {layer} is per replica"
    if backend == "tensorflow" and any(call.validation == "shared" for call in spec.calls):
        return "there a thread of plain Keras reads ahead from a generator that training and validation share"
    changed = any("Shrinks()" in call.callbacks for call in spec.calls)
    if backend == "tensorflow" and changed and spec.style in ("subclass", "lazy"):
        return "there Keras makes weights after callbacks have begun, and so does not let them change any"
    if spec.batch == 2 and "batch" in features(spec):
        return "two rows to try may hide that a function compares examples"
    if spec.optimizer in ("Lion", "Adafactor"):
        return f"{spec.optimizer} makes much of rounding"
    weighted = any(output.reduction == "mean_with_sample_weight" for output in spec.outputs)
    if spec.strategy and (spec.masked or weighted) and len(spec.outputs) > 1:
        return "several denominators"
    clips = any("clip" in option for option in spec.options)
    if backend == "tensorflow" and spec.data == "words" and (spec.optimizer != "SGD" or clips):
        return "TensorFlow squares the occurrences of a word one by one"
    return None


def _inexact_loop(spec: Loop, backend: str) -> str | None:
    if layer := _random(spec.layers):
        return f"{layer} is per replica"
    if spec.optimizer in ("Lion", "Adafactor"):
        return f"{spec.optimizer} makes much of rounding"
    if spec.loss == "keras" and (spec.count % spec.batch or spec.batch % 3):
        return "means of replicas with different numbers of examples"
    clipped = any("clip" in option for option in spec.options)
    if backend == "tensorflow" and clipped and not spec.outside and spec.source != "function":
        return "tf.distribute clips each replica's gradients, and not their sum"
    if spec.through and (backend != "tensorflow" or spec.source == "function"):
        return "no plain computation has gradients of what replicas tell each other"
    return None
