"""Merges: joint computations of the replicas of a `strategy.run`, such as updates, sums and joins.

A function of `strategy.run` merges where it applies an optimizer of Keras, which sums the gradients over the
replicas first, or calls `all_reduce` or `all_gather`. Each merge ends a round (see
`lockstep.keras.backends.multi_update`), unless the function continues without its result.

The backward pass of `all_reduce` and `all_gather` is also a merge: the gradient of a reduce is another
reduce, so the backends' custom gradients call `all_reduce`. Gradients are summed; the loss in the function
contains the divisor. Single numbers that the function returns travel with the last round, so
`strategy.reduce` of a loss does not need a further reduce.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NoReturn, Protocol

import keras

from lockstep.errors import ModelError
from lockstep.keras.backends.contract import GATHERED
from lockstep.keras.backends.eager_contract import CustomGradient
from lockstep.keras.backends.multi_update import ApplyCall, EndOfRound, Update, UpdateCall, UpdateRecorder
from lockstep.system.thread_value import ThreadValue
from lockstep.worker.patch_registry import PATCHES, definer, patch_of

Op = Literal["sum", "mean"]

SUMMED = "merge/"
"""The prefix of names of arrays that a merge sums."""


class Merger(Protocol):
    """Merges what the replicas of a `strategy.run` compute; all make the same calls in the same order."""

    def apply(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any] | None,
        call: UpdateCall | None = None,
    ) -> Any:
        """Apply an optimizer once, to the sum of all replicas' gradients, by `call`; see `Update`.

        Return the result of `call`, or None if it is called later.
        """

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the sum or the mean over the replicas of each leaf of a nest."""

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the leaves of all replicas, joined along `axis` in the replicas' order."""


@dataclass(frozen=True)
class Replica:
    """A replica that computes.

    Attributes:
        number: its id; a scalar tensor in a graph that serves all replicas.
        merger: merges its values with those of the other replicas.
    """

    number: Any
    merger: Merger


_replica: ThreadValue[Replica | None] = ThreadValue(None)


def current_replica() -> Replica | None:
    """Return the replica whose function runs in this thread, or None outside of `strategy.run`."""
    return _replica.value


def computing_as(replica: Replica | None) -> AbstractContextManager[None]:
    """Within the block, this thread computes `replica`, or none."""
    return _replica.within(replica)


def install() -> None:
    """Patch the updates of all optimizers, once per process, so that replicas merge their gradients.

    This includes the program's own classes, even those defined later: their updates get the summed gradients.
    """
    if PATCHES.has(__name__):
        return
    optimizers = keras.optimizers
    for kind in (*_with_subclasses(optimizers.Optimizer), optimizers.LossScaleOptimizer):
        _patch(kind)
    PATCHES.put(__name__, optimizers.Optimizer, "__init_subclass__", classmethod(_begin_subclass))


def _begin_subclass(kind: type, /, **options: Any) -> None:
    super(keras.optimizers.Optimizer, kind).__init_subclass__(**options)
    _patch(kind)


def _with_subclasses(kind: type) -> Iterator[type]:
    yield kind
    subclasses: list[type] = kind.__subclasses__()
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _patch(kind: type) -> None:
    """Patch the updates that a class of optimizers defines or inherits, unless they are patched."""
    for owner, name in _unpatched(kind):
        merging = _merging_apply if name == "apply" else _merging_apply_gradients
        _wrap(owner, name, functools.partial(merging, getattr(owner, name)))
        if name == "apply" and "stateless_apply" in vars(owner):
            _wrap(owner, "stateless_apply", _apply_separately)


def _unpatched(kind: type) -> list[tuple[type, str]]:
    """Return the updates that a class of optimizers defines or inherits and that are not patched."""
    updates = [(definer(kind, name), name) for name in ("apply", "apply_gradients")]
    # Keras's `apply_gradients` calls `apply`.
    plain = definer(keras.optimizers.Optimizer, "apply_gradients"), "apply_gradients"
    return [update for update in updates if update != plain and patch_of(*update) is None]


def _wrap(owner: type, name: str, call: Callable[..., Any]) -> None:
    PATCHES.wrap(__name__, owner, name, call, of_program=True)


def _apply_separately(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `stateless_apply`, which does not change variables, so each replica calls it separately."""
    with computing_as(None):
        return original(*args, **kwargs)


def _merging_apply(
    method: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call an `apply`, in a replica with the gradients of all replicas.

    Args:
        method: the `apply`, which defines the parameters.
        original: calls it.
        args: the optimizer, or another object that inherits the method, and other positional arguments.
        kwargs: the keyword arguments.
    """
    replica = current_replica()
    if replica is None or not isinstance(args[0], keras.optimizers.Optimizer):
        return original(*args, **kwargs)
    call = _call_of("apply", method, original, *args, **kwargs)
    gradients, variables = call.gradients_and_variables
    is_own = not method.__module__.startswith("keras.")
    return replica.merger.apply(args[0], gradients, variables, call if is_own else None)


def _merging_apply_gradients(
    method: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call an `apply_gradients` of the program's own, as `_merging_apply` does."""
    replica = current_replica()
    if replica is None or not isinstance(args[0], keras.optimizers.Optimizer):
        return original(*args, **kwargs)
    call = _call_of("apply_gradients", method, original, *args, **kwargs)
    result = replica.merger.apply(args[0], *call.gradients_and_variables, call)
    # A later update does not return anything here; Keras's own method returns this.
    return args[0].iterations if result is None else result


def _call_of(
    name: str,
    method: Callable[..., Any],
    original: Callable[..., Any],
    optimizer: Any,
    *args: Any,
    **kwargs: Any,
) -> UpdateCall:
    arguments = inspect.signature(MethodType(method, optimizer)).bind(*args, **kwargs)
    return UpdateCall(name, functools.partial(original, optimizer), arguments)


class SingleReplicaMerger:
    """The `Merger` of a job with one replica, which behaves as without a strategy."""

    def apply(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any] | None,
        call: UpdateCall | None = None,
    ) -> Any:
        """Apply the optimizer."""
        with computing_as(None):
            if call is None:
                return optimizer.apply(gradients, variables)
            return call(gradients, variables or [])

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the value."""
        return value

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the value."""
        return value


@dataclass(frozen=True)
class Merge:
    """A point of a function at which its replicas merge.

    Attributes:
        names: the names of its leaves in a partial; None for a leaf without a gradient.
        update: the update that applies the sum; None if the function itself uses the result.
    """

    names: tuple[str | None, ...]
    update: Update | None = None

    def leaves(self, total: Mapping[str, Any]) -> list[Any]:
        """Return its leaves in a total."""
        return [None if name is None else total[name] for name in self.names]


class RoundMerger(UpdateRecorder):
    """The `Merger` of one replica in one round of a `strategy.run`.

    Args:
        number: the number of the round, from 0.
        ends_early: whether the round ends at its own merge even if that is an update.
        earlier: the merges of earlier rounds.
        totals: the totals of these merges.
        repeat: makes the update of the earlier round whose number it gets.
        on_update: called with the round's own update if the function continues after it.
        replica: the id of the replica; a scalar tensor in a graph that serves all replicas.
        replicas: R.
        custom_gradient: defines the gradients of merges.
    """

    def __init__(
        self,
        number: int,
        ends_early: bool,
        earlier: Sequence[Merge],
        totals: Sequence[Mapping[str, Any]],
        repeat: Callable[[int], None],
        on_update: Callable[[Update], None],
        replica: Any,
        replicas: int,
        custom_gradient: CustomGradient,
    ) -> None:
        super().__init__(number, ends_early, [merge.update for merge in earlier], repeat, on_update)
        self._merges = earlier
        self._totals = totals
        self._replica = replica
        self._replicas = replicas
        self._custom_gradient = custom_gradient
        self._own_merge: tuple[Merge, Sequence[Any]] | None = None

    def apply(
        self, optimizer: Any, grads: Any, trainable_variables: Any = None, call: ApplyCall | None = None
    ) -> None:
        """See `UpdateRecorder.apply`.

        Raises:
            ModelError: the program has set an update of its own on the optimizer, or on its class after the
                class was defined. It has already received the gradients of one replica.
        """
        if own := sorted({"apply", "apply_gradients"} & vars(optimizer).keys()):
            raise ModelError(
                f"the program has set {own[0]} of the optimizer {optimizer.name!r}, which gets the gradients "
                "of one replica in strategy.run; define it in a class of optimizers, which gets their sum"
            )
        if later := _unpatched(type(optimizer)):
            owner, name = later[0]
            raise ModelError(
                f"the program has set {name} of {owner.__name__} while Lockstep was in use, so that it gets "
                "the gradients of one replica in strategy.run; define it in the class, which gets their sum"
            )
        super().apply(optimizer, grads, trainable_variables, call)

    @property
    def merge(self) -> Merge | None:
        """The round's own merge, after the function has reached it."""
        if self.update is not None:
            names = (None if g is None else f"{SUMMED}{i}" for i, g in enumerate(self.gradients))
            return Merge(tuple(names), self.update)
        return None if self._own_merge is None else self._own_merge[0]

    @property
    def partial(self) -> dict[str, Any]:
        """The contribution of this replica to the round's own merge."""
        if (merge := self.merge) is None:
            return {}
        leaves = self.gradients if self._own_merge is None else self._own_merge[1]
        return {name: leaf for name, leaf in zip(merge.names, leaves, strict=True) if name is not None}

    def all_reduce(self, op: Op, value: Any) -> Any:
        """Return the sum or mean if it is known; otherwise end the round."""
        leaves = keras.tree.flatten(value)
        slices = [leaf for leaf in leaves if _is_slices(leaf)]
        dense = [_addable(op, keras.ops.convert_to_tensor(leaf)) for leaf in leaves if not _is_slices(leaf)]
        reduced = iter(self._reduced(op, dense) if dense else [])
        joined = iter(self._joined_slices(op, slices) if slices else [])
        return keras.tree.pack_sequence_as(
            value, [next(joined if _is_slices(leaf) else reduced) for leaf in leaves]
        )

    def _joined_slices(self, op: Op, slices: Sequence[Any]) -> list[Any]:
        """Return the sum or mean of lists of slices of TensorFlow: those of all replicas."""
        values = [each.values if op == "sum" else each.values / self._replicas for each in slices]
        parts = [
            part for pair in zip(values, (each.indices for each in slices), strict=True) for part in pair
        ]
        joined = self._gathered(0, [keras.ops.convert_to_tensor(part) for part in parts])
        pairs = zip(joined[::2], joined[1::2], strict=True)
        return [type(each)(*pair, each.dense_shape) for each, pair in zip(slices, pairs, strict=True)]

    def all_gather(self, value: Any, axis: int) -> Any:
        """Return the joined values if they are known; otherwise end the round."""
        leaves = keras.tree.flatten(value)
        if any(_is_slices(leaf) for leaf in leaves):
            raise ModelError(
                "all_gather does not join IndexedSlices: make them dense with tf.convert_to_tensor, or add "
                "them up with all_reduce"
            )
        leaves = [keras.ops.convert_to_tensor(leaf) for leaf in leaves]
        if any(not len(leaf.shape) for leaf in leaves):
            raise ModelError("all_gather joins values along an axis; single numbers have none")
        return keras.tree.pack_sequence_as(value, self._gathered(axis, leaves))

    def _reduced(self, op: Op, leaves: Sequence[Any]) -> Sequence[Any]:
        """Reduce values. The gradient of a sum over the replicas is such a sum, in the backward pass."""

        def merge(leaves: Sequence[Any]) -> list[Any]:
            totals = self._merged([f"{SUMMED}{i}" for i in range(len(leaves))], leaves)
            return totals if op == "sum" else [total / self._replicas for total in totals]

        return self._differentiably(leaves, merge, lambda upstream: self._reduced(op, upstream))

    def _gathered(self, axis: int, leaves: Sequence[Any]) -> Sequence[Any]:
        """Join values. A replica's gradient is its own slice of the sum of all replicas' gradients."""
        sizes: list[Any] = []
        floats = _floating(leaves)

        def merge(leaves: Sequence[Any]) -> list[Any]:
            count = len(leaves)
            is_here = keras.ops.one_hot(self._replica, self._replicas, dtype="int32")
            rows = [is_here * keras.ops.shape(leaf)[axis] for leaf in leaves]
            names = [f"{GATHERED}{axis}/{i}" for i in range(count)] + [f"{SUMMED}{i}" for i in range(count)]
            totals = self._merged(names, [*leaves, *rows])
            sizes[:] = totals[count:]
            return totals[:count]

        def gradient(upstream: Sequence[Any]) -> list[Any]:
            sums = self._reduced("sum", upstream)
            return [self._own_slice(joined, sizes[i], axis) for joined, i in zip(sums, floats, strict=True)]

        return self._differentiably(leaves, merge, gradient)

    def _own_slice(self, joined: Any, sizes: Any, axis: int) -> Any:
        ends = keras.ops.cumsum(sizes)
        end = ends[self._replica]
        return keras.ops.take(joined, keras.ops.arange(end - sizes[self._replica], end), axis)

    def _differentiably(
        self,
        leaves: Sequence[Any],
        merge: Callable[[Sequence[Any]], Sequence[Any]],
        gradient: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> Sequence[Any]:
        """Return `merge(leaves)`, with gradients for the floating-point leaves."""
        floats = _floating(leaves)
        results = list(leaves)

        def merge_floats(differentiable: Sequence[Any]) -> list[Any]:
            results[:] = merge(_with(leaves, floats, differentiable))
            return [results[i] for i in floats]

        merged = self._custom_gradient([leaves[i] for i in floats], merge_floats, gradient)
        return _with(results, floats, merged)

    def _merged(self, names: Sequence[str], leaves: Sequence[Any]) -> list[Any]:
        """Return the result of a merge of an earlier round.

        Raises:
            EndOfRound: the merge is the round's own, or a later one.
        """
        number = self._next_number()
        if number < self._number:
            return self._merges[number].leaves(self._totals[number])
        self._own_merge = Merge(tuple(names)), leaves
        raise EndOfRound


def refuse_sum_of_booleans(name: str) -> NoReturn:
    """Raise ModelError, because NumPy adds two booleans with a logical or."""
    raise ModelError(f"{name} cannot add up booleans: cast them to integers first")


def _floating(leaves: Sequence[Any]) -> list[int]:
    """Return the positions of the leaves that have gradients."""
    return [i for i, leaf in enumerate(leaves) if _dtype(leaf).startswith(("float", "bfloat", "complex"))]


def _is_slices(leaf: Any) -> bool:
    """Whether a leaf is a sparse gradient of TensorFlow."""
    return type(leaf).__name__ == "IndexedSlices"


def _dtype(leaf: Any) -> str:
    return str(keras.backend.standardize_dtype(leaf.dtype))


def _addable(op: Op, leaf: Any) -> Any:
    if _dtype(leaf) != "bool":
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
