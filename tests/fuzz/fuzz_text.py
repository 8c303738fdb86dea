"""The text of a program as a user writes it, with or without Lockstep.

A program leaves its results in `found`: nests of arrays and numbers, by name.
"""

from fuzz_loop_text import loop_lines
from fuzz_specs import CHANGING, OWN_STEPS, Call, Loop, Output, Spec, Training

HEADER = """\
import keras
import numpy as np

layers, ops = keras.layers, keras.ops
found = {}
generator = np.random.default_rng(0)
"""

LOCKSTEP = """\
import lockstep

strategy = lockstep.MultiWorkerMirroredStrategy()
context = lockstep.get_replica_context
scope = strategy.scope
distribute = strategy.experimental_distribute_dataset
"""

PLAIN = """\
import contextlib
from types import SimpleNamespace

strategy = SimpleNamespace(num_replicas_in_sync=1)
scope = contextlib.nullcontext


def distribute(dataset):
    return dataset
"""

FOOTER = """\
if __name__ == "__main__":
    for name, value in found.items():
        print(name, value)
"""

CLASSES = {
    "Attend(": """\
class Attend(layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = layers.MultiHeadAttention(1, 2)

    def build(self, shape):
        self.inner.build(shape, shape)

    def call(self, inputs):
        return self.inner(inputs, inputs)
""",
    "Spread(": """\
class Spread(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        return inputs
""",
    "Summed(": """\
class Summed(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.sum(ops.square(inputs)))
        return inputs
""",
    "Moving(": """\
class Moving(layers.Layer):
    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs - self.mean
""",
    "Metered(": """\
class Metered(layers.Layer):
    def __init__(self):
        super().__init__()
        self.meter = keras.metrics.Mean(name="meter")

    def call(self, inputs):
        self.meter.update_state(inputs)
        return inputs
""",
    "Bias(": """\
class Bias(keras.metrics.Metric):
    def __init__(self, name="bias"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, y, prediction, sample_weight=None):
        difference = ops.cast(prediction, "float32") - ops.cast(y, "float32")
        self.total.assign(self.total + ops.sum(difference))
        self.count.assign(self.count + ops.cast(ops.size(difference), "float32"))

    def result(self):
        return self.total / (self.count + 1)
""",
    "Notes(": """\
class Notes(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        found.setdefault("noted batches", []).append([logs[name] for name in sorted(logs)])

    def on_epoch_end(self, epoch, logs=None):
        found.setdefault("noted epochs", []).append([logs[name] for name in sorted(logs)])
""",
    "Stops(": """\
class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1
""",
    "Shrinks(": """\
class Shrinks(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.optimizer.learning_rate = 0.01
        self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])
""",
    "Diverse(": """\
class Diverse(layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * divergence(inputs))
        return inputs
""",
    "mean_square": """\
def mean_square(activations):
    return 0.1 * ops.mean(ops.square(activations))
""",
    "sum_of_squares": """\
def sum_of_squares(activations):
    return 0.01 * ops.sum(ops.square(activations))
""",
    "divergence": """\
def divergence(activations):
    return 0.1 * ops.sum(ops.square(ops.mean(activations, axis=0) - 0.3))
""",
    "absolute": """\
def absolute(y, prediction):
    return ops.mean(ops.abs(ops.cast(y, prediction.dtype) - prediction), axis=-1)
""",
    "summed": """\
def summed(y, prediction):
    return ops.sum(ops.square(ops.cast(y, prediction.dtype) - prediction))
""",
    "part_of_a_sum": """\
def part_of_a_sum(y, prediction):
    return ops.sum(ops.square(ops.cast(y, prediction.dtype) - prediction)) / 12
""",
    "averaged": """\
def averaged(y, prediction):
    return ops.mean(ops.square(ops.cast(y, prediction.dtype) - prediction))
""",
    "averaged_where_positive": """\
def averaged_where_positive(y, prediction):
    y = ops.cast(y, prediction.dtype)
    positive = ops.cast(y > 0, prediction.dtype)
    return ops.sum(positive * ops.square(y - prediction)) / (ops.sum(positive) + 0.01)
""",
    "root_of_a_mean": """\
def root_of_a_mean(y, prediction):
    return ops.sqrt(ops.mean(ops.square(ops.cast(y, prediction.dtype) - prediction)))
""",
    "variance": """\
def variance(y, prediction):
    return ops.var(ops.cast(y, prediction.dtype) - prediction)
""",
    "soft_f1": """\
def soft_f1(y, prediction):
    y = ops.cast(y, prediction.dtype)
    return 1 - 2 * ops.sum(y * prediction) / (ops.sum(y) + ops.sum(prediction) + 0.5)
""",
    "summed_rows": """\
def summed_rows(y, prediction):
    return ops.sum(ops.square(ops.cast(y, prediction.dtype) - prediction), axis=-1)
""",
    "correlation": """\
def correlation(y, prediction):
    y = ops.cast(y, prediction.dtype)
    y, p = y - ops.mean(y, axis=0), prediction - ops.mean(prediction, axis=0)
    return 1 - ops.sum(y * p) / (ops.sqrt(ops.sum(y * y) * ops.sum(p * p)) + 0.01)
""",
    "contrast": """\
def contrast(y, prediction):
    errors = ops.square(ops.cast(y, prediction.dtype) - prediction)
    return ops.logsumexp(ops.reshape(errors, (-1,)))
""",
    "largest": """\
def largest(y, prediction):
    return ops.max(ops.square(ops.cast(y, prediction.dtype) - prediction))
""",
    "Warming(": """\
class Warming(keras.losses.Loss):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, y, prediction):
        self.calls += 1
        return (0.5 if self.calls < 3 else 1.0) * ops.square(ops.cast(y, prediction.dtype) - prediction)
""",
    "Phases(": """\
class Phases(layers.Layer):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def call(self, inputs, training=False):
        if training:
            self.calls += 1
            inputs = inputs * (0.5 if self.calls % 3 == 0 else 1.0)
        return inputs
""",
    "Centered(": """\
class Centered(layers.Layer):
    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)
""",
    "Lambda(centered": """\
def centered(inputs):
    return inputs - ops.mean(inputs, axis=0, keepdims=True)
""",
    "Growing(": """\
class Growing(Batches):
    count = 2

    def __len__(self):
        return min(self.count, super().__len__())

    def on_epoch_end(self):
        self.count += 1
""",
    "Shrinking(": """\
class Shrinking(Batches):
    count = 3

    def __len__(self):
        return max(1, min(self.count, super().__len__()))

    def on_epoch_end(self):
        self.count -= 1
""",
    "Rolling(": """\
class Rolling(Batches):
    def on_epoch_end(self):
        self.data = keras.tree.map_structure(lambda leaf: np.roll(leaf, 2, axis=0), self.data)
""",
    "Backwards(": """\
class Backwards(Batches):
    backwards = False

    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index if self.backwards else index)

    def on_epoch_end(self):
        self.backwards = not self.backwards
""",
    "Mixed(": """\
class Mixed(Batches):
    def __init__(self, data, batch):
        super().__init__(data, batch)
        self.generator = np.random.default_rng(5)

    def on_epoch_end(self):
        order = self.generator.permutation(len(keras.tree.flatten(self.data)[0]))
        self.data = keras.tree.map_structure(lambda leaf: leaf[order], self.data)
""",
    "Batches": """\
class Batches(keras.utils.PyDataset):
    def __init__(self, data, batch):
        super().__init__()
        self.data, self.batch = data, batch

    def __len__(self):
        return -(-len(keras.tree.flatten(self.data)[0]) // self.batch)

    def __getitem__(self, index):
        return part(self.data, index * self.batch, (index + 1) * self.batch)
""",
    "endless(": """\
def endless(data, batch):
    count = len(keras.tree.flatten(data)[0])
    while True:
        for start in range(0, count, batch):
            yield part(data, start, start + batch)
""",
    "part(": """\
def part(data, start, stop):
    return keras.tree.map_structure(lambda leaf: leaf[start:stop], data)
""",
}

EPSILON = ("Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Lamb")
"""Optimizers that may divide by rounding errors: a large epsilon keeps the quotients small."""


def text(spec: Spec, backend: str, *, plain: bool = False) -> str:
    """Return a program that can be run, for Lockstep or for plain Keras."""
    if isinstance(spec, Loop):
        head, lines = loop_lines(spec, backend, plain, optimizer_text(spec.optimizer, spec.options))
        head = head or LOCKSTEP
    else:
        head = LOCKSTEP if spec.strategy and not plain else PLAIN
        lines = _training_lines(spec, backend)
    body = "\n".join(["keras.utils.set_random_seed(7)", *lines]) + "\n"
    classes: list[str] = []
    for mark, definition in CLASSES.items():
        if mark in body or any(mark in other for other in classes):
            classes.append(definition)
    return "\n\n".join([HEADER + head, *reversed(classes), body, FOOTER])


def optimizer_text(name: str, options: tuple[str, ...]) -> str:
    """Return the expression that creates an optimizer."""
    given = list(options)
    if not any(option.startswith("learning_rate") for option in given):
        given.insert(0, "learning_rate=0.05")
    if name in EPSILON:
        given.append("epsilon=0.01")
    return f"keras.optimizers.{name}({', '.join(given)})"


def _training_lines(spec: Training, backend: str) -> list[str]:
    lines = [*_data_lines(spec), *_model_lines(spec, backend)]
    if spec.policy:
        lines.insert(0, f'keras.config.set_dtype_policy("{spec.policy}")')
    for number, call in enumerate(spec.calls):
        lines += _call_lines(f"{number} {call.kind}", call, spec)
    if any(call.kind in ("fit", "train_on_batch") for call in spec.calls):
        lines.append('found["optimizer"] = [ops.convert_to_numpy(v) for v in model.optimizer.variables]')
    return [*lines, 'found["weights"] = model.get_weights()']


def _data_lines(spec: Training) -> list[str]:
    n = spec.count
    shapes = {"table": (6,), "series": (5, 3), "image": (5, 5, 2), "words": (5,)}
    shape = (n, *shapes[spec.data])
    normal = f'generator.normal(size={shape}).astype("float32")'
    if spec.data == "words":
        lines = [f'x = generator.integers({0 if spec.masked else 1}, 8, {shape}).astype("int32")']
    elif spec.inputs == 2:
        lines = [f"x = {_nest(spec, 'ab', [normal, normal])}"]
    else:
        lines = [f"x = {normal}"]
    if spec.data == "series" and spec.masked:
        lines.append("x[generator.random(x.shape[:2]) < 0.4] = 0")
    sequences = spec.data in ("words", "series") and not spec.pool
    many = len(spec.outputs) > 1
    targets = [_target(output, n, sequences) for output in spec.outputs]
    lines.append(f"y = {_nest(spec, 'klm', targets) if many else targets[0]}")
    if any(call.weights for call in spec.calls):
        weight = f'generator.random({(n, 5) if sequences else n}).astype("float32") + 0.1'
        weights = [weight] * len(spec.outputs)
        lines.append(f"w = {_nest(spec, 'klm', weights) if many else weight}")
    return lines


def _nest(spec: Training, names: str, parts: list[str]) -> str:
    if spec.nest == "dict":
        return "{" + ", ".join(f'"{name}": {part}' for name, part in zip(names, parts, strict=False)) + "}"
    return f"({', '.join(parts)})"


def _target(output: Output, n: int, sequences: bool) -> str:
    shape = (n, 5) if sequences else (n,)
    return {
        "regression": f'generator.normal(size={(*shape, 2)}).astype("float32")',
        "binary": f'generator.integers(0, 2, {(*shape, 1)}).astype("float32")',
        "classes": f'generator.integers(0, 3, {shape}).astype("int32")',
        "onehot": f'np.eye(3, dtype="float32")[generator.integers(0, 3, {shape})]',
    }[output.task]


def _head(output: Output, name: str) -> str:
    units, activation = {
        "regression": (2, "linear"),
        "binary": (1, "sigmoid"),
        "classes": (3, "softmax"),
        "onehot": (3, "softmax"),
    }[output.task]
    return f"layers.Dense({units}, activation='{activation}', dtype='float32', name='{name}')"


def _body(spec: Training) -> list[str]:
    begin = []
    if spec.data == "words":
        begin = [f"layers.Embedding(8, 3, mask_zero={spec.masked})"]
    elif spec.data == "series" and spec.masked:
        begin = ["layers.Masking()"]
    end = ["Phases()"] if spec.memory == "layer" else []
    return [*begin, *spec.front, *([spec.pool] if spec.pool else []), *spec.back, *end]


def _model_lines(spec: Training, backend: str) -> list[str]:
    shape = {"table": "(6,)", "series": "(5, 3)", "image": "(5, 5, 2)", "words": "(5,)"}[spec.data]
    given = f"layers.Input({shape}{', dtype=' + chr(39) + 'int32' + chr(39) if spec.data == 'words' else ''})"
    heads = [_head(output, name) for output, name in zip(spec.outputs, "klm", strict=False)]
    body = _body(spec)
    lines, kind = _step_lines(spec, backend)
    if spec.style == "subclass":
        lines += _subclass(spec, kind, body, heads)
    lines.append("with scope():")
    if spec.style == "subclass":
        inner = ["model = Net()"]
    elif spec.style in ("sequential", "lazy"):
        parts = [*([given] if spec.style == "sequential" else []), *body, *heads]
        inner = [f"model = keras.Sequential([{', '.join(parts)}])"]
    else:
        inner = _functional(spec, kind, given, body, heads)
    inner += ["def compile():", f"    model.compile({', '.join(_compiling(spec))})", "compile()"]
    return [*lines, *(f"    {line}" for line in inner)]


def _functional(spec: Training, kind: str, given: str, body: list[str], heads: list[str]) -> list[str]:
    if spec.inputs == 2:
        lines = [f"inputs = {_nest(spec, 'ab', [given, given])}"]
        lines.append("h = layers.Concatenate()(keras.tree.flatten(inputs))")
    else:
        lines = [f"inputs = {given}", "h = inputs"]
    lines += [f"h = {layer}(h)" for layer in body]
    outputs = [f"{head}(h)" for head in heads]
    lines.append(f"outputs = {_nest(spec, 'klm', outputs) if len(outputs) > 1 else outputs[0]}")
    return [*lines, f"model = {kind}(inputs, outputs)"]


def _subclass(spec: Training, kind: str, body: list[str], heads: list[str]) -> list[str]:
    outputs = [f"self.heads[{i}](h)" for i in range(len(heads))]
    first = "ops.concatenate(keras.tree.flatten(inputs), axis=-1)" if spec.inputs == 2 else "inputs"
    return [
        f"class Net({kind}):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.body = [{', '.join(body)}]",
        f"        self.heads = [{', '.join(heads)}]",
        "",
        "    def call(self, inputs, training=None):",
        f"        h = {first}",
        "        for layer in self.body:",
        "            h = layer(h)",
        f"        return {_nest(spec, 'klm', outputs) if len(outputs) > 1 else outputs[0]}",
        "",
    ]


def _compiling(spec: Training) -> list[str]:
    many = len(spec.outputs) > 1

    def nested(parts: list[str]) -> str:
        if not many:
            return parts[0]
        return _nest(spec, "klm", parts) if spec.nest == "dict" else f"[{', '.join(parts)}]"

    def losses(output: Output) -> str:
        if output.loss.islower():
            return output.loss
        reduction = f"reduction='{output.reduction}'" if output.reduction else ""
        return f"keras.losses.{output.loss}({reduction})"

    given = [f"optimizer={optimizer_text(spec.optimizer, spec.options)}"]
    own = ["Warming()"] if spec.memory == "loss" else []
    given.append(f"loss={nested([*own, *map(losses, spec.outputs[len(own) :])])}")
    if any(output.weight != 1.0 for output in spec.outputs) and many:
        given.append(f"loss_weights={nested([str(output.weight) for output in spec.outputs])}")
    for name, attribute in (("metrics", "metrics"), ("weighted_metrics", "weighted")):
        metrics = [list(getattr(output, attribute)) for output in spec.outputs]
        if any(metrics):
            given.append(f"{name}={nested(['[' + ', '.join(one) + ']' for one in metrics])}")
    return [*given, *spec.compiling]


def _step_lines(spec: Training, backend: str) -> tuple[list[str], str]:
    """Return the classes of the program's own steps, figures and memory, and the name of the last one."""
    lines, kind = [], "keras.Model"
    if spec.step:
        lines, kind = STEPS[spec.step][backend].splitlines(), "Own"
    if spec.figures:
        lines += [*_figured(spec.figures, kind), ""]
        kind = "Figured"
    if spec.memory == "skips":
        skipping = _SKIPPING_JAX if backend == "jax" else _SKIPPING
        lines += [*skipping.format(kind=kind).splitlines(), ""]
        kind = "Remembering"
    elif spec.memory in FACTORS:
        lines += [*_remembering(spec.memory, kind), ""]
        kind = "Remembering"
    return lines, kind


def _figured(figures: tuple[str, ...], kind: str) -> list[str]:
    formulas = {"mean": "ops.mean(p)", "sum": "ops.sum(p)", "root": "ops.sqrt(ops.mean(ops.square(p)))"}
    return [
        f"class Figured({kind}):",
        "    def compute_metrics(self, x, y, y_pred, sample_weight=None):",
        "        logs = super().compute_metrics(x, y, y_pred, sample_weight)",
        "        p = ops.cast(keras.tree.flatten(y_pred)[0], 'float32')",
        *(f'        logs["the {figure}"] = {formulas[figure]}' for figure in figures),
        "        return logs",
        "",
    ]


FACTORS = {
    "counter": ("0", "self.memory += 1", "0.5 if self.memory % 3 == 0 else 1.0"),
    "list": ("[]", "self.memory.append(len(self.memory))", "1 / len(self.memory)"),
    "dict": ("{'steps': 0}", "self.memory['steps'] += 1", "2.0 if self.memory['steps'] > 2 else 1.0"),
    "array": ("np.zeros(2)", "self.memory[0] += 1", "1 / float(self.memory[0])"),
    "generator": ("np.random.default_rng(3)", "drawn = self.memory.random()", "0.5 + drawn"),
    "last": ("0.0", "self.memory = float(loss)", "1.0"),
}
"""By memory: its start, its change in a step, and the factor of the loss that reads it."""


def _remembering(memory: str, kind: str) -> list[str]:
    start, change, factor = FACTORS[memory]
    return [
        f"class Remembering({kind}):",
        "    def __init__(self, *arguments, **options):",
        "        super().__init__(*arguments, **options)",
        f"        self.memory = {start}",
        "",
        "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):",
        "        loss = super().compute_loss(x, y, y_pred, sample_weight, training)",
        "        if training:",
        f"            {change}",
        f"            loss = loss * ({factor})",
        "        return loss",
        "",
    ]


def _data_of(call: Call, spec: Training, *, epochs: bool = False) -> tuple[str, list[str]]:
    """Return the data of a call, and further arguments."""
    parts = ["x"] if call.kind in ("predict", "predict_on_batch") else ["x", "y"]
    if call.weights:
        parts.append("w")
    everything = f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    batch = spec.batch
    if call.source == "arrays":
        weights = ["sample_weight=w"] if call.weights else []
        return ", ".join(parts[:2]), [*weights, f"batch_size={batch}"]
    if call.source in ("pydataset", *CHANGING):
        kind = call.source.title() if call.source in CHANGING else "Batches"
        return f"{kind}({everything}, {batch})", []
    if call.source == "generator":
        steps = [] if call.kind == "fit" else ["steps=2"]
        return f"endless({everything}, {batch})", steps
    if call.source == "loader":
        tensors = ", ".join(f"torch.as_tensor({part})" for part in parts)
        return (
            f"torch.utils.data.DataLoader(torch.utils.data.TensorDataset({tensors}), batch_size={batch})",
            [],
        )
    dataset = f"tf.data.Dataset.from_tensor_slices({everything}).batch({batch})"
    if call.source == "strategy":
        return f"distribute({dataset}.repeat())", []
    return dataset, []


def _call_lines(name: str, call: Call, spec: Training) -> list[str]:
    if call.kind == "freeze":
        return ["model.layers[-1].trainable = False", "with scope():", "    compile()"]
    if call.kind == "rate":
        return ["model.optimizer.learning_rate = 0.01"]
    if call.kind == "compile":
        return ["with scope():", "    compile()"]
    if call.kind == "reset":
        return ["model.reset_metrics()"]
    imports = []
    if call.source in ("tf", "strategy"):
        imports = ["import tensorflow as tf"]
    if call.source == "loader":
        imports = ["import torch"]
    if call.kind.endswith("on_batch"):
        return [*imports, *_batch_lines(name, call, spec)]
    data, given = _data_of(call, spec)
    given = [data, *given, "verbose=0"]
    if call.kind == "fit":
        given += _fit_arguments(call, spec)
        if call.validation == "shared":
            imports, given[0] = [*imports, f"batches = {data}"], "batches"
        return [*imports, f'found["{name}"] = model.fit({", ".join(given)}).history']
    if call.kind == "evaluate":
        given.append("return_dict=True")
    return [*imports, f'found["{name}"] = model.{call.kind}({", ".join(given)})']


def _batch_lines(name: str, call: Call, spec: Training) -> list[str]:
    lines = []
    for number, stop in enumerate((spec.batch, spec.batch - 1)):
        parts = [f"part(x, 0, {stop})"]
        if call.kind != "predict_on_batch":
            parts.append(f"part(y, 0, {stop})")
            parts += [f"sample_weight=part(w, 0, {stop})"] if call.weights else []
        lines.append(f'found["{name} {number}"] = model.{call.kind}({", ".join(parts)})')
    return lines


def _fit_arguments(call: Call, spec: Training) -> list[str]:
    given = [f"shuffle={call.shuffle}"]
    if call.epochs > 1:
        given.append(f"epochs={call.epochs}")
    if call.steps:
        given.append(f"steps_per_epoch={call.steps}")
    if call.class_weight:
        given.append("class_weight={0: 0.5, 1: 1.5, 2: 1.0}")
    if call.validation == "split":
        given.append("validation_split=0.4")
    elif call.validation == "shared":
        given += ["validation_data=batches", "validation_steps=1"]
    elif call.validation == "data":
        source = "pydataset" if call.source in ("pydataset", *CHANGING) else "arrays"
        validation = Call("evaluate", source, call.weights)
        data, _ = _data_of(validation, spec)
        if validation.source == "arrays":
            data = f"({data}, w)" if call.weights else f"({data})"
            given.append(f"validation_batch_size={spec.batch}")
        given.append(f"validation_data={data}")
    if call.callbacks:
        given.append(f"callbacks=[{', '.join(call.callbacks)}]")
    return given


_SKIPPING = """\
class Remembering({kind}):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.steps = 0

    def train_step(self, *arguments):
        self.steps += 1
        return super().train_step(*arguments) if self.steps % 2 else self.test_step(arguments[-1])
"""
_SKIPPING_JAX = """\
class Remembering({kind}):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.steps = 0

    def train_step(self, state, data):
        self.steps += 1
        if self.steps % 2:
            return super().train_step(state, data)
        trainable, others, slots, metrics = state
        logs, (trainable, others, metrics) = self.test_step((trainable, others, metrics), data)
        return logs, (trainable, others, slots, metrics)
"""
_SUPER = """\
class Own(keras.Model):
    def train_step(self, *arguments):
        logs = super().train_step(*arguments)
        return {**logs, "extra": ops.mean(ops.cast(keras.tree.flatten(arguments[-1][1])[0], "float32"))}

"""
_SUPER_JAX = """\
class Own(keras.Model):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "extra": ops.mean(ops.cast(keras.tree.flatten(data[1])[0], "float32"))}, state

"""


def _own(backend: str, updates: int) -> str:
    """Return a model with a custom `train_step`."""
    if backend == "jax":
        return f"""\
import jax


class Own(keras.Model):
    def loss_of(self, trainable, others, x, y, w):
        prediction, others = self.stateless_call(trainable, others, x, training=True)
        return self.compute_loss(x, y, prediction, w), (prediction, others)

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        for _ in range({updates}):
            (loss, (prediction, others)), gradients = jax.value_and_grad(self.loss_of, has_aux=True)(
                trainable, others, x, y, w
            )
            trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        with keras.StatelessScope(
            state_mapping=list(zip(self.metrics_variables, metrics))
        ) as scope:
            self._loss_tracker.update_state(loss, sample_weight=len(keras.tree.flatten(x)[0]))
            logs = self.compute_metrics(x, y, prediction, w)
        metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        metrics = [m if v is None else v for v, m in zip(metrics, state[3])]
        return logs, (trainable, others, slots, metrics)

"""
    if backend == "tensorflow":
        gradients = """\
            with tf.GradientTape() as tape:
                prediction = self(x, training=True)
                loss = self.compute_loss(x, y, prediction, w)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))"""
        imports, rows = "import tensorflow as tf", "tf.shape(keras.tree.flatten(x)[0])[0]"
    else:
        gradients = """\
            self.zero_grad()
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction, w)
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)"""
        imports, rows = "import torch", "len(keras.tree.flatten(x)[0])"
    return f"""\
{imports}


class Own(keras.Model):
    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        for _ in range({updates}):
{gradients}
        self._loss_tracker.update_state(loss, sample_weight={rows})
        return self.compute_metrics(x, y, prediction, w)

"""


def _with_loss(backend: str, loss: str) -> str:
    """Return a model whose `train_step` computes a loss of its own, from one output."""
    formula = {
        "sum": "ops.sum(errors) / 12",
        "mean": "ops.mean(errors)",
        "scaled": "ops.mean(errors) / strategy.num_replicas_in_sync",
        "scaled sum": "ops.sum(errors) / 12 / strategy.num_replicas_in_sync",
        "average": "tf.nn.compute_average_loss(ops.mean(errors, axis=-1))",
        "by rows": "ops.sum(errors) / ops.shape(errors)[0]",
        "penalized": "ops.mean(errors) + 0.01 * sum(ops.sum(ops.square(weight)) for weight in weights)",
    }[loss]
    compute = f"""\
    def loss_from(self, y, prediction, weights):
        errors = ops.square(ops.cast(y, prediction.dtype) - prediction)
        return {formula}
"""
    if backend == "jax":
        return f"""\
import jax


class Own(keras.Model):
{compute}
    def loss_of(self, trainable, others, x, y):
        prediction, others = self.stateless_call(trainable, others, x, training=True)
        return self.loss_from(y, prediction, trainable), others

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
        (loss, others), gradients = jax.value_and_grad(self.loss_of, has_aux=True)(trainable, others, x, y)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {{"loss": loss}}, (trainable, others, slots, metrics)

"""
    if backend == "tensorflow":
        gradients = """\
        with tf.GradientTape() as tape:
            loss = self.loss_from(y, self(x, training=True), self.trainable_variables)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))"""
        imports = "import tensorflow as tf"
    else:
        gradients = """\
        self.zero_grad()
        loss = self.loss_from(y, self(x, training=True), self.trainable_variables)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)"""
        imports = "import torch"
    return f"""\
{imports}


class Own(keras.Model):
{compute}
    def train_step(self, data):
        x, y, w = keras.utils.unpack_x_y_sample_weight(data)
{gradients}
        return {{"loss": loss}}

"""


_BACKENDS = ("jax", "tensorflow", "torch")
STEPS = {
    "super": {backend: _SUPER_JAX if backend == "jax" else _SUPER for backend in _BACKENDS},
    "own": {backend: _own(backend, 1) for backend in _BACKENDS},
    "two": {backend: _own(backend, 2) for backend in _BACKENDS},
    **{loss: {name: _with_loss(name, loss) for name in _BACKENDS} for loss in OWN_STEPS},
}
