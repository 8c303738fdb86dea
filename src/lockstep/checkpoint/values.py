"""Nested Python values as JSON-able data and named arrays, and back, with the same types and bits.

JSON's own types are stored as they are: None, bool, str, list, dict with string keys, finite floats, and
integers of up to 63 bits and a sign. Everything else is an object with one key, which begins with `$`:

    {"$tuple": [...]}                    {"$dict": [[key, value], ...]}     other keys than plain strings
    {"$int": "-0x1f"}                    {"$float": "nan" | "inf" | "-inf"}
    {"$nan": "<hex>"}                    another nan than that of "$float"
    {"$bytes": "<base64>"}               {"$str": "<base64 of UTF-8>"}      with lone surrogates
    {"$scalar": ["float32", "<hex>"]}    {"$array": "<name>"}
    {"$strings": [[shape], [item]]}      an array of objects, all str or bytes
"""

import base64
import binascii
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lockstep.errors import CheckpointError

Array = npt.NDArray[Any]

_NAN = struct.pack(">d", math.nan)


class PackError(TypeError):
    """A part of a value cannot be packed; the message names the part and its location."""


def pack(value: Any, prefix: str) -> tuple[Any, dict[str, Array]]:
    """Split `value` into JSON-able data and arrays.

    Args:
        value: consists of None, bool, int, float, str, bytes, list, tuple, dict, NumPy arrays and scalars.
            Instances of subclasses are rejected, since `unpack` would not restore their types.
        prefix: the prefix of the arrays' names, and the location of `value` in messages.

    Returns:
        JSON-able data, and the arrays by name: `prefix` and the path of keys and positions, separated by
        slashes. The arrays are those of `value`, not copies.

    Raises:
        PackError: a part cannot be packed.
    """
    packer = _Packer()
    try:
        return packer.pack(value, prefix), packer.arrays
    except RecursionError:
        raise PackError(f"{prefix} is nested too deeply, or contains itself") from None


def packable(value: Any) -> bool:
    """Whether `pack` can pack a value."""
    try:
        pack(value, "")
    except PackError:
        return False
    return True


def unpack(packed: Any, arrays: Mapping[str, Array]) -> Any:
    """Restore a value from a result of `pack`; its arrays are those in `arrays`, not copies.

    Raises:
        CheckpointError: `packed` is not a result of `pack`, or an array is missing.
    """
    try:
        return _unpacked(packed, arrays)
    except RecursionError:
        raise CheckpointError("the checkpoint is nested too deeply") from None


class _Packer:
    """Packs one value; collects its arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def pack(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if isinstance(value, np.generic):
            return self._scalar(value, where)
        make = self._MAKERS.get(kind)
        if make is None:
            raise PackError(
                f"{where}: a {kind.__module__}.{kind.__qualname__} cannot be saved in a checkpoint"
            )
        return make(self, value, where)

    def _int(self, value: int, where: str) -> Any:
        return value if value.bit_length() <= 63 else {"$int": hex(value)}

    def _float(self, value: float, where: str) -> Any:
        if math.isnan(value) and (bits := struct.pack(">d", value)) != _NAN:
            return {"$nan": bits.hex()}
        return value if math.isfinite(value) else {"$float": repr(value)}

    def _str(self, value: str, where: str) -> Any:
        if plain(value):
            return value
        return {"$str": _base64(value.encode("utf-8", "surrogatepass"))}

    def _bytes(self, value: bytes, where: str) -> Any:
        return {"$bytes": _base64(value)}

    def _list(self, value: list[Any], where: str) -> Any:
        return [self.pack(item, f"{where}/{number}") for number, item in enumerate(value)]

    def _tuple(self, value: tuple[Any, ...], where: str) -> Any:
        return {"$tuple": self._list(list(value), where)}

    def _dict(self, value: dict[Any, Any], where: str) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise PackError(f"{where}: a key is {key!r}, but only str and int keys can be saved")
        if all(type(key) is str and plain(key) and not key.startswith("$") for key in value):
            return {key: self.pack(item, f"{where}/{key}") for key, item in value.items()}
        return {
            "$dict": [
                [self.pack(key, where), self.pack(item, f"{where}/{key}")] for key, item in value.items()
            ]
        }

    def _array(self, value: Array, where: str) -> Any:
        if value.dtype.kind == "O" and all(type(item) in (str, bytes) for item in value.flat):
            return {"$strings": [list(value.shape), self._list(value.ravel().tolist(), where)]}
        self._check(value.dtype, where)
        name = base = where.encode("utf-8", "backslashreplace").decode()
        number = 1
        while name in self.arrays:
            number += 1
            name = f"{base}#{number}"
        self.arrays[name] = value
        return {"$array": name}

    def _scalar(self, value: "np.generic[Any]", where: str) -> Any:
        self._check(value.dtype, where)
        return {"$scalar": [value.dtype.name, value.tobytes().hex()]}

    @staticmethod
    def _check(dtype: "np.dtype[Any]", where: str) -> None:
        if not storable(dtype):
            raise PackError(f"{where}: NumPy's dtype {dtype} cannot be saved in a checkpoint")

    _MAKERS: Mapping[type, Callable[["_Packer", Any, str], Any]] = {
        int: _int,
        float: _float,
        str: _str,
        bytes: _bytes,
        list: _list,
        tuple: _tuple,
        dict: _dict,
        np.ndarray: _array,
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _unpacked(packed: Any, arrays: Mapping[str, Array]) -> Any:
    if type(packed) is list:
        return [_unpacked(item, arrays) for item in packed]
    if type(packed) is not dict:
        return packed
    if len(packed) == 1:
        tag, content = next(iter(packed.items()))
        if tag.startswith("$"):
            return _untag(tag, content, arrays)
    return {key: _unpacked(item, arrays) for key, item in packed.items()}


def _untag(tag: str, content: Any, arrays: Mapping[str, Array]) -> Any:
    try:
        if tag == "$array":
            return arrays[content]
        if tag == "$strings":
            shape, items = content
            return np.array(_unpacked(items, arrays), object).reshape(shape)
        if tag == "$tuple":
            return tuple(_unpacked(item, arrays) for item in content)
        if tag == "$dict":
            return {_unpacked(key, arrays): _unpacked(item, arrays) for key, item in content}
        return _LEAVES[tag](content)
    except (KeyError, TypeError, ValueError, OverflowError, binascii.Error):
        raise CheckpointError(
            f"a checkpoint has {{{tag!r}: {content!r:.80}}}, which is not a known value"
        ) from None


def _scalar(content: Any) -> Any:
    name, bits = content
    dtype = named(name)
    if dtype is None:
        raise ValueError(name)
    (scalar,) = np.frombuffer(bytes.fromhex(bits), dtype)
    return scalar


_LEAVES: Mapping[str, Callable[[Any], Any]] = {
    "$int": lambda content: int(content, 16),
    "$float": float,
    "$nan": lambda content: struct.unpack(">d", bytes.fromhex(content))[0],
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$str": lambda content: base64.b64decode(content, validate=True).decode("utf-8", "surrogatepass"),
    "$scalar": _scalar,
}


_NAMES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
]
_DTYPES = {name: np.dtype(name) for name in _NAMES} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


def named(name: str) -> "np.dtype[Any] | None":
    """Return the dtype of this name, or None if checkpoints do not support it."""
    return _DTYPES.get(name)


def storable(dtype: "np.dtype[Any]") -> bool:
    """Whether checkpoints support this dtype, including its byte order."""
    return dtype == _DTYPES.get(dtype.name)


def plain(text: str) -> bool:
    """Whether JSON preserves `text`: it would turn adjacent lone surrogates into one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
