"""Rounds, the engine of `fit` and `strategy.run`: replicas compute partials, and all workers get their total.

A step or function takes one or more rounds (see `lockstep.keras.backends.multi_update`). A subclass of
`Round` defines what a replica computes. The round decides which replicas this worker computes, and sums the
partials of all workers along the plan of a view.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator, Span
from lockstep.errors import DisagreementError, InternalError, ModelError
from lockstep.keras.backends.common import refuse_unequal_state
from lockstep.keras.backends.contract import EQUAL, GATHERED, RARE, SCALED, Partial, Total
from lockstep.keras.scaled_sums import limits_of, scales_of, sum_of, summand_of
from lockstep.keras.worker_exchange import Packed, pack, unpack
from lockstep.observability.step_timer import Part
from lockstep.system.prose import first_of, shortened
from lockstep.topology import View

Array = npt.NDArray[Any]
Result = TypeVar("Result")

SCALAR = "output/"
"""The prefix of names of single numbers. They are not summed: every worker gets those of all replicas."""

_SHOWN, _LONGEST = 3, 60
"""The parts that a message shows, and the most characters of each."""
_VALUE = re.compile(r" = | was ")

_checked_rows = msgspec.msgpack.Decoder(tuple[bytes, dict[int, list[Packed]]])


@dataclass(frozen=True)
class PartialLayout:
    """The shapes and dtypes of a round's partials by name, equal for all replicas and workers."""

    leaves: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]

    @classmethod
    def of(cls, partial: Mapping[str, Array]) -> "PartialLayout":
        """Return the layout of partials like this one."""
        return cls({name: (array.shape, array.dtype) for name, array in partial.items()})

    @cached_property
    def zeros(self) -> Sequence[Array]:
        """The partial of a replica that does not contribute, in the order of the names."""
        return [np.zeros(*self.leaves[name]) for name in self.names]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names in the order of the arrays in a reduce."""
        return tuple(sorted(self.leaves))

    @cached_property
    def names_digest(self) -> bytes:
        """A hash of the names."""
        return xxhash.xxh3_64_digest("\0".join(self.names).encode())

    @cached_property
    def summed(self) -> tuple[str, ...]:
        """The names of arrays that are summed."""
        return tuple(name for name in self.names if not name.startswith(GATHERED))

    @cached_property
    def scalars(self) -> frozenset[str]:
        """The names of single numbers."""
        return frozenset(name for name in self.names if name.startswith(SCALAR))

    @cached_property
    def equal(self) -> tuple[str, ...]:
        """The names of arrays that are the same on all replicas."""
        return tuple(name for name in self.names if name.startswith(EQUAL))

    @cached_property
    def scaled(self) -> tuple[str, ...]:
        """The names of arrays that are summed as small integers."""
        return tuple(name for name in self.names if name.startswith(SCALED))

    @cached_property
    def rare(self) -> tuple[str, ...]:
        """The names of arrays that are summed if one of them is not zero."""
        return tuple(name for name in self.names if name.startswith(RARE))

    @cached_property
    def limited(self) -> tuple[str, ...]:
        """The names of arrays for which all replicas first sum limits; see `Round.limits_of`."""
        return (*self.scaled, *self.rare)

    @cached_property
    def joined(self) -> tuple[str, ...]:
        """The names of arrays that are joined."""
        return tuple(name for name in self.names if name.startswith(GATHERED))


class Round(ABC):
    """One round: what a replica computes in it, and the partials that this worker has computed.

    A partial is a function of the round alone: any worker can compute any replica, and a partial remains
    valid when the workers change. After an error of `compute`, the round can be summed again.

    Workers sum the same rounds in the same order. All get the same bits, for any number of workers.

    Args:
        to_numpy: waits for an array of a partial, and returns it as NumPy sees it.
        settle: waits until nothing reads the memory of the last total.
        lap: ends a part of the step, which the job measures.

    Attributes:
        label: names the round in messages.
        worker: the id of this worker.
        number: the number of the round in its step, from 0.
        advice: the remedy if replicas compute different things.
        anywhere: whether each worker can compute all replicas; equal on all workers.
        layout: the layout of the partials, if it is known.
        layouts: the layouts of rounds like this one, by the names of the arrays.
        started: the partials of the replicas whose computation has begun on this worker.
        verified: whether other workers have also computed some of its partials, if that was due.
        contributed: the arrays of the replicas that this worker has given to a sum, in the order of the
            layout's names, valid until the next round.
        limits: the last sum's results for `limits_of`.
        sums: its results for the arrays of `summed`, in their order, valid until the next call of the
            exchange.
    """

    advice = "every replica has to compute the same things"

    def __init__(
        self,
        label: str,
        worker: int,
        *,
        number: int = 0,
        layout: PartialLayout | None = None,
        layouts: dict[frozenset[str], PartialLayout] | None = None,
        to_numpy: Callable[[Any], Array] = np.asarray,
        settle: Callable[[], object] = lambda: None,
        lap: Callable[[Part], object] = lambda part: None,
    ) -> None:
        self.label = label
        self.worker = worker
        self.number = number
        self.anywhere = True
        self.layout = layout
        self.layouts = {} if layouts is None else layouts
        self.started: dict[int, Partial] = {}
        self.verified = False
        self.contributed: dict[int, Sequence[Array]] = {}
        self.limits: Sequence[Array] = ()
        self.sums: Sequence[Array] = ()
        self.to_numpy, self._settle, self._lap = to_numpy, settle, lap
        self._forms: set[str] = set()
        self._joined: dict[str, Array] = {}
        self._zeros: frozenset[str] | None = None
        self._differs = False

    # Subclasses define these methods.

    @abstractmethod
    def compute(self, replica: int) -> Partial:
        """Begin the computation of a replica; return its partial: arrays of NumPy or the backend, by name.

        Replica 0 computes even if it does not contribute: its partial shows the layout to a worker without
        one.
        """

    def contributes(self, replica: int) -> bool:
        """Whether a replica computes; otherwise it contributes zeros."""
        return True

    def counts(self, replica: int) -> bool:
        """Whether a replica that computes has examples."""
        return True

    def form(self) -> str | None:
        """Return a text on the last computation, apart from its arrays, or None if replicas cannot differ."""
        return None

    def digest_of_inputs(self) -> bytes:
        """Return bytes that are equal on all workers if all replicas compute from the same inputs."""
        return b""

    def parts(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the arrays of a partial or a total by the names that messages and records use.

        One array can hold several of these parts.
        """
        return arrays

    def inputs(self, replica: int) -> Sequence[Any]:
        """Return the arrays from which a replica that has contributed computes, if the round knows them."""
        return ()

    def outputs_of(self, replica: int) -> Mapping[str, Array]:
        """Return a contributing replica's results besides its partial, by names for messages."""
        return {}

    def catching_up(self) -> AbstractContextManager[None]:
        """See `lockstep.worker.job.Job.exchange`."""
        return nullcontext()

    # Partials.

    def begin(self, replicas: Iterable[int]) -> PartialLayout:
        """Begin the computation of those `replicas` that have not begun; return the layout of the partials.

        Raises:
            ModelError: replicas compute different things.
        """
        for replica in replicas:
            if replica not in self.started and self.contributes(replica):
                self.started[replica] = self._computed(replica)
        if self.layout is None:
            sample = next(iter(self.started.values()), None)
            if sample is None:
                sample = self._computed(0)
            names = frozenset(sample)
            if names not in self.layouts:
                arrays = {name: self.to_numpy(value) for name, value in sample.items()}
                self.layouts[names] = PartialLayout.of(arrays)
            self.layout = self.layouts[names]
        for computed in self.started.values():
            if computed.keys() != self.layout.leaves.keys():
                other, expected = self.parts(computed), self.named_parts(self.layout.zeros)
                # Arrays of another shape may also have another name.
                changed = other.keys() ^ expected.keys() or [
                    name for name in expected if tuple(other[name].shape) != expected[name].shape
                ]
                self._refuse(sorted(changed))
        if len(self._forms) > 1:
            self._refuse(differing_parts(self._forms))
        return self.layout

    def _computed(self, replica: int) -> Partial:
        partial = self.compute(replica)
        if (form := self.form()) is not None:
            self._forms.add(form)
        return partial

    def _refuse(self, differing: Sequence[str]) -> NoReturn:
        parts = first_of([shortened(part, _LONGEST) for part in differing], _SHOWN)
        raise ModelError(
            f"{self.label}: replicas compute different things in one step ({parts}): {self.advice}"
        )

    def entered(self) -> None:
        """Note that this worker is in the view, and is about to compute."""
        self._lap("wait")

    def settle(self) -> None:
        """Note that this worker has computed; return when nothing reads the memory of the last total."""
        self._settle()
        self._lap("compute")

    def partials(self, replicas: Iterable[int]) -> dict[int, Sequence[Array]]:
        """Wait for the partials of replicas that have begun or do not contribute.

        Returns:
            The arrays of each replica, in the order of the layout's names.
        """
        assert self.layout is not None
        names, zeros, started, to_numpy = self.layout.names, self.layout.zeros, self.started, self.to_numpy
        return {
            replica: [to_numpy(started[replica][name]) for name in names] if replica in started else zeros
            for replica in replicas
        }

    def named_parts(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the parts of a partial, given in the order of the layout, sorted by name."""
        assert self.layout is not None
        parts = self.parts(dict(zip(self.layout.names, arrays, strict=True)))
        return {name: parts[name] for name in sorted(parts)}

    # The total.

    def sum(self, view: View, communicator: Communicator) -> Total:
        """Compute the replicas that this worker owns in a view, and return the total over all replicas.

        This is the act of an exchange: in the next view, the round keeps its partials, and computes the
        replicas that this worker did not own before.

        Returns:
            Arrays by the names of the partials, valid until the next sum: the sum over all replicas along
            the job's tree; for `GATHERED`, the arrays of all replicas, joined in the replicas' order; for
            `SCALAR`, the argument of `gathered_scalars`. The sums of `SCALED` are rounded as
            `lockstep.keras.scaled_sums` says.

        Raises:
            DisagreementError: the workers differ in `check`, or in the shapes and dtypes of their partials.
            ModelError: replicas compute different things.
            PeerLostError: a worker was lost, and the view is over.
        """
        self.entered()
        owned = view.replicas_of(self.worker)
        layout = self.begin(owned)
        # Hash the inputs while the backend is still computing.
        check = self.check() if len(view.workers) > 1 else b""
        partials = self.partials(owned)
        self.contributed.update(partials)
        self.settle()
        if layout.joined and not self._joined:
            # This is complete for all members, so the next view does not repeat it.
            named = {r: dict(zip(layout.names, arrays, strict=True)) for r, arrays in partials.items()}
            contributions = {r: arrays for r, arrays in named.items() if r in self.started}
            self._joined, self._differs = _joined(layout, contributions, communicator, check, self.label)
        if self._joined and not layout.summed and not self._differs:
            return self._joined
        if len(self.sums):
            # A repeated sum may be of other partials.
            self._zeros, self.sums = None, ()
        try:
            self._reduce(partials, view.replicas, communicator, check)
        except InternalError:
            self._refuse_other_shapes(partials)
            raise
        except DisagreementError:
            # All members do this.
            self._refuse_other_forms(communicator)
            if not self._differ_in_zeros(communicator):
                raise
            # One of them has a wrong bit, which would otherwise end the job.
            self._zeros = None
            self._reduce(partials, view.replicas, communicator, check)
        return self.total_of(self.sums, self.limits, view.replicas)

    def check(self) -> bytes:
        """Return a hash of the inputs, the names of the arrays and the form: equal on all workers."""
        assert self.layout is not None
        form = (self.form() or "").encode()
        return xxhash.xxh3_128_digest(self.digest_of_inputs() + self.layout.names_digest + form)

    def forget(self) -> None:
        """Forget other workers' results and messages, because a joined worker takes part from here."""
        self.verified, self.sums = False, ()
        self._zeros, self._joined, self._differs = None, {}, False

    def _reduce(
        self,
        partials: Mapping[int, Sequence[Array]],
        replicas: int,
        communicator: Communicator,
        check: bytes,
    ) -> None:
        layout = self.layout
        assert layout is not None
        if layout.limited and self._zeros is None:
            # This is also complete for all members.
            limits = {Span(r, r + 1): arrays for r, arrays in self.limits_of(partials).items()}
            self.limits = [
                array.copy() for array in communicator.reduce(limits, check=check, what=self.label)
            ]
            of_names = dict(zip(layout.limited, self.limits, strict=True))
            self._zeros = frozenset(name for name in layout.rare if not of_names[name])
        summands = self.summands(partials, replicas)
        self.sums = communicator.reduce(
            {Span(r, r + 1): arrays for r, arrays in summands.items()}, check=check, what=self.label
        )

    def _differ_in_zeros(self, communicator: Communicator) -> bool:
        """Whether workers differ in which rare arrays are zeros; all call this after a failed reduce."""
        return len(set(communicator.gather(msgspec.msgpack.encode(sorted(self._zeros or ()))))) > 1

    def limits_of(self, partials: Mapping[int, Sequence[Array]]) -> dict[int, list[Array]]:
        """Return, for each replica, the limits of arrays, and whether rare arrays are not zeros.

        Args:
            partials: see `Round.partials`.

        Returns:
            Arrays in the order of `PartialLayout.limited`.
        """
        layout = self.layout
        assert layout is not None
        limits = {}
        for replica, arrays in partials.items():
            named = dict(zip(layout.names, arrays, strict=True))
            limits[replica] = [
                *(limits_of(named[name]) for name in layout.scaled),
                *(np.array([np.any(named[name] != 0)], np.float32) for name in layout.rare),
            ]
        return limits

    def _scales(self, limits: Sequence[Array], replicas: int) -> dict[str, Array]:
        assert self.layout is not None
        pairs = zip(self.layout.scaled, limits, strict=False)
        return {name: scales_of(of_name, replicas) for name, of_name in pairs}

    @property
    def summed(self) -> list[str]:
        """The names of the arrays that the round sums: those of `PartialLayout.summed` without rare zeros."""
        assert self.layout is not None
        return [name for name in self.layout.summed if name not in (self._zeros or ())]

    def summands(
        self, partials: Mapping[int, Sequence[Array]], replicas: int
    ) -> Mapping[int, Sequence[Array]]:
        """Return the arrays of each replica that are summed, in the order of `summed`.

        Args:
            partials: see `Round.partials`.
            replicas: R.
        """
        layout = self.layout
        assert layout is not None
        if not (layout.scalars or layout.joined or layout.equal or layout.limited):
            return partials
        summands, summed, scales = {}, self.summed, self._scales(self.limits, replicas)
        for replica, arrays in partials.items():
            named = dict(zip(layout.names, arrays, strict=True))
            for name in layout.scalars:
                named[name] = spread(named[name], replica, replicas)
            for name in layout.equal:
                named[name] = evidence(named[name], replica in self.started and self.counts(replica))
            for name in layout.scaled:
                named[name] = summand_of(named[name], scales[name], replicas)
            summands[replica] = [named[name] for name in summed]
        return summands

    def total_of(self, sums: Sequence[Array], limits: Sequence[Array], replicas: int) -> Total:
        """Return the total, given the sums in the order of `summed`, `Round.limits`, and R."""
        layout, scales = self.layout, self._scales(limits, replicas)
        assert layout is not None
        total = dict(zip(self.summed, sums, strict=True))
        total |= {name: np.zeros(*layout.leaves[name]) for name in self._zeros or ()}
        for name in layout.equal:
            shape, dtype = layout.leaves[name]
            value = equal_value(total[name], dtype)
            if value is None:
                refuse_unequal_state(self.label, dtype.name, name.split("/", 2)[2])
            total[name] = value.reshape(shape)
        for name in layout.scaled:
            total[name] = sum_of(total[name], scales[name], layout.leaves[name][1])
        return total | self._joined

    def _refuse_other_shapes(self, partials: Mapping[int, Sequence[Array]]) -> None:
        """Raise ModelError if arrays to sum have different shapes; for a failed reduce."""
        assert self.layout is not None
        first = next(iter(partials.values()))
        for replica, arrays in partials.items():
            for name, array, expected in zip(self.layout.names, arrays, first, strict=True):
                if array.shape != expected.shape and not name.startswith(GATHERED):
                    raise ModelError(
                        f"{self.label}: replicas cannot add up values of the shapes {list(expected.shape)} "
                        f"and {list(array.shape)} (replica {replica}): give them the same shape on all "
                        "replicas, or join them with all_gather in strategy.run"
                    )

    def _refuse_other_forms(self, communicator: Communicator) -> None:
        """Raise ModelError if workers compute different things; all call this after a failed reduce."""
        assert self.layout is not None
        if not self._forms:
            return
        shown = msgspec.msgpack.encode([self.layout.names, sorted(self._forms)])
        of_all = [msgspec.msgpack.decode(blob, type=list[list[str]]) for blob in communicator.gather(shown)]
        names, forms = ([set(of_worker[k]) for of_worker in of_all] for k in (0, 1))
        if differing := set().union(*names) - names[0].intersection(*names):
            self._refuse(sorted(differing))
        if differing := set().union(*forms) - forms[0].intersection(*forms):
            self._refuse(differing_parts(differing))


def differing_parts(forms: Iterable[str]) -> list[str]:
    """Return the parts in which several forms differ, without values such as those of attributes."""
    parts = [frozenset(form.split("; ")) for form in forms]
    differing = frozenset[str]().union(*parts).difference(frozenset.intersection(*parts))
    return sorted({_VALUE.split(part)[0] for part in differing if part})


class ExchangeCall(Protocol):
    """Makes a call between the workers of a view, and repeats it in the next view; see `Job.exchange`."""

    def __call__(
        self,
        act: Callable[[View, Communicator], Result],
        catching_up: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Result:
        """Return the result of `act` in the view in which the call completes."""


def _joined(
    layout: PartialLayout,
    partials: Mapping[int, Mapping[str, Array]],
    communicator: Communicator,
    check: bytes,
    label: str,
) -> tuple[dict[str, Array], bool]:
    """Return the joined arrays, and whether the workers differ in `check`: then a reduce names them."""
    packed = {r: [pack(name, arrays[name]) for name in layout.joined] for r, arrays in partials.items()}
    blobs = communicator.gather(msgspec.msgpack.encode((check, packed)), what=label)
    of_workers = [_checked_rows.decode(blob) for blob in blobs]
    if any(other != of_workers[0][0] for other, _ in of_workers):
        return {}, True
    columns: dict[str, dict[int, Array]] = {name: {} for name in layout.joined}
    for _, of_worker in of_workers:
        for replica, leaves in of_worker.items():
            for name, array in map(unpack, leaves):
                columns[name][replica] = array
    joined = {
        name: np.concatenate([column[r] for r in sorted(column)], axis=int(name.split("/")[1]))
        for name, column in columns.items()
    }
    return joined, False


def evidence(array: Array, counts: bool) -> Array:
    """Return numbers whose sum over the replicas shows the array, if it is equal on all that count.

    They are its bytes, their squares, and a 1: by Cauchy's inequality, n numbers are equal if and only if n
    times the sum of their squares is the square of their sum. Up to 2 ** 16 replicas, all sums are exact.
    """
    values = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8).astype(np.uint32)
    numbers = np.concatenate([values, values * values, np.ones(1, np.uint32)])
    return numbers if counts else np.zeros_like(numbers)


def equal_value(total: Array, dtype: np.dtype[Any]) -> Array | None:
    """Return the elements of the array in the sum of results of `evidence`, or None if replicas differ."""
    (sums, squares), count = np.split(total[:-1].astype(np.uint64), 2), np.uint64(total[-1])
    if not count or (sums * sums != count * squares).any():
        return None
    value: Array = (sums // count).astype(np.uint8).view(dtype)
    return value


def spread(array: Array, replica: int, replicas: int) -> Array:
    """Return an array of R numbers: the bits of the replica's number at its position, otherwise zeros.

    The sum of such arrays has the bits of all numbers.
    """
    bits = np.zeros(replicas, f"u{array.dtype.itemsize}")
    bits[replica] = np.ascontiguousarray(array).reshape(1).view(bits.dtype)[0]
    return bits


def gathered_scalars(bits: Array, dtype: npt.DTypeLike) -> list[Array]:
    """Return the numbers in the sum of results of `spread`, as arrays without dimensions."""
    return [number.reshape(()) for number in bits.view(dtype).copy()]
