"""Copies of contents: the same bits, in the same memory, whatever changes."""

import ml_dtypes
import numpy as np
import pytest

from lockstep.checkpoint.checkpoint_files import Contents
from lockstep.checkpoint.scheduler import Copies


def contents(seed: int, length: int = 50) -> Contents:
    random = np.random.default_rng(seed)
    return Contents(
        seed,
        {"seed": seed},
        {
            "a": random.normal(size=(length, 3)).T,
            "b": random.normal(size=7).astype(ml_dtypes.bfloat16),
            "scalar": np.array(float(seed)),
            "empty": np.empty((0, 2), "int8"),
        },
    )


@pytest.mark.parametrize("ready", [False, True])
def test_a_copy_does_not_change_with_its_origin(ready: bool) -> None:
    copies = Copies()
    if ready:
        copies.make_ready(contents(0))
        copies.make_ready(contents(0))
    for seed in range(4):
        origin = contents(seed)
        copy = copies.of(origin)
        expected = {name: (a.dtype, a.shape, a.tobytes()) for name, a in contents(seed).arrays.items()}
        for array in origin.arrays.values():
            array[...] = 0
        assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in copy.arrays.items()} == expected
        assert (copy.step, copy.manifest) == (seed, {"seed": seed})


def test_memory_is_used_again_where_it_fits() -> None:
    copies = Copies()
    copies.make_ready(contents(0))
    assert copies._thread is not None
    copies._thread.join()
    first, second = copies.of(contents(1)), copies.of(contents(2))
    other = copies.of(contents(3, length=60))
    for name in first.arrays:
        assert first.arrays[name] is second.arrays[name]
        assert (other.arrays[name] is second.arrays[name]) == (name != "a")
