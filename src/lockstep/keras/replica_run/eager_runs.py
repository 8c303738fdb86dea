"""`strategy.run` where functions run eagerly: on JAX and PyTorch, and on TensorFlow if it is told so.

A worker computes the function for each replica that it owns, one after the other, on the same variables; what
a computation does to them is undone, and made once from the total. See `keras.backends.multi_update` for
functions that take several rounds.
"""

import random
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from lockstep.keras import assignments
from lockstep.keras.backends.contract import Total
from lockstep.keras.backends.eager import Eager
from lockstep.keras.backends.state_changes import is_new
from lockstep.keras.consistency import state_facts
from lockstep.keras.nests import packed
from lockstep.keras.per_replica import PerReplica, Returned, Shelf, Spec, Values, is_empty, lost
from lockstep.keras.replica_run.computation import (
    KnownFunction,
    ReplicaComputation,
    ReplicaExecution,
    is_array,
    origin_of,
)
from lockstep.keras.replica_run.replica import Op
from lockstep.keras.replica_run.results import Results, along
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.synchronization import SCALAR, Round, gathered_scalars
from lockstep.keras.variables import named_arrays
from lockstep.worker.job import Job

_KEPT_FUNCTIONS = 32
"""How many functions are known at a time."""


class EagerRuns:
    """The runs of a process whose functions run eagerly; see `lockstep.keras.replica_run.contract.Runs`."""

    def __init__(self, job: Job) -> None:
        assignments.install()
        self._job = job
        self._replicas = job.view.replicas
        self._eager = _backend()
        self._exchange = RunRounds(job, self._eager.concrete)
        self._results = Results(self._exchange, self._eager.concrete, self._replicas)
        self._replica = ReplicaComputation(self._eager, self._replicas)
        self._functions: OrderedDict[Any, KnownFunction] = OrderedDict()
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._shelf = Shelf()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Let each replica of this worker compute `function`, and take over what all replicas have done."""
        name = getattr(function, "__name__", type(function).__name__)
        self._exchange.refuse_followers(name)
        arguments = tuple(args), dict(kwargs)
        # All workers draw the same; and who goes on from a checkpoint, or joins, has the state to draw from.
        seed = random.getrandbits(64)
        this = ReplicaExecution(self._known(function), arguments, seed, _sources(arguments))
        totals: list[Total] = []
        while not totals or not this.known.rounds.complete(len(totals) - 1):
            # The reduce of this round uses the memory of the last total again.
            totals[-1:] = [{key: array.copy() for key, array in total.items()} for total in totals[-1:]]
            what = f"strategy.run of {name}"
            this_round = self._exchange.round(
                what, partial(self._replica.compute, this, totals), this.inputs, seed
            )
            totals.append(self._exchange.total(this_round))
        self._apply(this, totals)
        returned = self._returned(this, this_round, totals[-1])
        self._compare(this, what)
        return returned

    def reduce(self, op: Op, value: Any, axis: int | None) -> Any:
        """Return the sum or the mean over the replicas of each leaf."""
        leaves = keras.tree.flatten(value)
        origins = [origin for leaf in leaves if (origin := origin_of(leaf))]
        reduced = iter(self._results.reduce_all(op, origins, axis))

        def one(leaf: Any) -> Any:
            if origin_of(leaf):
                return self._eager.own(next(reduced))
            tensor = keras.ops.convert_to_tensor(leaf)
            if axis is not None:
                tensor = along(op, tensor, axis)
            return tensor * self._replicas if op == "sum" else tensor

        return keras.tree.pack_sequence_as(value, [None if leaf is None else one(leaf) for leaf in leaves])

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along an axis."""

        def gather(leaf: Any) -> Any:
            if origin := origin_of(leaf):
                return self._eager.own(self._results.gather(*origin, axis))
            return keras.ops.concatenate([leaf] * self._replicas, axis)

        return keras.tree.map_structure(gather, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return what this worker's replicas have, one value a replica."""
        leaves = keras.tree.flatten(value)
        own = next((leaf.owned for leaf in leaves if isinstance(leaf, PerReplica)), None)
        if own is None:
            return (value,)
        rows = ([self._leaf_of(leaf, replica) for leaf in leaves] for replica in own)
        return tuple(keras.tree.pack_sequence_as(value, row) for row in rows)

    def per_replica(self, values: Values, shelf: Shelf) -> list[Any]:
        """Return one PerReplica for each leaf of `values`."""
        own = self._job.view.replicas_of(self._job.worker)
        return [PerReplica(values, leaf, own) for leaf in range(len(values.specs))]

    def _known(self, function: Any) -> KnownFunction:
        """Return what is known of a function; of several that were made from one text, each for itself."""
        key = (id(getattr(function, "__self__", None)), id(getattr(function, "__func__", function)))
        found = self._functions.pop(key, None) or KnownFunction(function)
        self._functions[key] = found
        if len(self._functions) > _KEPT_FUNCTIONS:
            self._functions.popitem(last=False)
        return found

    def _compare(self, this: ReplicaExecution, what: str) -> None:
        """Make sure, when an optimizer is first used, that all workers have equal weights.

        In a loop that Lockstep drives, the loop does.
        """
        updates = [meeting.update for meeting in this.meetings if meeting.update]
        new = [update for update in updates if update.optimizer not in self._compared]
        if new and not self._job.driven and len(self._job.view.workers) > 1:
            weights = [variable for update in new for variable in update.variables]
            arrays = named_arrays(weights, [variable.value for variable in weights])
            self._exchange.agree(what, state_facts(self._eager.concrete, arrays))
        self._compared.update(update.optimizer for update in new)

    def _apply(self, this: ReplicaExecution, totals: Sequence[Total]) -> None:
        """Make the updates, and change the variables, as all replicas have said."""
        for meeting, total in zip(this.meetings, totals, strict=False):
            if meeting.update is not None:
                self._eager.apply(meeting.update, meeting.leaves(total))
        for name, variable in this.changed.items():
            start = 0 if is_new(name) else self._eager.concrete(variable._value)
            variable.assign(np.array(start + totals[-1][name]))

    def _returned(self, this: ReplicaExecution, last: Round, total: Total) -> Any:
        """Return the function's result, with a PerReplica for each leaf that is not None."""
        outputs = this.outputs
        like = next(iter(outputs.values()))
        own = self._job.view.replicas_of(self._job.worker)
        empty = frozenset(replica for replica in own if is_empty(this.inputs, replica))
        columns: list[Mapping[int, Any]] = []
        for i, leaf in enumerate(like):
            column = {r: leaves[i] for r, leaves in outputs.items()}
            if (bits := total.get(f"{SCALAR}{i}")) is not None:
                dtype = self._eager.concrete(leaf).dtype
                column = dict(enumerate(gathered_scalars(bits, dtype))) | column
            columns.append(column)
        specs = tuple(self._spec(leaf) for leaf in like)
        values = (
            Returned(specs, tuple(columns), empty)
            if total or this.meetings
            else Returned(specs, tuple(columns), empty, last.check(()), self._again(this))
        )
        return packed(this.nest, self.per_replica(values, self._shelf))

    def _again(self, this: ReplicaExecution) -> Callable[[int], Sequence[Any]]:
        """Return what computes replicas of a run that has changed nothing, as long as nothing else has."""
        count = assignments.count()

        def again(number: int) -> Sequence[Any]:
            nonlocal count
            if assignments.count() != count:
                lost(number)
            if number not in this.outputs:
                self._replica.compute(this, (), number)
                count = assignments.count()
            return this.outputs[number]

        return again

    def _spec(self, leaf: Any) -> Spec:
        array = self._eager.concrete(leaf) if is_array(leaf) else np.array(str(leaf))
        return Spec("string" if array.dtype.kind in "OSU" else array.dtype.name, array.shape)

    def _leaf_of(self, leaf: Any, number: int) -> Any:
        return self._eager.own(leaf.source.leaf(leaf.leaf, number)) if isinstance(leaf, PerReplica) else leaf


def _backend() -> Eager:
    name = keras.backend.backend()
    if name == "jax":
        from lockstep.keras.backends.jax import EagerJax

        return EagerJax()
    if name == "torch":
        from lockstep.keras.backends.torch import EagerTorch

        return EagerTorch()
    from lockstep.keras.backends.tensorflow import EagerTensorFlow

    return EagerTensorFlow()


def _sources(arguments: Any) -> list[Values]:
    """Return the values that the leaves of arguments are of, each once."""
    origins = [origin for leaf in keras.tree.flatten(arguments) if (origin := origin_of(leaf))]
    return list({id(source): source for source, _ in origins}.values())
