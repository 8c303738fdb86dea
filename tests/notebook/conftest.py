from pathlib import Path

import pytest


@pytest.fixture
def _compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of one test compile the same."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
