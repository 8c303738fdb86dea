"""What each replica has or has computed: values that lie with the host, and the tickets that stand for them.

A graph of TensorFlow is made once, but which replicas a worker computes may change while it is used. So a
graph never holds the values of certain replicas: it holds the number of a ticket, and asks for the values
where it computes a replica.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

from lockstep.errors import DataError, ModelError

Object = TypeVar("Object")

_KEPT = 4
"""How many of a shelf's values live on though nothing refers to them but a number in a graph."""


class Spec(NamedTuple):
    """What is known of a value before it is there: the name of its dtype; sizes, None where they differ."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def is_number(self) -> bool:
        """Whether it is one number, of a dtype whose bits can be added up as those of an integer."""
        return self.shape == () and self.dtype not in ("string", "complex128")


class Values(Protocol):
    """One nest of leaves for each replica."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """What is known of the leaves, of all replicas."""

    def of(self, replica: int) -> Sequence[Any]:
        """Return the leaves of a replica, as arrays of NumPy or of the backend.

        Raises:
            DataError: this worker cannot know them.
        """

    def leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica.

        Raises:
            DataError: this worker cannot know it.
        """

    def examples(self, replica: int) -> int | None:
        """Return how many examples a replica has; None where its values are no examples."""

    def check(self) -> bytes:
        """Return bytes that are equal on all workers that have the same values; none where they differ."""


def is_empty(inputs: Iterable[Values], replica: int) -> bool:
    """Whether a replica has inputs, but no examples in any of them: it computes on zero rows."""
    counts = [values.examples(replica) for values in inputs]
    counts = [count for count in counts if count is not None]
    return bool(counts) and not any(counts)


@dataclass(frozen=True)
class Known:
    """Values that lie ready.

    Attributes:
        specs: of the leaves.
        columns: for each leaf, the value of each replica that is known here.
    """

    specs: tuple[Spec, ...]
    columns: tuple[Mapping[int, Any], ...]

    def of(self, replica: int) -> Sequence[Any]:
        """Return the leaves of a replica.

        Raises:
            DataError: another worker has them.
        """
        return [self.leaf(position, replica) for position in range(len(self.columns))]

    def leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica.

        Raises:
            DataError: another worker has it.
        """
        if replica not in self.columns[position]:
            raise DataError(
                f"the value of replica {replica} is on another worker: use strategy.reduce or "
                "strategy.gather to bring it here"
            )
        return self.columns[position][replica]

    def examples(self, replica: int) -> int | None:
        """Values are no examples."""
        return None

    def check(self) -> bytes:
        """Each replica may have its own."""
        return b""


def lost(replica: int) -> NoReturn:
    """Raise DataError: the worker that had a replica's values is gone, and with it the values."""
    raise DataError(
        f"the value of replica {replica} was on the lost worker; reduce what strategy.run "
        "returns before anything else changes"
    )


@dataclass(frozen=True)
class Returned(Known):
    """What replicas have returned.

    Attributes:
        empty: the replicas that had no examples.
        data: bytes that are equal on all workers whose replicas have computed from the same data.
        again: computes what a replica has returned that was on another worker; returns its leaves.
    """

    empty: frozenset[int] = frozenset()
    data: bytes = b""
    again: Callable[[int], Sequence[Any]] = lost

    def brought(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica of this worker.

        Raises:
            DataError: another worker had it, which was lost.
        """
        known = self.columns[position]
        return known[replica] if replica in known else self.again(replica)[position]

    def examples(self, replica: int) -> int | None:
        """Return 0 for a replica that was empty."""
        return 0 if replica in self.empty else None

    def check(self) -> bytes:
        """Return what the replicas computed from."""
        return self.data


class Registry(Generic[Object]):
    """Objects that graphs know by their numbers; one that nothing else refers to is gone.

    Args:
        gone: what to say of an object that is gone.
    """

    def __init__(self, gone: str) -> None:
        self._gone = gone
        self._numbers = itertools.count(1)
        self._objects: WeakValueDictionary[int, Object] = WeakValueDictionary()

    def add(self, one: Object) -> int:
        """Return the number of a new object."""
        number = next(self._numbers)
        self._objects[number] = one
        return number

    def find(self, number: int) -> Object:
        """Return the object of a number.

        Raises:
            DataError: it is gone.
        """
        found = self._objects.get(number)
        if found is None:
            raise DataError(self._gone)
        return found


class Shelf:
    """Where values of one origin lie: those that something refers to, and the last few."""

    def __init__(self) -> None:
        self.number = _shelves.add(self)
        self._values: Registry[_Kept] = Registry(
            "the values of an earlier step are no longer kept: use what an iterator or strategy.run gives "
            "in the next few steps"
        )
        self._last: OrderedDict[int, _Kept] = OrderedDict()

    def put(self, values: Values) -> int:
        """Take `values`; return their ticket."""
        kept = _Kept(values, self)
        ticket = self._values.add(kept)
        self._last[ticket] = kept
        if len(self._last) > _KEPT:
            self._last.popitem(last=False)
        return ticket

    def kept(self, ticket: int) -> "_Kept":
        """Return what keeps the values of a ticket alive as long as it is referred to.

        Raises:
            DataError: they are gone.
        """
        return self._values.find(ticket)

    @staticmethod
    def numbered(number: int) -> "Shelf":
        """Return the shelf of a number.

        Raises:
            DataError: it is gone.
        """
        return _shelves.find(number)


_shelves: Registry[Shelf] = Registry(
    "the source of these values no longer exists: keep a reference to the dataset or its iterator"
)


class _Kept:
    """Values, so that they can be referred to weakly; whoever has them can find them by their ticket."""

    def __init__(self, values: Values, shelf: Shelf) -> None:
        self.values = values
        self._shelf = shelf


class DistributedValues:
    """One value per replica; never a tensor, even if a worker computes a single replica."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError, because it is ambiguous which of the values is meant.

        This also holds if this worker has one replica: with fewer workers, or after a loss, it has several.
        """
        raise ModelError(
            "a PerReplica is used like a tensor, but it holds a value for each replica: add the values "
            'up with strategy.reduce("SUM", value), average them with strategy.reduce("MEAN", value), join '
            "rows with strategy.gather(value, axis=0), get those of this worker with "
            "strategy.experimental_local_results(value), or give it to strategy.run, which passes each "
            "replica its own"
        )

    numpy = item = __array__ = __jax_array__ = __float__ = __int__ = __getitem__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __matmul__ = __rmatmul__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError: a PyTorch function needs a tensor."""
        cls._refuse(None)  # type: ignore[arg-type]

    def __format__(self, spec: str) -> str:
        """Return the text that `print` shows; a format spec is refused."""
        return self._refuse() if spec else str(self)


def text_of(replicas: Sequence[int], value: Callable[[int], Any]) -> str:
    """Return what `print` shows of a PerReplica: the values of this worker's replicas, as TensorFlow does."""
    lines = []
    for replica in replicas:
        try:
            lines.append(f"  {replica}: {value(replica)!r}")
        except DataError as error:
            lines.append(f"  {replica}: {error}")
    return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


class PerReplica(DistributedValues):
    """One leaf of what each replica has.

    Attributes:
        source: the values of all leaves.
        leaf: the position among them.
        owned: the replicas of this worker when the value was made.
    """

    def __init__(self, source: Values, leaf: int, owned: Sequence[int]) -> None:
        self.source = source
        self.leaf = leaf
        self.owned = tuple(owned)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in their order."""
        return tuple(self.source.leaf(self.leaf, replica) for replica in self.owned)

    def __repr__(self) -> str:
        return text_of(self.owned, lambda replica: self.source.leaf(self.leaf, replica))
