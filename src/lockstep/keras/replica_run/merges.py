"""What the replicas of a run do together, one after the other: each is known, or recorded, or not reached.

The counterpart of `keras.backends.multi_update.Recording` for functions that `strategy.run` was given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.errors import ModelError
from lockstep.keras.backends.multi_update import Left, Update
from lockstep.keras.replica_run.eager import Through
from lockstep.keras.replica_run.exchange import refuse_sum_of_booleans
from lockstep.keras.replica_run.replica import Op
from lockstep.keras.synchronization import GATHERED

SUMMED = "merge/"
"""Begins the names of what is added up in a round."""


@dataclass(frozen=True)
class MergePoint:
    """One of the places where the replicas of a function do something together.

    Attributes:
        names: of its leaves in a partial; None for a leaf that has no gradient.
        update: what is made of the sum; None where the function itself wants it.
    """

    names: tuple[str | None, ...]
    update: Update | None = None

    def leaves(self, total: Mapping[str, Any]) -> list[Any]:
        """Return the leaves in its total."""
        return [None if name is None else total[name] for name in self.names]


class RunMerges:
    """The `lockstep.keras.replica_run.replica.Merges` of one round of a run.

    Args:
        number: of the round, from 0.
        leaves: whether the round ends at its own meeting, though that is an update.
        known: the meetings of earlier rounds.
        totals: theirs.
        repeat: makes the update of an earlier round, whose number it is given.
        noted: is told of the round's own update, if the function goes on.
        replica: which of them computes; a scalar tensor within a graph that serves all.
        replicas: R.
        through: lets gradients pass.

    Attributes:
        meeting: the round's own, once the function has come to it.
        partial: what this replica brings to it.
    """

    def __init__(
        self,
        number: int,
        leaves: bool,
        known: Sequence[MergePoint],
        totals: Sequence[Mapping[str, Any]],
        repeat: Callable[[int], None],
        noted: Callable[[Update], None],
        replica: Any,
        replicas: int,
        through: Through,
    ) -> None:
        self._number = number
        self._leaves = leaves
        self._known = known
        self._totals = totals
        self._repeat = repeat
        self._noted = noted
        self._replica = replica
        self._replicas = replicas
        self._through = through
        self._met = 0
        self.meeting: MergePoint | None = None
        self.partial: dict[str, Any] = {}

    def apply(self, optimizer: Any, gradients: list[Any], variables: list[Any] | None) -> None:
        """Record an update, or make one that is known."""
        if not gradients:
            # Keras's own does nothing then.
            return
        variables = optimizer._trainable_variables if variables is None else variables
        update = Update(optimizer, list(variables))
        number = self._next()
        if number < self._number:
            self._repeat(number)
            return
        names = tuple(None if g is None else f"{SUMMED}{i}" for i, g in enumerate(gradients))
        self._meet(MergePoint(names, update), gradients)
        if self._leaves:
            raise Left
        self._noted(update)

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the sum or mean that is known, or leave the function."""
        leaves = [_addable(op, keras.ops.convert_to_tensor(leaf)) for leaf in keras.tree.flatten(value)]
        return keras.tree.pack_sequence_as(value, self._reduced(op, leaves))

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the joined values that are known, or leave the function."""
        leaves = [keras.ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(value)]
        if any(not len(leaf.shape) for leaf in leaves):
            raise ModelError("all_gather joins values along an axis; single numbers have none")
        return keras.tree.pack_sequence_as(value, self._gathered(axis, leaves))

    def _reduced(self, op: Op, leaves: Sequence[Any]) -> Sequence[Any]:
        """Reduce, now or in the backward pass of that: the gradient of a sum over the replicas is one."""

        def meet(leaves: Sequence[Any]) -> list[Any]:
            totals = self._met_for([f"{SUMMED}{i}" for i in range(len(leaves))], leaves)
            return totals if op == "sum" else [total / self._replicas for total in totals]

        return self._differentiably(leaves, meet, lambda upstream: self._reduced(op, upstream))

    def _gathered(self, axis: int, leaves: Sequence[Any]) -> Sequence[Any]:
        """Join; a replica's gradient is its own part of what the gradients of all replicas add up to."""
        sizes: list[Any] = []
        floats = _floating(leaves)

        def meet(leaves: Sequence[Any]) -> list[Any]:
            count = len(leaves)
            own = keras.ops.one_hot(self._replica, self._replicas, dtype="int32")
            rows = [own * keras.ops.shape(leaf)[axis] for leaf in leaves]
            names = [f"{GATHERED}{axis}/{i}" for i in range(count)] + [f"{SUMMED}{i}" for i in range(count)]
            totals = self._met_for(names, [*leaves, *rows])
            sizes[:] = totals[count:]
            return totals[:count]

        def gradient(upstream: Sequence[Any]) -> list[Any]:
            sums = self._reduced("sum", upstream)
            return [self._own_part(one, sizes[i], axis) for one, i in zip(sums, floats, strict=True)]

        return self._differentiably(leaves, meet, gradient)

    def _own_part(self, joined: Any, sizes: Any, axis: int) -> Any:
        ends = keras.ops.cumsum(sizes)
        end = ends[self._replica]
        return keras.ops.take(joined, keras.ops.arange(end - sizes[self._replica], end), axis)

    def _differentiably(
        self,
        leaves: Sequence[Any],
        meet: Callable[[Sequence[Any]], Sequence[Any]],
        gradient: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> Sequence[Any]:
        """Return `meet(leaves)`; gradients pass through those that are floating-point."""
        floats = _floating(leaves)
        results = list(leaves)

        def met(given: Sequence[Any]) -> list[Any]:
            results[:] = meet(_with(leaves, floats, given))
            return [results[i] for i in floats]

        found = self._through([leaves[i] for i in floats], met, gradient)
        return _with(results, floats, found)

    def _met_for(self, names: Sequence[str], leaves: Sequence[Any]) -> list[Any]:
        """Return what a meeting has come to, or leave the function at it.

        Raises:
            Left: it is the round's own, or a later one.
        """
        number = self._next()
        if number < self._number:
            return self._known[number].leaves(self._totals[number])
        self._meet(MergePoint(tuple(names)), leaves)
        raise Left

    def _next(self) -> int:
        """Count a meeting; leave the function if it comes after the round's own."""
        number, self._met = self._met, self._met + 1
        if number > self._number:
            raise Left
        return number

    def _meet(self, meeting: MergePoint, leaves: Sequence[Any]) -> None:
        self.meeting = meeting
        named = zip(meeting.names, leaves, strict=True)
        self.partial = {name: leaf for name, leaf in named if name is not None}


def _floating(leaves: Sequence[Any]) -> list[int]:
    """Return the positions of the leaves that have gradients."""
    return [i for i, leaf in enumerate(leaves) if _kind(leaf).startswith(("float", "bfloat", "complex"))]


def _kind(leaf: Any) -> str:
    return str(keras.backend.standardize_dtype(leaf.dtype))


def _addable(op: Op, leaf: Any) -> Any:
    if _kind(leaf) != "bool":
        return leaf
    if op == "sum":
        refuse_sum_of_booleans("all_reduce")
    return keras.ops.cast(leaf, "int32")


def _with(leaves: Sequence[Any], positions: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Return the leaves with others in some positions."""
    whole = list(leaves)
    for position, leaf in zip(positions, others, strict=True):
        whole[position] = leaf
    return whole
