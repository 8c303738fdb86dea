"""What the replicas of one `strategy.run` add up and give each other, on the host, for every backend.

A run takes one or several rounds, as a step does (see `keras.backends.multi_update`): a round ends where
replicas do something together whose result the function wants, and the last one at the function's end. Single
numbers that a replica returns travel with the last round; so whoever asks for them later need not ask others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from lockstep.collectives.contract import Communicator, Leaves, Span
from lockstep.errors import DisagreementError, ModelError, PeerLostError
from lockstep.keras.backends.contract import Total
from lockstep.keras.consistency import Facts, gather
from lockstep.keras.replica_run.values import Values
from lockstep.topology import View
from lockstep.worker.job import Job

Result = TypeVar("Result")

Compute = Callable[[int], Mapping[str, Any]]
"""Computes a replica's part of a round: arrays of NumPy or of the backend, by name."""

SCALAR = "output/"
"""Begins the names of what a replica returns that has one number: all replicas get all of them."""

GATHERED = "gather/"
"""Begins the names of what is not added up, but joined; the axis follows, and the position."""

_Packed = list[tuple[str, str, list[int], bytes]]


@dataclass
class RunRound:
    """One round of a run.

    Attributes:
        inputs: the values that each replica has its own of.
        what: names the round in messages.
        like: a partial, once it is known what one looks like.
        started: the partials of the replicas that this worker has computed.
        seed: what random numbers follow from, where that is not the state of a variable.
    """

    inputs: Sequence[Values]
    what: str
    like: Mapping[str, npt.NDArray[Any]] | None = None
    started: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    seed: bytes = b""

    def check(self) -> bytes:
        """Return what must be equal on all workers: the inputs, and what is computed from them."""
        names = ",".join(sorted(self.like or ())).encode()
        checks = (self.seed, names, *(values.check() for values in self.inputs))
        return xxhash.xxh3_128_digest(b"".join(checks))


class RunExchange:
    """Adds up what replicas compute.

    A worker that is lost may be done without where Lockstep drives the loop: elsewhere nobody could join, and
    what the program itself has given the worker to do would be left undone.

    Attributes:
        concrete: shows an array of the backend to NumPy.
    """

    def __init__(self, job: Job, concrete: Callable[[Any], npt.NDArray[Any]]) -> None:
        self._job = job
        self.concrete = concrete

    @property
    def own(self) -> range:
        """The replicas that this worker owns, now."""
        return self._job.view.replicas_of(self._job.worker)

    def refuse_followers(self, name: str) -> None:
        """Raise DisagreementError in a worker that is to join: it cannot know how far the others are."""
        if self._job.joins and not self._job.driven:
            raise DisagreementError(
                f"this worker, which is joining, reaches strategy.run of {name} in a loop of the program's "
                "own and cannot know the others' position in it: let strategy.steps drive the loop, "
                "or run the job with --max-restarts 0"
            )

    def total(self, this: RunRound, compute: Compute) -> Total:
        """Sum a round over all replicas; valid until the next call.

        Where nothing is to be summed the workers do not meet.

        Args:
            this: the round.
            compute: is called for the replicas that this worker owns and that have not been started; raises
                what ends the call, which can be made again.

        Raises:
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
        """
        self._compute(this, compute, self._job.view)
        return self._exchange(partial(self._sum, this, compute)) if this.like else {}

    def agree(self, what: str, facts: Facts) -> None:
        """Return if every worker calls this with equal facts; see `lockstep.keras.consistency.agree`."""
        self._exchange(lambda view, communicator: gather(view, communicator, what, facts, b""))

    def sum_values(
        self, values_of: Callable[[int], Leaves], what: str, check: bytes = b""
    ) -> list[npt.NDArray[Any]]:
        """Sum leaves that only their replicas' workers have, who agree on `check`.

        Args:
            values_of: gives a replica's; asked for those of this worker.
            what: names the call in messages.
            check: at most 64 bytes that must be equal on all workers.

        Raises:
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
            DataError: a replica of this worker has none: whoever had them was lost.
        """

        def add(view: View, communicator: Communicator) -> list[npt.NDArray[Any]]:
            own = view.replicas_of(self._job.worker)
            parts = {Span(r, r + 1): values_of(r) for r in own}
            return [np.array(leaf) for leaf in communicator.reduce(parts, check=check, what=what)]

        return self._exchange(add)

    def gather_values(
        self, values_of: Callable[[int], Leaves], what: str
    ) -> dict[int, list[npt.NDArray[Any]]]:
        """Return the leaves of all replicas, of which each worker gives its own.

        Raises:
            PeerLostError: a worker was lost, and Lockstep does not drive the loop.
            DataError: a replica of this worker has none: whoever had them was lost.
        """

        def gather(view: View, communicator: Communicator) -> dict[int, list[npt.NDArray[Any]]]:
            own = view.replicas_of(self._job.worker)
            packed = {r: [_packed("", leaf) for leaf in values_of(r)] for r in own}
            blobs = communicator.gather(msgspec.msgpack.encode(packed), what=what)
            decoded = [msgspec.msgpack.decode(blob, type=dict[int, _Packed]) for blob in blobs]
            return {r: [_unpacked(leaf)[1] for leaf in part[r]] for part in decoded for r in part}

        return self._exchange(gather)

    def _exchange(self, act: Callable[[View, Communicator], Result]) -> Result:
        if self._job.driven:
            return self._job.exchange(act)
        try:
            return act(self._job.view, self._job.communicator)
        except PeerLostError as lost:
            # The rest of the message is about the next view, which this loop never enters.
            who = str(lost).partition(";")[0]
            raise PeerLostError(
                f"{who}; strategy.steps does not drive this loop, so no new worker can join: restart the "
                "job to resume from the program's checkpoint, or let strategy.steps drive the loop"
            ) from None

    def _compute(self, this: RunRound, compute: Compute, view: View) -> None:
        for replica in view.replicas_of(self._job.worker):
            if replica not in this.started:
                this.started[replica] = compute(replica)
        if this.like is None:
            computed = next(iter(this.started.values()))
            this.like = {name: self.concrete(value) for name, value in computed.items()}
        for computed in this.started.values():
            if computed.keys() != this.like.keys():
                changed = ", ".join(sorted(computed.keys() ^ this.like.keys()))
                raise ModelError(
                    f"{this.what}: replicas compute different things ({changed}): the function "
                    "passed to strategy.run must take the same path on all replicas"
                )

    def _sum(self, this: RunRound, compute: Compute, view: View, communicator: Communicator) -> Total:
        self._compute(this, compute, view)
        assert this.like is not None
        own = view.replicas_of(self._job.worker)
        parts = {replica: self._part(this, replica, view) for replica in own}
        gathered = sorted(name for name in this.like if name.startswith(GATHERED))
        names = sorted(this.like.keys() - set(gathered))
        check = this.check() if len(view.workers) > 1 else b""
        sums = {Span(r, r + 1): [part[name] for name in names] for r, part in parts.items()}
        joined = self._join(gathered, parts, this, communicator)
        total = communicator.reduce(sums, check=check, what=this.what)
        self._job.stepped()
        return dict(zip(names, total, strict=True)) | joined

    def _part(self, this: RunRound, replica: int, view: View) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a replica, all replicas' of equal shapes."""
        assert this.like is not None
        arrays = {name: self.concrete(value) for name, value in this.started[replica].items()}
        for name, array in arrays.items():
            if name.startswith(SCALAR):
                arrays[name] = spread(array, replica, view.replicas)
            elif not name.startswith(GATHERED) and array.shape != this.like[name].shape:
                raise ModelError(
                    f"{this.what}: replicas cannot add up values of the shapes {list(this.like[name].shape)} "
                    f"and {list(array.shape)} (replica {replica}): give them the same shape on all replicas, "
                    "or join them with all_gather"
                )
        return arrays

    def _join(
        self,
        names: list[str],
        parts: Mapping[int, Mapping[str, npt.NDArray[Any]]],
        this: RunRound,
        communicator: Communicator,
    ) -> dict[str, npt.NDArray[Any]]:
        if not names:
            return {}
        packed = {replica: [_packed(name, part[name]) for name in names] for replica, part in parts.items()}
        blobs = communicator.gather(msgspec.msgpack.encode(packed), what=this.what)
        columns: dict[str, dict[int, npt.NDArray[Any]]] = {name: {} for name in names}
        for blob in blobs:
            for replica, leaves in msgspec.msgpack.decode(blob, type=dict[int, _Packed]).items():
                for leaf in leaves:
                    name, array = _unpacked(leaf)
                    columns[name][replica] = array
        return {
            name: np.concatenate([column[r] for r in sorted(column)], axis=int(name.split("/")[1]))
            for name, column in columns.items()
        }


def refuse_sum_of_booleans(name: str) -> NoReturn:
    """Raise ModelError: NumPy's sum of two booleans is whether one of them is true."""
    raise ModelError(f"{name} cannot add up booleans: cast them to integers first")


def spread(array: npt.NDArray[Any], replica: int, replicas: int) -> npt.NDArray[Any]:
    """Return the bits of one number at a replica's place among zeros: sums of such arrays hold them all."""
    bits = np.zeros(replicas, f"u{array.dtype.itemsize}")
    bits[replica] = np.ascontiguousarray(array).reshape(1).view(bits.dtype)[0]
    return bits


def gathered_scalars(bits: npt.NDArray[Any], dtype: npt.DTypeLike) -> list[npt.NDArray[Any]]:
    """Return the numbers of all replicas that `spread` has spread, as arrays without dimensions."""
    return [number.reshape(()) for number in bits.view(dtype).copy()]


def _packed(name: str, array: npt.NDArray[Any]) -> tuple[str, str, list[int], bytes]:
    return name, str(array.dtype), list(array.shape), array.tobytes()


def _unpacked(packed: tuple[str, str, list[int], bytes]) -> tuple[str, npt.NDArray[Any]]:
    name, dtype, shape, data = packed
    return name, np.frombuffer(data, np.dtype(dtype)).reshape(shape)
