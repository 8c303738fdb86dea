"""A server of S3 on this machine: that of the package moto, where it is installed; and one with faults."""

import contextlib
import http.client
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

_PATIENCE = 120.0
_OF_CONNECTION = ("connection", "transfer-encoding", "content-length", "date", "server")
SECRET = "S3CRET"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket named `bucket`; yield the variables of its users. Without moto, skip the test.

    Args:
        folder: for the log of the server.
    """
    command = shutil.which("moto_server")
    works = (
        command and not subprocess.run([command, "--help"], capture_output=True, timeout=_PATIENCE).returncode
    )
    if command is None or not works:
        pytest.skip("moto_server, a server of S3, is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (folder / "s3.log").open("w") as log:
        server = subprocess.Popen([command, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }
    finally:
        server.terminate()
        server.wait(_PATIENCE)


class FaultyServer:
    """Passes requests on to a server of S3, and misbehaves.

    Attributes:
        denies: whether a request, of this method and path, is answered with 403 Forbidden.
        holds: whether it waits until `released` is set.
        released: see above.
        requests: the methods and paths of all requests.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._target = urlsplit(variables["AWS_ENDPOINT_URL"])
        self.denies: Callable[[str, str], bool] = lambda method, path: False
        self.holds: Callable[[str, str], bool] = lambda method, path: False
        self.released = threading.Event()
        self.requests: list[tuple[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body, method, path = self.rfile.read(length), self.command, urlsplit(self.path).path
                server.requests.append((method, path))
                if server.holds(method, path):
                    server.released.wait(_PATIENCE)
                if server.denies(method, path):
                    text = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
                    self.reply(403, {}, b"" if method == "HEAD" else text)
                else:
                    self.reply(*server.passed_on(method, self.path, body, dict(self.headers)))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def reply(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _OF_CONNECTION:
                        self.send_header(name, value)
                length = headers.get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.variables = {
            **variables,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_address[1]}",
        }

    def passed_on(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the answer of the server."""
        connection = http.client.HTTPConnection(self._target.netloc, timeout=_PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
