"""A receiver of `--notify`: a server of HTTP in this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0KEN"


class Webhook(ThreadingHTTPServer):
    """A server that keeps the messages that it gets, and answers with a status.

    Attributes:
        received: path, type and message of each request.
        redirects_to: an URL that each answer names; none if it is empty.
    """

    def __init__(self, status: int = 204) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.received: list[tuple[str, str, dict[str, Any]]] = []
        self.redirects_to = ""
        self.arrived = threading.Condition()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        super().__exit__(*exception)

    def url(self, scheme: str = "http", host: str = "127.0.0.1") -> str:
        """Return an URL with a secret."""
        return f"{scheme}://{host}:{self.server_port}/hook/{SECRET}?key={SECRET}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [message for _, _, message in self.received]

    def await_message(self, what: str, patience: float) -> dict[str, Any]:
        """Wait for the first message of a kind, and return it."""

        def first() -> dict[str, Any] | None:
            return next((message for message in self.messages if message["what"] == what), None)

        with self.arrived:
            message = self.arrived.wait_for(first, patience)
        assert message is not None, self.messages
        return message


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.arrived:
            self.server.received.append((self.path, self.headers["Content-Type"], body))
            self.server.arrived.notify_all()
        self.send_response(self.server.status)
        if self.server.redirects_to:
            self.send_header("Location", self.server.redirects_to)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        pass
