"""The server of the page: who may read, and what it answers."""

import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from lockstep.errors import ConfigError
from lockstep.monitoring.page_server import PageServer, RunsView
from lockstep.monitoring.run_catalog import Catalog, resolve
from lockstep.system.locks import try_lock
from lockstep.transport.keys import JobKey
from lockstep.transport.page_certificate import page_certificate

from .made_runs import END, EVENTS, LOG, MEASURED, event, job, lines, make_run, metrics


@contextmanager
def serving(*folders: Path, context: ssl.SSLContext | None = None) -> Iterator[PageServer]:
    view = RunsView(Catalog(folders))
    with PageServer(("127.0.0.1", 0), socket.AF_INET, view, context, "pages.example") as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    make_run(tmp_path / "runs" / "one")
    with serving(tmp_path / "runs") as found:
        yield found


def ask(
    server: PageServer, path: str, method: str = "GET", *, cookie: bool = True, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        own = {"Cookie": f"other=1; {server.cookie_name}={server.cookie}"} if cookie else {}
        connection.request(method, path, headers=own | headers)
        answer = connection.getresponse()
        return answer, answer.read()
    finally:
        connection.close()


def get(server: PageServer, path: str, **query: Any) -> Any:
    answer, body = ask(server, f"/api/{path}?{urlencode(query)}")
    assert answer.status == 200, body
    return json.loads(body)


def test_the_address_opens_the_page_once(server: PageServer) -> None:
    address = urlsplit(server.address)
    path = f"{address.path}?{address.query}"
    answer, _ = ask(server, path, cookie=False)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    cookie = answer.headers["Set-Cookie"]
    pair, *attributes = cookie.split("; ")
    assert pair == f"lockstep-{server.server_port}={server.cookie}"
    assert set(attributes) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert server.cookie not in path
    assert ask(server, path, cookie=False)[0].status == 403
    assert ask(server, path)[0].status == 303
    answer, body = ask(server, "/", cookie=False, Cookie=pair)
    assert (answer.status, b"Lockstep" in body) == (200, True)


@pytest.mark.parametrize(
    "path", ["/", "/page.js", "/page.css", "/api/runs", "/?token=", "/?token=a", "/nothing", "/?token=%C3%A4"]
)
def test_without_the_cookie_nothing_is_shown(server: PageServer, path: str) -> None:
    for cookie in ("", f"{server.cookie_name}=", f"{server.cookie_name}=x", "\x01;;=", f"x={server.cookie}"):
        answer, body = ask(server, path, cookie=False, Cookie=cookie)
        assert answer.status == 403
        assert b"lockstep ui" in body
    assert ask(server, "/")[0].status == 200


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:1", True),
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("pages.example:9", True),
        ("[::1]:80", True),
        ("attacker.example", False),
        ("attacker.example:80", False),
        ("127.0.0.1.attacker.example", False),
        ("localhost@attacker.example", False),
        ("localhost.", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_names_that_another_site_can_point_here_are_refused(
    server: PageServer, host: str, allowed: bool
) -> None:
    assert (ask(server, "/", Host=host)[0].status == 200) == allowed


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_only_get_is_allowed(server: PageServer, method: str) -> None:
    assert ask(server, "/", method)[0].status == 405


def test_every_answer_limits_what_the_page_may_do(server: PageServer) -> None:
    for path in ("/", "/page.js", "/api/runs", "/nothing"):
        for cookie in (True, False):
            headers = ask(server, path, cookie=cookie)[0].headers
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
            assert "unsafe" not in policy
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
            assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/../page_server.py",
        "/static/page.js",
        "/page.js/../../page_server.py",
        "/%2e%2e/page_server.py",
        "/api/log?run=..%2F..&worker=0",
        "/api/log?run=one&worker=..%2F..%2Fsecret",
        "/api/log?run=one&worker=-1",
        "/api/log?run=one&worker=1e99",
        "/api/log?run=one&worker=7",
        "/api/run?run=%00",
        "/api/run",
        "/api/chart?run=one&chart=metric:nothing",
        "/api/chart?run=one&chart=metric:loss&start=x",
        "/api/chart?run=one&chart=metric:loss&start=nan",
        "/api/search?run=one&worker=0",
        "/api/compare?run=one",
    ],
)
def test_what_does_not_exist_is_refused_by_name(server: PageServer, path: str) -> None:
    get(server, "run", run="one")
    answer, body = ask(server, path)
    assert answer.status == 404
    assert json.loads(body)["error"]


def test_a_run_of_a_later_version_is_refused_by_name(server: PageServer, tmp_path: Path) -> None:
    with (tmp_path / "runs" / "one" / "events.jsonl").open("ab") as file:
        file.write(lines([job(format=99)]))
    for query in ("run?run=one", "compare?run=one&other=one"):
        answer, body = ask(server, f"/api/{query}")
        assert answer.status == 404
        assert "has format 99" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "request_",
    [
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9\r\n\r\n",
        b"GET /?" + b"a=1&" * 99 + b" HTTP/1.0\r\n\r\n",
    ],
)
def test_garbage_is_refused(server: PageServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(request_)
        answer = b""
        while data := connection.recv(4096):
            answer += data
        assert b" 200 " not in answer
        assert b" 40" in answer or b" 505 " in answer
    assert ask(server, "/")[0].status == 200


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "old")
    active = make_run(tmp_path / "runs" / "new", EVENTS)
    failed = event(9.0, "finished", status=137, message="killed", steps=None)
    make_run(tmp_path / "else" / "old", [*EVENTS, failed])
    (tmp_path / "runs" / "empty").mkdir()
    os.utime(tmp_path / "runs" / "old" / "events.jsonl", (1, 1))
    lock = try_lock(active / "lock")
    assert lock is not None
    with serving(tmp_path / "runs", tmp_path / "else" / "old") as server:
        answer = get(server, "runs")
        rows = {row["id"]: (row["state"], row["steps"], row["script"]) for row in answer["runs"]}
        assert rows == {
            "new": ("running", None, "train.py"),
            f"{tmp_path}/runs/old": ("finished", 60, "train.py"),
            f"{tmp_path}/else/old": ("failed", None, "train.py"),
        }
        assert answer["runs"][-1]["id"] == f"{tmp_path}/runs/old"
        assert get(server, "runs", have=answer["digest"]) == {"digest": answer["digest"]}
        os.close(lock)
        assert next(row for row in get(server, "runs")["runs"] if row["id"] == "new")["state"] != "running"


def test_only_what_has_changed_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.monitoring.page_server._UPDATE_EVERY", 0.0)
    folder = make_run(tmp_path / "one", EVENTS, MEASURED)
    with serving(folder) as server:
        answer = get(server, "run", run="one")
        assert set(answer["parts"]) == set(answer["digests"])
        have = ",".join(f"{name}:{digest}" for name, digest in answer["digests"].items())
        assert get(server, "run", run="one", have=have) == {"parts": {}, "digests": {}}
        with (folder / "measurements.jsonl").open("ab") as file:
            file.write(lines([metrics(9.0, 70, None, loss=0.3)]))
        answer = get(server, "run", run="one", have=have)
        assert set(answer["parts"]) == {"charts", "summary"}
        series = get(server, "chart", run="one", chart="metric:loss", axis="step")[0]
        assert (series["x"], series["mean"]) == ([10, 20, 70], [0.9, 0.7, 0.3])


def test_charts_logs_and_comparisons(server: PageServer, tmp_path: Path) -> None:
    get(server, "run", run="one")
    window = {"axis": "step", "start": 15, "stop": 25, "points": 100, "smoothing": 0.1}
    assert get(server, "chart", run="one", chart="metric:loss", **window)[0]["x"] == [10, 20]
    assert get(server, "logs", run="one") == [[0, len(LOG)], [1, 0]]
    page = get(server, "log", run="one", worker=0)
    assert page == {"text": LOG, "start": 0, "stop": len(LOG), "size": len(LOG)}
    found = get(server, "search", run="one", worker=0, text="NEEDLE")["found"]
    assert found == [{"start": LOG.index("the needle"), "text": "the needle is here"}]
    assert not get(server, "search", run="one", worker=0, text="NEEDLE", case=1)["found"]
    make_run(tmp_path / "runs" / "two", EVENTS)
    rows = get(server, "compare", run="one", other="two")
    assert rows[0]["differs"]
    assert {row["name"] for row in rows if row["differs"]} == {"state", "digest", "model", "steps"}


def test_a_page_for_other_machines_is_encrypted(tmp_path: Path) -> None:
    certificate = page_certificate(JobKey.generate(), "pages.example", "127.0.0.1")
    folder = make_run(tmp_path / "one")
    trusts = ssl.create_default_context(cadata=certificate.certificate.decode())
    with serving(folder, context=certificate.server_context()) as server:
        assert server.address.startswith("https://")
        for name in ("pages.example", "127.0.0.1"):
            raw = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
            with trusts.wrap_socket(raw, server_hostname=name) as connection:
                address = urlsplit(server.address)
                text = f"GET /?{address.query} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n"
                connection.sendall(text.encode())
                answer = connection.recv(65536)
                status = b" 303 " if name == "pages.example" else b" 403 "
                assert status in answer.split(b"\r\n")[0]
                assert (b"; Secure" in answer) == (status == b" 303 ")
        # A connection that says nothing does not keep others out.
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=60):
            raw = socket.create_connection(("127.0.0.1", server.server_port), timeout=60)
            with trusts.wrap_socket(raw, server_hostname="127.0.0.1") as connection:
                connection.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                assert b" 403 " in connection.recv(65536)


def test_the_private_key_of_a_page_follows_from_the_key() -> None:
    key = JobKey.generate()
    one, other = page_certificate(key, "a"), page_certificate(key, "b")
    assert one.private_key == other.private_key
    assert one.certificate != other.certificate
    assert one.private_key != page_certificate(JobKey.generate(), "a").private_key
    assert len(one.fingerprint) == 95
    assert "PRIVATE" not in repr(one)


@contextmanager
def command(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command of Lockstep, which ends with the block."""
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_KEY_FILE"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | variables,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("ui", "--host", "0.0.0.0", "."), "so the page needs a key"),
        (("ui", "nothing-here"), "'nothing-here' is neither a running job"),
        (("report", "."), "'.' is neither a running job"),
        (("run", "--ui", "--on", "ray", "-n", "2", "train.py"), "--ui shows the run folder"),
    ],
)
def test_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with command(*words) as process:
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("lockstep: ")
    assert expected in err
    assert err.count("\n") == 1
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    key = tmp_path / "key"
    JobKey.generate().write(key)
    with command("ui", "--host", "0.0.0.0", str(tmp_path), LOCKSTEP_KEY_FILE=str(key)) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("lockstep: the page is at https://0.0.0.0:")
        # A terminal takes a sign after an address for a part of it.
        assert line.split()[-1].startswith("https://")
        assert line.rstrip()[-1] not in ";.,"
        fingerprint = process.stderr.readline()
        assert process.stderr.readline() == "lockstep: Ctrl-C ends the page\n"
        port = int(line.split(":")[3].split("/")[0])
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        with context.wrap_socket(raw) as connection:
            certificate = connection.getpeercert(binary_form=True)
            assert certificate is not None
            hashed = hashlib.sha256(certificate).digest().hex(":").upper()
            assert fingerprint == f"lockstep: its certificate has the SHA-256 fingerprint {hashed}\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "", "lockstep: the page has ended\n")


def test_what_words_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder runs here"):
        resolve([])
    (tmp_path / "runs").mkdir()
    assert resolve([]) == [tmp_path / "runs"]
    with pytest.raises(ConfigError, match="'' is neither a running job"):
        resolve([""])


def test_a_glance_at_a_broken_log(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    catalog = Catalog([folder])
    assert (catalog.glance(folder).end, catalog.glance(folder).troubled) == ("finished", False)
    for content in (b"", b"\x00\xff", b"[1]\n", b'{"event":"finished","status":"x"}', lines(END)[:-20]):
        (folder / "events.jsonl").write_bytes(content)
        assert catalog.glance(folder).end == ""
    (folder / "events.jsonl").unlink()
    assert catalog.runs() == {}


def test_a_strange_name_of_a_run(tmp_path: Path) -> None:
    name = "a&b=<c>#?ä"
    make_run(tmp_path / name)
    with serving(tmp_path) as server:
        assert [row["id"] for row in get(server, "runs")["runs"]] == [name]
        answer, _ = ask(server, f"/api/run?run={quote(name, safe='')}")
        assert answer.status == 200
