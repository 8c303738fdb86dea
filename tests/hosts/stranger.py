"""A stranger that disturbs a job: stranger.py ADDRESS PORT GREETING; prints what it did, and ends.

GREETING is a file with a recorded greeting.
"""

import contextlib
import select
import socket
import sys
import time
from pathlib import Path

address, port = sys.argv[1], int(sys.argv[2])


def connect(at: int = port) -> socket.socket:
    return socket.create_connection((address, at), 30.0)


def wait_closed(connection: socket.socket) -> None:
    """Wait until the other end has closed a connection; it sends nothing."""
    with connection, contextlib.suppress(ConnectionError):
        assert connection.recv(1) == b""


for at in range(port - 100, port + 100):
    with contextlib.suppress(OSError):
        connect(at).close()
print("scanned", flush=True)

for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 1000, b"\x16\x03\x01\xff\xff" * 50):
    connection = connect()
    with contextlib.suppress(ConnectionError):
        connection.sendall(garbage)
    wait_closed(connection)
print("garbage", flush=True)

many = [connect() for _ in range(500)]
for each in many:
    wait_closed(each)
print("many", flush=True)

greeting = Path(sys.argv[3]).read_bytes()
connection = connect()
connection.sendall(greeting)
wait_closed(connection)
print("replayed", flush=True)

slow = connect()
began = time.monotonic()
with contextlib.suppress(ConnectionError):
    for byte in greeting:
        slow.send(bytes([byte]))
        if select.select([slow], [], [], 1.0)[0]:
            break
wait_closed(slow)
assert time.monotonic() - began < 60.0
print("slow", flush=True)
