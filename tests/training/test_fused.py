"""A fused kernel computes the update that Keras computes, up to rounding."""

from collections.abc import Callable

import pytest

WITH_KERNEL = ["adam", "its options", "decay", "schedule", "clipped", "average"]
WITHOUT = ["amsgrad", "accumulated", "another"]


@pytest.mark.slow("tensorflow")
@pytest.mark.ci
def test_fused_updates_are_those_of_keras(plain: Callable[..., str], backend: str) -> None:
    """On TensorFlow, then also in graphs of a program's own."""
    if backend == "jax":
        pytest.skip("XLA makes one pass by itself")
    lines = plain("fused.py", backend=backend).splitlines()
    updates = [
        *(f"{name}: kernel True, near True, equal False" for name in WITH_KERNEL),
        *(f"{name}: kernel False, near True, equal True" for name in WITHOUT),
    ]
    assert [line for line in lines if ": kernel" in line] == updates * (2 if backend == "tensorflow" else 1)
