"""Servers of object stores on this machine, where their commands are installed; and faulty ones.

The buckets are named `bucket`. The commands are not packages that Lockstep's tests install:

    s3    moto_server         pip install 'moto[server]'
    az    azurite-blob        npm install --global azurite
    gs    storage-testbench   pip install git+https://github.com/googleapis/storage-testbench
"""

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

_PATIENCE = 120.0
_OF_CONNECTION = ("connection", "transfer-encoding", "content-length", "date", "server")
SECRET = "S3CRET"
SCHEMES = ("s3", "az", "gs")
_COMMANDS = {"s3": "moto_server", "az": "azurite-blob", "gs": "storage-testbench"}
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "az": "AZURITE_BLOB_STORAGE_URL", "gs": "GOOGLE_BASE_URL"}
"""The variables with the addresses of the stores."""
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account that Azurite has, with its public key, and that the library uses with an emulator."""
_SMALLEST_PART = 5 << 20

Answer = tuple[int, dict[str, str], bytes]


@contextlib.contextmanager
def store_server(scheme: str, folder: Path) -> Iterator[dict[str, str]]:
    """Serve a bucket named `bucket`; yield the variables of its users. Without the command, skip the test.

    Args:
        scheme: one of `SCHEMES`, with which the URLs begin.
        folder: for the log of the server.
    """
    command = shutil.which(_COMMANDS[scheme])
    works = (
        command and not subprocess.run([command, "--help"], capture_output=True, timeout=_PATIENCE).returncode
    )
    if command is None or not works:
        pytest.skip(f"{_COMMANDS[scheme]}, a server of {scheme}:// URLs, is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = {
        "s3": ("-H", "127.0.0.1", "-p", str(port)),
        "az": ("--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)),
        "gs": ("--port", str(port)),
    }[scheme]
    with (folder / f"{scheme}.log").open("w") as log:
        server = subprocess.Popen(
            [command, *words], stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    url = f"http://{'localhost' if scheme == 'gs' else '127.0.0.1'}:{port}"
    try:
        give_up = time.monotonic() + _PATIENCE
        while True:
            try:
                urllib.request.urlopen(_new_bucket(scheme, url)).close()
                break
            except OSError:
                assert server.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.05)
        if scheme == "s3":
            yield {
                "AWS_ENDPOINT_URL": url,
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": SECRET,
            }
        elif scheme == "az":
            yield {"AZURITE_BLOB_STORAGE_URL": url, "AZURE_STORAGE_USE_EMULATOR": "true"}
        else:
            with GoogleServer(url) as google:
                yield google.variables
    finally:
        # Some have children.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(_PATIENCE)


def _new_bucket(scheme: str, url: str) -> urllib.request.Request:
    if scheme == "s3":
        return urllib.request.Request(f"{url}/bucket", method="PUT")
    if scheme == "gs":
        body, headers = json.dumps({"name": "bucket"}).encode(), {"Content-Type": "application/json"}
        return urllib.request.Request(f"{url}/storage/v1/b?project=any", body, headers, method="POST")
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed = "\n".join(
        [
            "PUT" + "\n" * 11,
            *(f"{name}:{value}" for name, value in headers.items()),
            f"/{_ACCOUNT}/{_ACCOUNT}/bucket",
            "restype:container",
        ]
    )
    digest = hmac.digest(base64.b64decode(_ACCOUNT_KEY), signed.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
    place = f"{url}/{_ACCOUNT}/bucket?restype=container"
    return urllib.request.Request(place, headers=headers, method="PUT")


class FaultyServer:
    """Passes requests on to a server of a store, and misbehaves.

    Attributes:
        denies: whether a request, of this method and path, is answered with `denial`.
        denial: the status and the body of such an answer; by default, those of S3 without a permission.
        holds: whether it waits until `released` is set.
        released: see above.
        loses: whether it has its effect, but is answered with 503 Service Unavailable.
        requests: the methods and paths of all requests.
        variables: those of the server's users.

    Args:
        variables: those of the users of the other server.
        endpoint: the one that has its address.
    """

    def __init__(self, variables: Mapping[str, str], endpoint: str = ENDPOINTS["s3"]) -> None:
        self._target = urlsplit(variables[endpoint])
        self.denies: Callable[[str, str], bool] = lambda method, path: False
        self.denial = 403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.holds: Callable[[str, str], bool] = lambda method, path: False
        self.released = threading.Event()
        self.loses: Callable[[str, str], bool] = lambda method, path: False
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
                    status, text = server.denial
                    self.reply(status, {}, text)
                    return
                answer = server.passed_on(method, self.path, body, dict(self.headers))
                self.reply(*((503, {}, b"") if server.loses(method, path) else answer))

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

            def reply(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in _OF_CONNECTION:
                        self.send_header(name, value)
                lengths = [value for name, value in headers.items() if name.lower() == "content-length"]
                is_head = self.command == "HEAD"
                self.send_header("Content-Length", lengths[0] if is_head and lengths else str(len(data)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(b"" if is_head else data)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.variables = {**variables, endpoint: f"http://127.0.0.1:{self._server.server_address[1]}"}

    def passed_on(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Return the answer of the server."""
        connection = http.client.HTTPConnection(self._target.netloc, timeout=_PATIENCE)
        with contextlib.closing(connection):
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


class GoogleServer(FaultyServer):
    """Speaks the XML API of Google Cloud Storage, of which its testbench has only a part.

    The testbench decides which writes hold. Uploads in parts are kept here until they are complete.

    https://cloud.google.com/storage/docs/xml-api/reference-methods

    Args:
        url: the address of the testbench.
    """

    def __init__(self, url: str) -> None:
        token = {"GOOGLE_BEARER_TOKEN": SECRET, ENDPOINTS["gs"]: url}
        super().__init__(token, ENDPOINTS["gs"])
        self._uploads: dict[str, dict[int, bytes]] = {}

    def passed_on(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Return the answer of the testbench, as Google Cloud Storage would give it."""
        if headers.get("authorization", headers.get("Authorization")) != f"Bearer {SECRET}":
            return _refused(401, "AuthenticationRequired", "Authentication required.")
        place = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(place.query, keep_blank_values=True).items()}
        if place.path == "/bucket":
            return self._listed(query)
        name = place.path.removeprefix("/bucket/")
        if "uploads" in query or "uploadId" in query:
            return self._in_parts(method, name, body, query)
        if method == "PUT":
            return self._put(name, body, headers)
        if method == "DELETE":
            status, _, _ = self._asked("DELETE", f"/storage/v1/b/bucket/o/{name}")
            return (204, {}, b"") if status < 300 else _refused(404, "NoSuchKey", "It does not exist.")
        return self._read(method, name, headers)

    def _asked(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> Answer:
        return super().passed_on(method, path, body, {**(headers or {}), "Host": self._target.netloc})

    def _metadata(self, name: str) -> dict[str, Any] | None:
        status, _, body = self._asked("GET", f"/storage/v1/b/bucket/o/{name}")
        return json.loads(body) if status == 200 else None

    def _put(self, name: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        kept = {each: value for each, value in headers.items() if each.lower().startswith("x-goog-if-")}
        status, _, text = self._asked("PUT", f"/bucket/{name}", body, kept)
        if status == 412:
            return _refused(412, "PreconditionFailed", "At least one of the pre-conditions did not hold.")
        if status != 200:
            return status, {}, text
        metadata = self._metadata(name)
        assert metadata is not None
        return 200, _described(metadata), b""

    def _read(self, method: str, name: str, headers: Mapping[str, str]) -> Answer:
        metadata = self._metadata(name)
        if metadata is None:
            return _refused(404, "NoSuchKey", "The specified key does not exist.")
        described = _described(metadata)
        if method == "HEAD":
            return 200, {**described, "Content-Length": metadata.get("size", "0")}, b""
        wanted = {each: value for each, value in headers.items() if each.lower() == "range"}
        path = f"/storage/v1/b/bucket/o/{name}?alt=media&generation={metadata['generation']}"
        status, answered, body = self._asked("GET", path, headers=wanted)
        if status == 416:
            return _refused(416, "InvalidRange", "The requested range cannot be satisfied.")
        ranges = {each: value for each, value in answered.items() if each.lower() == "content-range"}
        return status, {**described, **ranges}, body

    def _listed(self, query: Mapping[str, str]) -> Answer:
        assert query["list-type"] == "2"
        words = {"prefix": query.get("prefix", ""), "pageToken": query.get("continuation-token", "")}
        words = {name: value for name, value in words.items() if value}
        status, _, body = self._asked("GET", f"/storage/v1/b/bucket/o?{urlencode(words)}")
        assert status == 200, body
        page = json.loads(body)
        items = "".join(
            f"<Contents><Key>{escape(item['name'])}</Key><Size>{item.get('size', 0)}</Size>"
            f'<LastModified>{item["updated"]}</LastModified><ETag>"{item["etag"]}"</ETag></Contents>'
            for item in page.get("items", ())
        )
        token = page.get("nextPageToken")
        more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
        return 200, {}, f"<ListBucketResult>{items}{more}</ListBucketResult>".encode()

    def _in_parts(self, method: str, name: str, body: bytes, query: Mapping[str, str]) -> Answer:
        if "uploads" in query:
            number = secrets.token_hex(8)
            self._uploads[number] = {}
            answer = f"<UploadId>{number}</UploadId>"
            return (
                200,
                {},
                f"<InitiateMultipartUploadResult>{answer}</InitiateMultipartUploadResult>".encode(),
            )
        parts = self._uploads.get(query["uploadId"])
        if parts is None:
            return _refused(404, "NoSuchUpload", "The requested upload was not found.")
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return 200, {"ETag": _tag_of(body)}, b""
        if method == "DELETE":
            del self._uploads[query["uploadId"]]
            return 204, {}, b""
        joined = b""
        listed = list(ElementTree.fromstring(body))
        for part in listed:
            data = parts[int(part.findtext("PartNumber", ""))]
            if part.findtext("ETag") != _tag_of(data):
                return _refused(400, "InvalidPart", "One or more of the parts could not be found.")
            if len(data) < _SMALLEST_PART and part is not listed[-1]:
                return _refused(400, "EntityTooSmall", "A part is smaller than 5 MiB.")
            joined += data
        status, headers, text = self._put(name, joined, {})
        del self._uploads[query["uploadId"]]
        if status != 200:
            return status, headers, text
        answer = f"<ETag>{escape(headers['ETag'])}</ETag>"
        return (
            200,
            headers,
            f"<CompleteMultipartUploadResult>{answer}</CompleteMultipartUploadResult>".encode(),
        )


def _described(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that describe an object of the testbench."""
    return {
        "ETag": f'"{base64.b64decode(metadata["md5Hash"]).hex()}"',
        "x-goog-generation": metadata["generation"],
        "Last-Modified": formatdate(usegmt=True),
    }


def _tag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _refused(status: int, code: str, message: str) -> Answer:
    return status, {}, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
