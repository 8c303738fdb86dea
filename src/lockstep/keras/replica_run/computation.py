"""One replica's computation of a function that runs eagerly: what it brings to a round of a run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.assignments import heard_by
from lockstep.keras.backends.contract import Total
from lockstep.keras.backends.eager import Eager
from lockstep.keras.backends.losses import scaled_losses
from lockstep.keras.backends.multi_update import Left, Rounds, Unknown, Update, hidden
from lockstep.keras.backends.state_changes import KERAS_SEED, StateKind, in_sum, kind_by_itself
from lockstep.keras.backends.steps import refuse_integer_state
from lockstep.keras.per_replica import DistributedValues, Values, is_empty
from lockstep.keras.replica_run.merges import MergePoint, RunMerges
from lockstep.keras.replica_run.replica import Replica, entered
from lockstep.keras.seeds import key_of_replica, seed_of_replica
from lockstep.keras.synchronization import SCALAR

Array = npt.NDArray[Any]


class RunChanges:
    """The variables that one computation assigns; an `lockstep.keras.assignments.Listener`.

    Args:
        eager: the backend.
        prepared: metrics and seeds that are known to be assigned.

    Attributes:
        late: metrics and seeds that were assigned without having been prepared.
        made_and_assigned: whether variables were assigned that the computation itself has made: perhaps a
            layer's, which was built only now and will be there the next time.
    """

    def __init__(self, eager: Eager, prepared: Iterable[Any]) -> None:
        self._eager = eager
        self._prepared = {id(variable): variable for variable in prepared}
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._starts: dict[int, Array] = {}
        self._assigned: dict[int, tuple[StateKind, Any]] = {}
        self._made: dict[int, Any] = {}
        self._updated: dict[int, Any] = {}
        self._hidden: frozenset[int] = frozenset()
        self.late: list[Any] = []
        self.made_and_assigned = False

    @contextmanager
    def of(self, replica: int) -> Iterator[None]:
        """Within the block variables are a replica's; afterwards they have their values from before."""
        try:
            for variable in self._prepared.values():
                self._keep(variable)
                start = np.array(self._eager.concrete(variable._value))
                if kind_of(variable) == "seed":
                    start = key_of_replica(start, replica)
                elif replica:
                    # Replica 0 speaks for what was added up before: for a reset, or where the sum is used.
                    start = np.zeros_like(start)
                self._starts[id(variable)] = start
                variable.assign(start)
            yield
        finally:
            with heard_by(None):
                for variable, value in self._kept.values():
                    variable.assign(value)

    def made(self, variable: Any) -> None:
        """Note a variable whose values are the computation's own affair."""
        self._made[id(variable)] = variable

    def assigned(self, variable: Any) -> None:
        """Keep the value that a variable has before it is assigned for the first time."""
        key = id(variable)
        if key in self._hidden:
            raise Left
        if key in self._made:
            if getattr(variable, "_value", None) is not None:
                self._keep(variable)
                self.made_and_assigned = True
            return
        if key in self._assigned:
            return
        if key in self._updated:
            refuse_weight(variable)
        kind = kind_of(variable)
        self._assigned[key] = kind, variable
        if key in self._prepared:
            return
        self._keep(variable)
        if kind in ("metric", "seed"):
            self.late.append(variable)

    @contextmanager
    def updating(self, update: Update) -> Iterator[None]:
        """Within the block an update is made for the rest of the computation."""
        with heard_by(None), entered(None):
            if not update.optimizer.built:
                update.optimizer.build(update.variables)
            for variable in update.changed:
                self._keep(variable)
                self._updated[id(variable)] = variable
            yield

    def hide(self, update: Update) -> AbstractContextManager[None]:
        """Within the block, whoever wants what an update would have changed leaves the function."""
        self._hidden = frozenset(id(variable) for variable in update.changed)
        return hidden(update)

    @property
    def hides(self) -> bool:
        """Whether there are variables that nobody is to see."""
        return bool(self._hidden)

    def found(self, replica: int, weight: float) -> dict[str, tuple[Any, Array]]:
        """Return the variables that were assigned, and what was done to them, in the form that adds up.

        Args:
            replica: which has done it.
            weight: its part in the mean of the replicas' changes; 0 if it had no examples.
        """
        found = {}
        for i, (kind, variable) in enumerate(self._assigned.values()):
            end = np.asarray(self._eager.concrete(variable._value))
            found[f"{kind}/{i}/{variable.path}"] = (
                variable,
                self._change(kind, variable, end, replica, weight),
            )
        return found

    def _change(self, kind: StateKind, variable: Any, end: Array, replica: int, weight: float) -> Array:
        start = self._starts.get(id(variable))
        if start is None:
            start = np.asarray(self._eager.concrete(self._kept[id(variable)][1]))
        return np.array(in_sum(kind, start, end, replica, np.asarray(weight, start.dtype), np))

    def _keep(self, variable: Any) -> None:
        if id(variable) not in self._kept:
            self._kept[id(variable)] = variable, self._eager.kept(variable)


def kind_of(variable: Any) -> StateKind:
    """Decide what is done with a variable that a function assigns.

    Raises:
        ModelError: there is nothing right to do with it.
    """
    if (kind := kind_by_itself(variable.aggregation, KERAS_SEED in variable.name)) is not None:
        return kind
    if variable.trainable:
        refuse_weight(variable)
    if not keras.backend.is_float_dtype(variable.dtype):
        refuse_integer_state(variable)
    return "layer"


def refuse_weight(variable: Any) -> NoReturn:
    """Raise ModelError: a function changes a weight by itself."""
    raise ModelError(
        f"the function passed to strategy.run assigns the weight {variable.path!r} itself, and replicas "
        "may not agree about its value; weights change through an optimizer's apply. Keep derived values "
        "in a variable with trainable=False, whose changes are averaged, or assign it after "
        "strategy.run"
    )


ZERO_ROWS = (
    "lockstep: replica {replica} has no examples in this batch, which has fewer rows than there are replicas "
    "({replicas}); it computes on zero rows, as under tf.distribute: drop such a batch "
    "(drop_remainder=True), or make the function accept zero rows"
)


@dataclass
class KnownFunction:
    """What earlier computations of a function have shown.

    Attributes:
        function: which.
        rounds: that it takes.
        prepared: metrics and seeds that it assigns.
        completed: whether it has come to its end before.
    """

    function: Any
    rounds: Rounds = field(default_factory=Rounds)
    prepared: list[Any] = field(default_factory=list)
    completed: bool = False


@dataclass
class ReplicaExecution:
    """One `strategy.run`.

    Attributes:
        known: of its function.
        arguments: of the function: a pair of positional ones and others.
        seed: random numbers follow from it.
        inputs: the values that each replica has its own of.
        meetings: of the rounds that have begun.
        nest: the function's result.
        outputs: the leaves, other than None, of what each replica has returned that was computed here.
        changed: the variables that the function assigns, by the names of their changes.
    """

    known: KnownFunction
    arguments: tuple[Sequence[Any], Mapping[str, Any]]
    seed: int
    inputs: Sequence[Values]
    meetings: list[MergePoint] = field(default_factory=list)
    nest: Any = None
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)

    def take(self, nest: Any, number: int, outputs: list[Any]) -> None:
        """Take what replica `number` has returned."""
        if self.outputs:
            try:
                keras.tree.assert_same_structure(self.nest, nest)
            except (TypeError, ValueError) as error:
                raise ModelError(f"replicas return nests of different structures: {error}") from error
        self.nest = nest
        self.outputs[number] = outputs

    def note(self, found: Mapping[str, tuple[Any, Any]]) -> None:
        """Note the variables that a replica has assigned."""
        for name, (variable, _) in found.items():
            if self.changed.setdefault(name, variable) is not variable:
                raise ModelError(
                    f"replicas assign different variables of the same name, {variable.path!r}: the function "
                    "passed to strategy.run must take the same path on all replicas"
                )


class ReplicaComputation:
    """Computes functions for one replica after the other.

    Args:
        eager: the backend.
        replicas: R.
    """

    def __init__(self, eager: Eager, replicas: int) -> None:
        self._eager = eager
        self._replicas = replicas

    def compute(self, this: ReplicaExecution, earlier: Sequence[Total], number: int) -> Mapping[str, Any]:
        """Compute the part of replica `number` in the round after `earlier`."""
        while True:
            if (computed := self._attempt(this, earlier, number)) is not None:
                return computed

    def _attempt(
        self, this: ReplicaExecution, earlier: Sequence[Total], number: int
    ) -> dict[str, Any] | None:
        """Compute a replica's part; None if this has shown how it must be computed."""
        rounds = this.known.rounds
        changes = RunChanges(self._eager, this.known.prepared)
        seed = seed_of_replica(this.seed, number)
        with (
            changes.of(number),
            heard_by(changes),
            self._eager.apart(seed),
            scaled_losses(self._replicas),
        ):
            merges, outputs = self._called(this, changes, earlier, number)
            if changes.late or (changes.made_and_assigned and not this.known.completed):
                this.known.prepared += changes.late
                this.known.completed = True
                return None
            if outputs is None and not rounds.leaves(len(earlier)):
                rounds.leave(len(earlier))
                if merges.meeting is None or merges.meeting.update is not None:
                    return None
            if merges.meeting is not None and len(this.meetings) == len(earlier):
                this.meetings.append(merges.meeting)
            if outputs is None or not rounds.complete(len(earlier)):
                return merges.partial
            this.known.completed = True
            found = changes.found(number, 0.0 if is_empty(this.inputs, number) else 1.0 / self._replicas)
            this.note(found)
            computed = merges.partial | {name: change for name, (_, change) in found.items()}
            return computed | self._scalars(outputs) if computed or earlier else {}

    def _called(
        self, this: ReplicaExecution, changes: RunChanges, earlier: Sequence[Total], number: int
    ) -> tuple[RunMerges, list[Any] | None]:
        """Call the function; return what it has met for, and its results, if it has come to its end."""

        def repeat(index: int) -> None:
            update = this.meetings[index].update
            assert update is not None
            with changes.updating(update):
                self._eager.apply(update, this.meetings[index].leaves(earlier[index]))

        outputs: list[Any] | None = None
        with ExitStack() as stack:
            merges = RunMerges(
                len(earlier),
                this.known.rounds.leaves(len(earlier)),
                this.meetings,
                [self._tensors(*pair) for pair in zip(this.meetings, earlier, strict=False)],
                repeat,
                lambda update: stack.enter_context(changes.hide(update)),
                number,
                self._replicas,
                self._eager.through,
            )
            args, kwargs = self._arguments_of(this, number)
            stack.enter_context(entered(Replica(number, merges)))
            try:
                with suppress(Left):
                    nest = this.known.function(*args, **kwargs)
                    outputs = [self._result(leaf) for leaf in keras.tree.flatten(nest) if leaf is not None]
            except Exception as error:
                # Not everything that is given an unknown value asks for it.
                names = (Unknown.__name__, "__jax_array__")
                asks = isinstance(error, TypeError | ValueError) and any(name in str(error) for name in names)
                if not changes.hides or not asks:
                    if is_empty(this.inputs, number):
                        error.add_note(ZERO_ROWS.format(replica=number, replicas=self._replicas))
                    raise
        if outputs is not None:
            this.take(nest, number, outputs)
        return merges, outputs

    def _tensors(self, meeting: MergePoint, total: Total) -> Mapping[str, Any]:
        """Return a total as the function wants it; that of an update it does not see."""
        return total if meeting.update else {name: self._eager.own(array) for name, array in total.items()}

    def _arguments_of(self, this: ReplicaExecution, number: int) -> Any:
        leaves: dict[int, Sequence[Any]] = {}

        def own(leaf: Any) -> Any:
            if (origin := origin_of(leaf)) is None:
                return leaf
            source, position = origin
            if id(source) not in leaves:
                leaves[id(source)] = source.of(number)
            return self._eager.own(leaves[id(source)][position])

        return keras.tree.map_structure(own, this.arguments)

    def _result(self, leaf: Any) -> Any:
        """Return a leaf of a function's result as nobody can change it any more."""
        if isinstance(leaf, keras.Variable):
            leaf = leaf.value
        if isinstance(leaf, Unknown):
            raise Left
        if isinstance(leaf, bool | int | float | complex):
            leaf = keras.ops.convert_to_tensor(leaf)
        return self._eager.own(leaf) if is_array(leaf) else leaf

    def _scalars(self, outputs: Sequence[Any]) -> dict[str, Any]:
        return {
            f"{SCALAR}{i}": leaf for i, leaf in enumerate(outputs) if is_array(leaf) and not len(leaf.shape)
        }


def origin_of(leaf: Any) -> tuple[Values, int] | None:
    """Return the values that a PerReplica, of whichever kind, is a leaf of, and which; None for another."""
    return (leaf.source, leaf.leaf) if isinstance(leaf, DistributedValues) else None  # type: ignore[attr-defined]


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a nest is an array or a tensor."""
    return isinstance(leaf, np.ndarray | np.generic) or bool(keras.ops.is_tensor(leaf))
