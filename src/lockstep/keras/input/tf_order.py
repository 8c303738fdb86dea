"""The order in which the functions of a `tf.data` pipeline draw random numbers.

Calls of a function that run in parallel (`num_parallel_calls`) draw in no fixed order, so workers that read
the same pipeline would get different numbers.
"""

from collections.abc import Callable
from typing import Any

from lockstep.keras.private.tensorflow import (
    PARALLEL,
    StatefulCallsInOrder,
    functions_of,
    inputs_of,
    is_traced,
)
from lockstep.keras.tf_random_ops import counts_its_runs

_GENERATORS = frozenset(
    (
        *("RngReadAndSkip", "RngSkip", "StatefulRandomBinomial", "StatefulUniform", "StatefulUniformInt"),
        *("StatefulUniformFullInt", "StatefulStandardNormalV2", "StatefulTruncatedNormal"),
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"),
    )
)
"""Operations that advance a generator, TensorFlow's or Keras's."""


def drawn_in_order(dataset: Any, origin: Any = None) -> Any:
    """Return a `tf.data.Dataset` whose functions draw random numbers in the order of its elements.

    Functions that draw in parallel run one call after another, in part: operations that only use the numbers
    remain parallel where TensorFlow can separate them. The numbers are those without `num_parallel_calls`.

    Args:
        dataset: to read.
        origin: the dataset of which it is a copy, whose functions are known; by default itself.
    """
    known = dataset if origin is None else origin
    return StatefulCallsInOrder(dataset) if _draws_in_parallel(known) else dataset


def operations(function: Any, chosen: Callable[[Any], bool]) -> list[str]:
    """Return the names of the chosen operations of a traced function and of all functions that it calls.

    Args:
        function: of an operation of `tf.data`, with a graph.
        chosen: called with the definition of each operation.
    """
    definition = function.function.graph.as_graph_def()
    nodes = [definition.node, *(called.node_def for called in definition.library.function)]
    return [node.op for part in nodes for node in part if chosen(node)]


def _draws_in_parallel(dataset: Any) -> bool:
    """Whether an operation of a pipeline calls a function that draws random numbers in parallel."""
    functions = filter(is_traced, functions_of(dataset))
    return any(
        (isinstance(dataset, PARALLEL) or operations(function, _is_parallel)) and operations(function, _draws)
        for function in functions
    ) or any(map(_draws_in_parallel, inputs_of(dataset)))


def _is_parallel(node: Any) -> bool:
    """Whether an operation makes a dataset that calls a function in parallel."""
    return bool(node.op.startswith(("ParallelMap", "ParallelInterleave", "MapAndBatch")))


def _draws(node: Any) -> bool:
    return node.op in _GENERATORS or counts_its_runs(node)
