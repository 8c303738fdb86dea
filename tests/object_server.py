"""A server of S3 on this machine: that of the package moto, where it is installed."""

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE = 120.0
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
