"""Packing and unpacking restore the same types and bits."""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from checkpoint_samples import DTYPES, same
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint.values import pack, packable, unpack
from lockstep.errors import CheckpointError


def of_bits(shape: tuple[int, ...], dtype: "np.dtype[Any]", fill: bytes) -> Any:
    """Return an array whose bytes repeat `fill`."""
    if dtype.kind == "b":
        fill = bytes(byte & 1 for byte in fill)
    count = math.prod(shape) * dtype.itemsize
    return np.frombuffer((fill * count)[:count], dtype).reshape(shape)


arrays = st.builds(
    of_bits,
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.binary(min_size=1, max_size=9),
)
scalars = st.builds(
    lambda dtype, fill: of_bits((1,), dtype, fill)[0],
    st.sampled_from(DTYPES),
    st.binary(min_size=8, max_size=8),
)
texts = st.text(st.characters(categories=["L", "Cs", "P", "S"]), max_size=4)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from(
        [math.copysign(math.nan, -1.0), struct.unpack(">d", bytes.fromhex("7ff8000000000abc"))[0]]
    )
    | texts
    | st.binary(max_size=5)
    | arrays
    | scalars
    | st.lists(texts | st.binary(max_size=3), max_size=4).map(lambda items: np.array(items, object))
    | texts.map(lambda text: np.array([[text]], object))
)
keys = texts | st.integers() | st.sampled_from(["$array", "$tuple", "$", "a/b", "a"])
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(values)
def test_values_are_restored_with_the_same_types_and_bits(value: Any) -> None:
    assert packable(value)
    packed, found = pack(value, "callbacks")
    text = json.dumps(packed, allow_nan=False)
    assert same(unpack(json.loads(text), found), value)
    assert all(name == "callbacks" or name.startswith("callbacks/") for name in found)
    assert all(name.encode() for name in found)


def test_json_values_are_stored_as_they_are() -> None:
    value = {"a": [None, True, 1, -0.5, "text"], "b": {"c": []}}
    assert pack(value, "x") == (value, {})


def test_arrays_are_named_by_their_location_and_not_copied() -> None:
    first, second, third = np.ones(2), np.zeros(3), np.ones(())
    packed, found = pack({"a": [first], 3: {"b": second}, "a/0": third}, "x")
    assert list(found) == ["x/a/0", "x/3/b", "x/a/0#2"]
    assert found["x/a/0"] is first
    assert unpack(packed, found)["a/0"] is third


def test_large_integers() -> None:
    value = [10**4299, -(10**5000), 2**63 - 1, 2**63, -(2**63), 2**64]
    packed, _ = pack(value, "x")
    assert unpack(json.loads(json.dumps(packed)), {}) == value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"a": [1, object()]}, "x/a/1: a builtins.object"),
        (lambda: OrderedDict(a=1), "x: a collections.OrderedDict"),
        (lambda: {1.5: 1}, "x: a key is 1.5"),
        (lambda: {True: 1}, "x: a key is True"),
        (lambda: 1j, "x: a builtins.complex"),
        (lambda: {"b": np.ones(2, complex)}, "x/b: NumPy's dtype complex128"),
        (lambda: np.ones(2, ">f4"), "x: NumPy's dtype >f4"),
        (lambda: np.array(["text"]), "x: NumPy's dtype <U4"),
        (lambda: np.array([object()]), "x: NumPy's dtype object"),
        (lambda: np.str_("text"), "x: NumPy's dtype <U4"),
        (lambda: np.ma.masked_array([1], [True]), "x: a numpy.ma.*MaskedArray"),
        (endless, "x is nested too deeply"),
    ],
)
def test_unsupported_values_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack(make(), "x")
    assert not packable(make())


@pytest.mark.parametrize(
    "packed",
    [
        {"$array": "missing"},
        {"$set": [1]},
        {"$int": "1.5"},
        {"$bytes": "?"},
        {"$scalar": ["object", "00"]},
        {"$scalar": ["float32", "00"]},
        {"$strings": [[2], ["a"]]},
        {"$dict": [[[], 1]]},
        {"$tuple": None},
    ],
)
def test_invalid_packed_values_are_refused(packed: Any) -> None:
    with pytest.raises(CheckpointError, match="which is not a known value"):
        unpack([packed], {})
