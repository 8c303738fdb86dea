"""What the replicas of a `strategy.run` do together: updates, sums and joins, with their gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from lockstep.errors import ModelError
from lockstep.keras.backends.eager import Through
from lockstep.keras.backends.multi_update import Left, Recording, Update
from lockstep.keras.replica_run.replica import Op
from lockstep.keras.replica_run.run_rounds import refuse_sum_of_booleans
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


class RunMerges(Recording):
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
        super().__init__(number, leaves, [meeting.update for meeting in known], repeat, noted)
        self._meetings = known
        self._totals = totals
        self._replica = replica
        self._replicas = replicas
        self._through = through
        self._own: tuple[MergePoint, Sequence[Any]] | None = None

    @property
    def meeting(self) -> MergePoint | None:
        """The round's own, once the function has come to it."""
        if self.update is not None:
            names = (None if g is None else f"{SUMMED}{i}" for i, g in enumerate(self.gradients))
            return MergePoint(tuple(names), self.update)
        return None if self._own is None else self._own[0]

    @property
    def partial(self) -> dict[str, Any]:
        """What this replica brings to the round's own meeting."""
        if (meeting := self.meeting) is None:
            return {}
        leaves = self.gradients if self._own is None else self._own[1]
        return {name: leaf for name, leaf in zip(meeting.names, leaves, strict=True) if name is not None}

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
            return self._meetings[number].leaves(self._totals[number])
        self._own = MergePoint(tuple(names)), leaves
        raise Left


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
