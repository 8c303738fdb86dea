"""`strategy.run` for functions that run eagerly: on JAX, PyTorch and, if the script requests it, TensorFlow.

A worker computes the function for the replicas that it owns, one after the other, on the same variables. The
changes that a computation makes to them are undone, and made once from the total. See
`lockstep.keras.backends.multi_update` for functions that take several rounds.

The variables and objects that a function names are treated like a model's attributes, but a function is never
computed twice to find state out of reach.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from lockstep.keras import assignments
from lockstep.keras.backends.adapter import adapter
from lockstep.keras.backends.contract import Partial, Total
from lockstep.keras.backends.state_changes import holds_new_value
from lockstep.keras.nests import packed
from lockstep.keras.per_replica import (
    PerReplica,
    ReturnedValues,
    Spec,
    Values,
    ValueStore,
    is_empty,
    refuse_lost_value,
)
from lockstep.keras.private.common import stored_value
from lockstep.keras.python_replicas import PythonOfReplicas
from lockstep.keras.replica_run.eager_replica import (
    EagerExecution,
    FunctionProfile,
    ReplicaComputation,
    is_array,
    origin_of,
)
from lockstep.keras.replica_run.merges import Op
from lockstep.keras.replica_run.named_arrays import NamedArrays
from lockstep.keras.replica_run.results import Axis, ResultCombiner, reduced_plain
from lockstep.keras.replica_run.run_rounds import FunctionRound, RunRounds
from lockstep.keras.rounds import SCALAR, gathered_scalars
from lockstep.keras.variables import named_arrays
from lockstep.keras.worker_exchange import state_facts
from lockstep.system.notes import note
from lockstep.worker.job import Job

_MAX_PROFILES = 32
_RESULT = "result/"
"""The prefix of names of a function's results, where a computation of a replica is compared with another."""


class EagerRunner:
    """A `lockstep.keras.replica_run.runner.Runner` for functions that run eagerly."""

    def __init__(self, job: Job, next_seed: Callable[[], int]) -> None:
        self._job = job
        self._replicas = job.view.replicas
        self._backend = adapter().functions()
        self._rounds = RunRounds(job, self._backend.to_numpy, next_seed)
        self._combiner = ResultCombiner(self._rounds, self._backend.to_numpy, self._replicas)
        self._replica = ReplicaComputation(self._backend, self._replicas)
        self._profiles: OrderedDict[Any, FunctionProfile] = OrderedDict()
        self._compared: weakref.WeakSet[Any] = weakref.WeakSet()
        self._says_whole = job.settings.divided_update
        self._store = ValueStore()

    def scope(self) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute `function` for this worker's replicas, and apply the changes of all replicas."""
        name = getattr(function, "__name__", type(function).__name__)
        self._rounds.begin_run(name)
        self._rounds.compare_hosts()
        arguments = tuple(args), dict(kwargs)
        seed = self._rounds.next_seed()
        execution = EagerExecution(self._profile(function), arguments, seed, _sources(arguments))
        python = execution.profile.python
        python.begin()
        execution.profile.arrays.begin()
        totals: list[Total] = []
        while not totals or not execution.profile.rounds.is_last(len(totals) - 1):
            # The reduce of this round reuses the memory of the last total.
            totals[-1:] = [{key: array.copy() for key, array in total.items()} for total in totals[-1:]]
            last = EagerRound(self._rounds, f"strategy.run of {name}", self._replica, execution, list(totals))
            totals.append(self._rounds.total(last))
        self._apply(execution, totals)
        returned = self._returned(execution, last, totals[-1])
        python.end()
        execution.profile.arrays.end()
        self._compare(execution, last.label)
        return returned

    def reduce(self, op: Op, value: Any, axis: Axis) -> Any:
        """Return the sum or the mean over the replicas of each leaf."""
        leaves = keras.tree.flatten(value)
        origins = [origin for leaf in leaves if (origin := origin_of(leaf))]
        reduced = iter(self._combiner.reduce_all(op, origins, axis))

        def reduced_leaf(leaf: Any) -> Any:
            if origin_of(leaf):
                return self._backend.to_tensor(next(reduced))
            return reduced_plain(op, leaf, axis, self._replicas)

        return keras.tree.pack_sequence_as(
            value, [None if leaf is None else reduced_leaf(leaf) for leaf in leaves]
        )

    def gather(self, value: Any, axis: int) -> Any:
        """Return the values of all replicas of each leaf, joined along an axis."""

        def gather(leaf: Any) -> Any:
            if origin := origin_of(leaf):
                return self._backend.to_tensor(self._combiner.gather(*origin, axis))
            return leaf

        return keras.tree.map_structure(gather, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this worker's replicas, a nest like `value` for each."""
        leaves = keras.tree.flatten(value)
        owned = next(
            (leaf.owned for leaf in leaves if isinstance(leaf, PerReplica)), tuple(self._rounds.owned)
        )
        if not (keras.tree.is_nested(value) or isinstance(value, PerReplica)):
            return (value,)
        rows = ([self._leaf_of(leaf, replica) for leaf in leaves] for replica in owned)
        return tuple(keras.tree.pack_sequence_as(value, row) for row in rows)

    def per_replica(self, values: Values, store: ValueStore) -> list[Any]:
        """Return one PerReplica for each leaf of `values`."""
        return [PerReplica(values, leaf, self._rounds.owned) for leaf in range(len(values.specs))]

    def _profile(self, function: Any) -> FunctionProfile:
        """Return the profile of a function object. Two functions with the same code have two profiles."""
        key = (id(getattr(function, "__self__", None)), id(getattr(function, "__func__", function)))
        profile = self._profiles.pop(key, None) or FunctionProfile(
            function, PythonOfReplicas.of_function(function, self._backend.to_numpy), NamedArrays(function)
        )
        self._profiles[key] = profile
        if len(self._profiles) > _MAX_PROFILES:
            self._profiles.popitem(last=False)
        return profile

    def _compare(self, execution: EagerExecution, label: str) -> None:
        """Check, when an optimizer is first used, that all workers have equal weights.

        In a loop that Lockstep drives, the loop compares them.
        """
        updates = [merge.update for merge in execution.merges if merge.update]
        new = [update for update in updates if update.optimizer not in self._compared]
        if new and self._says_whole and self._job.is_chief:
            self._says_whole = False
            note("each worker computes the whole update: a function of strategy.run makes it")
        if new and not self._job.driven and len(self._job.view.workers) > 1:
            weights = [variable for update in new for variable in update.variables]
            arrays = named_arrays(weights, [variable.value for variable in weights])
            self._rounds.agree(label, state_facts(self._backend.to_numpy, arrays))
        self._compared.update(update.optimizer for update in new)

    def _apply(self, execution: EagerExecution, totals: Sequence[Total]) -> None:
        """Make the updates, and change the variables, from the totals."""
        for merge, total in zip(execution.merges, totals, strict=False):
            if merge.update is not None:
                self._backend.apply(merge.update, merge.leaves(total))
        for name, variable in execution.changed.items():
            start = 0 if holds_new_value(name) else self._backend.to_numpy(stored_value(variable))
            variable.assign(np.array(start + totals[-1][name]))

    def _returned(self, execution: EagerExecution, last: FunctionRound, total: Total) -> Any:
        """Return the function's result, with a PerReplica for each leaf that is not None."""
        # A replica that this worker only verifies is computed for another worker.
        owned = frozenset(self._rounds.owned)
        outputs = {replica: leaves for replica, leaves in execution.outputs.items() if replica in owned}
        like = next(iter(outputs.values()))
        empty = frozenset(replica for replica in self._rounds.owned if is_empty(execution.inputs, replica))
        columns: list[Mapping[int, Any]] = []
        for i, leaf in enumerate(like):
            column = {r: leaves[i] for r, leaves in outputs.items()}
            if (bits := total.get(f"{SCALAR}{i}")) is not None:
                dtype = self._backend.to_numpy(leaf).dtype
                column = dict(enumerate(gathered_scalars(bits, dtype))) | column
            columns.append(column)
        specs = tuple(self._spec(leaf) for leaf in like)
        values = (
            ReturnedValues(specs, tuple(columns), empty)
            if total or execution.merges
            else ReturnedValues(specs, tuple(columns), empty, last.check(), self._recomputation(execution))
        )
        return packed(execution.nest, self.per_replica(values, self._store))

    def _recomputation(self, execution: EagerExecution) -> Callable[[int], Sequence[Any]]:
        """Return a function that repeats replicas of a `strategy.run`, until a variable is assigned."""
        count, python = assignments.count(), execution.profile.python
        changes = python.has_changed

        def recompute(replica: int) -> Sequence[Any]:
            nonlocal count
            if assignments.count() != count or changes:
                refuse_lost_value(replica)
            if replica not in execution.outputs:
                with python.unchanged():
                    self._replica.compute(execution, (), replica)
                count = assignments.count()
            return execution.outputs[replica]

        return recompute

    def _spec(self, leaf: Any) -> Spec:
        array = self._backend.to_numpy(leaf) if is_array(leaf) else np.array(str(leaf))
        return Spec("string" if array.dtype.kind in "OSU" else array.dtype.name, array.shape)

    def _leaf_of(self, leaf: Any, replica: int) -> Any:
        if not isinstance(leaf, PerReplica):
            return leaf
        return self._backend.to_tensor(leaf.source.leaf(leaf.leaf, replica))


class EagerRound(FunctionRound):
    """The round of an eager `strategy.run` that follows the rounds with the totals `earlier`."""

    def __init__(
        self,
        rounds: RunRounds,
        label: str,
        computation: ReplicaComputation,
        execution: EagerExecution,
        earlier: Sequence[Total],
    ) -> None:
        super().__init__(rounds, label, execution.inputs, execution.seed)
        self._computation = computation
        self._execution = execution
        self._earlier = earlier

    def compute(self, replica: int) -> Partial:
        """Return a replica's partial; it leaves Python attributes unchanged."""
        execution, earlier = self._execution, self._earlier

        def run(_: int) -> Partial:
            partial = self._computation.compute(execution, earlier, replica)
            leaves = execution.outputs.get(replica, ())
            results = {f"{_RESULT}{i}": leaf for i, leaf in enumerate(leaves) if is_array(leaf)}
            return {**partial, **results}

        python = execution.profile.python
        partial = python.compute(run, replica, 0, self.label, first_round=not earlier)
        return {name: array for name, array in partial.items() if not name.startswith(_RESULT)}

    def form(self) -> str:
        """Return a text on the round's update and, in the last round, on the changes in Python."""
        profile, merges = self._execution.profile, self._execution.merges[len(self._earlier) :]
        updates = [merge.update.others for merge in merges if merge.update is not None]
        python = profile.python.form() if profile.rounds.is_last(len(self._earlier)) else ""
        return "; ".join(text for text in (python, *updates) if text)


def _sources(arguments: Any) -> list[Values]:
    """Return the values to which the leaves of arguments belong, each once."""
    origins = [origin for leaf in keras.tree.flatten(arguments) if (origin := origin_of(leaf))]
    return list({id(source): source for source, _ in origins}.values())
