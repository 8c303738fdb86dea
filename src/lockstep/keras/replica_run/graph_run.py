"""One `strategy.run` in a graph of TensorFlow: the rounds of its replicas, and the changes from their totals.

The graph is built once, but the replicas that this worker computes may change while it is used. So the graph
requests one replica after the other from Python, computes it, and passes its partial to Python, until no
replica is left and the partials are summed.

So a graph serves any number of workers, even when the number changes. Python does not call functions of
TensorFlow meanwhile, because TensorFlow's only thread for operations waits for Python. Elements of datasets
and results are in a store in Python, and the graph has their handles (`keras/per_replica.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from lockstep.keras import tf_random_ops
from lockstep.keras.backends.contract import GATHERED, Total
from lockstep.keras.backends.eager_contract import Tensors
from lockstep.keras.backends.losses import scaled_losses
from lockstep.keras.backends.multi_update import EndOfRound, RoundCount, Update
from lockstep.keras.backends.state_changes import holds_new_value
from lockstep.keras.backends.tf_graphs import (
    AssignedVariables,
    RoundTrace,
    UpdateOperations,
    assigned,
    borrowed,
    call_python,
    copied,
    natives,
    refuse_assignments,
    scaled,
    summed_on_read,
    traced,
    with_custom_gradient,
)
from lockstep.keras.per_replica import ReturnedValues, Spec, Values, ValueStore, is_empty
from lockstep.keras.replica_run.merges import Merge, Replica, RoundMerger, computing_as
from lockstep.keras.replica_run.run_rounds import FunctionRound, RunRounds
from lockstep.keras.replica_run.tf_merged_variables import is_merged, refuse_other_changes
from lockstep.keras.rounds import SCALAR, PartialLayout, gathered_scalars
from lockstep.keras.tf_per_replica import (
    CompositePerReplica,
    SymbolicPerReplica,
    parts_of_leaf,
    spec_of,
    symbolic,
)
from lockstep.keras.worker_exchange import CHECK_EVERY, state_facts
from lockstep.worker.job import Job

Partial = dict[str, Any]

NONE_LEFT = -1
"""Instead of the id of a replica: all replicas of a round are computed, and their partials are summed."""


class GraphRun:
    """Adds one `strategy.run` to the graph that is being built.

    Args:
        job: the job whose replicas compute.
        rounds: sum over its workers.
        function: the function of a replica, converted by AutoGraph.
        args: its arguments; each replica has its own value of a PerReplica.
        kwargs: its keyword arguments, likewise.
    """

    def __init__(
        self,
        job: Job,
        rounds: RunRounds,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._job = job
        self._rounds = rounds
        self._replicas = job.view.replicas
        self._function = function
        self._arguments = (tuple(args), dict(kwargs))
        self._leaves = [part for leaf in keras.tree.flatten(self._arguments) for part in parts_of_leaf(leaf)]
        self._per_replica = [leaf for leaf in self._leaves if isinstance(leaf, SymbolicPerReplica)]
        self._shared = [leaf for leaf in self._leaves if isinstance(leaf, tf.Tensor)]
        self._scheduler = ReplicaScheduler(rounds, getattr(function, "__name__", "a function"))
        self._count = RoundCount()
        self._merges: list[Merge] = []
        self._merge: Merge | None = None
        self._assigned = AssignedVariables()
        self._draws = False
        self._nest: Any = None
        self._places: list[ResultPlace | None] = []
        self._outputs: list[Spec] = []

    def build(self) -> Any:
        """Return the function's result, with a PerReplica for each leaf."""
        order = seed = self._begin()
        totals: list[Partial] = []
        while not totals or not self._count.is_last(len(totals) - 1):
            order, total = self._round(order, seed, totals)
            totals.append(total)
        with tf.control_dependencies(self._applied(totals)):
            handle = call_python(self._finish, [], tf.int64)
        handle.set_shape(())
        # The code that traces the function belongs to the code that computes it.
        self._job.timer.lap("compute")
        tensors = iter(symbolic(handle, self._scheduler.store, self._outputs))
        return keras.tree.pack_sequence_as(
            self._nest, [None if place is None else place.take(tensors) for place in self._places]
        )

    def _finish(self) -> int:
        """End an execution; from time to time, check that all workers have equal weights.

        In a loop that Lockstep drives, the loop compares them.
        """
        if self._scheduler.is_due and not self._job.driven and len(self._job.view.workers) > 1:
            updates = [merge.update for merge in self._merges if merge.update is not None]
            variables = [variable for update in updates for variable in natives(update.changed)]
            arrays = {f"{variable.name} ({i})": variable.read_value() for i, variable in enumerate(variables)}
            self._rounds.agree(f"after {self._scheduler.label}", state_facts(self._rounds.to_numpy, arrays))
        return self._scheduler.finish(self._outputs)

    def _begin(self) -> Any:
        """Add the beginning of an execution, and return the seed of its random numbers."""
        origins = [(leaf.store, leaf.leaf) for leaf in self._per_replica]

        def begin(*handles: Any) -> int:
            seed = tf_random_ops.signed(self._rounds.next_seed()) if self._draws else 0
            self._scheduler.begin(
                [
                    (ValueStore.numbered(store).find(int(handle)).values, leaf)
                    for handle, (store, leaf) in zip(handles, origins, strict=True)
                ],
                seed,
            )
            return seed

        seed = call_python(begin, [leaf.handle for leaf in self._per_replica], tf.int64)
        seed.set_shape(())
        return seed

    def _round(self, order: Any, seed: Any, earlier: list[Partial]) -> tuple[Any, Partial]:
        """Add one round, which begins after the tensor `order`, and return (the next `order`, the total)."""
        number = len(earlier)
        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in (*self._per_replica, *self._shared)]
        compute = self._traced(earlier, specs)
        if self._draws:
            tf_random_ops.set_seed(seed)
        parts, _ = compute.structured_outputs
        names = sorted(parts)
        # The first replica's partial shows shapes that the graph does not, such as those of joined arrays.
        shows_shapes = all(tensor.shape.is_fully_defined() for tensor in parts.values())
        layout = PartialLayout({name: _leaf(parts[name]) for name in names}) if shows_shapes else None

        def next_replica(order: Any) -> Any:
            replica = call_python(lambda _: self._scheduler.next_replica(number, layout), [order], tf.int64)
            replica.set_shape(())
            return replica

        def publish(replica: Any, *tensors: Any) -> int:
            partial = dict(zip(names, tensors, strict=False))
            self._scheduler.publish(number, int(replica), partial, tensors[len(names) :])
            return 0

        def body(replica: Any) -> Any:
            partial, outputs = compute(replica, earlier, *self._values_of(replica), *self._shared)
            published = [replica, *(partial[name] for name in names), *outputs]
            return (next_replica(call_python(publish, published, tf.int64)),)

        (end,) = tf.while_loop(
            lambda replica: replica != NONE_LEFT, body, (next_replica(order),), parallel_iterations=1
        )
        return end, self._total(number, end, parts)

    def _values_of(self, replica: Any) -> list[Any]:
        """Return whether a replica has examples, and its own value of each PerReplica among the arguments."""
        if not self._per_replica:
            return [tf.constant(True)]
        types = [tf.bool, *(leaf.dtype for leaf in self._per_replica)]
        tensors = call_python(lambda r: self._scheduler.leaves_of(int(r)), [replica], types)
        tensors[0].set_shape(())
        for tensor, leaf in zip(tensors[1:], self._per_replica, strict=True):
            tensor.set_shape(leaf.shape)
        return list(tensors)

    def _total(self, number: int, end: Any, parts: Mapping[str, Any]) -> Partial:
        """Add an operation that reads a total into the graph; "one" is 1, as a value unknown to the graph."""
        last = self._count.is_last(number)
        names = sorted(name for name in parts if not name.startswith(SCALAR))

        def total(_: Any) -> list[Any]:
            arrays = self._scheduler.total(number, last=last)
            return [tf.constant(1.0), *(borrowed(arrays[name]) for name in names)]

        types = [tf.float32, *(parts[name].dtype for name in names)]
        tensors = call_python(total, [end], types)
        tensors[0].set_shape(())
        for tensor, name in zip(tensors[1:], names, strict=True):
            tensor.set_shape(self._shape_of(name, parts[name].shape.as_list()))
        return dict(zip(("one", *names), tensors, strict=True))

    def _shape_of(self, name: str, part: list[int | None]) -> list[int | None]:
        """Return the shape of an array of a total, given that of a partial."""
        if name.startswith(GATHERED):
            axis = int(name.split("/")[1])
            size = part[axis]
            part[axis] = None if size is None else size * self._replicas
        return part

    def _applied(self, totals: list[Partial]) -> list[Any]:
        """Add the operations that apply the totals to the variables, and return them."""
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        one, last = totals[-1]["one"], totals[-1]
        with computing_as(None):
            for merge, total in zip(self._merges, totals, strict=False):
                if merge.update is not None:
                    leaves = merge.leaves(total)
                    merge.update.apply(scaled(leaves, one) if merge.update.kernel is None else leaves)
            for name, variable in self._assigned.named.items():
                change = variable.assign if holds_new_value(name) else variable.assign_add
                change(tf.cast(copied(last[name], one), variable.dtype))
        return [one, *graph.get_operations()[start:]]

    def _traced(self, earlier: list[Partial], specs: list[Any]) -> Any:
        """Return a traced function that computes (a replica's partial of a round, its other outputs)."""
        number = len(earlier)
        replica = tf.TensorSpec((), tf.int64)
        inner, trace = self._trace(replica, earlier, specs)
        if trace.ended and trace.uses_update(inner.graph):
            self._count.add_after(number)
            inner, trace = self._trace(replica, earlier, specs)
        if not trace.ended:
            self._count.add_after(number)
        if self._merge is not None and number == len(self._merges):
            self._merges.append(self._merge)
        tf_random_ops.refuse_random_operations(inner.graph)
        updates = [merge.update for merge in self._merges[:number] if merge.update is not None]
        updated = [variable for update in updates for variable in natives(update.changed)]
        # The update of this round would overwrite earlier assignments of the function.
        own_changes = [] if trace.update is None else natives(trace.update.changed)
        refuse_assignments(inner.graph, [*updated, *own_changes], trace.operations.earlier)
        variables = [*assigned(inner.graph), *summed_on_read(inner.graph.variables)]
        refuse_other_changes(inner.graph, variables)
        assignments = AssignedVariables.of_function(variables, updated, is_merged)
        self._draws = self._draws or bool(assignments.counters)
        if trace.ended:
            self._assigned = assignments

        def compute(replica: Any, earlier: Any, examples: Any, *tensors: Any) -> Any:
            # The variables that the function assigns are restored.
            with assignments.as_replica(replica, sums_so_far=True) as changes:
                partial, results = inner(replica, earlier, *tensors)
                partial = dict(partial)
                if trace.ended:
                    partial |= changes(tf.where(examples, tf.constant(1.0 / self._replicas, tf.float64), 0))
                    numbers = [(i, leaf) for i, leaf in enumerate(results) if spec_of(leaf).is_number]
                    partial |= {f"{SCALAR}{i}": leaf for i, leaf in numbers}
            return partial, [leaf for leaf in results if not spec_of(leaf).is_number]

        return traced(compute, False, replica, earlier, tf.TensorSpec((), tf.bool), *specs)

    def _trace(self, replica: Any, earlier: list[Partial], specs: list[Any]) -> tuple[Any, RoundTrace]:
        trace = RoundTrace()

        def step(replica: Any, earlier: Any, *tensors: Any) -> Any:
            return self._step(trace, replica, earlier, *tensors)

        return traced(tf_random_ops.stateless(step), False, replica, earlier, *specs), trace

    def _step(self, trace: RoundTrace, replica: Any, earlier: list[Partial], *tensors: Any) -> Any:
        """Run the function, and return (its contribution to the round's merge, its results)."""
        trace.operations = UpdateOperations()

        def repeat(index: int) -> None:
            update = self._merges[index].update
            assert update is not None
            with trace.operations.of_earlier_update(), computing_as(None), tf_random_ops.drawn_from(None):
                update.apply(self._merges[index].leaves(earlier[index]))

        def on_update(update: Update) -> None:
            trace.operations.mark_own_update()
            if not update.optimizer.built:
                with tf.init_scope(), computing_as(None):
                    update.optimizer.build(update.variables)

        def custom_gradient(
            leaves: Tensors, merge: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
        ) -> Tensors:
            trace.operations.refuse_inner_graphs()
            return with_custom_gradient(leaves, merge, gradient)

        number = len(earlier)
        merger = RoundMerger(
            number=number,
            ends_early=self._count.ends_early(number),
            earlier=self._merges,
            totals=earlier,
            repeat=repeat,
            on_update=on_update,
            replica=replica,
            replicas=self._replicas,
            custom_gradient=custom_gradient,
        )
        args, kwargs = self._filled(tensors)
        results: list[Any] = []
        trace.ended = False
        with (
            computing_as(Replica(tf.cast(replica, tf.int32), merger)),
            scaled_losses(self._replicas),
            suppress(EndOfRound),
        ):
            results = self._flat_result(self._function(*args, **kwargs))
            trace.ended = True
        trace.update, self._merge = merger.update, merger.merge
        return {name: tf.convert_to_tensor(leaf) for name, leaf in merger.partial.items()}, results

    def _filled(self, tensors: Sequence[Any]) -> Any:
        """Return the function's arguments, with `tensors` in place of each PerReplica and tensor."""
        own_values, shared = iter(tensors[: len(self._per_replica)]), iter(tensors[len(self._per_replica) :])

        def value(leaf: Any) -> Any:
            if isinstance(leaf, SymbolicPerReplica):
                return next(own_values)
            return next(shared) if isinstance(leaf, tf.Tensor) else leaf

        leaves = [
            leaf.joined([next(own_values) for _ in leaf.parts])
            if isinstance(leaf, CompositePerReplica)
            else value(leaf)
            for leaf in keras.tree.flatten(self._arguments)
        ]
        return keras.tree.pack_sequence_as(self._arguments, leaves)

    def _flat_result(self, result: Any) -> list[Any]:
        # As in a `tf.function`, an operation runs and becomes None.
        leaves = [None if isinstance(leaf, tf.Operation) else leaf for leaf in keras.tree.flatten(result)]
        self._nest = result
        self._places = [None if leaf is None else ResultPlace.of(leaf) for leaf in leaves]
        tensors = [tensor for leaf in leaves if leaf is not None for tensor in tensors_of_leaf(leaf)]
        self._outputs = [spec_of(tensor) for tensor in tensors]
        return tensors


@dataclass(frozen=True)
class ResultPlace:
    """The place of a leaf in a function's result.

    Attributes:
        tensors: the number of tensors in the leaf.
        spec: the `tf.TypeSpec` of a ragged or a sparse tensor; None for a dense one.
    """

    tensors: int = 1
    spec: Any = None

    @classmethod
    def of(cls, leaf: Any) -> "ResultPlace":
        """Return the place of a leaf."""
        if not _is_composite(leaf):
            return cls()
        return cls(len(tensors_of_leaf(leaf)), tf.type_spec_from_value(leaf))

    def take(self, tensors: Iterator[SymbolicPerReplica]) -> Any:
        """Return the PerReplica of the leaf, made of the next tensors."""
        if self.spec is None:
            return next(tensors)
        return CompositePerReplica.of(self.spec, [next(tensors) for _ in range(self.tensors)])


def tensors_of_leaf(leaf: Any) -> list[Any]:
    """Return the tensors of a leaf of a function's result."""
    if _is_composite(leaf):
        tensors: list[Any] = tf.nest.flatten(leaf, expand_composites=True)
        return tensors
    return [tf.convert_to_tensor(leaf)]


def _is_composite(leaf: Any) -> bool:
    return isinstance(leaf, tf.RaggedTensor | tf.SparseTensor)


@dataclass
class GraphExecution:
    """One execution of a `strategy.run` in a graph.

    Attributes:
        inputs: the values of each PerReplica among the arguments, and the position of its leaf in them.
        seed: the seed of the random numbers that do not follow from a variable.
        rounds: the rounds that have begun.
        totals: the totals of the rounds that are summed.
        outputs: the results, except single numbers, of this worker's replicas.
    """

    inputs: Sequence[tuple[Values, int]]
    seed: int = 0
    rounds: list["GraphRound"] = field(default_factory=list)
    totals: list[Total] = field(default_factory=list)
    outputs: dict[int, Sequence[Any]] = field(default_factory=dict)

    @property
    def sources(self) -> list[Values]:
        """The values of the inputs, each once."""
        return list({id(values): values for values, _ in self.inputs}.values())


class ReplicaScheduler:
    """The part of a `GraphRun` that runs in Python: schedules replicas, and sums their partials.

    Args:
        rounds: sum the partials of the workers.
        name: the name of the function, for messages.

    Attributes:
        store: the store of the results.
    """

    def __init__(self, rounds: RunRounds, name: str) -> None:
        self._rounds = rounds
        self._name = name
        self._count = 0
        self._execution = GraphExecution(())
        self.store = ValueStore()

    @property
    def label(self) -> str:
        """Names the present execution in messages."""
        return f"execution {self._count} of {self._name}"

    @property
    def is_due(self) -> bool:
        """Whether to compare the workers' weights after the present execution."""
        return (self._count - 1) % CHECK_EVERY == 0

    def begin(self, inputs: Sequence[tuple[Values, int]], seed: int) -> None:
        """Begin an execution with these inputs and this seed; see `GraphExecution`."""
        self._rounds.begin_run(self._name)
        self._count += 1
        self._execution = GraphExecution(inputs, seed)

    def next_replica(self, number: int, layout: PartialLayout | None) -> int:
        """Return the next replica to compute in round `number`; NONE_LEFT if the round is summed.

        Args:
            number: the number of the round, from 0.
            layout: the layout of its partials; None if their shapes are unknown.
        """
        execution = self._execution
        if number == len(execution.rounds):
            round_ = GraphRound(self._rounds, self.label, execution.sources, execution.seed, layout)
            execution.rounds.append(round_)
        try:
            total = self._rounds.total(execution.rounds[number])
        except ReplicaMissing as missing:
            return missing.replica
        execution.totals.append(total)
        return NONE_LEFT

    def leaves_of(self, replica: int) -> list[Any]:
        """Return whether a replica has examples, and its own value of each input."""
        execution = self._execution
        examples = not is_empty(execution.sources, replica)
        return [examples, *(values.of(replica)[leaf] for values, leaf in execution.inputs)]

    def publish(self, number: int, replica: int, partial: Mapping[str, Any], outputs: Sequence[Any]) -> None:
        """Record the partial and the outputs of a replica in round `number`."""
        self._execution.rounds[number].started[replica] = partial
        self._execution.outputs[replica] = outputs

    def total(self, number: int, *, last: bool) -> Total:
        """Return the total of a round, copied unless it is the last: the next reduce reuses its memory."""
        total = self._execution.totals[number]
        return total if last else {name: array.copy() for name, array in total.items()}

    def finish(self, specs: Sequence[Spec]) -> int:
        """End the execution; store the results, with `specs`, and return their handle."""
        execution, self._execution = self._execution, GraphExecution(())
        local = iter(range(len(specs)))
        columns: list[Mapping[int, Any]] = []
        for position, spec in enumerate(specs):
            if spec.is_number:
                bits = execution.totals[-1][f"{SCALAR}{position}"]
                columns.append(dict(enumerate(gathered_scalars(bits, np.dtype(spec.dtype)))))
            else:
                at = next(local)
                # A replica that this worker only verifies is computed for another worker.
                owned = [replica for replica in self._rounds.owned if replica in execution.outputs]
                columns.append({replica: execution.outputs[replica][at] for replica in owned})
        sources = execution.sources
        empty = frozenset(replica for replica in self._rounds.owned if is_empty(sources, replica))
        return self.store.put(ReturnedValues(tuple(specs), tuple(columns), empty))


class ReplicaMissing(Exception):
    """A round cannot be summed before the graph has computed a replica."""

    def __init__(self, replica: int) -> None:
        super().__init__(replica)
        self.replica = replica


class GraphRound(FunctionRound):
    """A round of a `strategy.run` in a graph, which itself computes the replicas."""

    def compute(self, replica: int) -> NoReturn:
        """Raise `ReplicaMissing`."""
        raise ReplicaMissing(replica)


def _leaf(tensor: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and the dtype of the arrays that a tensor of a graph becomes."""
    return tuple(tensor.shape.as_list()), np.dtype(tensor.dtype.as_numpy_dtype)
