"""The order in which a `tf.data` pipeline yields elements and its functions draw random numbers.

With `deterministic=False`, a pipeline yields elements in the order in which they are ready. Calls of a
function that run in parallel (`num_parallel_calls`) draw in an arbitrary order. In either case, workers that
read the same pipeline would get different elements.

A pipeline that several workers read ignores `deterministic=False`. Functions that draw in parallel draw in
the order of the elements: TensorFlow's own graph rewriting `make_deterministic` moves stateful operations out
of the parallel part. A pipeline is read to its end with its last batch, which completes a cache on disk.
"""

import sys
from collections.abc import Callable
from typing import Any

from lockstep.keras.private.tensorflow import (
    PARALLEL,
    StatefulCallsInOrder,
    functions_of,
    inputs_of,
    is_traced,
    is_unordered,
    without_order,
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


def in_order(dataset: Any, origin: Any = None) -> Any:
    """Return a `tf.data.Dataset` that yields equal elements in each process, in their order.

    It ignores `deterministic=False`. Functions that draw random numbers in parallel run partly one call after
    another: operations that only use the numbers remain parallel if TensorFlow can separate them. The numbers
    are the same as without `num_parallel_calls`.

    Args:
        dataset: the dataset to read.
        origin: the dataset that it copies, whose functions are known; by default `dataset`.
    """
    original = dataset if origin is None else origin
    if original.options().deterministic is False:
        options = sys.modules["tensorflow"].data.Options()
        options.deterministic = True
        dataset = dataset.with_options(options)
    return (
        StatefulCallsInOrder(dataset) if _draws_in_parallel(original) or _is_unordered(original) else dataset
    )


def yields_any_order(dataset: Any) -> bool:
    """Whether a `tf.data.Dataset` may yield its elements in a different order in each run."""
    return dataset.options().deterministic is False or _is_unordered(dataset)


def operations(function: Any, chosen: Callable[[Any], bool]) -> list[str]:
    """Return the names of the chosen operations of a traced function and of all functions that it calls.

    Args:
        function: the function of an operation of `tf.data`, with a graph.
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


def _is_unordered(dataset: Any) -> bool:
    """Whether an operation of a pipeline, or of an inner dataset, was created with `deterministic=False`."""
    return (
        is_unordered(dataset)
        or any(operations(function, without_order) for function in filter(is_traced, functions_of(dataset)))
        or any(map(_is_unordered, inputs_of(dataset)))
    )


def _is_parallel(node: Any) -> bool:
    """Whether an operation makes a dataset that calls a function in parallel."""
    return bool(node.op.startswith(("ParallelMap", "ParallelInterleave", "MapAndBatch")))


def _draws(node: Any) -> bool:
    return node.op in _GENERATORS or counts_its_runs(node)
