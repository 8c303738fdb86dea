"""A server on loopback that answers requests for pods as the API server of Kubernetes does."""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


def pod(name: str, address: str | None, phase: str = "Running", **labels: str) -> dict[str, Any]:
    status = {"phase": phase, "hostIP": "192.0.2.1"} | ({"podIP": address} if address else {})
    return {
        "metadata": {"name": name, "namespace": "training", "labels": labels},
        "spec": {"containers": [{"name": "main", "image": "training:1"}]},
        "status": status,
    }


class ApiServer(ThreadingHTTPServer):
    """Holds the pods and records requests."""

    daemon_threads = True

    def __init__(self, pods: list[dict[str, Any]], refusal: tuple[int, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pods = pods
        self.refusal = refusal
        self.page: str | None = None
        self.requests: list[tuple[str, str | None]] = []
        self.answers = threading.Event()
        self.answers.set()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def secure(self, certificate: Path, key: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)


class Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        [selector] = parse_qs(url.query)["labelSelector"]
        self.server.requests.append((f"{url.path}?{selector}", self.headers["Authorization"]))
        self.server.answers.wait(300)
        if self.server.refusal:
            code, message = self.server.refusal
            self._answer(
                code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
            )
            return
        if self.server.page is not None:
            self._answer(200, self.server.page)
            return
        name, _, value = selector.partition("=")
        found = [pod for pod in self.server.pods if pod["metadata"]["labels"].get(name) == value]
        self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, code: int, value: Any) -> None:
        body = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(server: ApiServer) -> Iterator[ApiServer]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()
