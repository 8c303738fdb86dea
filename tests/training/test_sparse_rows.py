"""Rows of sparse arrays of each library."""

from typing import Any

import numpy as np
import pytest

from lockstep.keras.input.batch_division import HeldRows, decoded, encoded
from lockstep.keras.input.readings import whole_batch
from lockstep.keras.input.sparse_rows import SparseRows, is_sparse

DENSE = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3], [0, 0, 4], [5, 0, 0]], "float32")


def of_scipy(kind: str) -> Any:
    return getattr(pytest.importorskip("scipy.sparse"), kind)(DENSE)


def of_scipy_twice() -> Any:
    """The element (0, 1) is the sum of two."""
    given = [1, 1, 1, 3, 4, 5], ([0, 0, 2, 2, 3, 4], [1, 1, 0, 2, 2, 0])
    return pytest.importorskip("scipy.sparse").coo_matrix(given, DENSE.shape, "float32")


def of_jax(kind: str, **options: int) -> Any:
    return getattr(pytest.importorskip("jax.experimental.sparse"), kind).fromdense(DENSE, **options)


def of_tensorflow() -> Any:
    return pytest.importorskip("tensorflow").sparse.from_dense(DENSE)


def of_torch(method: str) -> Any:
    return getattr(pytest.importorskip("torch").tensor(DENSE), method)()


ARRAYS = {
    "scipy csr_matrix": lambda: of_scipy("csr_matrix"),
    "scipy coo_array": lambda: of_scipy("coo_array"),
    "scipy csc_array": lambda: of_scipy("csc_array"),
    "scipy, an element twice": of_scipy_twice,
    "jax BCOO": lambda: of_jax("BCOO"),
    "jax BCOO, padded": lambda: of_jax("BCOO", nse=9),
    "jax BCOO, dense columns": lambda: of_jax("BCOO", n_dense=1),
    "jax BCOO, in batches": lambda: of_jax("BCOO", n_batch=1),
    "jax BCSR": lambda: of_jax("BCSR"),
    "tensorflow": of_tensorflow,
    "torch COO": lambda: of_torch("to_sparse"),
    "torch CSR": lambda: of_torch("to_sparse_csr"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", ARRAYS)
def test_slices_of_rows_are_dense(name: str) -> None:
    given = ARRAYS[name]()
    assert is_sparse(given)
    rows = SparseRows.of(given)
    assert (rows.shape, rows.dtype, len(rows), rows.nbytes) == ((5, 3), np.float32, 5, DENSE.nbytes)
    for part in (slice(None), slice(0, 2), slice(2, 5), slice(3, 3)):
        np.testing.assert_array_equal(rows[part], DENSE[part])
        assert rows[part].dtype == np.float32


def test_texts_are_empty_where_a_sparse_tensor_has_none() -> None:
    tf = pytest.importorskip("tensorflow")
    texts = tf.SparseTensor([[0, 1], [2, 0]], ["a", "b"], [3, 2])
    assert SparseRows.of(texts)[:].tolist() == [[b"", b"a"], [b"", b""], [b"b", b""]]


def test_dense_arrays_are_not_sparse() -> None:
    assert not is_sparse(DENSE)
    assert not is_sparse(None)
    for library, make in (("torch", "tensor"), ("tensorflow", "constant"), ("jax.numpy", "asarray")):
        if module := pytest.importorskip(library):
            assert not is_sparse(getattr(module, make)(DENSE))


def test_a_batch_reads_and_hashes_rows_of_a_sparse_array() -> None:
    batch, dense = (whole_batch((x, np.arange(5)), 2) for x in (of_scipy("csr_matrix"), DENSE))
    assert batch.check() == dense.check()
    x, y = batch.share(1).data()
    np.testing.assert_array_equal(x, DENSE[3:])
    assert y.tolist() == [3, 4]


def test_rows_of_a_sparse_batch_are_handed_over() -> None:
    held = HeldRows.whole((of_scipy("csr_matrix"), np.arange(5)), 0, {})
    (sent,) = (np.concatenate(encoded({3: held.cut(slice(1, 3))})),)
    x, y = decoded(sent, {})[3].read(slice(1, 3))
    np.testing.assert_array_equal(x, DENSE[1:3])
    assert y.tolist() == [1, 2]
