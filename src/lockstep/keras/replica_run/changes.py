"""What one replica's computation of a function does to variables of Keras; nothing of it stays there.

The counterpart of `lockstep.keras.backends.state_changes` for functions that run eagerly: which variables one
assigns is learnt while it runs. Metrics must start from what is the replica's own, and seeds too, before the
function reads them; so where it turns out to assign one that was not prepared, it is computed again.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NoReturn

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.backends.multi_update import Left, Update, hidden
from lockstep.keras.backends.steps import refuse_integer_state
from lockstep.keras.replica_run.assignments import heard_by
from lockstep.keras.replica_run.eager import Eager
from lockstep.keras.replica_run.replica import entered

_GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio: spreads consecutive replica ids over the seeds."""

_SEED = "seed_generator_state"
"""How Keras calls the state of a generator, also of the one that serves layers without one of their own."""

Kind = Literal["metric", "seed", "first", "layer"]
Array = npt.NDArray[Any]


class RunChanges:
    """The variables that one computation assigns; an `lockstep.keras.replica_run.assignments.Listener`.

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
        self._assigned: dict[int, tuple[Kind, Any]] = {}
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
                    start = mixed(start, replica)
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

    def _change(self, kind: Kind, variable: Any, end: Array, replica: int, weight: float) -> Array:
        start = self._starts.get(id(variable))
        if start is None:
            start = np.asarray(self._eager.concrete(self._kept[id(variable)][1]))
        if kind == "layer" and not weight:
            # A mean over no examples is not a number.
            return np.zeros_like(start)
        if kind == "layer":
            # What has not changed stays, even if it is infinite.
            change = np.where(end == start, np.zeros_like(start), end - start)
            return np.asarray(change * np.asarray(weight, start.dtype))
        if kind == "metric":
            # Where replica 0 alone begins with the sum so far, the sum of all is the new one.
            return np.array(end)
        if kind == "first":
            return np.array(end) if replica == 0 else np.zeros_like(end)
        # Every replica advances its seeds by the same amount: replica 0 speaks for all.
        return np.asarray(end - start) if replica == 0 else np.zeros_like(start)

    def _keep(self, variable: Any) -> None:
        if id(variable) not in self._kept:
            self._kept[id(variable)] = variable, self._eager.kept(variable)


def is_new(name: str) -> bool:
    """Whether what adds up to `name` is a variable's new value, and not its change."""
    return name.startswith(("metric/", "first/"))


def kind_of(variable: Any) -> Kind:
    """Decide what is done with a variable that a function assigns.

    Raises:
        ModelError: there is nothing right to do with it.
    """
    if variable.aggregation == "sum":
        return "metric"
    if _SEED in variable.name:
        return "seed"
    if variable.aggregation == "only_first_replica":
        return "first"
    if variable.trainable:
        refuse_weight(variable)
    if not keras.backend.is_float_dtype(variable.dtype):
        refuse_integer_state(variable)
    return "layer"


def mixed(seed: Array, replica: int) -> Array:
    """Give each replica random numbers of its own; replica 0 keeps those that the generator gives."""
    own = np.array(seed)
    bits = own.view(f"u{own.itemsize}")
    bits[0] ^= bits.dtype.type(replica * _GOLDEN % 2**32)
    return own


def refuse_weight(variable: Any) -> NoReturn:
    """Raise ModelError: a function changes a weight by itself."""
    raise ModelError(
        f"the function passed to strategy.run assigns the weight {variable.path!r} itself, and replicas "
        "may not agree about its value; weights change through an optimizer's apply. Keep derived values "
        "in a variable with trainable=False, whose changes are averaged, or assign it after "
        "strategy.run"
    )
