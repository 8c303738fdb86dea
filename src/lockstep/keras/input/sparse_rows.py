"""Sparse batches of any library, from which replicas get their rows as dense arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt


class SparseRows:
    """A sparse array on the host, with a row for each example; slices of its rows are dense arrays.

    The whole array is never dense, because it may have many columns.

    Attributes:
        shape: the shape of the whole array.
        dtype: the dtype of its elements.
    """

    def __init__(self, indices: npt.NDArray[Any], values: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
        """Keep some elements; the others are zero.

        Args:
            indices: a row of indices for each element. Elements of equal indices are added up, and those
                outside of the shape, with which JAX pads, do not count.
            values: the values of the elements.
            shape: the shape of the array.
        """
        inside = (indices < np.array(shape[: indices.shape[1]])).all(axis=1)
        self.shape = shape
        self.dtype = values.dtype
        self._indices = indices[inside]
        self._values = values[inside]

    @classmethod
    def of(cls, array: Any) -> "SparseRows":
        """Convert a sparse array for which `is_sparse` holds."""
        if hasattr(array, "tocoo"):
            array = array.tocoo()
            return cls(np.stack([array.row, array.col], axis=1), array.data, array.shape)
        if hasattr(array, "dense_shape"):
            return cls(array.indices.numpy(), array.values.numpy(), tuple(array.dense_shape.numpy().tolist()))
        if hasattr(array, "to_sparse_coo"):
            array = array.detach().cpu().to_sparse_coo().coalesce()
            return cls(array.indices().T.numpy(), array.values().numpy(), tuple(array.shape))
        if type(array).__name__ == "BCOO" and not array.n_batch:
            return cls(np.asarray(array.indices), np.asarray(array.data), array.shape)
        dense = np.asarray(array.todense())
        indices = np.argwhere(dense)
        return cls(indices, dense[tuple(indices.T)], dense.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows as a dense array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> npt.NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        among = (self._indices[:, 0] >= start) & (self._indices[:, 0] < stop)
        indices = self._indices[among] - np.eye(1, self._indices.shape[1], dtype=np.int64) * start
        cells, shape = tuple(indices.T), (max(stop - start, 0), *self.shape[1:])
        if self.dtype.kind in "OSU":
            texts = np.full(shape, b"", self.dtype)
            texts[cells] = self._values[among]
            return texts
        dense = np.zeros(shape, self.dtype)
        np.add.at(dense, cells, self._values[among])
        return dense


def is_sparse(leaf: Any) -> bool:
    """Whether a leaf of a batch is a sparse array: of SciPy, JAX or PyTorch, or a `tf.SparseTensor`."""
    kind = type(leaf)
    if kind.__module__.startswith(("scipy.sparse", "jax.experimental.sparse")):
        return True
    if kind.__name__ == "SparseTensor":
        return kind.__module__.startswith("tensorflow.")
    return kind.__module__.startswith("torch") and str(leaf.layout).startswith("torch.sparse")
