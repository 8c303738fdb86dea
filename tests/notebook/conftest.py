from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "launched_training.py"


@pytest.fixture
def _compiled_once(
    tmp_path: Path, lean: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Share compiled code among the processes of a test, compile quickly, and import no other backend."""
    for name, value in lean(PROGRAM, "jax").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
