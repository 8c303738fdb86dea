"""What programs of `tf.distribute` compute under TensorFlow's own MirroredStrategy of three replicas.

mirrored_values.py: prints the values of all cases as JSON, as TensorFlow computes them on three virtual CPUs.
`VALUES` has them; `test_tensorflow.py` compares those of Lockstep.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

REPLICAS = 3
KINDS, MOMENTS = tf.VariableAggregation, tf.VariableSynchronization


class Program:
    """A program that uses a strategy.

    Args:
        distribute: `tf.distribute`, or `lockstep` in its place.
        devices: of the strategies; None for three replicas of a job.
    """

    def __init__(self, distribute: Any, devices: Sequence[str] | None = None) -> None:
        self.distribute = distribute
        self.strategy, self.other = (distribute.MirroredStrategy(devices) for _ in range(2))

    @property
    def context(self) -> Any:
        return self.distribute.get_replica_context()

    @property
    def number(self) -> Any:
        """The replica's id as a float."""
        return tf.cast(self.context.replica_id_in_sync_group, tf.float32)

    def variable(self, first: Any, kind: Any, **options: Any) -> Any:
        with self.strategy.scope():
            return tf.Variable(first, trainable=False, aggregation=kind, **options)

    def local(self, value: Any) -> list[Any]:
        """The values of all replicas, which one process computes."""
        return [plain(one) for one in self.strategy.experimental_local_results(value)]

    def run(self, function: Any, *args: Any) -> list[Any]:
        return self.local(self.strategy.run(function, args=args))

    def slices(self) -> Any:
        """Replica r has a slice for row r, and another one for row 3."""
        rows = tf.stack([3 * (self.number + 1), 12.0])
        places = tf.stack([self.context.replica_id_in_sync_group, 3])
        return tf.IndexedSlices(rows, places, tf.constant([4]))


def plain(value: Any) -> Any:
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy().tolist()
    if isinstance(value, tf.Tensor | tf.Variable):
        return value.numpy().tolist()
    return value


CASES: dict[str, Callable[[Program], Any]] = {}


def case(function: Callable[[Program], Any]) -> Callable[[Program], Any]:
    CASES[function.__name__] = function
    return function


@case
def reduced_over_axes(program: Program) -> Any:
    value = program.strategy.run(lambda: tf.ones((2, 4)) * (program.number + 1))
    reduce = program.strategy.reduce
    return [plain(reduce(op, value, axis=axes)) for op in ("SUM", "MEAN") for axes in ((0, 1), (1,), -1, ())]


@case
def uneven_rows_reduced_over_axes(program: Program) -> Any:
    rows = tf.data.Dataset.range(7).map(lambda row: tf.stack([tf.cast(row, tf.float32), 1.0])).batch(7)
    batch = next(iter(program.strategy.experimental_distribute_dataset(rows)))
    return [plain(program.strategy.reduce(op, batch, axis=(0, 1))) for op in ("SUM", "MEAN")]


@case
def values_that_replicas_share(program: Program) -> Any:
    strategy, one = program.strategy, tf.constant([3.0])

    def total() -> Any:
        return strategy.reduce("SUM", one, axis=None)

    return [
        plain(strategy.gather(one, axis=0)),
        plain(strategy.reduce("MEAN", one, axis=None)),
        plain(strategy.reduce("SUM", one, axis=0)),
        [len(strategy.experimental_local_results(value)) for value in (one, 5, None, {"a": one})],
        refusal(total),
        refusal(tf.function(total)),
    ]


@case
def sparse_gradients_reduced(program: Program) -> Any:
    def reduced(op: str) -> Any:
        return tf.convert_to_tensor(program.context.all_reduce(op, program.slices()))

    in_graph = tf.function(lambda: program.strategy.run(reduced, args=("SUM",)))
    return [*(program.run(reduced, op) for op in ("SUM", "MEAN")), program.local(in_graph())]


@case
def results_of_several_tensors(program: Program) -> Any:
    def ragged() -> Any:
        rows = tf.range(3) * (program.context.replica_id_in_sync_group + 1)
        return {"ragged": tf.RaggedTensor.from_row_lengths(rows, [2, 0, 1]), "number": program.number}

    found = program.strategy.run(ragged)
    again = tf.function(lambda: program.strategy.run(lambda given: given["ragged"] * 2, args=(found,)))()
    sparse = program.strategy.run(lambda: tf.sparse.from_dense([[0.0, 5.0]]) * (program.number + 1))
    rows = program.strategy.run(lambda one: tf.sparse.to_dense(one)[0], args=(sparse,))
    return [
        program.local(found["ragged"]),
        program.local(again),
        program.local(sparse),
        plain(program.strategy.reduce("SUM", rows, axis=0)),
    ]


@case
def operations_have_no_value(program: Program) -> Any:
    counter = program.variable(0.0, KINDS.SUM)
    found = program.strategy.run(lambda: tf.group(counter.assign_add(program.number)))
    return [found, plain(counter)]


@case
def booleans_assigned(program: Program) -> Any:
    def step(flag: Any, values: Any) -> None:
        flag.assign(True if values is None else values[program.context.replica_id_in_sync_group])

    found = []
    for moment in (MOMENTS.AUTO, MOMENTS.ON_READ):
        for values in (None, [False, True, True], [True, False, False]):
            flag = program.variable(False, KINDS.ONLY_FIRST_REPLICA, synchronization=moment)
            program.strategy.run(step, args=(flag, None if values is None else tf.constant(values)))
            found.append(plain(flag))
    return found


@case
def slices_scattered(program: Program) -> Any:
    found = {}
    for method in ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div"):
        for kind in (KINDS.SUM, KINDS.MEAN, KINDS.ONLY_FIRST_REPLICA):
            found[f"{method} {kind.name}"] = scattered(program, method, kind)
    for method in ("scatter_min", "scatter_max", "scatter_update"):
        found[method] = scattered(program, method, KINDS.ONLY_FIRST_REPLICA)
    return found


def scattered(program: Program, method: str, kind: Any) -> Any:
    """Scatter in a graph; return what replicas see afterwards, and the value."""
    variable = program.variable([8.0] * 4, kind)

    def step() -> Any:
        getattr(variable, method)(program.slices())
        return variable.read_value()

    seen = program.run(tf.function(step))
    assert seen == [seen[0]] * REPLICAS
    return plain(variable)


@case
def sums_on_read(program: Program) -> Any:
    total = program.variable(4.0, KINDS.SUM, synchronization=MOMENTS.ON_READ)
    first = plain(total)
    program.strategy.run(lambda: total.assign_add(program.number + 1))
    both = [plain(program.strategy.reduce(op, total, axis=None)) for op in ("SUM", "MEAN")]
    return [first, plain(total), both]


@case
def ids_are_numbers_of_32_bits(program: Program) -> Any:
    return program.run(lambda: program.context.replica_id_in_sync_group * tf.constant(3))


@case
def fixed_shapes(program: Program) -> Any:
    data = tf.data.Dataset.range(13).map(lambda row: (row, tf.zeros([2])))
    shapes: list[Any] = []

    @tf.function
    def step(iterator: Any) -> Any:
        def look(row: Any, zeros: Any) -> Any:
            shapes.append([row.shape.as_list(), zeros.shape.as_list()])
            return tf.ones([row.shape[0] or 0])

        return program.strategy.run(look, args=next(iterator))

    found = []
    for batches in (data.batch(6, drop_remainder=True), data.batch(6), data.batch(5, drop_remainder=True)):
        step(iter(program.strategy.experimental_distribute_dataset(batches)))
        found.append(shapes[-1])
    return found


@case
def one_pipeline_for_all_replicas(program: Program) -> Any:
    seen: list[Any] = []

    def pipeline(batch: int, rows: int, fixed: bool) -> Callable[[Any], Any]:
        def make(context: Any) -> Any:
            seen.append(
                [context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync]
            )
            return tf.data.Dataset.range(rows).batch(batch, drop_remainder=fixed)

        return make

    found = []
    for make in (pipeline(2, 12, False), pipeline(2, 13, False), pipeline(2, 14, True)):
        dataset = program.strategy.distribute_datasets_from_function(make)
        found.append([plain(program.strategy.gather(element, axis=0)) for element in dataset])
    return [seen[0], found]


@case
def scopes_of_two_strategies(program: Program) -> Any:
    other, default = program.other, program.distribute.get_strategy()

    def enter(*scopes: Any) -> Any:
        if scopes:
            with scopes[0].scope():
                return enter(*scopes[1:])
        return program.distribute.get_strategy() is program.strategy

    return [
        enter(program.strategy, program.strategy),
        enter(default, program.strategy),
        *(refusal(lambda inner=inner: enter(program.strategy, inner)) for inner in (other, default)),
        program.distribute.has_strategy(),
    ]


@case
def resolvers_and_old_names(program: Program) -> Any:
    strategy = program.strategy
    dataset = strategy.experimental_distribute_datasets_from_function(
        lambda context: tf.data.Dataset.range(6).batch(context.get_per_replica_batch_size(6))
    )
    default = program.distribute.get_strategy()
    merged = program.context.merge_call(lambda own, number: [own is default, number], args=(3,))
    cardinality = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(3)).cardinality
    return [
        strategy.cluster_resolver,
        default.cluster_resolver,
        plain(strategy.gather(next(iter(dataset)), axis=0)),
        merged,
        int(cardinality),
    ]


def refusal(act: Callable[[], Any]) -> Any:
    """The type of the error."""
    try:
        return act()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__


VALUES: dict[str, Any] = {
    "reduced_over_axes": [
        48.0,
        [24.0, 24.0],
        [24.0, 24.0],
        [[6.0, 6.0, 6.0, 6.0], [6.0, 6.0, 6.0, 6.0]],
        2.0,
        [2.0, 2.0],
        [2.0, 2.0],
        [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]],
    ],
    "uneven_rows_reduced_over_axes": [28.0, 2.0],
    "values_that_replicas_share": [[3.0], [3.0], 9.0, [1, 1, 1, 3], "ValueError", "ValueError"],
    "sparse_gradients_reduced": [
        [[3.0, 6.0, 9.0, 36.0], [3.0, 6.0, 9.0, 36.0], [3.0, 6.0, 9.0, 36.0]],
        [[1.0, 2.0, 3.0, 12.0], [1.0, 2.0, 3.0, 12.0], [1.0, 2.0, 3.0, 12.0]],
        [[3.0, 6.0, 9.0, 36.0], [3.0, 6.0, 9.0, 36.0], [3.0, 6.0, 9.0, 36.0]],
    ],
    "results_of_several_tensors": [
        [[[0, 1], [], [2]], [[0, 2], [], [4]], [[0, 3], [], [6]]],
        [[[0, 2], [], [4]], [[0, 4], [], [8]], [[0, 6], [], [12]]],
        [[[0.0, 5.0]], [[0.0, 10.0]], [[0.0, 15.0]]],
        30.0,
    ],
    "operations_have_no_value": [None, 3.0],
    "booleans_assigned": [True, False, True, True, False, True],
    "slices_scattered": {
        "scatter_add SUM": [11.0, 14.0, 17.0, 44.0],
        "scatter_add MEAN": [9.0, 10.0, 11.0, 20.0],
        "scatter_add ONLY_FIRST_REPLICA": [11.0, 8.0, 8.0, 20.0],
        "scatter_sub SUM": [5.0, 2.0, -1.0, -28.0],
        "scatter_sub MEAN": [7.0, 6.0, 5.0, -4.0],
        "scatter_sub ONLY_FIRST_REPLICA": [5.0, 8.0, 8.0, -4.0],
        "scatter_mul SUM": [24.0, 48.0, 72.0, 13824.0],
        "scatter_mul MEAN": [8.0, 16.0, 24.0, 512.0],
        "scatter_mul ONLY_FIRST_REPLICA": [24.0, 8.0, 8.0, 96.0],
        "scatter_div SUM": [2.6666667461395264, 1.3333333730697632, 0.8888888955116272, 0.004629629664123058],
        "scatter_div MEAN": [8.0, 4.0, 2.6666667461395264, 0.125],
        "scatter_div ONLY_FIRST_REPLICA": [2.6666667461395264, 8.0, 8.0, 0.6666666865348816],
        "scatter_min": [3.0, 8.0, 8.0, 8.0],
        "scatter_max": [8.0, 8.0, 8.0, 12.0],
        "scatter_update": [3.0, 8.0, 8.0, 12.0],
    },
    "sums_on_read": [12.0, 18.0, [18.0, 6.0]],
    "ids_are_numbers_of_32_bits": [0, 3, 6],
    "fixed_shapes": [[[2], [2, 2]], [[None], [None, 2]], [[None], [None, 2]]],
    "one_pipeline_for_all_replicas": [
        [1, 0, 3],
        [
            [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
            [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]],
            [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
        ],
    ],
    "scopes_of_two_strategies": [True, True, "RuntimeError", "RuntimeError", False],
    "resolvers_and_old_names": [None, None, [0, 1, 2, 3, 4, 5], [True, 3], 2],
}
"""Those of TensorFlow 2.21."""


def main(names: Sequence[str]) -> None:
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * REPLICAS
    tf.config.set_logical_device_configuration(cpu, devices)
    program = Program(tf.distribute, [f"CPU:{number}" for number in range(REPLICAS)])
    print(json.dumps({name: CASES[name](program) for name in names}))


if __name__ == "__main__":
    main(list(CASES))
