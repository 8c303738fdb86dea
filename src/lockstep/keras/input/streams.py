"""Datasets of any kind as streams of nests of arrays on the host, for distributed datasets."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import inf
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from lockstep.errors import DataError
from lockstep.keras.input.sparse_rows import SparseRows, is_sparse
from lockstep.keras.nests import Nest, leaves_of, parts_of
from lockstep.keras.per_replica import Spec


def on_host(leaf: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor as a NumPy array, without a copy if NumPy can read its memory.

    A sparse array becomes dense.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if is_sparse(leaf):
        return SparseRows.of(leaf)[:]
    if type(leaf).__module__.startswith("torch"):
        leaf = leaf.detach().cpu()
    elif hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return np.asarray(keras.ops.convert_to_numpy(leaf))


@dataclass(frozen=True)
class Form:
    """The form of elements.

    Attributes:
        nest: the structure of an element: a placeholder for each leaf, None for a missing one.
        specs: the specs of each replica's share of the leaves.
    """

    nest: Nest
    specs: tuple[Spec, ...]

    @classmethod
    def of(cls, element: Nest) -> "Form":
        """Return the form of elements like this one."""
        marks = keras.tree.map_structure(lambda leaf: None if leaf is None else True, element)
        return cls(marks, tuple(spec_of(leaf) for leaf in leaves_of(element)))


class Stream:
    """A dataset that is read in its own order: `tf.data`, PyTorch's, a `PyDataset`, or any iterable.

    Args:
        dataset: the dataset, of any of these kinds.
        apart: a context for all code of the dataset itself.
        parts: the number of shares into which each element is divided; None if their sizes are unknown.

    Raises:
        DataError: the dataset declares elements without rows that can be split.
    """

    def __init__(
        self,
        dataset: Any,
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
        parts: int | None = None,
    ) -> None:
        self.apart = apart
        self.is_tensorflow = is_tensorflow(dataset)
        self.dataset = readable(dataset) if self.is_tensorflow else dataset
        self._begun: Reader | None = None
        self._form = _declared(dataset.element_spec, parts) if self.is_tensorflow else None

    def begin(self) -> "Reader":
        """Begin a pass."""
        begun, self._begun = self._begun, None
        return begun or self.opened()

    def peek(self) -> Nest:
        """Return the first element of the next pass, which still yields it, or None if it is empty."""
        self._begun = self._begun or self.opened()
        return self._begun.peek()

    def form(self) -> Form:
        """Return the form of the elements; read the first one ahead if the form is not known otherwise.

        Raises:
            DataError: there is no element.
        """
        if self._form is None:
            self.peek()
        return self.known_form()

    def known_form(self) -> Form:
        """Return the form of the elements, if it is known without reading.

        Raises:
            DataError: the form is not known.
        """
        if self._form is None:
            raise DataError("the dataset is empty, so the structure of its elements is unknown")
        return self._form

    def note(self, element: Nest) -> None:
        """Record the form of an element."""
        if self._form is None:
            self._form = Form.of(element)

    def opened(self) -> "Reader":
        """Begin a pass that does not count: the next one starts again."""
        with self.apart():
            return Reader(self, read(self.dataset))

    @property
    def length(self) -> float | None:
        """The number of elements in a pass; infinite if it never ends, None if unknown."""
        if self.is_tensorflow:
            cardinality = int(self.dataset.cardinality())
            return {-1: inf, -2: None}.get(cardinality, cardinality)
        if isinstance(self.dataset, keras.utils.PyDataset):
            batches = self.dataset.num_batches
            return inf if batches is None else int(batches)
        try:
            return len(self.dataset)
        except TypeError:
            return None


class Reader:
    """One pass over a stream; yields nests of NumPy arrays.

    Attributes:
        iterator: the iterator of the dataset itself.
    """

    def __init__(self, stream: Stream, iterator: Iterator[Any]) -> None:
        self._stream = stream
        self._ahead: list[Nest] = []
        self.iterator = iterator

    def __iter__(self) -> Iterator[Nest]:
        return self

    def __next__(self) -> Nest:
        return self._ahead.pop() if self._ahead else self._read()

    def peek(self) -> Nest:
        """Return the next element without taking it, or None at the end."""
        if not self._ahead:
            try:
                self._ahead.append(self._read())
            except StopIteration:
                return None
        return self._ahead[0]

    def _read(self) -> Nest:
        with self._stream.apart():
            element = host_nest(next(self.iterator))
        self._stream.note(element)
        return element


def is_tensorflow(dataset: Any) -> bool:
    """Whether a dataset is one of `tf.data`."""
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset)


def easily_freed(dataset: Any) -> Any:
    """Return a `tf.data.Dataset` without autotuning, unless autotuning was requested.

    Freeing an autotuned iterator takes seconds, in proportion to its lifetime.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = sys.modules["tensorflow"].data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def readable(dataset: Any) -> Any:
    """Return a `tf.data.Dataset` as several workers read it: with equal elements, and easily freed."""
    from lockstep.keras.input.tf_order import in_order

    return easily_freed(in_order(dataset))


def read(dataset: Any) -> Iterator[Any]:
    """Begin a pass over a dataset of any kind."""
    return _batches(dataset) if isinstance(dataset, keras.utils.PyDataset) else iter(dataset)


def _batches(dataset: keras.utils.PyDataset) -> Iterator[Any]:
    endless = dataset.num_batches is None
    yield from (dataset[index] for index in (count() if endless else range(dataset.num_batches)))
    dataset.on_epoch_end()


def host_nest(nest: Nest) -> Nest:
    """Convert a nest to NumPy arrays."""
    leaves, pack = parts_of(nest)
    return pack([None if leaf is None else array_of(leaf) for leaf in leaves])


def array_of(leaf: Any) -> npt.NDArray[Any]:
    """Return an array or a tensor of any framework as a NumPy array.

    Raises:
        DataError: the argument is not a dense array.
    """
    _refuse_rows_of_their_own(leaf)
    array = on_host(leaf)
    if (
        array is not leaf
        and array.dtype.kind == "O"
        and not all(isinstance(item, str | bytes) for item in array.flat)
    ):
        raise DataError(
            f"an element has type {type(leaf).__name__}: give numbers, strings, arrays or nests of them"
        )
    return array


def spec_of(leaf: npt.NDArray[Any]) -> Spec:
    """Return the spec of each replica's share of an array, without the number of examples."""
    return _spec(leaf.dtype, leaf.shape[1:])


@lru_cache
def _spec(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Spec:
    """Return the spec of rows; cached, since NumPy takes longer to name a dtype than to slice rows."""
    return Spec("string" if dtype.kind in "OSU" else dtype.name, (None, *shape))


def _declared(element_spec: Any, parts: int | None) -> Form:
    """Return the form that `tf.data` declares, which has its own representation of a missing leaf."""
    marks = keras.tree.map_structure(lambda spec: True if hasattr(spec, "dtype") else None, element_spec)
    specs = [spec for spec in keras.tree.flatten(element_spec) if hasattr(spec, "dtype")]
    return Form(marks, tuple(_share_of(spec, parts) for spec in specs))


def _share_of(spec: Any, parts: int | None) -> Spec:
    _refuse_rows_of_their_own(spec)
    if spec.shape.rank == 0:
        raise DataError(
            "the dataset has elements without an axis of examples, so it cannot be split over the "
            "replicas; batch it (`dataset.batch(global_batch_size)`) before it is distributed"
        )
    if spec.shape.rank is None:
        raise DataError(
            "the dataset does not declare the rank of its elements; declare it with `tf.ensure_shape`, or in "
            "its output_signature"
        )
    rows, *others = spec.shape.as_list()
    even = rows is not None and parts is not None and rows % parts == 0
    return Spec(spec.dtype.name, (rows // parts if even else None, *others))


def sliceable_rows(leaf: Any) -> "npt.NDArray[Any] | SparseRows":
    """Return an array or a tensor, even a sparse one, in a form whose slices are rows: NumPy arrays.

    Raises:
        DataError: the tensor is ragged.
    """
    if isinstance(leaf, np.ndarray):
        return leaf
    if is_sparse(leaf):
        return SparseRows.of(leaf)
    refuse_ragged(leaf)
    return on_host(leaf)


def is_ragged(leaf: Any) -> bool:
    """Whether a leaf of a batch is a ragged tensor, or its spec."""
    return "Ragged" in type(leaf).__name__


def refuse_ragged(leaf: Any) -> None:
    """Refuse a ragged tensor, or its spec.

    Raises:
        DataError: the argument is ragged.
    """
    if is_ragged(leaf):
        raise DataError(_no_rows(leaf, "`.map(lambda x: x.to_tensor())`"))


def _refuse_rows_of_their_own(leaf: Any) -> None:
    """Refuse a ragged or a sparse tensor, or its spec.

    Raises:
        DataError: the argument is ragged or sparse.
    """
    refuse_ragged(leaf)
    if is_sparse(leaf) or "Sparse" in type(leaf).__name__:
        raise DataError(_no_rows(leaf, "`.map(tf.sparse.to_dense)`"))


def _no_rows(leaf: Any, remedy: str) -> str:
    kind = type(leaf).__name__.removesuffix("Spec")
    return (
        f"the dataset has a {kind}, which cannot be split into the rows of replicas; make it dense in the "
        f"dataset: {remedy}; or train with one replica, which does not split batches"
    )
