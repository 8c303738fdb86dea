"""A fused kernel computes the update that Keras computes, up to rounding."""

from collections.abc import Callable

import pytest

WITH_KERNEL = ["adam", "its options", "decay", "schedule", "clipped", "average"]
WITHOUT = ["amsgrad", "accumulated", "another"]


@pytest.mark.parametrize("in_graph", ["", "1"])
def test_fused_updates_are_those_of_keras(plain: Callable[..., str], backend: str, in_graph: str) -> None:
    if backend == "jax":
        pytest.skip("XLA makes one pass by itself")
    if in_graph and backend != "tensorflow":
        pytest.skip("only TensorFlow has graphs of a program's own")
    lines = plain("fused.py", *(["--graph"] if in_graph else []), backend=backend).splitlines()
    assert [line for line in lines if ": kernel" in line] == [
        *(f"{name}: kernel True, near True, equal False" for name in WITH_KERNEL),
        *(f"{name}: kernel False, near True, equal True" for name in WITHOUT),
    ]
