"""`keras.utils.get_file` in a job: one worker downloads and the others wait, even if it is killed."""

import io
import json
import os
import signal
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lockstep.worker.downloads import _digest

BODY = bytes(100_000)


def archive() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("inside.txt", BODY)
    return packed.getvalue()


class Origin:
    """Counts requests; answers the first for `partial.bin` with half a file and kills the worker."""

    def __init__(self, locks: Path) -> None:
        self.requests: Counter[str] = Counter()
        origin = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/")
                origin.requests[name] += 1
                body = archive() if name.endswith(".zip") else BODY
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if name == "partial.bin" and origin.requests[name] == 1:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    holder = json.loads((locks / _digest(f"{origin.address}/{name}")).read_bytes())
                    os.kill(holder["process"], signal.SIGKILL)
                else:
                    self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def origin(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    monkeypatch.setitem(environment, "XDG_CACHE_HOME", str(tmp_path / "caches"))
    made = Origin(tmp_path / "caches" / "lockstep" / "downloads")
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_one_request_for_two_workers(origin: Origin, launch: Callable[..., Any], tmp_path: Path) -> None:
    """Half a file of a killed worker is not used by another one."""
    (tmp_path / "cache").mkdir()
    names = ["plain.bin", "new.bin", "new.bin", "packed.zip", "partial.bin"]
    run = launch("-n 2 --max-restarts 0", "downloading.py", origin.address, str(tmp_path / "cache"), *names)
    assert run.status == 0, run.stderr
    assert origin.requests == {"plain.bin": 1, "new.bin": 2, "packed.zip": 1, "partial.bin": 2}
    killed, survivor = sorted(
        ([line for line in run.log(worker) if line.startswith("file ")] for worker in (0, 1)), key=len
    )
    assert [line.split()[2] for line in survivor] == ["100000"] * 5
    # The archive was unpacked once, and no worker wrote to files that the other one may be reading.
    assert [line for line in killed if ".zip" in line or "plain" in line] == [survivor[0], survivor[3]]
    assert not [path.name for path in (tmp_path / "cache" / "datasets").iterdir() if path.suffix == ".part"]
