"""The features of a random Keras program: frozen values whose defaults are the simplest program.

`draw(seed)` returns the program of a seed; the seed also determines its kind, one of `KINDS` in turn.
`simpler(spec)` yields all programs with one feature less. Layers, metrics, optimizers and their options are
pieces of the program's text.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Output:
    """One output of a model, and its losses and metrics.

    Attributes:
        task: the kind of targets: "regression", "binary", "classes", "onehot".
        loss: the name of a Keras loss, or, in small letters, of a function of the program.
        reduction: of the loss; "" leaves Keras's.
        metrics: without weights.
        weighted: metrics with weights.
        weight: in the sum of losses.
    """

    task: str = "regression"
    loss: str = "MeanSquaredError"
    reduction: str = ""
    metrics: tuple[str, ...] = ()
    weighted: tuple[str, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class Call:
    """A call of a program on its model.

    Attributes:
        kind: a method of `keras.Model`, or "freeze", "rate", "compile", "reset".
        source: of the examples: "arrays", "tf", "pydataset", "loader", "generator", "strategy", or one of
            `CHANGING`: a PyDataset that changes from epoch to epoch.
        weights: whether there are sample weights.
        class_weight: whether there are weights of classes.
        shuffle: whether `fit` shuffles.
        epochs: of `fit`.
        steps: of an epoch; 0 for all.
        validation: of `fit`: "", "split", "data", or "shared", the generator that also has the training data.
        callbacks: of `fit`.
    """

    kind: str = "fit"
    source: str = "arrays"
    weights: bool = False
    class_weight: bool = False
    shuffle: bool = False
    epochs: int = 1
    steps: int = 0
    validation: str = ""
    callbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """A program that trains with Keras's own loops.

    Attributes:
        data: "table", "words", "series" or "image".
        masked: whether words and series have a mask.
        inputs: of tables.
        nest: of several inputs or outputs: "tuple" or "dict".
        front: layers on inputs with more than one axis.
        pool: layer whose output has one axis; "" if the input has one, or outputs are sequences.
        back: layers on the output of `pool`.
        style: "functional", "sequential", "lazy" (without an Input) or "subclass".
        outputs: at least one.
        optimizer: the name of a Keras optimizer.
        options: of the optimizer.
        policy: of dtypes; "" for float32.
        compiling: options of `compile`.
        step: "" for Keras's `train_step`, "super" for one that calls it, "own", or "two" with two updates; or
            the loss of one that computes its own, one of `OWN_STEPS`.
        figures: that the program's own `compute_metrics` adds to Keras's.
        memory: the Python state that a training step changes and reads, one of `MEMORIES`; "" for none.
        strategy: whether the script has a strategy, with a scope.
        calls: at least one.
        count: of examples.
        batch: examples of a batch.
    """

    data: str = "table"
    masked: bool = False
    inputs: int = 1
    nest: str = "tuple"
    front: tuple[str, ...] = ()
    pool: str = ""
    back: tuple[str, ...] = ()
    style: str = "functional"
    outputs: tuple[Output, ...] = (Output(),)
    optimizer: str = "SGD"
    options: tuple[str, ...] = ()
    policy: str = ""
    compiling: tuple[str, ...] = ()
    step: str = ""
    figures: tuple[str, ...] = ()
    memory: str = ""
    strategy: bool = False
    calls: tuple[Call, ...] = (Call(),)
    count: int = 13
    batch: int = 6


@dataclass(frozen=True)
class Loop:
    """A program with a custom loop: functions for `strategy.run`.

    Attributes:
        layers: of the model, before its last.
        optimizer: the name of a Keras optimizer.
        options: of the optimizer.
        source: of the batches: "list", "tf" or "function".
        loss: "sum", "keras" or "average" (TensorFlow's `compute_average_loss`). "replica" is never drawn: it
            is wrong on purpose, a mean over the replica's own rows, whose gradients must not be summed.
        trains: whether there is an update; else losses only.
        outside: whether gradients are returned, added up, and applied outside.
        second: whether there is a second update, of another model, that follows the first.
        metrics: that count examples.
        talks: the values that replicas exchange.
        through: whether the loss depends on these values.
        returns: the use of the function's results.
        graph: whether the step is a `tf.function`, on TensorFlow; else functions run eagerly.
        driven: whether `strategy.steps` drives the loop.
        epochs: passes over the batches.
        count: of examples.
        batch: examples of a batch.
    """

    layers: tuple[str, ...] = ()
    optimizer: str = "SGD"
    options: tuple[str, ...] = ()
    source: str = "list"
    loss: str = "sum"
    trains: bool = True
    outside: bool = False
    second: bool = False
    metrics: tuple[str, ...] = ()
    talks: tuple[str, ...] = ()
    through: bool = False
    returns: tuple[str, ...] = ("loss",)
    graph: bool = False
    driven: bool = False
    epochs: int = 1
    count: int = 13
    batch: int = 6


Spec = Training | Loop

RANDOM_LAYERS = (
    "layers.Dropout(0.3)",
    "layers.GaussianNoise(0.1)",
    "layers.AlphaDropout(0.2)",
    "layers.BatchNormalization()",
    "Moving()",
    "Summed()",
)
"""Layers on one axis whose results may differ between replicas and one process."""

EXACT_LAYERS = (
    "layers.Dense(4, activation='tanh')",
    "layers.Dense(4, activation='gelu', kernel_regularizer='l2')",
    "layers.Dense(4, activation='softplus', kernel_constraint='max_norm')",
    "layers.Dense(4, bias_regularizer='l1', bias_initializer='ones')",
    "layers.Dense(4, activity_regularizer='l2')",
    "layers.Dense(4, trainable=False)",
    "layers.Dense(4, activation='relu', use_bias=False, kernel_constraint='unit_norm')",
    "layers.LayerNormalization()",
    "layers.BatchNormalization(trainable=False)",
    "layers.UnitNormalization()",
    "layers.GroupNormalization(1)",
    "layers.Rescaling(0.5)",
    "layers.LeakyReLU()",
    "layers.PReLU()",
    "layers.ActivityRegularization(l2=0.1)",
    "Spread()",
    "Metered()",
)

SEQUENCE_LAYERS = (
    "layers.Dense(3, activation='tanh')",
    "layers.TimeDistributed(layers.Dense(3, activation='tanh'))",
    "layers.LSTM(3, return_sequences=True)",
    "layers.GRU(3, return_sequences=True, kernel_regularizer='l2')",
    "layers.Bidirectional(layers.LSTM(2, return_sequences=True))",
    "layers.Conv1D(3, 2, padding='same', activation='tanh')",
    "layers.LayerNormalization()",
    "Attend()",
    "Metered()",
)
RANDOM_SEQUENCE_LAYERS = (
    "layers.SpatialDropout1D(0.3)",
    "layers.GRU(3, return_sequences=True, recurrent_dropout=0.2)",
    "layers.BatchNormalization()",
    "layers.Dropout(0.2)",
)
SEQUENCE_POOLS = (
    "layers.LSTM(3)",
    "layers.GRU(3, reset_after=False)",
    "layers.SimpleRNN(3, recurrent_regularizer='l2')",
    "layers.Bidirectional(layers.GRU(2))",
    "layers.GlobalAveragePooling1D()",
    "layers.GlobalMaxPooling1D()",
    "layers.Flatten()",
)
IMAGE_LAYERS = (
    "layers.Conv2D(3, 2, activation='tanh')",
    "layers.Conv2D(2, 3, padding='same', kernel_regularizer='l2')",
    "layers.DepthwiseConv2D(2, activation='gelu')",
    "layers.SeparableConv2D(3, 2)",
    "layers.MaxPooling2D(2, padding='same')",
    "layers.AveragePooling2D(2, padding='same')",
    "layers.UpSampling2D()",
    "layers.GroupNormalization(1)",
)
RANDOM_IMAGE_LAYERS = (
    "layers.BatchNormalization()",
    "layers.SpatialDropout2D(0.3)",
    "layers.RandomFlip()",
)
IMAGE_POOLS = ("layers.Flatten()", "layers.GlobalAveragePooling2D()", "layers.GlobalMaxPooling2D()")

LOSSES = {
    "regression": (
        "MeanSquaredError",
        "MeanAbsoluteError",
        "Huber",
        "LogCosh",
        "CosineSimilarity",
        "absolute",
    ),
    "binary": ("BinaryCrossentropy", "BinaryFocalCrossentropy", "Hinge", "MeanSquaredError"),
    "classes": ("SparseCategoricalCrossentropy",),
    "onehot": ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence", "Dice"),
}
METRICS = {
    "regression": (
        "'mae'",
        "keras.metrics.RootMeanSquaredError()",
        "keras.metrics.R2Score()",
        "keras.metrics.CosineSimilarity()",
        "keras.metrics.MeanMetricWrapper(keras.losses.log_cosh, name='wrapped')",
        "Bias()",
    ),
    "binary": (
        "'accuracy'",
        "keras.metrics.AUC(num_thresholds=9)",
        "keras.metrics.Precision()",
        "keras.metrics.Recall(thresholds=[0.4, 0.6])",
        "keras.metrics.BinaryIoU()",
        "keras.metrics.PrecisionAtRecall(0.5, num_thresholds=9)",
    ),
    "classes": (
        "'accuracy'",
        "'sparse_categorical_crossentropy'",
        "keras.metrics.SparseTopKCategoricalAccuracy(2)",
    ),
    "onehot": (
        "'accuracy'",
        "keras.metrics.F1Score()",
        "keras.metrics.OneHotMeanIoU(3)",
        "keras.metrics.TopKCategoricalAccuracy(2)",
        "keras.metrics.AUC(num_thresholds=9, multi_label=True)",
    ),
}
SUMS = {
    "regression": ("summed", "part_of_a_sum", "summed_rows"),
    "binary": ("summed", "part_of_a_sum"),
    "classes": (),
    "onehot": ("summed", "part_of_a_sum", "summed_rows"),
}
MEANS = {
    "regression": ("absolute", "averaged"),
    "binary": ("averaged",),
    "classes": (),
    "onehot": ("averaged",),
}
BATCH_FUNCTIONS = {
    "regression": (
        "averaged_where_positive",
        "variance",
        "root_of_a_mean",
        "correlation",
        "contrast",
        "largest",
    ),
    "binary": ("soft_f1", "root_of_a_mean", "contrast"),
    "classes": (),
    "onehot": ("soft_f1", "contrast", "largest"),
}
"""Losses and metrics that are functions of the program: sums, means, and others of a whole batch."""

SUM_LAYERS = ("Summed()", "layers.Dense(4, activity_regularizer=sum_of_squares)")
MEAN_LAYERS = ("Spread()", "layers.Dense(4, activity_regularizer=mean_square)")
BATCH_LAYERS = (
    "Diverse()",
    "Centered()",
    "layers.Lambda(centered)",
    "layers.Dense(4, activation='tanh', activity_regularizer=divergence)",
)
OWN_LAYERS = (*SUM_LAYERS, *MEAN_LAYERS, *BATCH_LAYERS)
"""Layers that add a function of the program to the loss, or compare examples."""

FIGURES = ("mean", "sum", "root")
OWN_STEPS = ("sum", "mean", "scaled", "scaled sum", "average", "by rows", "penalized")
"""Losses of a program's own `train_step`: sums and means, divided by constants, by the number of replicas
("scaled", "scaled sum"), by TensorFlow ("average"), by the number of rows, or with a penalty on weights."""

MEMORIES = ("counter", "list", "dict", "array", "generator", "last", "skips", "layer", "loss")
"""Python state: attributes of the model, drawn numbers, the last loss, a step that has an update every other
time, a layer's counter and a loss's."""

CHANGING = ("growing", "shrinking", "rolling", "backwards", "mixed")
"""A PyDataset whose `on_epoch_end` changes its length, its rows or their order."""
OPTIMIZERS = {
    "SGD": ("momentum=0.9", "nesterov=True"),
    "Adam": ("amsgrad=True",),
    "AdamW": (),
    "RMSprop": ("centered=True", "momentum=0.5"),
    "Adagrad": (),
    "Adadelta": (),
    "Adamax": (),
    "Nadam": (),
    "Ftrl": ("l1_regularization_strength=0.01",),
    "Adafactor": (),
    "Lamb": (),
    "Lion": (),
}
"""Optimizers and their specific options."""

OPTIMIZER_OPTIONS = (
    "clipnorm=0.3",
    "clipvalue=0.1",
    "global_clipnorm=0.3",
    "weight_decay=0.01",
    "use_ema=True",
    "use_ema=True, ema_overwrite_frequency=2",
    "gradient_accumulation_steps=2",
    "loss_scale_factor=8.0",
    "learning_rate=keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)",
    "learning_rate=keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01])",
)
CALLBACKS = (
    "keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)",
    "keras.callbacks.ReduceLROnPlateau(monitor='loss', patience=1, min_delta=10.0)",
    "keras.callbacks.EarlyStopping(monitor='loss', patience=1, min_delta=10.0, restore_best_weights=True)",
    "keras.callbacks.TerminateOnNaN()",
    "keras.callbacks.SwapEMAWeights(swap_on_epoch=True)",
    "Notes()",
    "Stops()",
    "Shrinks()",
)
TALKS = ("sum", "mean", "gather", "integers")
RETURNS = ("loss", "sum rows", "mean rows", "gather", "mean")


KINDS = ("loop", "state", "step", "input", "sum", "batch", "any", "own")
"""The kinds of programs, drawn in turn: a custom loop, five kinds of parts of its own, two mixtures."""


def draw(seed: int) -> Spec:
    """Return the program of `seed`."""
    dice, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    if kind == "loop":
        return _draw_loop(dice)
    spec = _draw_training(dice)
    if kind == "any":
        return spec
    return _with_own(dice, spec) if kind == "own" else _with_one(dice, _quiet(dice, spec), kind)


def simpler(spec: Any) -> Iterator[Any]:
    """Yield programs with one feature less: a field with its default, an item less, or a simpler part."""
    for one in fields(spec):
        value, simplest = getattr(spec, one.name), _simplest(spec, one.name)
        if value != simplest:
            yield replace(spec, **{one.name: simplest})
        if isinstance(value, tuple):
            for i, item in enumerate(value):
                if len(value) > 1:
                    yield replace(spec, **{one.name: value[:i] + value[i + 1 :]})
                if is_dataclass(item):
                    for other in simpler(item):
                        yield replace(spec, **{one.name: (*value[:i], other, *value[i + 1 :])})


def size(spec: Any) -> int:
    """Return the number of features that the simplest program lacks."""
    number = 0
    for one in fields(spec):
        value = getattr(spec, one.name)
        if isinstance(value, tuple):
            number += sum(1 + (size(item) if is_dataclass(item) else 0) for item in value)
        else:
            number += value != _simplest(spec, one.name)
    return number


def _simplest(spec: Any, name: str) -> Any:
    (one,) = (one for one in fields(spec) if one.name == name)
    return one.default


def _some(dice: random.Random, items: Sequence[str], most: int) -> tuple[str, ...]:
    return tuple(dice.sample(items, min(len(items), dice.randint(0, most))))


def _optimizer(dice: random.Random) -> tuple[str, tuple[str, ...]]:
    name = dice.choice(["SGD", "Adam", *OPTIMIZERS])
    own = tuple(option for option in OPTIMIZERS[name] if dice.random() < 0.5)
    options = _some(dice, OPTIMIZER_OPTIONS, 2)
    names = [option.split("=")[0] for option in (*own, *options)]
    clips = sum("clip" in name for name in names)
    if len(set(names)) < len(names) or clips > 1 or ("nesterov" in names and "momentum" not in names):
        options, own = (), ()
    if name == "AdamW" or name == "Lion":
        options = tuple(option for option in options if not option.startswith("weight_decay"))
    return name, own + options


def _output(dice: random.Random, tasks: Sequence[str], weighted: bool) -> Output:
    task = dice.choice(tasks)
    return Output(
        task,
        dice.choice(LOSSES[task]),
        dice.choice(["", "", "", "", "sum", "mean_with_sample_weight"]),
        _some(dice, METRICS[task], 2),
        _some(dice, METRICS[task], 1) if weighted else (),
        dice.choice([1.0, 1.0, 0.5]),
    )


def _draw_training(dice: random.Random) -> Training:
    data = dice.choice(["table", "table", "words", "series", "image"])
    spicy = dice.random() < 0.4
    front: tuple[str, ...] = ()
    pool = ""
    if data == "image":
        front = _some(dice, IMAGE_LAYERS + (RANDOM_IMAGE_LAYERS if spicy else ()), 2)
        pool = dice.choice(IMAGE_POOLS)
    elif data != "table":
        front = _some(dice, SEQUENCE_LAYERS + (RANDOM_SEQUENCE_LAYERS if spicy else ()), 1)
        pool = dice.choice(["", *SEQUENCE_POOLS, *SEQUENCE_POOLS])
    sequences = data in ("words", "series") and not pool
    tables = data == "table"
    inputs = dice.choice([1, 1, 1, 2]) if tables else 1
    many = 1 if sequences else dice.choice([1, 1, 1, 2, 3])
    styles = ["functional", "subclass"] + (["sequential", "lazy"] if inputs == many == 1 else [])
    weighted = dice.random() < 0.4
    tasks = ["regression", "binary", "classes"] if sequences else list(LOSSES)
    outputs = tuple(_output(dice, tasks, weighted) for _ in range(many))
    if dice.random() < 0.9:
        # Lockstep refuses sums combined with means.
        outputs = tuple(replace(output, reduction=outputs[0].reduction) for output in outputs)
    name, options = _optimizer(dice)
    back = () if sequences else _some(dice, EXACT_LAYERS + (RANDOM_LAYERS if spicy else ()), 2)
    compiling = dice.choice(
        [
            (),
            (),
            (),
            ("run_eagerly=True",),
            ("jit_compile=False",),
            ("jit_compile=True",),
            ("steps_per_execution=2",),
        ]
    )
    return Training(
        data=data,
        masked=data in ("words", "series") and dice.random() < 0.5,
        inputs=inputs,
        nest=dice.choice(["tuple", "dict"]),
        front=front,
        pool=pool,
        back=back,
        style=dice.choice(styles),
        outputs=outputs,
        optimizer=name,
        options=options,
        policy="mixed_float16" if dice.random() < 0.06 else "mixed_bfloat16" if dice.random() < 0.04 else "",
        compiling=compiling,
        step=dice.choice(["", "", "", "", "", "super", "own", "two"]),
        calls=_calls(dice, outputs, weighted, sequences),
        count=dice.choice([13, 12, 7]),
        batch=dice.choice([6, 6, 4, 5, 2]),
    )


def _with_one(dice: random.Random, spec: Training, kind: str) -> Training:
    """Return a program with one part that is a function of the program, or changes from step to step."""
    if kind == "state":
        memory = dice.choice(MEMORIES)
        compiling = ("run_eagerly=True",) if dice.random() < 0.9 else ()
        return replace(spec, memory=memory, compiling=compiling, calls=_trained(dice, spec.calls))
    if kind == "step":
        return replace(spec, step=dice.choice(OWN_STEPS), strategy=dice.random() < 0.7)
    if kind == "input":
        if dice.random() < 0.25:
            call = Call(source="generator", epochs=2, steps=dice.choice([2, 3]), validation="shared")
        else:
            call = Call(
                source=dice.choice(CHANGING), epochs=dice.choice([2, 3]), validation=dice.choice(["", "data"])
            )
        return replace(spec, calls=(call, *spec.calls[1:]))
    layers, losses = (SUM_LAYERS, SUMS) if kind == "sum" else (BATCH_LAYERS, BATCH_FUNCTIONS)
    where = dice.choice(["loss", "loss", "metric", "layer"])
    first, *rest = spec.outputs
    known = losses[first.task]
    if where == "loss" and known:
        first = replace(first, loss=dice.choice(known), reduction="")
    elif where == "metric" and known:
        first = replace(first, metrics=(dice.choice(known),))
    elif spec.data == "table" or spec.pool:
        return replace(spec, back=(*spec.back, dice.choice(layers)))
    elif kind == "sum":
        return replace(spec, outputs=tuple(replace(output, reduction="sum") for output in spec.outputs))
    else:
        return replace(spec, figures=("root",))
    return replace(spec, outputs=(first, *rest))


def _trained(dice: random.Random, calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Return calls that begin with several steps of training."""
    first = calls[0]
    if first.kind == "fit":
        first = replace(first, epochs=2)
    return (first, *calls[1:]) if dice.random() < 0.7 else (first,)


def _quiet(dice: random.Random, spec: Training) -> Training:
    """Return a program with few features, so that a part per replica rarely hides another."""
    table = dice.random() < 0.6
    return replace(
        spec,
        data="table" if table else spec.data,
        front=(),
        pool="" if table else spec.pool,
        back=("layers.Dense(4, activation='tanh')",) if dice.random() < 0.5 else (),
        policy="",
        outputs=tuple(map(_without_reduction, spec.outputs[:2])),
        compiling=spec.compiling if dice.random() < 0.5 else (),
        step="",
        calls=spec.calls[:2],
    )


def _without_reduction(output: Output) -> Output:
    return replace(output, loss="MeanSquaredError" if output.loss == "Dice" else output.loss, reduction="")


def _with_own(dice: random.Random, spec: Training) -> Training:
    """Return a program that has any parts which are functions of the program."""

    def own(output: Output) -> Output:
        parts = [name for kind in (SUMS, MEANS, BATCH_FUNCTIONS) for name in kind[output.task]]
        if parts and dice.random() < 0.5:
            output = replace(output, loss=dice.choice(parts), reduction="")
        if parts and dice.random() < 0.4:
            output = replace(output, metrics=(*output.metrics[:1], dice.choice(parts)))
        return output

    def other(call: Call) -> Call:
        if call.kind == "fit" and dice.random() < 0.15:
            call = replace(call, source=dice.choice(CHANGING), epochs=2, steps=0)
        if call.kind == "fit" and dice.random() < 0.1:
            call = replace(call, source="generator", epochs=2, validation="shared")
        return call

    if dice.random() < 0.6:
        spec = _quiet(dice, spec)
    if spec.pool or spec.data == "table":
        spec = replace(spec, back=(*spec.back, *((dice.choice(OWN_LAYERS),) if dice.random() < 0.3 else ())))
    return replace(
        spec,
        outputs=tuple(map(own, spec.outputs)),
        step=dice.choice(OWN_STEPS) if dice.random() < 0.2 else spec.step,
        figures=_some(dice, FIGURES, 2) if dice.random() < 0.25 else (),
        memory=dice.choice(MEMORIES) if dice.random() < 0.3 else "",
        strategy=dice.random() < 0.2,
        calls=tuple(map(other, spec.calls)),
    )


def _calls(
    dice: random.Random, outputs: Sequence[Output], weighted: bool, sequences: bool
) -> tuple[Call, ...]:
    calls = []
    kinds = ["fit", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"]
    kinds += ["freeze", "rate", "compile", "reset"]
    classes = len(outputs) == 1 and outputs[0].task in ("classes", "binary") and not sequences
    for i in range(dice.randint(1, 3)):
        kind = dice.choice(["fit", "fit", "fit", "train_on_batch"]) if i == 0 else dice.choice(kinds)
        source = dice.choice(
            ["arrays", "arrays", "arrays", "tf", "pydataset", "loader", "generator", "strategy"]
        )
        weights = weighted and dice.random() < 0.8
        fits = kind == "fit"
        calls.append(
            Call(
                kind,
                source if fits or kind in ("evaluate", "predict") else "arrays",
                weights and kind not in ("predict", "predict_on_batch"),
                fits and classes and not weights and dice.random() < 0.3,
                fits and dice.random() < 0.25,
                dice.choice([1, 2]) if fits else 1,
                dice.choice([0, 0, 0, 2]) if fits else 0,
                dice.choice(["", "", "split", "data"]) if fits else "",
                _some(dice, CALLBACKS, 1) if fits else (),
            )
        )
    return tuple(calls)


def _draw_loop(dice: random.Random) -> Loop:
    spicy = dice.random() < 0.3
    name, options = _optimizer(dice)
    return Loop(
        layers=_some(dice, EXACT_LAYERS[:10] + (RANDOM_LAYERS[:4] if spicy else ()), 2),
        optimizer=name,
        options=options,
        source=dice.choice(["list", "list", "tf", "function"]),
        loss=dice.choice(["sum", "keras", "average"]),
        trains=dice.random() < 0.85,
        outside=dice.random() < 0.2,
        second=dice.random() < 0.2,
        metrics=_some(dice, ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "Mean"), 2),
        talks=_some(dice, TALKS, 2),
        through=dice.random() < 0.1,
        returns=("loss", *_some(dice, RETURNS[1:], 2)),
        graph=dice.random() < 0.6,
        driven=dice.random() < 0.2,
        epochs=dice.choice([1, 2]),
        count=dice.choice([12, 13]),
        batch=dice.choice([6, 4, 5]),
    )
