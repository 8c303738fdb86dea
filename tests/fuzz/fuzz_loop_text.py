"""The text of a program with a custom loop, and of a replacement for the strategy without Lockstep."""

from fuzz_specs import Loop

MIRRORED = """\
import contextlib
import tensorflow as tf

strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(3)])
context = tf.distribute.get_replica_context
scope = strategy.scope
"""

ALONE = """\
import contextlib
from types import SimpleNamespace


class Alone:
    \"\"\"One replica with all rows. What it is asked to average are sums over rows, of three replicas.\"\"\"

    num_replicas_in_sync = 3

    def run(self, fn, args=()):
        return fn(*args)

    def reduce(self, op, value, axis=None):
        def one(leaf):
            if axis is not None:
                return ops.sum(leaf, axis) if op == "SUM" else ops.mean(leaf, axis)
            return leaf if op == "SUM" else leaf / 3

        return keras.tree.map_structure(one, value)

    def gather(self, value, axis):
        return value

    def all_reduce(self, op, value):
        return value if op == "SUM" else value / 3

    def all_gather(self, value, axis):
        return value

    def experimental_distribute_dataset(self, dataset):
        return Rows(dataset)

    def distribute_datasets_from_function(self, fn):
        contexts = [SimpleNamespace(num_input_pipelines=3, input_pipeline_id=i) for i in range(3)]
        return Rows([np.concatenate(leaves) for leaves in zip(*parts)] for parts in zip(*map(fn, contexts)))


class Rows:
    def __init__(self, batches):
        self.batches = list(batches)

    def __iter__(self):
        return ([ops.convert_to_tensor(leaf) for leaf in batch] for batch in self.batches)


strategy = Alone()
context = Alone
scope = contextlib.nullcontext
"""

_TENSORFLOW = """\
def gradients_of(model, loss_of, x, y):
    with tf.GradientTape() as tape:
        outputs = model(x, training=True)
        loss = loss_of(y, outputs)
    return loss, outputs, tape.gradient(loss, model.trainable_variables)
"""

_TORCH = """\
def gradients_of(model, loss_of, x, y):
    model.zero_grad()
    outputs = model(x, training=True)
    loss = loss_of(y, outputs)
    loss.backward()
    return loss.detach(), outputs.detach(), [v.value.grad for v in model.trainable_variables]
"""

_JAX = """\
def gradients_of(model, loss_of, x, y):
    def compute(trainable, others):
        outputs, after = model.stateless_call(trainable, others, x, training=True)
        return loss_of(y, outputs), (outputs, after)

    groups = model.trainable_variables, model.non_trainable_variables
    values = [[v.value for v in group] for group in groups]
    (loss, (outputs, after)), gradients = transformed(jax.value_and_grad(compute, has_aux=True))(*values)
    for variable, value in zip(model.non_trainable_variables, after):
        variable.assign(value)
    return loss, outputs, gradients
"""

_GRADIENTS = {"tensorflow": _TENSORFLOW, "torch": _TORCH, "jax": _JAX}


def loop_lines(spec: Loop, backend: str, plain: bool, optimizer: str) -> tuple[str, list[str]]:
    """Return the replacement for the strategy ("" for Lockstep's), and the program's lines."""
    head = ""
    if plain:
        head = MIRRORED if backend == "tensorflow" and spec.source != "function" else ALONE
    lines = [f"import {'tensorflow as tf' if backend == 'tensorflow' else backend}"]
    if backend == "tensorflow" and not spec.graph:
        lines.append("tf.config.run_functions_eagerly(True)")
    lines += [f'x = generator.normal(size=({spec.count}, 6)).astype("float32")']
    lines += [f'y = generator.integers(0, 3, {spec.count}).astype("int32")', "", "with scope():"]
    lines += [f"    {line}" for line in _made(spec, optimizer)]
    if backend == "jax":
        # A compiled function does not have the values that replicas exchange.
        lines += ["", f"transformed = {'lambda function: function' if spec.through else 'jax.jit'}"]
    lines += ["", *_GRADIENTS[backend].splitlines(), "", *_loss(spec), "", *_function(spec, backend), ""]
    lines += [*_step(spec), "", *_batches(spec, backend), *_driving(spec)]
    lines += ['found["metrics"] = [metric.result() for metric in metrics]']
    lines += ['found["weights"] = model.get_weights()']
    if spec.trains:
        lines.append('found["optimizer"] = [ops.convert_to_numpy(v) for v in optimizer.variables]')
    if spec.second:
        lines.append('found["second"] = other.get_weights()')
    return head, lines


def _made(spec: Loop, optimizer: str) -> list[str]:
    parts = ["layers.Input((6,))", *spec.layers, "layers.Dense(3)"]
    lines = [f"model = keras.Sequential([{', '.join(parts)}])"]
    if spec.trains:
        lines += [f"optimizer = {optimizer}", "optimizer.build(model.trainable_variables)"]
    if spec.second:
        lines.append("other = keras.Sequential([layers.Input((6,)), layers.Dense(3)])")
        lines += ["second = keras.optimizers.SGD(0.1)", "second.build(other.trainable_variables)"]
    metrics = ", ".join(f"keras.metrics.{name}()" for name in spec.metrics)
    return [*lines, f"metrics = [{metrics}]"]


def _loss(spec: Loop) -> list[str]:
    name = "keras.losses.SparseCategoricalCrossentropy"
    lines = ["def loss_of(y, outputs):"]
    if spec.loss == "keras":
        lines.append(f"    loss = {name}(from_logits=True)(y, outputs)")
    elif spec.loss == "replica":
        lines.append(f"    loss = ops.mean({name}(from_logits=True, reduction=None)(y, outputs))")
    elif spec.loss == "average":
        lines.append(f"    losses = {name}(from_logits=True, reduction=None)(y, outputs)")
        lines.append(f"    loss = tf.nn.compute_average_loss(losses, global_batch_size={spec.batch})")
    else:
        lines.append(f"    loss = {name}(from_logits=True, reduction='sum')(y, outputs) / {spec.batch}")
    if spec.through:
        lines.append('    total = context().all_reduce("SUM", ops.sum(outputs))')
        lines.append("    loss = loss + 0.01 * ops.square(total)")
    return [*lines, "    return loss"]


def _function(spec: Loop, backend: str) -> list[str]:
    lines = ["def compute(x, y):"]
    if spec.trains:
        lines.append("    loss, outputs, gradients = gradients_of(model, loss_of, x, y)")
        if not spec.outside:
            lines += _applied("optimizer", "model", backend)
    else:
        lines += ["    outputs = model(x)", "    loss = loss_of(y, outputs)"]
    if spec.second:
        lines += [
            "    follow = lambda y, outputs: ops.sum(ops.square(outputs - y)) / 6",
            "    after, _, gradients = gradients_of(other, follow, x, ops.stop_gradient(model(x)))",
            *_applied("second", "other", backend),
        ]
    for number, name in enumerate(spec.metrics):
        given = "ops.sum(outputs, axis=1)" if name == "Mean" else "y, outputs"
        lines.append(f"    metrics[{number}].update_state({given})")
    lines.append('    results = {"loss": loss, "rows": outputs}')
    if spec.outside:
        lines.append('    results["gradients"] = gradients')
    if spec.second:
        lines.append('    results["after"] = after')
    lines.append('    results["count"] = ops.sum(ops.ones_like(outputs[:, 0]))')
    talks = {
        "sum": 'context().all_reduce("SUM", ops.sum(ops.abs(outputs)))',
        "mean": 'context().all_reduce("MEAN", ops.sum(outputs, axis=0))',
        "gather": "ops.sum(context().all_gather(outputs, axis=0), axis=0)",
        "integers": 'context().all_reduce("SUM", ops.sum(y))',
    }
    for talk in spec.talks:
        # A loss that all replicas share: each contributes in proportion to its rows.
        lines.append(f'    results["talk {talk}"] = ops.cast({talks[talk]}, "float32") * results["count"]')
    return [*lines, "    return results"]


def _applied(optimizer: str, model: str, backend: str) -> list[str]:
    apply = f"{optimizer}.apply_gradients(zip(gradients, {model}.trainable_variables))"
    return ["    with torch.no_grad():", f"        {apply}"] if backend == "torch" else [f"    {apply}"]


def _step(spec: Loop) -> list[str]:
    lines = ["@tf.function"] if spec.graph else []
    lines += ["def step(batch):", "    results = strategy.run(compute, args=batch)"]
    lines.append('    made = {"loss": strategy.reduce("SUM", results["loss"], axis=None)}')
    for talk in spec.talks:
        lines.append(f'    made["talk {talk}"] = strategy.reduce("SUM", results["talk {talk}"], axis=None)')
    if spec.outside:
        lines.append('    made["gradients"] = strategy.reduce("SUM", results["gradients"], axis=None)')
    if spec.second:
        lines.append('    made["after"] = strategy.reduce("SUM", results["after"], axis=None)')
    asked = {
        "sum rows": 'strategy.reduce("SUM", results["rows"], axis=0)',
        "mean rows": 'strategy.reduce("MEAN", results["rows"], axis=0)',
        "gather": 'strategy.gather(results["rows"], axis=0)',
        "mean": 'strategy.reduce("MEAN", results["count"], axis=None)',
    }
    for name in spec.returns:
        if name in asked:
            lines.append(f'    made["{name}"] = {asked[name]}')
    return [*lines, "    return made"]


def _batches(spec: Loop, backend: str) -> list[str]:
    if spec.source == "function":
        return [
            "def pipeline(context):",
            "    rows = slice(context.input_pipeline_id, None, context.num_input_pipelines)",
            "    own = x[rows], y[rows]",
            f"    return [(own[0][i : i + {spec.batch // 3 or 1}], own[1][i : i + {spec.batch // 3 or 1}])",
            f"            for i in range(0, len(own[0]), {spec.batch // 3 or 1})]",
            "",
            "batches = strategy.distribute_datasets_from_function(pipeline)",
        ]
    if spec.source == "tf":
        imports = [] if backend == "tensorflow" else ["import tensorflow as tf"]
        data = f"tf.data.Dataset.from_tensor_slices((x, y)).batch({spec.batch})"
        return [*imports, f"batches = strategy.experimental_distribute_dataset({data})"]
    data = (
        f"[(x[i : i + {spec.batch}], y[i : i + {spec.batch}]) for i in range(0, {spec.count}, {spec.batch})]"
    )
    return [f"batches = strategy.experimental_distribute_dataset({data})"]


def _driving(spec: Loop) -> list[str]:
    steps = -(-spec.count // spec.batch)
    body = ["results = step(batch)"]
    if spec.outside:
        body += ['gradients = results.pop("gradients")']
        body += ["optimizer.apply_gradients(zip(gradients, model.trainable_variables))"]
    body.append('found.setdefault("steps", []).append(results)')
    if not spec.driven:
        return [f"for epoch in range({spec.epochs}):", "    for batch in batches:", *_indented(body, 2)]
    parts = ['"model": model', '"batches": iterator']
    parts += ['"optimizer": optimizer'] if spec.trains else []
    parts += ['"other": other', '"second": second'] if spec.second else []
    parts += [f'"metric {i}": metrics[{i}]' for i in range(len(spec.metrics))]
    return [
        f"for epoch in range({spec.epochs}):",
        "    iterator = iter(batches)",
        "    state = {" + ", ".join(parts) + "}",
        f"    count = {steps}",
        "    for number in strategy.steps(count, state) if hasattr(strategy, 'steps') else range(count):",
        "        batch = next(iterator)",
        *_indented(body, 2),
    ]


def _indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]
