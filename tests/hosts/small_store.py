"""A server of S3 for small objects, with conditional writes; it serves any bucket, to anybody.

small_store.py PORT
"""

import hashlib
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

objects: dict[str, bytes] = {}
lock = Lock()


def tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    """Answers GET, HEAD, PUT, and POST for objects to delete."""

    protocol_version = "HTTP/1.1"

    def answer(self, status: int, data: bytes = b"", etag: str = "", part: str = "") -> None:
        self.send_response(status)
        if part:
            self.send_header("Content-Range", part)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self) -> None:
        if "?" in self.path:
            self.answer(200, b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>")
            return
        with lock:
            data = objects.get(self.path)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if data is None:
            self.answer(404)
        elif wanted is not None:
            begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            self.answer(206, data[begin:end], tag(data), f"bytes {begin}-{end - 1}/{len(data)}")
        else:
            self.answer(200, data, tag(data))

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = self.headers.get("If-Match")
        with lock:
            before = objects.get(self.path)
            refuses = self.headers.get("If-None-Match") == "*" and before is not None
            if refuses or (wanted is not None and (before is None or tag(before) != wanted)):
                self.answer(412)
                return
            objects[self.path] = data
        self.answer(200, etag=tag(data))

    def do_POST(self) -> None:
        """Delete the objects that the message names."""
        message = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        keys, bucket = re.findall("<Key>(.*?)</Key>", message), self.path.partition("?")[0].rstrip("/")
        with lock:
            for key in keys:
                objects.pop(f"{bucket}/{key}", None)
        deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self.answer(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Handler).serve_forever()
