"""Packs the small arrays of a partial into one array for each dtype.

In each step, each array costs a conversion to NumPy, and separate calls for additions. For an array of a few
kilobytes, that takes longer than copying it. So a compiled step returns such arrays packed.

TensorFlow's update takes the arrays from the packed one. XLA compiles a slice in 35 ms, so on JAX, and where
XLA compiles TensorFlow's update, they are views of the total. Records and messages use the names of the
arrays (`Program.parts`). PyTorch has no compiled function and does not pack.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import xxhash

from lockstep.collectives.layout import ALIGNMENT
from lockstep.keras.backends.contract import EQUAL, GATHERED, LOGS

SMALL = 1 << 16
"""The size in bytes of the largest array that is packed."""

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes of arrays, by name."""


class Place(NamedTuple):
    """The place of an array in the packed one: the elements from `start` to `stop`, and the array's shape."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Packing:
    """The places of small arrays.

    Attributes:
        places: the places in each packed array, in their order there, by its name. Each begins at a multiple
            of `ALIGNMENT` bytes, so that sums have the same bits as sums of the arrays themselves. The name
            contains a hash of the places, so that packed arrays with equal names have equal places.
    """

    places: Mapping[str, Sequence[Place]]

    @classmethod
    def of(cls, shapes: Shapes) -> Self:
        """Return the packing of arrays with these shapes; large and empty ones are left out."""
        small = sorted(
            (dtype.name, dtype.itemsize, name, shape)
            for name, (shape, dtype) in shapes.items()
            if 0 < prod(shape) * dtype.itemsize <= SMALL
        )
        all_places = {}
        for (dtype_name, size), group in groupby(small, lambda entry: entry[:2]):
            places, start = list[Place](), 0
            for _, _, name, shape in group:
                places.append(Place(name, start, start + prod(shape), shape))
                start = places[-1].stop + -places[-1].stop % (ALIGNMENT // size)
            digest = xxhash.xxh3_64_hexdigest(repr(places).encode())
            all_places[f"packed/{dtype_name}/{digest}"] = tuple(places)
        return cls(all_places)

    def packed(
        self, arrays: Mapping[str, Any], join: Callable[[Iterable[tuple[Any, int]]], Any]
    ) -> dict[str, Any]:
        """Return `arrays` with the small ones packed.

        Args:
            arrays: the arrays, by name.
            join: flattens and joins arrays, and adds a number of zeros after each.
        """
        rest = dict(arrays)
        joined = {}
        for name, places in self.places.items():
            ends = [place.start for place in places[1:]] + [places[-1].stop]
            joined[name] = join(
                [(rest.pop(place.name), end - place.stop) for place, end in zip(places, ends, strict=True)]
            )
        return rest | joined

    def unpacked(
        self, arrays: Mapping[str, Any], reshape: Callable[[Any, tuple[int, ...]], Any] = np.reshape
    ) -> dict[str, Any]:
        """Return arrays by their own names: the packed ones as slices, which are views in NumPy.

        Arrays that are not packed remain as they are.
        """
        separate = {name: array for name, array in arrays.items() if name not in self.places}
        for packed, places in self.places.items():
            if packed in arrays:
                for name, start, stop, shape in places:
                    separate[name] = reshape(arrays[packed][start:stop], shape)
        return separate


class Packings:
    """The packings of the rounds of a step, each learned when the round is first traced."""

    def __init__(self) -> None:
        self._rounds: dict[int, Packing] = {}

    def learn(self, number: int, shapes: Shapes) -> Packing:
        """Return the packing of round `number`, whose partials have arrays with these shapes and dtypes.

        The packing is empty if an earlier trace had other arrays. Then the names show the difference.
        """
        packing = Packing.of(shapes)
        return packing if self._rounds.setdefault(number, packing) == packing else Packing({})

    def unpacked(
        self,
        number: int,
        arrays: Mapping[str, Any],
        reshape: Callable[[Any, tuple[int, ...]], Any] = np.reshape,
    ) -> Mapping[str, Any]:
        """Return the arrays of a partial or a total of round `number` by their own names.

        A round that has not been traced does not pack.
        """
        return self._rounds[number].unpacked(arrays, reshape) if number in self._rounds else arrays


def is_packable(name: str, array: Any) -> bool:
    """Whether each step of a program computes the array with this shape, and replicas sum it.

    The shapes of figures that a step logs can vary.
    """
    return not name.startswith((EQUAL, GATHERED)) and (not name.startswith(LOGS) or not array.shape)
