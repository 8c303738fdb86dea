"""Packed arrays against the arrays themselves: equal bits, equal sums, and packings that do not change."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.layout import ALIGNMENT
from lockstep.keras.backends.packing import SMALL, Packing, Packings

Array = npt.NDArray[Any]

_SHAPES = st.sampled_from([(), (0,), (1,), (3,), (16,), (5, 7), (2, 3, 4), (SMALL,), (SMALL // 4, 4)])
_DTYPES = st.sampled_from(["float16", "float32", "float64", "int32", "uint32", "uint8"])


def _joined(parts: Any) -> Array:
    flat = [np.concatenate([array.reshape(-1), np.zeros(zeros, array.dtype)]) for array, zeros in parts]
    return np.concatenate(flat)


def _random(seed: int, shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array of random bits, NaNs included."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(np.random.default_rng(seed).bytes(size), dtype).reshape(shape)


@given(
    st.dictionaries(st.text("ab/", min_size=1), st.tuples(_SHAPES, _DTYPES), max_size=8), st.integers(0, 99)
)
def test_packed_arrays_have_the_same_bits_and_sums(
    shapes: dict[str, tuple[tuple[int, ...], str]], seed: int
) -> None:
    one, other = ({name: _random(seed + add, *shape) for name, shape in shapes.items()} for add in (0, 100))
    packing = Packing.of({name: (array.shape, array.dtype) for name, array in one.items()})

    packed = packing.packed(one, _joined)
    assert len(packed) == len(packing.places) + sum(
        array.nbytes > SMALL or not array.size for array in one.values()
    )
    for places in packing.places.values():
        for place in places:
            assert place.start * one[place.name].itemsize % ALIGNMENT == 0
    unpacked = packing.unpacked(packed)
    assert unpacked.keys() == one.keys()
    for name, array in unpacked.items():
        assert array.shape == one[name].shape
        assert array.tobytes() == one[name].tobytes()

    with np.errstate(all="ignore"):
        sums = {name: array + packing.packed(other, _joined)[name] for name, array in packed.items()}
        for name, total in packing.unpacked(sums).items():
            np.testing.assert_array_equal(total, one[name] + other[name])


def test_arrays_with_equal_names_are_packed_alike() -> None:
    def named(**shapes: tuple[int, ...]) -> set[str]:
        return set(Packing.of({name: (shape, np.dtype("float32")) for name, shape in shapes.items()}).places)

    assert named(a=(10,), b=(3,)) == named(b=(3,), a=(10,))
    assert len(named(a=(10,), b=(3,)) | named(a=(12,), b=(3,)) | named(a=(10,), c=(3,)) | named(a=(10,))) == 4


def test_a_round_keeps_its_packing() -> None:
    packings = Packings()
    weights = ((3,), np.dtype("float32"))
    first = packings.learn(0, {"gradient/0": weights, "state/1": weights})
    assert packings.learn(0, {"state/1": weights, "gradient/0": weights}) == first
    assert packings.learn(0, {"gradient/0": weights}) == Packing({})

    (name,) = packings.learn(1, {"gradient/0": weights}).places
    total = np.arange(16, dtype="float32")
    other = np.zeros(2)
    unpacked = packings.unpacked(1, {name: total, "log/loss": other})
    assert unpacked.keys() == {"gradient/0", "log/loss"}
    assert unpacked["gradient/0"].tolist() == [0, 1, 2]
    assert np.shares_memory(unpacked["gradient/0"], total)
    assert unpacked["log/loss"] is other
    assert packings.unpacked(1, unpacked) == unpacked
    assert packings.unpacked(2, {name: total}) == {name: total}
