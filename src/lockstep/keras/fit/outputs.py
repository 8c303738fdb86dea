"""The outputs of a batch of `predict`, from those of its replicas: joined along the rows, or taken once.

Plain Keras joins the outputs of batches along the first axis, whatever they are. The output of a batch
follows from those of its replicas in two cases: it has rows for the examples in their order, or it does not
depend on the examples, as a table of embeddings. A trial distinguishes these cases: the first replica
computes again, with other numbers of its rows. Any other output is refused.

Equal numbers of rows do not prove either case, because a table may have as many rows as a replica. So the
first replica with examples computes two of its rows again, once in a call for each form of outputs. On JAX,
this is only traced. If an output does not have exactly one row for each example, it is tried with all rows of
the replica twice. Then its values must appear twice, or stay the same. The result of the trial is sent with
the outputs, so all workers put them together in the same way. Outputs that do not depend on the examples must
agree bit for bit. If only one replica has examples, its outputs are those of the batch.

The other effects of a compiled step of `evaluate` or `predict` may depend on the inputs that it has, so each
structure of inputs has its own program.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import keras
import msgspec
import numpy as np
import numpy.typing as npt

from lockstep.errors import ModelError
from lockstep.keras.worker_exchange import Packed, unpack

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Leaves = Sequence[tuple[str, Array]]
"""The leaves of a nest of outputs by path, in the order of the nest."""

_ROUNDING = 0.02
"""The largest difference, relative to the largest value, of outputs that are equal up to rounding."""

_ADVICE = "return it from another method of the model, or run with one replica (--replicas 1)"


class OutputTrial(msgspec.Struct, array_like=True, frozen=True):
    """The result of a trial of the outputs of a replica.

    Attributes:
        joins: for each leaf, whether it is joined along the rows or taken once; None if neither is possible.
        reasons: for each leaf, why neither is possible, as a predicate; otherwise empty.
    """

    joins: list[bool | None]
    reasons: list[str]


class ReplicaOutputs(msgspec.Struct, array_like=True, frozen=True):
    """The outputs of one replica, in a form for messages.

    Attributes:
        replica: the id of the replica.
        leaves: the leaves of the nest of outputs, named by path.
        trial: the trial, for the first replica with examples if others have examples, too; otherwise None.
    """

    replica: int
    leaves: list[Packed]
    trial: OutputTrial | None = None


def leaves_by_path(outputs: Any, to_numpy: Callable[[Any], Array]) -> list[tuple[str, Array]]:
    """Return the leaves of a nest of outputs as arrays of NumPy.

    Raises:
        ModelError: a leaf is not a dense array of numbers or strings.
    """
    leaves = []
    for path, leaf in keras.tree.flatten_with_path(outputs):
        name, array = "/".join(map(str, path)), to_numpy(leaf)
        if array.dtype.kind == "O" and not all(isinstance(item, bytes | str) for item in array.flat):
            _refuse(name, f"is a {type(leaf).__name__}: return a dense tensor")
        leaves.append((name, array))
    return leaves


class OutputTrials:
    """The trials of one call. Their results hold for all of its batches with outputs of the same form."""

    def __init__(self) -> None:
        self._joins_by_form: dict[Any, bool] = {}

    def of(
        self,
        leaves: Leaves,
        examples: int,
        shapes: Callable[[int], Sequence[Shape]],
        computed: Callable[[int], Leaves],
    ) -> OutputTrial:
        """Return the trial of the outputs of a replica.

        Args:
            leaves: the outputs.
            examples: the number of the replica's rows.
            shapes: returns the shapes of the outputs for another number of rows.
            computed: returns the outputs for another number of rows, which are the same rows repeated.
        """
        joins = [self._recall(*leaf, examples) for leaf in leaves]
        reasons = [""] * len(leaves)
        if None in joins:
            # One row would not do, because programs may drop axes of length 1.
            joins = _with_rows(leaves, examples, 2 if examples != 2 else 3, shapes)
        if None in joins:
            doubled, reasons = _doubled(leaves, examples, computed)
            joins = [other if join is None else join for join, other in zip(joins, doubled, strict=True)]
        for leaf, join in zip(leaves, joins, strict=True):
            if join is not None:
                self._joins_by_form[_form(*leaf, examples, exact=not join)] = join
        return OutputTrial(joins, reasons)

    def _recall(self, name: str, array: Array, examples: int) -> bool | None:
        forms = (_form(name, array, examples, exact=exact) for exact in (True, False))
        return next((self._joins_by_form[form] for form in forms if form in self._joins_by_form), None)


def joined(parts: Sequence[ReplicaOutputs]) -> list[Array]:
    """Return the leaves of the outputs of a batch.

    Args:
        parts: the outputs of all replicas that have examples.

    Raises:
        ModelError: the outputs of the batch do not follow from them.
    """
    parts = sorted(parts, key=lambda part: part.replica)
    arrays = [[unpack(leaf) for leaf in part.leaves] for part in parts]
    names = [[name for name, _ in leaves] for leaves in arrays]
    for part, others in zip(parts, names, strict=True):
        if others != names[0]:
            raise ModelError(
                f"replicas return different outputs: {_listed(names[0])} (replica {parts[0].replica}) and "
                f"{_listed(others)} (replica {part.replica}); make the model return the same outputs for all "
                "rows of a batch, or run with one replica (--replicas 1)"
            )
    columns = [[array for _, array in column] for column in zip(*arrays, strict=True)]
    trial = parts[0].trial
    if trial is None:
        return [column[0].copy() for column in columns]
    result = []
    for name, column, joins, reason in zip(names[0], columns, trial.joins, trial.reasons, strict=True):
        first = column[0]
        for part, other in zip(parts, column, strict=True):
            if joins is None:
                _refuse(
                    name,
                    f"{reason}, so the output of a batch cannot be joined from those of its parts: {_ADVICE}",
                )
            if joins and (other.shape[1:], other.dtype) != (first.shape[1:], first.dtype):
                _refuse(
                    name,
                    f"has the shape {list(first.shape)} on replica {parts[0].replica} and "
                    f"{list(other.shape)} on replica {part.replica}, which cannot be joined along the rows: "
                    "give all rows one shape",
                )
            if not joins and not _same_bits(first, other):
                _refuse(
                    name,
                    f"has no row for each example, and replicas {parts[0].replica} and {part.replica} "
                    f"compute different values of it: {_ADVICE}",
                )
        result.append(np.concatenate(column) if joins else first.copy())
    return result


def _form(name: str, array: Array, examples: int, *, exact: bool) -> Any:
    """Return the key of a leaf. Unless it is exact, it is the same for other numbers of rows."""
    if exact or not array.ndim:
        return name, array.dtype, array.shape, examples
    return name, array.dtype, array.shape[1:], len(array) == examples


def _with_rows(
    leaves: Leaves, examples: int, count: int, shapes: Callable[[int], Sequence[Shape]]
) -> list[bool | None]:
    """Return True for each leaf with one row for each example, even of `count` examples; otherwise None."""
    own_shapes = [array.shape for _, array in leaves]
    if any(shape[:1] == (examples,) for shape in own_shapes):
        try:
            others = shapes(count)
        except Exception:
            # The program may need a minimum number of rows.
            others = []
        if len(others) == len(own_shapes):
            pairs = zip(own_shapes, others, strict=True)
            return [
                True if (shape, other[:1]) == ((examples, *other[1:]), (count,)) else None
                for shape, other in pairs
            ]
    return [None] * len(own_shapes)


def _doubled(
    leaves: Leaves, examples: int, computed: Callable[[int], Leaves]
) -> tuple[list[bool | None], list[str]]:
    """Compute with all rows twice, and return how to combine each leaf, and why some cannot be combined."""
    try:
        doubled = computed(2 * examples)
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        reason = f"cannot be tried, because the step fails for {2 * examples} rows ({failure})"
        return [None] * len(leaves), [reason] * len(leaves)
    if [name for name, _ in doubled] != [name for name, _ in leaves]:
        reason = f"is one of a different set of outputs for {2 * examples} rows"
        return [None] * len(leaves), [reason] * len(leaves)
    joins: list[bool | None] = []
    reasons = []
    for (_, once), (_, twice) in zip(leaves, doubled, strict=True):
        join, reason = _compared(once, twice, examples)
        joins.append(join)
        reasons.append(reason)
    return joins, reasons


def _compared(once: Array, twice: Array, examples: int) -> tuple[bool | None, str]:
    if once.ndim and twice.shape == (2 * len(once), *once.shape[1:]):
        if _close(np.concatenate([once, once]), twice):
            return True, ""
        return (
            None,
            f"has {len(once)} rows for {examples} examples, which are not in the order of the examples",
        )
    if twice.shape == once.shape:
        if _close(once, twice):
            return False, ""
        return None, "has no row for each example, and changes with their number"
    return None, (
        f"has the shape {list(once.shape)} for {examples} rows and {list(twice.shape)} for {2 * examples}"
    )


def _close(left: Array, right: Array) -> bool:
    if left.dtype.kind in "OSUbiu":
        return np.array_equal(left, right)
    wide = "complex128" if left.dtype.kind == "c" else "float64"
    left, right = left.astype(wide), right.astype(wide)
    finite = np.abs(left[np.isfinite(left)])
    largest = float(finite.max()) if finite.size else 0.0
    return np.allclose(left, right, rtol=_ROUNDING, atol=_ROUNDING * largest, equal_nan=True)


def _same_bits(left: Array, right: Array) -> bool:
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        return False
    return left.tolist() == right.tolist() if left.dtype.kind == "O" else left.tobytes() == right.tobytes()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _refuse(name: str, predicate: str) -> NoReturn:
    """Raise ModelError: replicas cannot compute an output together."""
    subject = f"output {name!r} of the model" if name else "the output of the model"
    raise ModelError(f"predict with several replicas: {subject} {predicate}")
