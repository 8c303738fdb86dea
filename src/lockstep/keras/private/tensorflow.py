"""The private parts of TensorFlow that Lockstep uses: only this file changes when TensorFlow changes one.

TensorFlow makes no promises about modules below `tensorflow.python` and attributes that begin with an
underscore. Docstrings say what Lockstep relies on, in all versions of `docs/versions.md`. The random state of
eager operations, which programs on other backends use too, is in `lockstep.worker.private_modules`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.checkpoint.checkpoint import TrackableSaver
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.data.ops import (
    batch_op,
    cache_op,
    dataset_ops,
    interleave_op,
    map_op,
    prefetch_op,
    repeat_op,
    shuffle_op,
    skip_op,
    structured_function,
    take_op,
    unbatch_op,
)
from tensorflow.python.data.ops.options import ExternalStatePolicy
from tensorflow.python.data.util import structure
from tensorflow.python.distribute.input_ops import auto_shard_dataset
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import auto_control_deps_utils, op_def_registry, random_seed
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.ops import (
    gen_candidate_sampling_ops,
    gen_dataset_ops,
    gen_image_ops,
    gen_nn_ops,
    gen_random_ops,
    nn_impl_distribute,
    summary_ops_v2,
)
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph, WhileCondFuncGraph
from tensorflow.python.ops.parallel_for import control_flow_ops
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from lockstep.worker.patch_registry import Part
from lockstep.worker.private_modules import TENSORFLOW_CONTEXT

_context: Any = import_module(TENSORFLOW_CONTEXT)

# Operations and graphs


def definition_of(operation: str) -> Any:
    """Return the definition of a type of operations, as in `OpList`, or None if it is not registered."""
    return op_def_registry.get(operation)


def written_by(operation: Any) -> Any:
    """Return those inputs of an operation that are resources, such as variables, to which it may write.

    For a call or a condition, it considers the operations of the inner graphs.
    """
    _, written = auto_control_deps_utils.get_read_write_resource_inputs(operation)
    return written


def read_only_inputs(graph: Any) -> Any:
    """Return the positions of those inputs of a graph that are resources to which it never writes."""
    return auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)


def call_flat(function: ConcreteFunction, tensors: list[Any]) -> Any:
    """Call a traced function with the tensors of its arguments, in the order of `tf.nest.flatten`.

    It does not check their number and shapes, because binding and checking arguments takes longer than
    running a small graph.
    """
    return function._call_flat(tensors, function.captured_inputs)


def register_lookups() -> None:
    """Tell TensorFlow that lookups in a table do not change the table. Another call has no effect."""
    for operation in ("LookupTableFindV2", "LookupTableSizeV2"):
        auto_control_deps_utils.register_read_only_resource_op(operation)


def entered_graphs() -> Any:
    """Return the graphs and eager contexts that this thread has entered, the innermost last.

    Each has `is_building_function`.
    """
    return _context.context().context_switches.stack


def counters_of_loops(graph: Any) -> list[Any]:
    """Return the counters of the loops around additions to a graph, the outermost first.

    The counter of a loop's runs is the first argument of the graphs of its body and its condition.
    """
    counters: list[Any] = []
    while isinstance(graph, FuncGraph):
        if isinstance(graph, WhileBodyFuncGraph | WhileCondFuncGraph):
            counters.insert(0, graph.get_operations()[0].outputs[0])
        graph = graph.outer_graph
    return counters


MAKE_FUNCTION_CONTEXT: Part = function_context, "make_function_context"
"""Called for each call of a `tf.function`: returns the key of the graphs that may serve the call."""


def with_own_graphs(key: Any, owner: object) -> Any:
    """Return a result of `MAKE_FUNCTION_CONTEXT` that only equal results with an equal `owner` match."""
    return key._replace(context=key.context._replace(xla_context_id=owner))


def eagerly() -> AbstractContextManager[None]:
    """Return a context in which operations run eagerly, even on a thread that is building a graph."""
    context: AbstractContextManager[None] = _context.eager_mode()
    return context


def wait_for_operations() -> None:
    """Wait for all eager operations that this process has started, and raise the error of a failed one."""
    _context.async_wait()


# Variables

VARIABLE_CLASSES = (BaseResourceVariable, ResourceVariable)
"""The classes that define the assignments of variables, of which `tf.Variable` makes instances."""


def uncounted_variable(initial: Any, dtype: Any, name: str) -> Any:
    """Return a variable that a `tf.function` may create even after its first call."""
    return ResourceVariable(initial, trainable=False, dtype=dtype, name=name)


# AutoGraph


def exempt_from_autograph(package: str) -> None:
    """Prevent AutoGraph from converting the code of a package: the first rule that matches applies."""
    rule = autograph_config.DoNotConvert(package)
    if all(str(rule) != str(existing) for existing in autograph_config.CONVERSION_RULES):
        autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def autograph_status() -> Any:
    """Return the status of AutoGraph in the present code, which `converted` takes.

    Within a block of it, code also has this status.
    """
    return ag_ctx.control_status_ctx()


def converted(function: Callable[..., Any], status: Any) -> Callable[..., Any]:
    """Return a function as AutoGraph converts it in code with this status, unless it is disabled there."""
    conversion: Callable[..., Any] = autograph.tf_convert(function, status)
    return conversion


def python_function_of(function: Any) -> tuple[Callable[..., Any], Any]:
    """Return the Python function of a `tf.function`, and its status for `converted`, if any."""
    status = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.UNSPECIFIED) if function._autograph else None
    return function.python_function, status


# Random numbers

GENERATED_RANDOM_OPERATIONS = gen_random_ops
"""Has a function for each random operation, by the operation's name, which those of `tf.random` call.

Their arguments are those of the operation: inputs first, attributes by name, among them `seed` and `seed2`.
"""

RANDOM_WITHOUT_EQUIVALENT: tuple[Part, ...] = (
    (gen_random_ops, "parameterized_truncated_normal"),
    (gen_candidate_sampling_ops, "all_candidate_sampler"),
    (gen_candidate_sampling_ops, "fixed_unigram_candidate_sampler"),
    (gen_candidate_sampling_ops, "learned_unigram_candidate_sampler"),
    (gen_candidate_sampling_ops, "log_uniform_candidate_sampler"),
    (gen_candidate_sampling_ops, "uniform_candidate_sampler"),
    (gen_image_ops, "sample_distorted_bounding_box_v2"),
    (gen_nn_ops, "fractional_avg_pool"),
    (gen_nn_ops, "fractional_max_pool"),
)
"""The functions of random operations for which there are no stateless ones that do the same."""

TENSORFLOW_SEED = "StateVar"
"""Part of the name of the variable that is the state of a `tf.random.Generator`."""

GET_SEED: Part = random_seed, "get_seed"
"""Called as `get_seed(op_seed)` for each random operation; returns the values of its `seed` and `seed2`."""

PFOR: Part = control_flow_ops, "pfor"
"""Called by `tf.vectorized_map` to trace the function of an element."""


# Summaries


@contextmanager
def summaries_recorded_if(condition: Callable[[], Any]) -> Iterator[None]:
    """Within the block, `tf.summary` writes only where `condition()` is also true, a bool or a tensor.

    TensorFlow calls the condition for each summary that the program writes, in the graph that is being built,
    if any. It does not call it if the condition of an enclosing block is False.
    """
    state = summary_ops_v2._summary_state
    before = state.is_recording_distribution_strategy

    def both() -> Any:
        outer = before() if callable(before) else before
        return condition() if outer is True else outer

    state.is_recording_distribution_strategy = both
    try:
        yield
    finally:
        state.is_recording_distribution_strategy = before


def is_summary_writer(handle: Any) -> bool:
    """Whether a resource that a graph has captured is a writer of `tf.summary`."""
    return "SummaryWriter" in str(handle)


# Losses and checkpoints

DISTRIBUTION_OF_LOSSES: Part = nn_impl_distribute, "distribute_lib"
"""The module that `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss` ask for the strategy.

They call `has_strategy()`, and `get_strategy().num_replicas_in_sync`.
"""

SAVE: Part = TrackableSaver, "save"
"""Called by `tf.train.Checkpoint` and its manager as (saver, prefix of paths, ...); returns the prefix."""


def reached_by(saver: Any) -> Any:
    """Return the objects that a `TrackableSaver` saves, including all variables."""
    return saver._graph_view.descendants()


# The operations of `tf.data`: each method of a dataset creates an instance of a class

MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
PARALLEL = (map_op._ParallelMapDataset, interleave_op._ParallelInterleaveDataset)
"""Operations that call a function in parallel."""
BATCHES = (batch_op._BatchDataset, batch_op._ParallelBatchDataset)
REPEAT, TAKE, SKIP = repeat_op._RepeatDataset, take_op._TakeDataset, skip_op._SkipDataset
PREFETCH, OPTIONS = prefetch_op._PrefetchDataset, dataset_ops._OptionsDataset
SHUFFLE, CACHE = shuffle_op._ShuffleDataset, cache_op.CacheDataset


def input_of(operation: Any) -> Any:
    """Return the dataset to which an operation of one of these classes is applied."""
    return operation._input_dataset


def inputs_of(dataset: Any) -> Sequence[Any]:
    """Return the datasets on which any dataset depends directly."""
    inputs: Sequence[Any] = dataset._inputs()
    return inputs


def functions_of(dataset: Any) -> Sequence[Any]:
    """Return the functions that an operation calls, each a `StructuredFunctionWrapper`."""
    functions: Sequence[Any] = dataset._functions()
    return functions


def is_unordered(dataset: Any) -> bool:
    """Whether an operation was created with `deterministic=False`."""
    if isinstance(dataset, interleave_op._ParallelInterleaveDataset):
        # Only the graph keeps the argument. Its source usually contains only names of files.
        try:
            nodes = graph_of(dataset).node
        except tf.errors.OpError:
            return False
        return any(without_order(node) for node in nodes if node.op.startswith("ParallelInterleave"))
    return getattr(dataset, "_deterministic", "") == "false"


def without_order(node: Any) -> bool:
    """Whether an operation in a graph was created with `deterministic=False`."""
    return "deterministic" in node.attr and bool(node.attr["deterministic"].s == b"false")


def count_of(operation: Any) -> Any:
    """Return the argument of `repeat`, `take` or `skip`."""
    return operation._count


def batching_of(operation: Any) -> tuple[Any, Any]:
    """Return the arguments `batch_size` and `drop_remainder` of `batch`."""
    return operation._batch_size, operation._drop_remainder


def buffer_of(operation: Any) -> int:
    """Return the argument of `prefetch`; -1 for an autotuned one."""
    return int(operation._buffer_size)


def function_of(operation: Any) -> Any:
    """Return the traced function of a map, a `StructuredFunctionWrapper`.

    Its `function` is the one that TensorFlow runs, and its `output_structure` is the form of the result.
    """
    return operation._map_func


def is_traced(function: Any) -> bool:
    """Whether a map's function has a graph, `function.function.graph`, as all but legacy ones have."""
    return isinstance(function.function, ConcreteFunction)


def traced_python_function(function: Any) -> Callable[..., Any]:
    """Return the function that the program passed to `map`. It takes the parts of a tuple as arguments."""
    python_function: Callable[..., Any] = function._func
    return python_function


def argument_of(function: Any) -> Any:
    """Return the form of the elements for which the function of a map was traced."""
    return function._input_structure


def traced_for(function: Callable[..., Any], argument: Any) -> Any:
    """Trace a function as `map` does for elements of this form; see `function_of`."""
    return structured_function.StructuredFunctionWrapper(function, "Dataset.map()", input_structure=argument)


def as_result(value: Any) -> Any:
    """Return a result of a map's function in the form that `map` takes; some lists become tuples."""
    return tuple(value) if structured_function._should_pack(value) else value


def not_converted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that `traced_for` traces without AutoGraph."""
    wrapped: Callable[..., Any] = autograph.do_not_convert(function)
    return wrapped


def plain_map(dataset: Any, function: Callable[..., Any]) -> Any:
    """Return `dataset.map(function)`, whose function may end the dataset with an `OutOfRangeError`."""
    return map_op._MapDataset(dataset, function, preserve_cardinality=False)


def unbatched(dataset: Any) -> Any:
    """Return the rows of the elements of a dataset of dense tensors, without the checks of `unbatch`."""
    return unbatch_op._UnbatchDataset(dataset)


class MappedDataset(dataset_ops.UnaryDataset):  # type: ignore[misc]
    """Another dataset, mapped with a traced function as an operation maps its own input.

    Args:
        dataset: the dataset, whose tensors are those of the function's arguments, in any structure.
        operation: the operation, a map.
        function: the traced function, as `function_of` returns it.
        one_thread: whether one thread runs all operations of the function.
    """

    def __init__(self, dataset: Any, operation: Any, function: Any, *, one_thread: bool) -> None:
        self._function = function
        self._name = None
        options = {
            "f": function.function,
            "use_inter_op_parallelism": operation._use_inter_op_parallelism and not one_thread,
            "preserve_cardinality": operation._preserve_cardinality,
            **self._common_args,
        }
        inputs = dataset._variant_tensor, function.function.captured_inputs
        if isinstance(operation, map_op._ParallelMapDataset):
            variant = gen_dataset_ops.parallel_map_dataset_v2(
                *inputs,
                num_parallel_calls=operation._num_parallel_calls,
                deterministic=operation._deterministic,
                use_unbounded_threadpool=operation._use_unbounded_threadpool,
                **options,
            )
        else:
            variant = gen_dataset_ops.map_dataset(
                *inputs, force_synchronous=operation._force_synchronous, **options
            )
        super().__init__(dataset, variant)

    def _functions(self) -> list[Any]:
        return [self._function]

    @property
    def element_spec(self) -> Any:
        """The form of the function's result."""
        return self._function.output_structure


class StatefulCallsInOrder(dataset_ops.UnaryUnchangedStructureDataset):  # type: ignore[misc]
    """A dataset as TensorFlow rewrites it if its operations must be deterministic.

    Operations with a state that depends on the order of calls run in the order of the elements.
    """

    def __init__(self, dataset: Any) -> None:
        variant = gen_dataset_ops.optimize_dataset_v2(
            dataset._variant_tensor,
            optimizations_enabled=["make_deterministic"],
            optimizations_disabled=[],
            optimizations_default=[],
            **dataset._flat_structure,
        )
        super().__init__(dataset, variant)


# The forms of elements of `tf.data`


def is_dense(spec: Any) -> bool:
    """Whether all parts of an element are dense tensors, or None."""
    return all(isinstance(part, tf.TensorSpec | structure.NoneTensorSpec) for part in tf.nest.flatten(spec))


def in_batches(spec: Any) -> Any:
    """Return the form of batches of any number of elements whose form is one `tf.TensorSpec`."""
    return spec._batch(None)


def tensor_specs(spec: Any) -> list[Any]:
    """Return the form of each tensor of an element."""
    specs: list[Any] = structure.get_flat_tensor_specs(spec)
    return specs


def tensors_of(spec: Any, element: Any) -> list[Any]:
    """Return the tensors of an element."""
    tensors: list[Any] = structure.to_tensor_list(spec, element)
    return tensors


def element_of(spec: Any, tensors: Sequence[Any]) -> Any:
    """Return the element that has these tensors."""
    return structure.from_compatible_tensor_list(spec, tensors)


# Graphs and shards of `tf.data`


def graph_of(dataset: Any) -> Any:
    """Return the graph that makes a dataset, which refers to states outside of it, as a `GraphDef`."""
    graph = dataset._as_serialized_graph(
        strip_device_assignment=True, external_state_policy=ExternalStatePolicy.IGNORE
    )
    return tf.compat.v1.GraphDef.FromString(graph.numpy())


def dataset_of(graph: Any, element_spec: Any) -> Any:
    """Return the dataset that a graph makes, on the CPU."""
    return distribute._RemoteDataset(graph.SerializeToString(), "/CPU:0", element_spec)


def divided_batches(dataset: Any, replicas: int, replica: int) -> Any:
    """Return a dataset of global batches as one of a replica's batches, divided as by `tf.distribute`."""
    batch_size = distribute.compute_batch_size(dataset)
    if int(batch_size) == -1:
        return distribute._LegacyRebatchDataset(dataset, replicas)
    return dataset.rebatch(distribute.batch_sizes_for_worker(batch_size, replicas, 1, replica))


def shard_of(dataset: Any, replicas: int, replica: int) -> Any:
    """Return the shard of one of the replicas, by the auto-shard policy of the dataset.

    Raises:
        tf.errors.NotFoundError: the policy is `FILE`, and the dataset has no reader of files.
    """
    return auto_shard_dataset(dataset, replicas, replica, replicas)
