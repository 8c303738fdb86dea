"""Makes the modules that these tests share importable, and starts servers of object stores."""

import functools
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from object_server import SCHEMES, store_server

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def server_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, str]]]:
    """Return a function that starts the server of a scheme once, and returns the variables of its users."""
    with ExitStack() as servers:

        @functools.cache
        def start(scheme: str) -> dict[str, str]:
            return servers.enter_context(store_server(scheme, tmp_path_factory.mktemp(scheme)))

        yield start


@pytest.fixture(params=["memory", *(pytest.param(each, marks=pytest.mark.slow) for each in SCHEMES)])
def backing(
    request: pytest.FixtureRequest,
    server_variables: Callable[[str], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """An empty store of the library."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed")
    if request.param == "memory":
        return obstore.store.MemoryStore()
    for name, value in server_variables(request.param).items():
        monkeypatch.setenv(name, value)
    prefix = f"{request.param}://bucket/{secrets.token_hex(8)}"
    return obstore.store.from_url(prefix, client_options={"allow_http": True})
