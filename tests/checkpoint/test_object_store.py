"""Stores of each kind, over HTTP: a request has the same effect and the same errors everywhere."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.checkpoint import object_store
from lockstep.checkpoint.object_store import Conflict, ObjectStore
from lockstep.errors import CheckpointError
from object_server import ENDPOINTS, SCHEMES, FaultyServer

pytest.importorskip("obstore", reason="obstore is not installed")

CREDENTIALS = (
    "the store refuses the credentials of this process ({}); renew them in its environment, or give them the "
    "permission"
)
NAME = "step-000000001200-0123abcd/state.safetensors"


@pytest.fixture(
    params=[
        pytest.param(each, marks=pytest.mark.ci if each == "s3" else pytest.mark.slow) for each in SCHEMES
    ]
)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(
    scheme: str, server_variables: Callable[[str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyServer]:
    with FaultyServer(server_variables(scheme), ENDPOINTS[scheme]) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def url(scheme: str) -> str:
    # The names of objects are in errors, but decide nothing.
    return f"{scheme}://bucket/orange expired {secrets.token_hex(4)}"


def refused(server: FaultyServer, url: str, status: int, text: str) -> str:
    """Return the message of an error that the store answers with."""
    server.denies, server.denial = lambda method, path: True, (status, text.encode())
    with pytest.raises(CheckpointError) as error:
        ObjectStore(url, retry_seconds=0).read("head.json")
    return str(error.value)


def test_objects(server: FaultyServer, url: str, tmp_path: Path) -> None:
    store, file = ObjectStore(url), tmp_path / "file"
    store.check_conditions()
    assert store.names() == []
    content = os.urandom((20 << 20) + 1)
    file.write_bytes(content)
    store.put(NAME, file, len(content))
    odd = "logs/a b\u00e9#?%41&<>"
    for name, data in ((odd, b"12345"), ("empty", b"")):
        file.write_bytes(data)
        store.put(name, file, len(data))
    assert sorted(store.names()) == sorted([NAME, odd, "empty"])
    assert [store.size(name) for name in (NAME, odd, "empty", "absent")] == [len(content), 5, 0, None]
    assert b"".join(store.parts(NAME, len(content))) == content
    assert b"".join(store.parts(odd, 5)) == b"12345"
    for name, size in (("absent", 5), ("empty", 5), (odd, 6), (NAME, len(content) + 1)):
        with pytest.raises(FileNotFoundError):
            list(store.parts(name, size))
    store.delete([NAME, odd, "empty", "absent"])
    assert (store.names(), store.read(odd)) == ([], None)


def test_of_two_writers_one_fails(server: FaultyServer, url: str) -> None:
    store = ObjectStore(url)
    first = store.replace("head.json", b"1", None)
    assert store.read("head.json") == (b"1", first)
    with pytest.raises(Conflict):
        store.replace("head.json", b"2", None)
    second = store.replace("head.json", b"2", first)
    with pytest.raises(Conflict):
        store.replace("head.json", b"3", first)
    assert store.read("head.json") == (b"2", second)
    store.delete(["head.json"])
    with pytest.raises(Conflict):
        store.replace("head.json", b"3", second)


def test_a_request_is_repeated_for_a_time_however_often_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_PAUSE", "_LONGEST_PAUSE"):
        monkeypatch.setattr(object_store, name, 0.001)
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": "us-east-1"}
    with FaultyServer({ENDPOINTS["s3"]: "http://127.0.0.1:9", **keys}) as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)

        def deny(method: str, path: str) -> bool:
            server.denial = (503 if len(server.requests) <= 20 else 404), b""
            return True

        server.denies = deny
        assert ObjectStore("s3://bucket/job").read("head.json") is None
        assert len(server.requests) == 21
        server.requests.clear()
        with pytest.raises(CheckpointError, match="503"):
            ObjectStore("s3://bucket/job", retry_seconds=0).read("head.json")
        assert len(server.requests) == 1


def test_a_write_whose_answer_is_lost_has_succeeded(server: FaultyServer, url: str) -> None:
    """The library repeats it, and then its condition does not hold any more."""
    store, lost = ObjectStore(url), list[str]()

    def lose(method: str, path: str) -> bool:
        loses = method == "PUT" and path not in lost
        lost.extend([path] if loses else [])
        return loses

    server.loses = lose
    store.check_conditions()
    assert len(lost) == 1
    tag = store.replace("head.json", b"1", None)
    lost.clear()
    second = store.replace("head.json", b"2", tag)
    assert store.read("head.json") == (b"2", second)
    with pytest.raises(Conflict):
        store.replace("head.json", b"3", tag)


def test_a_store_that_fails_has_no_damaged_objects(server: FaultyServer, url: str, tmp_path: Path) -> None:
    """A job would skip a damaged checkpoint, and resume from an earlier one."""
    store, file = ObjectStore(url, retry_seconds=0), tmp_path / "file"
    file.write_bytes(b"12345")
    store.put(NAME, file, 5)
    server.denies, server.denial = lambda method, path: method == "GET", (500, b"")
    with pytest.raises(CheckpointError, match="500 Internal Server Error; check the store"):
        list(store.parts(NAME, 5))


def test_refused_credentials_are_named_whatever_the_request(
    server: FaultyServer, url: str, tmp_path: Path
) -> None:
    store, file = ObjectStore(url, retry_seconds=0), tmp_path / "file"
    file.write_bytes(b"12345")
    tag = store.replace("head.json", b"1", None)
    server.denies = lambda method, path: True
    for request in (
        lambda: store.read("head.json"),
        lambda: store.replace("head.json", b"2", tag),
        lambda: store.replace("other", b"2", None),
        lambda: store.put(NAME, file, 5),
        lambda: store.size("head.json"),
        lambda: store.delete(["head.json"]),
        store.names,
    ):
        with pytest.raises(CheckpointError, match="the store refuses the credentials of this process"):
            request()
    with pytest.raises(CheckpointError) as error:
        store.check_conditions()
    assert str(error.value) == f"{url} cannot be written: {CREDENTIALS.format('AccessDenied: Access Denied')}"


def test_an_object_that_may_not_be_deleted_is_named(server: FaultyServer, url: str, scheme: str) -> None:
    """S3 answers a request for several deletions with success, and with an error for each object."""
    store = ObjectStore(url, retry_seconds=0)
    store.replace("head.json", b"1", None)
    server.denies, denial = lambda method, path: method in ("DELETE", "POST"), server.denial
    if scheme == "s3":
        name = f"{url.removeprefix('s3://bucket/')}/head.json".encode()
        errors = denial[1].replace(b"<Error>", b"<Error><Key>" + name + b"</Key>")
        server.denial = 200, b"<DeleteResult>" + errors + b"</DeleteResult>"
    with pytest.raises(CheckpointError, match="the store refuses the credentials of this process"):
        store.delete(["head.json"])


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (
            403,
            "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
            CREDENTIALS.format("AccessDenied: Access Denied"),
        ),
        (
            400,
            "<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>",
            CREDENTIALS.format("ExpiredToken: The token has expired."),
        ),
        (
            403,
            "<Error><Code>AuthenticationFailed</Code><Message>Server failed to authenticate the request.\n"
            "RequestId:1\nTime:2</Message><AuthenticationErrorDetail>S3CRET</AuthenticationErrorDetail></Error>",
            CREDENTIALS.format("AuthenticationFailed: Server failed to authenticate the request."),
        ),
        (
            403,
            "<Error><Code>RequestTimeTooSkewed</Code><Message>The difference is too large.</Message></Error>",
            "the clock of this machine is wrong (RequestTimeTooSkewed: The difference is too large.); set it",
        ),
        (
            429,
            "<Error><Code>SlowDown</Code><Message>\x1b[31mWait.</Message></Error>",
            "SlowDown: ?[31mWait.; check the store and the network",
        ),
        (503, "", "503 Service Unavailable; check the store and the network"),
    ],
    ids=["denied", "expired", "lines", "clock", "escapes", "unavailable"],
)
def test_an_error_is_one_line(server: FaultyServer, url: str, status: int, text: str, expected: str) -> None:
    assert refused(server, url, status, text) == f"{url} cannot be read: {expected}"
