"""One `strategy.run` in a graph of TensorFlow: the replicas' rounds, and what is made of their totals."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from lockstep.errors import LockstepError
from lockstep.keras import tf_random_ops
from lockstep.keras.backends.eager import Tensors
from lockstep.keras.backends.graphs import (
    AssignedVariables,
    RoundTrace,
    UpdateOperations,
    assigned,
    borrowed,
    natives,
    own,
    refuse_assignments,
    scaled,
    summed_on_read,
    traced,
    with_gradient,
)
from lockstep.keras.backends.losses import scaled_losses
from lockstep.keras.backends.multi_update import Left, Rounds, Update
from lockstep.keras.backends.state_changes import is_new
from lockstep.keras.consistency import state_facts
from lockstep.keras.nests import packed
from lockstep.keras.per_replica import Shelf, Spec
from lockstep.keras.replica_run.host import NONE_LEFT, RunHost
from lockstep.keras.replica_run.merged_variables import is_merged, refuse_other_changes
from lockstep.keras.replica_run.merges import MergePoint, RunMerges
from lockstep.keras.replica_run.replica import Replica, entered
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.synchronization import GATHERED, SCALAR
from lockstep.keras.tf_per_replica import SymbolicPerReplica, spec_of, symbolic
from lockstep.worker.job import Job
from lockstep.worker.script import keep_original

Partial = dict[str, Any]


def on_host(act: Callable[..., Any], given: Sequence[Any], types: Any) -> Any:
    """Add an operation to the graph that calls `act` on the host, whenever it is executed.

    TensorFlow passes on the text of an error, but not the error itself, which is therefore kept.
    """

    def guarded(*tensors: Any) -> Any:
        try:
            return act(*tensors)
        except LockstepError as error:
            keep_original(error)
            # TensorFlow writes all of the traceback into what it says, several times.
            raise error.with_traceback(None) from None

    return tf.py_function(guarded, list(given), types)


class GraphRun:
    """Puts one `strategy.run` into the graph that is being made.

    Args:
        job: whose replicas compute.
        exchange: between its workers.
        function: what a replica computes, as AutoGraph has made it.
        args: its arguments; each replica has its own value of a PerReplica.
        kwargs: likewise.
    """

    def __init__(
        self,
        job: Job,
        exchange: RunRounds,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._job = job
        self._exchange = exchange
        self._replicas = job.view.replicas
        self._function = function
        self._arguments = (tuple(args), dict(kwargs))
        self._leaves = keras.tree.flatten(self._arguments)
        self._own = [leaf for leaf in self._leaves if isinstance(leaf, SymbolicPerReplica)]
        self._shared = [leaf for leaf in self._leaves if isinstance(leaf, tf.Tensor)]
        self._host = RunHost(exchange, getattr(function, "__name__", "a function"))
        self._rounds = Rounds()
        self._meetings: list[MergePoint] = []
        self._meeting: MergePoint | None = None
        self._assigned = AssignedVariables()
        self._draws = False
        self._result: Any = None
        self._outputs: list[Spec] = []

    def build(self) -> Any:
        """Return the function's result, with a PerReplica for each leaf."""
        order = seed = self._begin()
        totals: list[Partial] = []
        while not totals or not self._rounds.complete(len(totals) - 1):
            order, total = self._round(order, seed, totals)
            totals.append(total)
        with tf.control_dependencies(self._applied(totals)):
            ticket = on_host(self._finish, [], tf.int64)
        ticket.set_shape(())
        return packed(self._result, symbolic(ticket, self._host.shelf, self._outputs))

    def _finish(self) -> int:
        """End an execution on the host; from time to time, make sure that all workers have equal weights.

        In a loop that Lockstep drives, the loop does.
        """
        if self._host.is_due and not self._job.driven and len(self._job.view.workers) > 1:
            updates = [meeting.update for meeting in self._meetings if meeting.update is not None]
            variables = [variable for update in updates for variable in natives(update.changed)]
            arrays = {f"{variable.name} ({i})": variable.read_value() for i, variable in enumerate(variables)}
            self._exchange.agree(f"after {self._host.what}", state_facts(self._exchange.concrete, arrays))
        return self._host.finish(self._outputs)

    def _begin(self) -> Any:
        """Begin an execution on the host; return what its random numbers follow from."""
        origins = [(leaf.shelf, leaf.leaf) for leaf in self._own]

        def begin(*tickets: Any) -> int:
            seed = tf_random_ops.new_seed() if self._draws else 0
            self._host.begin(
                [
                    (Shelf.numbered(shelf).kept(int(ticket)).values, leaf)
                    for ticket, (shelf, leaf) in zip(tickets, origins, strict=True)
                ],
                seed,
            )
            return seed

        seed = on_host(begin, [leaf.ticket for leaf in self._own], tf.int64)
        seed.set_shape(())
        return seed

    def _round(self, order: Any, seed: Any, earlier: list[Partial]) -> tuple[Any, Partial]:
        """Add one round to the graph, after `order`; return what the next is to wait for, and the total."""
        number = len(earlier)
        specs = [tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in (*self._own, *self._shared)]
        compute = self._traced(earlier, specs)
        if self._draws:
            tf_random_ops.set_seed(seed)
        parts, _ = compute.structured_outputs
        names = sorted(parts)
        like = {name: _zeros(parts[name]) for name in names}
        # What has no fixed shape, as what is joined, is learnt from the first replica.
        known = None if any(zeros is None for zeros in like.values()) else like

        def ask(order: Any) -> Any:
            replica = on_host(lambda _: self._host.next_replica(number, known), [order], tf.int64)
            replica.set_shape(())
            return replica

        def publish(replica: Any, *tensors: Any) -> int:
            partial = dict(zip(names, tensors, strict=False))
            self._host.publish(number, int(replica), partial, tensors[len(names) :])
            return 0

        def body(replica: Any) -> Any:
            partial, outputs = compute(replica, earlier, *self._values_of(replica), *self._shared)
            given = [replica, *(partial[name] for name in names), *outputs]
            return (ask(on_host(publish, given, tf.int64)),)

        (end,) = tf.while_loop(
            lambda replica: replica != NONE_LEFT, body, (ask(order),), parallel_iterations=1
        )
        return end, self._total(number, end, parts)

    def _values_of(self, replica: Any) -> list[Any]:
        """Return whether a replica has examples, and its own of each argument."""
        if not self._own:
            return [tf.constant(True)]
        types = [tf.bool, *(leaf.dtype for leaf in self._own)]
        tensors = on_host(lambda r: self._host.leaves_of(int(r)), [replica], types)
        tensors[0].set_shape(())
        for tensor, leaf in zip(tensors[1:], self._own, strict=True):
            tensor.set_shape(leaf.shape)
        return list(tensors)

    def _total(self, number: int, end: Any, parts: Mapping[str, Any]) -> Partial:
        """Add an operation that brings a total into the graph; "one" is 1, which the graph must not know."""
        last = self._rounds.complete(number)
        names = sorted(name for name in parts if not name.startswith(SCALAR))

        def total(_: Any) -> list[Any]:
            arrays = self._host.total(number, last=last)
            return [tf.constant(1.0), *(borrowed(arrays[name]) for name in names)]

        types = [tf.float32, *(parts[name].dtype for name in names)]
        tensors = on_host(total, [end], types)
        tensors[0].set_shape(())
        for tensor, name in zip(tensors[1:], names, strict=True):
            tensor.set_shape(self._shape_of(name, parts[name].shape.as_list()))
        return dict(zip(("one", *names), tensors, strict=True))

    def _shape_of(self, name: str, part: list[int | None]) -> list[int | None]:
        """Return the shape of a total of which each replica has a part."""
        if name.startswith(GATHERED):
            axis = int(name.split("/")[1])
            size = part[axis]
            part[axis] = None if size is None else size * self._replicas
        return part

    def _applied(self, totals: list[Partial]) -> list[Any]:
        """Apply the totals to the variables; return the operations that do."""
        graph = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        one, last = totals[-1]["one"], totals[-1]
        with entered(None):
            for meeting, total in zip(self._meetings, totals, strict=False):
                if meeting.update is not None:
                    self._update(meeting, total, one)
            for name, variable in self._assigned.named.items():
                (variable.assign if is_new(name) else variable.assign_add)(own(last[name], one))
        return [one, *graph.get_operations()[start:]]

    def _update(self, meeting: MergePoint, total: Partial, one: Any) -> None:
        assert meeting.update is not None
        leaves = meeting.leaves(total)
        meeting.update.apply(scaled(leaves, one) if meeting.update.kernel is None else leaves)

    def _traced(self, earlier: list[Partial], specs: list[Any]) -> Any:
        """Return what computes a replica's partial of a round, and what it returns beyond single numbers."""
        number = len(earlier)
        replica = tf.TensorSpec((), tf.int64)
        inner, trace = self._trace(replica, earlier, specs)
        if trace.ended and trace.resumes(inner.graph):
            self._rounds.leave(number)
            inner, trace = self._trace(replica, earlier, specs)
        if not trace.ended:
            self._rounds.leave(number)
        if self._meeting is not None and number == len(self._meetings):
            self._meetings.append(self._meeting)
        tf_random_ops.refuse_random_operations(inner.graph)
        updates = [meeting.update for meeting in self._meetings[:number] if meeting.update is not None]
        updated = [variable for update in updates for variable in natives(update.changed)]
        # The round's own update would not see what the function assigns before it.
        own_changes = [] if trace.update is None else natives(trace.update.changed)
        refuse_assignments(inner.graph, [*updated, *own_changes], trace.places.made)
        variables = [*assigned(inner.graph), *summed_on_read(inner.graph.variables)]
        refuse_other_changes(inner.graph, variables)
        found = AssignedVariables.of_function(variables, updated, is_merged)
        self._draws = self._draws or bool(found.counters)
        if trace.ended:
            self._assigned = found

        def compute(replica: Any, earlier: Any, examples: Any, *given: Any) -> Any:
            return self._computed(inner, found, trace.ended, replica, earlier, examples, *given)

        return traced(compute, False, replica, earlier, tf.TensorSpec((), tf.bool), *specs)

    def _trace(self, replica: Any, earlier: list[Partial], specs: list[Any]) -> tuple[Any, RoundTrace]:
        trace = RoundTrace()

        def step(replica: Any, earlier: Any, *given: Any) -> Any:
            return self._step(trace, replica, earlier, *given)

        return traced(tf_random_ops.stateless(step), False, replica, earlier, *specs), trace

    def _step(self, trace: RoundTrace, replica: Any, earlier: list[Partial], *given: Any) -> Any:
        """Run the function; return (what it brings to the round's meeting, its results)."""
        trace.places = UpdateOperations()

        def repeat(index: int) -> None:
            update = self._meetings[index].update
            assert update is not None
            with trace.places.making(), entered(None), tf_random_ops.drawn_from(None):
                update.apply(self._meetings[index].leaves(earlier[index]))

        def noted(update: Update) -> None:
            trace.places.note()
            if not update.optimizer.built:
                with tf.init_scope(), entered(None):
                    update.optimizer.build(update.variables)

        def through(
            leaves: Tensors, meet: Callable[[Tensors], Tensors], gradient: Callable[[Tensors], Tensors]
        ) -> Tensors:
            # The meeting must be in the function's own graph.
            trace.places.check()
            return with_gradient(leaves, meet, gradient)

        number = len(earlier)
        merges = RunMerges(
            number,
            self._rounds.leaves(number),
            self._meetings,
            earlier,
            repeat,
            noted,
            replica,
            self._replicas,
            through,
        )
        args, kwargs = self._filled(given)
        results: list[Any] = []
        trace.ended = False
        with entered(Replica(replica, merges)), scaled_losses(self._replicas), suppress(Left):
            results = self._taken(self._function(*args, **kwargs))
            trace.ended = True
        trace.update, self._meeting = merges.update, merges.meeting
        return {name: tf.convert_to_tensor(leaf) for name, leaf in merges.partial.items()}, results

    def _filled(self, given: Sequence[Any]) -> Any:
        """Return the function's arguments, with `given` in the places of what replicas are given."""
        own_values, shared = iter(given[: len(self._own)]), iter(given[len(self._own) :])

        def value(leaf: Any) -> Any:
            if isinstance(leaf, SymbolicPerReplica):
                return next(own_values)
            return next(shared) if isinstance(leaf, tf.Tensor) else leaf

        return keras.tree.pack_sequence_as(self._arguments, [value(leaf) for leaf in self._leaves])

    def _taken(self, result: Any) -> list[Any]:
        self._result = keras.tree.map_structure(lambda leaf: None if leaf is None else True, result)
        tensors = [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(result) if leaf is not None]
        self._outputs = [spec_of(tensor) for tensor in tensors]
        return tensors

    def _computed(
        self,
        inner: Any,
        variables: AssignedVariables,
        ended: bool,
        replica: Any,
        earlier: Any,
        examples: Any,
        *given: Any,
    ) -> Any:
        """Return a replica's partial and results; restore what the function assigns."""
        with variables.of(replica, sums_so_far=True) as changes:
            partial, results = inner(replica, earlier, *given)
            partial = dict(partial)
            if ended:
                partial |= changes(tf.where(examples, tf.constant(1.0 / self._replicas, tf.float64), 0))
                numbers = [(i, leaf) for i, leaf in enumerate(results) if spec_of(leaf).is_number]
                partial |= {f"{SCALAR}{i}": leaf for i, leaf in numbers}
        return partial, [leaf for leaf in results if not spec_of(leaf).is_number]


def _zeros(tensor: Any) -> Any:
    """Return zeros like a tensor of a graph; None where its shape is not known."""
    if not tensor.shape.is_fully_defined():
        return None
    return np.zeros(tensor.shape.as_list(), tensor.dtype.as_numpy_dtype)
