"""Values that differ between replicas: the values, the store that keeps them, and `PerReplica`.

A TensorFlow graph is built once, but the replicas that a worker computes may change while it is used. So a
graph never holds the values of certain replicas: it holds a handle, a number under which a store keeps the
values, and requests them when it computes a replica.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar
from weakref import WeakValueDictionary

from lockstep.errors import DataError, ModelError

Object = TypeVar("Object")

_RECENT = 4
"""The number of a store's latest values that stay alive even if only a graph's number refers to them."""


class Spec(NamedTuple):
    """The known properties of a leaf: the name of its dtype, and its shape, with None for unknown sizes."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def is_number(self) -> bool:
        """Whether it is a single number of a dtype whose bits can be added as those of an integer."""
        return self.shape == () and self.dtype not in ("string", "complex128")


class Values(Protocol):
    """One nest of leaves for each replica."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The specs of the leaves, equal for all replicas."""

    @property
    def anywhere(self) -> bool:
        """Whether each worker can get the values of all replicas; equal on all workers."""

    def of(self, replica: int) -> Sequence[Any]:
        """Return the leaves of a replica, as arrays of NumPy or of the backend.

        Raises:
            DataError: the leaves are not available on this worker.
        """

    def is_here(self, replica: int) -> bool:
        """Whether this worker has the values of a replica, or can read them."""

    def leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica.

        Raises:
            DataError: the leaf is not available on this worker.
        """

    def examples(self, replica: int) -> int | None:
        """Return the number of examples of a replica, or None if the values are not examples."""

    def check(self) -> bytes:
        """Return bytes that are equal on all workers with the same values, or none if values may differ."""


def is_empty(inputs: Iterable[Values], replica: int) -> bool:
    """Whether a replica has inputs but no examples in any of them. Then it computes on zero rows."""
    counts = [values.examples(replica) for values in inputs]
    counts = [count for count in counts if count is not None]
    return bool(counts) and not any(counts)


@dataclass(frozen=True)
class KnownValues:
    """Values that have been computed.

    Attributes:
        specs: the specs of the leaves.
        columns: for each leaf, the values that this worker has, by replica.
    """

    specs: tuple[Spec, ...]
    columns: tuple[Mapping[int, Any], ...]

    @property
    def anywhere(self) -> bool:
        """True: a function of the script has computed the values on every worker."""
        return True

    def of(self, replica: int) -> Sequence[Any]:
        """Return the leaves of a replica.

        Raises:
            DataError: the leaves are on another worker.
        """
        return [self.leaf(position, replica) for position in range(len(self.columns))]

    def is_here(self, replica: int) -> bool:
        """Whether this worker has computed the values of a replica."""
        return all(replica in column for column in self.columns)

    def leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica.

        Raises:
            DataError: the leaf is on another worker.
        """
        if replica not in self.columns[position]:
            raise DataError(
                f"the value of replica {replica} is on another worker: use strategy.reduce or "
                "strategy.gather to bring it here"
            )
        return self.columns[position][replica]

    def examples(self, replica: int) -> int | None:
        """Return None: the values are not examples."""
        return None

    def check(self) -> bytes:
        """Return no bytes: the values may differ between workers."""
        return b""


def refuse_lost_value(replica: int) -> NoReturn:
    """Raise DataError: the value of a replica was lost with its worker."""
    raise DataError(
        f"the value of replica {replica} was on the lost worker; reduce what strategy.run "
        "returns before anything else changes"
    )


@dataclass(frozen=True)
class ReturnedValues(KnownValues):
    """Values that replicas have returned.

    Attributes:
        empty: the replicas without examples.
        data: bytes that are equal on all workers whose replicas have computed from the same data.
        recompute: computes the leaves that a replica on another worker has returned; raises DataError if it
            cannot.
    """

    empty: frozenset[int] = frozenset()
    data: bytes = b""
    recompute: Callable[[int], Sequence[Any]] = refuse_lost_value

    @property
    def anywhere(self) -> bool:
        """False, because each worker has the values of its own replicas."""
        return False

    def owned_leaf(self, position: int, replica: int) -> Any:
        """Return one leaf of a replica that this worker owns, computed again if another worker had it.

        Raises:
            DataError: the worker that had the leaf was lost, and the leaf cannot be computed again.
        """
        values = self.columns[position]
        return values[replica] if replica in values else self.recompute(replica)[position]

    def examples(self, replica: int) -> int | None:
        """Return 0 for a replica without examples, otherwise None."""
        return 0 if replica in self.empty else None

    def check(self) -> bytes:
        """Return the bytes of the data from which the replicas have computed."""
        return self.data


class Registry(Generic[Object]):
    """Numbers objects, for graphs; keeps an object only while something else refers to it.

    Args:
        gone: a message about an object that no longer exists.
    """

    def __init__(self, gone: str) -> None:
        self._gone = gone
        self._numbers = itertools.count(1)
        self._objects: WeakValueDictionary[int, Object] = WeakValueDictionary()

    def add(self, new: Object) -> int:
        """Return the number of a new object."""
        number = next(self._numbers)
        self._objects[number] = new
        return number

    def find(self, number: int) -> Object:
        """Return the object with a number.

        Raises:
            DataError: the object no longer exists.
        """
        kept = self._objects.get(number)
        if kept is None:
            raise DataError(self._gone)
        return kept


class ValueStore:
    """Stores values of one origin under handles: values that are referred to, and the latest few.

    Attributes:
        number: the number of the store in graphs.
    """

    def __init__(self) -> None:
        self.number = _stores.add(self)
        self._values: Registry[StoredValues] = Registry(
            "the values of an earlier step are no longer kept: use what an iterator or strategy.run gives "
            "in the next few steps"
        )
        self._recent: OrderedDict[int, StoredValues] = OrderedDict()

    def put(self, values: Values) -> int:
        """Store `values`, and return their handle."""
        stored = StoredValues(values, self)
        handle = self._values.add(stored)
        self._recent[handle] = stored
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return handle

    def find(self, handle: int) -> "StoredValues":
        """Return the stored values, which exist as long as the caller refers to the result.

        Raises:
            DataError: they are no longer stored.
        """
        return self._values.find(handle)

    @staticmethod
    def numbered(number: int) -> "ValueStore":
        """Return the store with a number.

        Raises:
            DataError: the store no longer exists.
        """
        return _stores.find(number)


_stores: Registry[ValueStore] = Registry(
    "the source of these values no longer exists: keep a reference to the dataset or its iterator"
)


class StoredValues:
    """Values in a store: an object that can have weak references, and that keeps the store alive."""

    def __init__(self, values: Values, store: ValueStore) -> None:
        self.values = values
        self._store = store


class DistributedValues:
    """One value per replica. It is not a tensor, even if a worker computes a single replica.

    Example:
        In a job of two replicas (`lockstep run -n 1 --replicas 2 example.py`):

        >>> import lockstep
        >>> import numpy as np
        >>> strategy = lockstep.MultiWorkerMirroredStrategy()
        >>> batch = next(iter(strategy.experimental_distribute_dataset([np.arange(4)])))
        >>> isinstance(batch, lockstep.DistributedValues)
        True
        >>> batch + 1  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        lockstep.errors.ModelError: a PerReplica is used like a tensor, but it holds a value for each ...
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ModelError, because it is ambiguous which of the values is meant.

        This also applies if this worker has one replica, because it has several with fewer workers, or after
        a loss.
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


def format_values(replicas: Sequence[int], value: Callable[[int], Any]) -> str:
    """Return the text of a PerReplica: the values of this worker's replicas, in TensorFlow's format."""
    lines = []
    for replica in replicas:
        try:
            lines.append(f"  {replica}: {value(replica)!r}")
        except DataError as error:
            lines.append(f"  {replica}: {error}")
    return "PerReplica:{\n" + ",\n".join(lines) + "\n}"


class PerReplica(DistributedValues):
    """One leaf of values.

    Attributes:
        source: the values.
        leaf: the position of the leaf in them.
        owned: the replicas that this worker owned when the PerReplica was created.
    """

    def __init__(self, source: Values, leaf: int, owned: Sequence[int]) -> None:
        self.source = source
        self.leaf = leaf
        self.owned = tuple(owned)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of this worker's replicas, in the replicas' order."""
        return tuple(self.source.leaf(self.leaf, replica) for replica in self.owned)

    def __repr__(self) -> str:
        return format_values(self.owned, lambda replica: self.source.leaf(self.leaf, replica))
