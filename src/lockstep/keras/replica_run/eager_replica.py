"""One replica's eager computation of a function of `strategy.run`, for one round."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.assignments import observed_by
from lockstep.keras.backends.contract import Total
from lockstep.keras.backends.eager_contract import EagerBackend
from lockstep.keras.backends.losses import scaled_losses
from lockstep.keras.backends.multi_update import EndOfRound, RoundCount, UnknownValue, Update, hidden
from lockstep.keras.backends.state_changes import StateKind, contribution, declared_kind
from lockstep.keras.per_replica import DistributedValues, Values, is_empty
from lockstep.keras.private.common import KERAS_SEED, stored_value
from lockstep.keras.python_replicas import PythonOfReplicas
from lockstep.keras.replica_run.merges import Merge, Replica, RoundMerger, computing_as
from lockstep.keras.replica_run.named_arrays import NamedArrays
from lockstep.keras.rounds import SCALAR
from lockstep.keras.seeds import key_of_replica, seed_of_replica

Array = npt.NDArray[Any]


class VariableChanges:
    """Tracks the variables that one computation assigns; a `VariableObserver`.

    Args:
        backend: the backend on which the function runs.
        prepared: metrics and seeds that the function is known to assign.

    Attributes:
        late: the metrics and seeds that the function has assigned although they were not prepared.
        assigned_new: whether the function has assigned variables that it has created, such as those of a
            layer that it has built. They will exist the next time.
    """

    def __init__(self, backend: EagerBackend, prepared: Iterable[Any]) -> None:
        self._backend = backend
        self._prepared = {id(variable): variable for variable in prepared}
        self._before: dict[int, tuple[Any, Any]] = {}
        self._starts: dict[int, Array] = {}
        self._assigned: dict[int, tuple[StateKind, Any]] = {}
        self._created: dict[int, Any] = {}
        self._updated: dict[int, Any] = {}
        self._hidden: frozenset[int] = frozenset()
        self.late: list[Any] = []
        self.assigned_new = False

    @contextmanager
    def as_replica(self, replica: int) -> Iterator[None]:
        """Within the block, variables have a replica's values; afterwards, they have their old values."""
        try:
            for variable in self._prepared.values():
                self._save(variable)
                start = np.array(self._backend.to_numpy(stored_value(variable)))
                if kind_of(variable) == "seed":
                    start = key_of_replica(start, replica)
                elif replica:
                    # Replica 0 contributes earlier sums, which the function may use or reset.
                    start = np.zeros_like(start)
                self._starts[id(variable)] = start
                variable.assign(start)
            yield
        finally:
            with observed_by(None):
                for variable, value in self._before.values():
                    variable.assign(value)

    def on_create(self, variable: Any) -> None:
        """Note a variable that belongs only to the computation."""
        self._created[id(variable)] = variable

    def on_assign(self, variable: Any) -> None:
        """Save the value of a variable before its first assignment."""
        key = id(variable)
        if key in self._hidden:
            raise EndOfRound
        if key in self._created:
            if stored_value(variable) is not None:
                self._save(variable)
                self.assigned_new = True
            return
        if key in self._assigned:
            return
        if key in self._updated:
            refuse_weight(variable)
        kind = kind_of(variable)
        self._assigned[key] = kind, variable
        if key in self._prepared:
            return
        self._save(variable)
        if kind in ("metric", "seed"):
            self.late.append(variable)

    @contextmanager
    def updating(self, update: Update) -> Iterator[None]:
        """Within the block, make an update that lasts until the end of the computation."""
        with observed_by(None), computing_as(None):
            if not update.optimizer.built:
                update.optimizer.build(update.variables)
            for variable in update.changed:
                self._save(variable)
                self._updated[id(variable)] = variable
            yield

    def hide(self, update: Update) -> AbstractContextManager[None]:
        """Within the block, any use of the variables that an update would have changed ends the round."""
        self._hidden = frozenset(id(variable) for variable in update.changed)
        return hidden(update)

    @property
    def assigned(self) -> list[Any]:
        """The variables that the computation has assigned, except those that updates change."""
        return [variable for _, variable in self._assigned.values()]

    @property
    def hides_variables(self) -> bool:
        """Whether `hide` has hidden any variables."""
        return bool(self._hidden)

    def contributions(self, replica: int, weight: float) -> dict[str, tuple[Any, Array]]:
        """Return the assigned variables with their changes in a form that can be summed, by name.

        Args:
            replica: the replica that has computed.
            weight: its share in the mean of the replicas' changes; 0 if it had no examples.
        """
        contributed = {}
        for i, (kind, variable) in enumerate(self._assigned.values()):
            end = np.asarray(self._backend.to_numpy(stored_value(variable)))
            contributed[f"{kind}/{i}/{variable.path}"] = (
                variable,
                self._contribution(kind, variable, end, replica, weight),
            )
        return contributed

    def _contribution(self, kind: StateKind, variable: Any, end: Array, replica: int, weight: float) -> Array:
        start = self._starts.get(id(variable))
        if start is None:
            start = np.asarray(self._backend.to_numpy(self._before[id(variable)][1]))
        return np.array(contribution(kind, start, end, replica, np.asarray(weight, start.dtype), np))

    def _save(self, variable: Any) -> None:
        if id(variable) not in self._before:
            self._before[id(variable)] = variable, self._backend.saved_value(variable)


def kind_of(variable: Any) -> StateKind:
    """Return how the replicas' values of a variable that a function assigns are combined.

    Raises:
        ModelError: the variable is a weight.
    """
    if (kind := declared_kind(variable.aggregation, KERAS_SEED in variable.name)) is not None:
        return kind
    if variable.trainable:
        refuse_weight(variable)
    return "layer" if keras.backend.is_float_dtype(variable.dtype) else "equal"


def refuse_weight(variable: Any) -> NoReturn:
    """Raise ModelError: a function assigns a weight itself."""
    raise ModelError(
        f"the function passed to strategy.run assigns the weight {variable.path!r} itself, and replicas "
        "may not agree about its value; weights change through an optimizer's apply. Keep derived values "
        "in a variable with trainable=False, whose changes are averaged, or assign it after "
        "strategy.run"
    )


ZERO_ROWS = (
    "lockstep: replica {replica} has no examples in this batch, which has fewer rows than there are replicas "
    "({replicas}); it computes on zero rows, as in tf.distribute: drop such a batch "
    "(drop_remainder=True), or make the function accept zero rows"
)


@dataclass
class FunctionProfile:
    """The facts about a function that earlier computations have shown.

    Attributes:
        function: the function.
        python: the attributes that it changes.
        arrays: the arrays that it names.
        rounds: the rounds that it takes.
        prepared: the metrics and seeds that it assigns.
        completed: whether it has already run to its end.
    """

    function: Any
    python: PythonOfReplicas
    arrays: NamedArrays
    rounds: RoundCount = field(default_factory=RoundCount)
    prepared: list[Any] = field(default_factory=list)
    completed: bool = False


@dataclass
class EagerExecution:
    """One `strategy.run`.

    Attributes:
        profile: the profile of the function.
        arguments: its positional arguments and its keyword arguments.
        seed: determines random numbers.
        inputs: the values among the arguments that differ between replicas.
        merges: the merges of the rounds that have begun.
        nest: the function's result.
        outputs: the leaves, except None, that the replicas computed here have returned.
        changed: the variables that the function assigns, by the names of their changes.
    """

    profile: FunctionProfile
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    seed: int
    inputs: Sequence[Values]
    merges: list[Merge] = field(default_factory=list)
    nest: Any = None
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    def add_result(self, nest: Any, replica: int, outputs: list[Any]) -> None:
        """Add the result of a replica.

        Raises:
            ModelError: replicas return nests of different structures.
        """
        if self.outputs:
            try:
                keras.tree.assert_same_structure(self.nest, nest)
            except (TypeError, ValueError) as error:
                raise ModelError(f"replicas return nests of different structures: {error}") from error
        self.nest = nest
        self.outputs[replica] = outputs

    def add_changes(self, contributed: Mapping[str, tuple[Any, Any]]) -> None:
        """Add the variables that a replica has assigned.

        Raises:
            ModelError: replicas assign different variables.
        """
        for name, (variable, _) in contributed.items():
            if self.changed.setdefault(name, variable) is not variable:
                raise ModelError(
                    f"replicas assign different variables of the same name, {variable.path!r}: the function "
                    "passed to strategy.run must take the same path on all replicas"
                )


class ReplicaComputation:
    """Computes functions, one replica at a time.

    Args:
        backend: the backend on which the functions run.
        replicas: R.
    """

    def __init__(self, backend: EagerBackend, replicas: int) -> None:
        self._backend = backend
        self._replicas = replicas

    def compute(self, execution: EagerExecution, earlier: Sequence[Total], replica: int) -> Mapping[str, Any]:
        """Return a replica's partial in the round that follows the totals `earlier`.

        Raises:
            ModelError: the changes that the function makes cannot be combined over replicas.
        """
        while True:
            computed = self._attempt(execution, earlier, replica)
            execution.profile.arrays.refuse_changes()
            if computed is not None:
                return computed
            execution.profile.python.undo()

    def _attempt(
        self, execution: EagerExecution, earlier: Sequence[Total], replica: int
    ) -> dict[str, Any] | None:
        """Return a replica's partial, or None if it must compute again because the profile has changed."""
        rounds = execution.profile.rounds
        changes = VariableChanges(self._backend, execution.profile.prepared)
        seed = seed_of_replica(execution.seed, replica)
        with (
            changes.as_replica(replica),
            observed_by(changes),
            self._backend.isolated(seed, lambda: changes.assigned),
            scaled_losses(self._replicas),
        ):
            merger, outputs = self._call(execution, changes, earlier, replica)
            if changes.late or (changes.assigned_new and not execution.profile.completed):
                execution.profile.prepared += changes.late
                execution.profile.completed = True
                return None
            if outputs is None and not rounds.ends_early(len(earlier)):
                rounds.add_after(len(earlier))
                if merger.merge is None or merger.merge.update is not None:
                    return None
            if merger.merge is not None and len(execution.merges) == len(earlier):
                execution.merges.append(merger.merge)
            if outputs is None or not rounds.is_last(len(earlier)):
                return merger.partial
            execution.profile.completed = True
            weight = 0.0 if is_empty(execution.inputs, replica) else 1.0 / self._replicas
            contributed = changes.contributions(replica, weight)
            execution.add_changes(contributed)
            computed = merger.partial | {name: change for name, (_, change) in contributed.items()}
            return computed | self._scalars(outputs) if computed or earlier else {}

    def _call(
        self, execution: EagerExecution, changes: VariableChanges, earlier: Sequence[Total], replica: int
    ) -> tuple[RoundMerger, list[Any] | None]:
        """Call the function, and return its merger, and its results if it has run to its end."""

        def repeat(index: int) -> None:
            update = execution.merges[index].update
            assert update is not None
            with changes.updating(update):
                self._backend.apply(update, execution.merges[index].leaves(earlier[index]))

        outputs: list[Any] | None = None
        with ExitStack() as stack:
            merger = RoundMerger(
                number=len(earlier),
                ends_early=execution.profile.rounds.ends_early(len(earlier)),
                earlier=execution.merges,
                totals=[self._tensors(*pair) for pair in zip(execution.merges, earlier, strict=False)],
                repeat=repeat,
                on_update=lambda update: stack.enter_context(changes.hide(update)),
                replica=replica,
                replicas=self._replicas,
                custom_gradient=self._backend.custom_gradient,
            )
            args, kwargs = self._arguments_of(execution, replica)
            stack.enter_context(computing_as(Replica(replica, merger)))
            try:
                with suppress(EndOfRound):
                    nest = execution.profile.function(*args, **kwargs)
                    outputs = [self._result(leaf) for leaf in keras.tree.flatten(nest) if leaf is not None]
            except Exception as error:
                # Some code rejects an unknown value by its type, without reading it.
                names = (UnknownValue.__name__, "__jax_array__")
                reads = isinstance(error, TypeError | ValueError) and any(
                    name in str(error) for name in names
                )
                if not changes.hides_variables or not reads:
                    if is_empty(execution.inputs, replica):
                        error.add_note(ZERO_ROWS.format(replica=replica, replicas=self._replicas))
                    raise
        if outputs is not None:
            execution.add_result(nest, replica, outputs)
        return merger, outputs

    def _tensors(self, merge: Merge, total: Total) -> Mapping[str, Any]:
        """Return a total as tensors if the function itself uses it."""
        if merge.update:
            return total
        return {name: self._backend.to_tensor(array) for name, array in total.items()}

    def _arguments_of(self, execution: EagerExecution, replica: int) -> Any:
        leaves: dict[int, Sequence[Any]] = {}

        def value_of(leaf: Any) -> Any:
            if (origin := origin_of(leaf)) is None:
                return leaf
            source, position = origin
            if id(source) not in leaves:
                leaves[id(source)] = source.of(replica)
            return self._backend.to_tensor(leaves[id(source)][position])

        return keras.tree.map_structure(value_of, execution.arguments)

    def _result(self, leaf: Any) -> Any:
        """Return a leaf of a function's result as a value that later code cannot change."""
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if isinstance(leaf, UnknownValue):
            raise EndOfRound
        if isinstance(leaf, bool | int | float | complex):
            leaf = keras.ops.convert_to_tensor(leaf)
        return self._backend.to_tensor(leaf) if is_array(leaf) else leaf

    def _scalars(self, outputs: Sequence[Any]) -> dict[str, Any]:
        return {
            f"{SCALAR}{i}": leaf for i, leaf in enumerate(outputs) if is_array(leaf) and not len(leaf.shape)
        }


def origin_of(leaf: Any) -> tuple[Values, int] | None:
    """Return the values of a PerReplica of any kind, and the position of its leaf; otherwise None."""
    return (leaf.source, leaf.leaf) if isinstance(leaf, DistributedValues) else None  # type: ignore[attr-defined]


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a nest is an array or a tensor."""
    return isinstance(leaf, np.ndarray | np.generic) or bool(keras.ops.is_tensor(leaf))
