"""The server of the page: HTTP on one port, for the one browser that has the printed address.

The address has a token, which the first request exchanges for a cookie. Requests without the cookie, with a
name in `Host` that another site could point here, or with another method than GET are refused.

One browser sends a request every two seconds, so the server of the standard library is sufficient, and the
command does not need a package. The page is three files in `static/`, written by hand: a page of tables and
canvas charts needs neither a framework nor a build, and the wheel needs no other tool. All computing is in
Python (`page_data.py`). Data that rarely changes travels in parts with digests, so a poll transfers only
parts that have changed. The report is the same page with the data inside; its policy allows the script and
the style by their hashes.

The page never takes part in a run. `lockstep run --ui` starts it as a separate process of the command,
outside of the job, and kills it at the end.
"""

import hmac
import ipaddress
import secrets
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import msgspec
import xxhash

from lockstep.coordinator.job_report import state_of
from lockstep.errors import ConfigError
from lockstep.monitoring import page_data
from lockstep.monitoring.page_data import Window
from lockstep.monitoring.run_catalog import Catalog, is_active
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.run_logs import log_sizes, read_page, search

STATIC = files("lockstep.monitoring") / "static"
"""The files of the page."""

_TYPES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_JSON = "application/json"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NO_COOKIE = (
    "This page opens with the address that lockstep prints, which works once.\n"
    "For another one, run lockstep ui with the name or the folder of the run.\n"
)
_MOST_CONNECTIONS = 64
_IDLE = 60.0
_UPDATE_EVERY = 0.5


class BadRequest(Exception):
    """A request for something that the page does not have; the text says why."""


class _Followed:
    """A run that a browser looks at."""

    def __init__(self, folder: Path) -> None:
        self.lock = threading.Lock()
        self.run = RunFolder(folder)
        self._folder = folder
        self._updated = -1.0
        self._active = False
        self._encoded: dict[str, tuple[str, bytes]] | None = None

    def update(self) -> None:
        """Read new lines, unless that was done just now; like all methods, while holding the lock."""
        if time.monotonic() < self._updated + _UPDATE_EVERY:
            return
        active = is_active(self._folder)
        if self.run.update() or active != self._active:
            self._encoded = None
        self._active = active
        self._updated = time.monotonic()

    def parts(self) -> dict[str, Any]:
        return page_data.parts(self.run.state, active=self._active)

    def encoded(self) -> dict[str, tuple[str, bytes]]:
        """Return each part as JSON with its digest."""
        if self._encoded is None:
            self._encoded = {}
            for name, part in self.parts().items():
                text = msgspec.json.encode(part)
                self._encoded[name] = xxhash.xxh64_hexdigest(text), text
        return self._encoded


class RunsView:
    """Answers the requests of the page about runs.

    Args:
        catalog: the runs that may be seen.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._followed: dict[Path, _Followed] = {}

    def answer(self, path: str, query: Mapping[str, str]) -> bytes:
        """Return the JSON for a request.

        Raises:
            BadRequest: the page does not have the requested data.
            ConfigError: a later version of Lockstep has recorded the run.
            OSError: a file cannot be read.
        """
        ask = self._REQUESTS.get(path)
        if ask is None:
            raise BadRequest("there is no such page")
        return ask(self, query)

    def _runs(self, query: Mapping[str, str]) -> bytes:
        with self._lock:
            rows = []
            for name, folder in self._catalog.runs().items():
                glance = self._catalog.glance(folder)
                shown = glance.end or state_of(None, active=is_active(folder))
                rows.append({"id": name, "state": shown} | asdict(glance))
        rows.sort(key=lambda row: row["last"], reverse=True)
        text = msgspec.json.encode(rows)
        digest = xxhash.xxh64_hexdigest(text)
        if query.get("have") == digest:
            return msgspec.json.encode({"digest": digest})
        return msgspec.json.encode({"digest": digest, "runs": msgspec.Raw(text)})

    def _run(self, query: Mapping[str, str]) -> bytes:
        have = dict(pair.split(":", 1) for pair in query.get("have", "").split(",") if ":" in pair)
        followed = self._find(query, "run")
        with followed.lock:
            followed.update()
            new = {
                name: encoded for name, encoded in followed.encoded().items() if have.get(name) != encoded[0]
            }
        return msgspec.json.encode(
            {
                "parts": {name: msgspec.Raw(text) for name, (_, text) in new.items()},
                "digests": {name: digest for name, (digest, _) in new.items()},
            }
        )

    def _chart(self, query: Mapping[str, str]) -> bytes:
        window = Window(
            axis="step" if query.get("axis") == "step" else "time",
            start=_number(query, "start"),
            stop=_number(query, "stop"),
            points=int(_number(query, "points") or 1000),
            smoothing=_number(query, "smoothing") or 0.0,
        )
        followed = self._find(query, "run")
        with followed.lock:
            try:
                return msgspec.json.encode(
                    page_data.chart(followed.run.state, query.get("chart", ""), window)
                )
            except KeyError:
                raise BadRequest("the run has no such chart") from None

    def _logs(self, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode([*log_sizes(self._folder(query)).items()])

    def _log(self, query: Mapping[str, str]) -> bytes:
        start, before = _natural(query, "start"), _natural(query, "before")
        worker = _natural(query, "worker") or 0
        return msgspec.json.encode(read_page(self._folder(query), worker, start, before))

    def _search(self, query: Mapping[str, str]) -> bytes:
        text = query.get("text", "")
        if not text:
            raise BadRequest("there is nothing to search for")
        worker, start = _natural(query, "worker") or 0, _natural(query, "start") or 0
        case = query.get("case") == "1"
        return msgspec.json.encode(search(self._folder(query), worker, text, case=case, start=start))

    def _compare(self, query: Mapping[str, str]) -> bytes:
        both = []
        for name in ("run", "other"):
            followed = self._find(query, name)
            with followed.lock:
                followed.update()
                both.append(followed.parts())
        return msgspec.json.encode(page_data.compare(*both))

    def _folder(self, query: Mapping[str, str], name: str = "run") -> Path:
        with self._lock:
            folder = self._catalog.runs().get(query.get(name, ""))
        if folder is None:
            raise BadRequest("there is no such run")
        return folder

    def _find(self, query: Mapping[str, str], name: str) -> _Followed:
        folder = self._folder(query, name)
        with self._lock:
            return self._followed.setdefault(folder, _Followed(folder))

    _REQUESTS: Mapping[str, Callable[["RunsView", Mapping[str, str]], bytes]] = {
        "/api/runs": _runs,
        "/api/run": _run,
        "/api/chart": _chart,
        "/api/logs": _logs,
        "/api/log": _log,
        "/api/search": _search,
        "/api/compare": _compare,
    }


def _number(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = float("nan")
    if value is not None and not abs(value) < 1e15:
        raise BadRequest(f"{name} is not a number")
    return value


def _natural(query: Mapping[str, str], name: str) -> int | None:
    value = _number(query, name)
    if value is not None and (value < 0 or value != int(value)):
        raise BadRequest(f"{name} is not a natural number")
    return None if value is None else int(value)


class PageServer(ThreadingHTTPServer):
    """Serves the page at an address; `serve_forever` serves until `shutdown`, or an interrupt.

    Args:
        address: the host and the port at which to listen; port 0 for any free port.
        family: the family of the address.
        view: answers requests about runs.
        context: the context with which connections are encrypted; None if they are not.
        name: the name of the host that users may write in the address, besides IP addresses and localhost.

    Raises:
        OSError: the address cannot be used.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[Any, ...],
        family: socket.AddressFamily,
        view: RunsView,
        context: ssl.SSLContext | None = None,
        name: str = "localhost",
    ) -> None:
        self.address_family = family
        self.view = view
        self.context = context
        self.names = {"localhost", name.lower()}
        self.cookie = secrets.token_urlsafe(32)
        self._token: str | None = secrets.token_urlsafe(32)
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(cast(tuple[str, int], address), _Handler)

    def server_bind(self) -> None:
        """Bind without asking name servers for this host's name, which may take long."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    @property
    def address(self) -> str:
        """The address to open, with the token; secret until it is used."""
        host = str(self.server_address[0])
        host = f"[{host}]" if ":" in host else host
        scheme = "http" if self.context is None else "https"
        return f"{scheme}://{host}:{self.server_port}/?token={self._token}"

    @property
    def cookie_name(self) -> str:
        """The name of the cookie: browsers do not distinguish the ports of a host."""
        return f"lockstep-{self.server_port}"

    def take(self, token: str) -> bool:
        """Whether this is the token of the address; it is valid once."""
        with self._lock:
            valid = self._token is not None and hmac.compare_digest(token.encode(), self._token.encode())
            if valid:
                self._token = None
            return valid

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread; close it at once if there are too many."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, encrypted if the page is."""
        if self.context is None:
            super().finish_request(request, client_address)
            return
        # The handshake needs the other end, so it takes place in the thread of the connection.
        request.settimeout(_IDLE)
        with self.context.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break; show everything else."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "lockstep"
    sys_version = ""
    timeout = _IDLE
    server: PageServer

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, max_num_fields=20).items()}
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "The address is malformed.\n")
            return
        if not self._host_is_ours():
            self._refuse(HTTPStatus.FORBIDDEN, "The name in the address is not the name of this page.\n")
        elif "token" in query and url.path == "/":
            if self._has_cookie() or self.server.take(query["token"]):
                self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Location": "/"} | self._set_cookie())
            else:
                self._refuse(HTTPStatus.FORBIDDEN, _NO_COOKIE)
        elif not self._has_cookie():
            self._refuse(HTTPStatus.FORBIDDEN, _NO_COOKIE)
        elif url.path in _TYPES:
            name, kind = _TYPES[url.path]
            self._send(HTTPStatus.OK, kind, (STATIC / name).read_bytes())
        else:
            self._answer(url.path, query)

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        try:
            self._send(HTTPStatus.OK, _JSON, self.server.view.answer(path, query))
        except (BadRequest, ConfigError) as error:
            self._send(HTTPStatus.NOT_FOUND, _JSON, msgspec.json.encode({"error": str(error)}))
        except (BrokenPipeError, ConnectionError, TimeoutError):
            raise
        except OSError as error:
            reason = f"a file cannot be read: {error.strerror or error}"
            self._send(HTTPStatus.NOT_FOUND, _JSON, msgspec.json.encode({"error": reason}))

    def _host_is_ours(self) -> bool:
        host = self.headers.get("Host", "")
        try:
            name = urlsplit(f"//{host}").hostname if host.isascii() and "@" not in host else None
        except ValueError:
            return False
        if name is None:
            return False
        try:
            # No other site can make an IP address point here.
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower() in self.server.names
        return True

    def _has_cookie(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie_name)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value.encode(), self.server.cookie.encode())

    def _set_cookie(self) -> dict[str, str]:
        secure = "; Secure" if self.server.context is not None else ""
        pair = f"{self.server.cookie_name}={self.server.cookie}"
        return {"Set-Cookie": f"{pair}; Path=/; HttpOnly; SameSite=Strict{secure}"}

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        # The next bytes of the connection may not be a request.
        self.close_connection = True
        self._send(status, "text/plain; charset=utf-8", text.encode())

    def _send(
        self, status: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(body))} | _HEADERS | dict(more or {})
        headers |= {"Connection": "close"} if self.close_connection else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is malformed, or has another method than GET."""
        # A request without a version also gets an answer with a status line.
        self.request_version = self.protocol_version
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self.close_connection = True
            allowed = {"Allow": "GET"}
            self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"Only GET is allowed.\n", allowed)
        else:
            self._refuse(HTTPStatus(code), "The request is malformed.\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log anything, because the address has the token."""
