"""The notifier of `lockstep run --notify`, with commands and with real servers of HTTP."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.cli import notifier
from lockstep.protocol.notification import Notification, NotifierMessage, ProgressMade, encode
from lockstep.transport.keys import JobKey
from lockstep.transport.page_certificate import page_certificate
from webhook import SECRET, Webhook

SCRIPT = Path(__file__).parent / "notifying.py"
NAN = Notification(what="nan", text="train-1: loss is not a finite number", steps=3, workers=2)
END = Notification(what="failed", text="train-1: ended with status 1", status=1, steps=7, workers=1)
IDENTITY = {
    "format": 1,
    "job": "train-1",
    "script": "train.py",
    "run_dir": "/runs/train-1",
    "host": "node1",
}


@pytest.fixture
def server() -> Iterator[Webhook]:
    with Webhook() as made:
        yield made


Notify = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def notify(tmp_path: Path) -> Notify:
    """Run a notifier with some messages; its receiver is named on the command line."""

    def run(
        option: str, *messages: NotifierMessage | str, limit: float | None = None, **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        lines = [one if isinstance(one, str) else encode(one).decode() for one in messages]
        program = [sys.executable, str(SCRIPT), option]
        if limit is not None:
            patch = (
                f"import lockstep.cli.notifier as n, runpy, sys; n.LIMIT = {limit}; sys.argv = sys.argv[1:]"
            )
            program = [sys.executable, "-c", f"{patch}; runpy.run_path(sys.argv[0])", str(SCRIPT), option]
        return subprocess.run(
            program,
            input="".join(f"{line}\n" for line in lines),
            env={**os.environ, "no_proxy": "*", **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


def without_time(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "time"}


def test_a_url_gets_each_message_once(server: Webhook, notify: Notify) -> None:
    done = notify("env:HOOK", NAN, ProgressMade(60.0, 5), END, "end 1", HOOK=server.url())
    assert (done.returncode, done.stderr) == (0, "")
    assert [(path, kind) for path, kind, _ in server.received] == [
        (f"/hook/{SECRET}?key={SECRET}", "application/json")
    ] * 2
    first, last = (without_time(message) for _, _, message in server.received)
    assert first == IDENTITY | {
        "what": "nan",
        "text": "train-1: loss is not a finite number",
        "status": None,
        "steps": 3,
        "workers": 2,
        "metrics": {},
    }
    assert (last["what"], last["status"], last["steps"]) == ("failed", 1, 7)


def test_a_command_gets_messages_from_stdin(notify: Notify, tmp_path: Path) -> None:
    done = notify("exec:cat >> got; echo said", NAN, END)
    assert (done.returncode, done.stderr) == (0, "said\nsaid\n")
    text = (tmp_path / "got").read_text()
    assert [json.loads(line)["what"] for line in text.replace("}{", "}\n{").splitlines()] == ["nan", "failed"]


def test_a_stall_is_told_once_until_there_is_progress(notify: Notify, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "exec:cat >> got; echo >> got; echo told >&2"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    ) as running:
        assert running.stdin is not None
        assert running.stderr is not None
        for steps in (5, 6):
            print(encode(ProgressMade(0.01, steps)).decode(), file=running.stdin, flush=True)
            assert running.stderr.readline() == "told\n"
        print(encode(ProgressMade(None, 7)).decode(), file=running.stdin, flush=True)
        print(encode(END).decode(), file=running.stdin, flush=True)
        running.stdin.close()
        assert running.wait(600) == 0
    messages = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert [(one["what"], one["steps"]) for one in messages] == [
        ("stalled", 5),
        ("stalled", 6),
        ("failed", 7),
    ]
    assert messages[0]["text"] == "train-1: no step was completed for 0 s"


def test_the_end_is_told_though_everything_was_killed(notify: Notify, server: Webhook) -> None:
    assert notify("env:HOOK", NAN, "kill", HOOK=server.url()).returncode == -9
    # The notifier outlives the command, and holds the pipes of its output: `notify` has waited for it.
    assert [message["what"] for _, _, message in server.received] == ["nan", "failed"]
    assert server.received[-1][2]["text"] == "train-1: all processes of the job on node1 were killed"


def test_the_command_tells_of_an_end_that_the_job_could_not_tell(notify: Notify, server: Webhook) -> None:
    notify("env:HOOK", "end 137", HOOK=server.url())
    ((_, _, message),) = server.received
    assert (message["what"], message["status"]) == ("failed", 137)
    assert message["text"] == "train-1: ended with status 137; its process did not say why"


@pytest.mark.parametrize(
    ("status", "to", "problem"),
    [
        (302, "/elsewhere", "the server redirects (status 302), which is not followed; give the final URL"),
        (307, "/elsewhere", "the server redirects (status 307), which is not followed; give the final URL"),
        (500, "", "the server answered with status 500"),
        (404, "", "the server answered with status 404"),
    ],
)
def test_an_answer_that_is_not_success_is_noted_without_the_url(
    status: int, to: str, problem: str, server: Webhook, notify: Notify
) -> None:
    server.status, server.redirects_to = status, to
    done = notify("env:HOOK", END, HOOK=server.url())
    assert done.stderr == f"lockstep: --notify env:HOOK: a message is lost: {problem}\n"
    assert len(server.received) == 1


def test_a_server_that_is_gone_is_noted(server: Webhook, notify: Notify) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/{SECRET}"
        done = notify("env:HOOK", END, HOOK=url)
    assert done.stderr == "lockstep: --notify env:HOOK: a message is lost: Connection refused\n"


@pytest.mark.parametrize(
    "drips", [pytest.param(b"", marks=pytest.mark.ci), b"HTTP/1.1 200 OK\r\nA: "], ids=["hangs", "drips"]
)
def test_a_server_that_hangs_delays_the_end_by_the_limit(drips: bytes, notify: Notify) -> None:
    """It accepts, and says nothing; or it sends a byte at a time, so that no single read times out."""
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        with connection:
            while drips and not ended.wait(0.01):
                try:
                    connection.sendall(drips[:1] or b"x")
                except OSError:
                    return
            ended.wait()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=accept, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}"
        done = notify("env:HOOK", NAN, NAN, NAN, NAN, END, limit=1.0, HOOK=url)
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 0
    assert SECRET not in done.stderr
    assert "--notify env:HOOK: not all messages were taken within 1 s" in done.stderr


def test_a_command_that_hangs_is_killed_with_its_children(notify: Notify, tmp_path: Path) -> None:
    done = notify("exec:sleep 1000 & echo $! > child; wait", END, limit=1.0)
    assert done.returncode == 0
    assert "--notify exec:sleep 1000 & echo $! > child; wait: " in done.stderr
    # `notify` has waited until nobody had its pipes; who reaps orphans may be slow.
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.status() == psutil.STATUS_ZOMBIE


def test_a_command_that_fails_is_noted(notify: Notify) -> None:
    done = notify("exec:exit 3", END)
    assert done.stderr == "lockstep: --notify exec:exit 3: the command exited with status 3\n"


def test_certificates_are_verified(server: Webhook, notify: Notify, tmp_path: Path) -> None:
    own = page_certificate(JobKey.generate(), "localhost", "127.0.0.1")
    server.socket = own.server_context().wrap_socket(server.socket, server_side=True)
    done = notify("env:HOOK", END, HOOK=server.url("https"))
    assert done.stderr.startswith("lockstep: --notify env:HOOK: a message is lost: ")
    assert "self-signed certificate" in done.stderr or "unable to get local issuer" in done.stderr
    assert server.received == []
    # The user trusts it.
    pem = ssl.get_server_certificate(("127.0.0.1", server.server_port))
    (tmp_path / "ca.pem").write_text(pem)
    trusted = {"SSL_CERT_FILE": str(tmp_path / "ca.pem"), "HOOK": server.url("https")}
    assert notify("env:HOOK", END, **trusted).stderr == ""
    assert len(server.received) == 1


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            f"https://host/{SECRET}",
            "--notify takes no URL, because other users can read a command line, and ",
        ),
        (f"HTTPS://host/{SECRET}", "--notify takes no URL"),
        (SECRET, "--notify needs exec:COMMAND, env:NAME or file:PATH"),
        ("exec: ", "--notify needs exec:COMMAND"),
        ("env:", "--notify needs exec:COMMAND"),
        ("env:MISSING", "--notify env:MISSING: the variable MISSING is not set"),
        ("file:missing", "--notify file:missing: the file cannot be read: No such file or directory"),
        ("file:.", "--notify file:.: the file cannot be read: "),
        ("env:FTP", "--notify env:FTP does not hold a URL that begins with https:// or http://"),
        ("env:PORT", "--notify env:PORT does not hold a URL"),
        ("env:LINES", "--notify env:LINES does not hold a URL"),
        ("env:USER", "--notify env:USER holds a URL with a user or a password, which Lockstep does not send"),
    ],
)
def test_receivers_that_are_refused(
    option: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    variables = {
        "FTP": f"ftp://host/{SECRET}",
        "PORT": f"http://host:port/{SECRET}",
        "LINES": f"https://host/{SECRET}\r\nX: y",
        "USER": f"https://user:{SECRET}@host/",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(notifier.ConfigError) as caught:
        notifier.parse_receiver(option)
    assert str(caught.value).startswith(message)
    assert SECRET not in str(caught.value)


def test_a_file_may_end_with_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(f"https://host/{SECRET}\n")
    receiver = notifier.parse_receiver(f"file:{tmp_path / 'hook'}")
    assert receiver.url == f"https://host/{SECRET}"
    assert SECRET not in repr(receiver)
