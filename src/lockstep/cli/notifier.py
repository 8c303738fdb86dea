"""The notifier of `lockstep run --notify`: a process beside the command that delivers messages about the job.

The process of the coordinator decides which events are worth a message (`coordinator/notifications.py`), and
sends messages here without waiting. The notifier delivers one message at a time, each in a separate process,
which it kills after `LIMIT`, because a name server, a TLS handshake or a program may hang. So a receiver does
not delay the steps of the job, and delays the end of the command by at most `LIMIT`.

The notifier outlives the command. If no message has reported how the job ended, it reports that everything
was killed.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import msgspec

from lockstep.errors import ConfigError
from lockstep.protocol.notification import Notification, ProgressMade, decode, encode
from lockstep.system.descendants import kill_family
from lockstep.system.environment import variable
from lockstep.system.event_loop import wait_for
from lockstep.system.exit_status import STOP_SIGNALS, describe_exit
from lockstep.system.files import read_regular
from lockstep.system.notes import note
from lockstep.system.standard_streams import close_other_descriptors, flush_streams
from lockstep.version import __version__

FORMAT = 1
"""The number of the format of a message; docs/monitoring.md describes it."""
LIMIT = 10.0
"""Seconds that a receiver has for a message, and for all that is left when the job has ended."""
_LARGEST = 2**17
_FORMS = "exec:COMMAND, env:NAME or file:PATH, with a URL in the variable or the file"


class Receiver(NamedTuple):
    """The receiver of the messages: a command of the shell or a URL; the other one is empty.

    Attributes:
        option: the value of `--notify`, which is not a secret; messages name it.
        command: reads a message from its standard input.
        url: receives a message by POST. It may be a secret.
    """

    option: str
    command: str
    url: str

    def __repr__(self) -> str:
        return f"Receiver({self.option!r})"


class JobIdentity(msgspec.Struct, frozen=True):
    """The fields of each message about its job: its name, script, run folder, and the host of its command."""

    job: str
    script: str
    run_dir: str
    host: str


def variable_with_url(option: str) -> str | None:
    """Return the name of the variable that a value of `--notify` names, or None if it names none."""
    form, _, name = option.partition(":")
    return name if form.lower() == "env" and name else None


def parse_receiver(option: str) -> Receiver:
    """Return the receiver that `--notify` names.

    Raises:
        ConfigError: the value does not name a receiver. The message does not contain the URL, even if the
            user has written it on the command line.
    """
    form, _, rest = option.partition(":")
    match form.lower():
        case "exec" if rest.strip():
            return Receiver(option, rest, "")
        case "env" if rest:
            url = variable(rest)
            if url is None:
                raise ConfigError(f"--notify {option}: the variable {rest} is not set")
        case "file" if rest:
            try:
                url = read_regular(Path(rest)).decode(errors="replace")
            except OSError as error:
                raise ConfigError(f"--notify {option}: the file cannot be read: {error.strerror}") from None
        case "http" | "https":
            raise ConfigError(
                "--notify takes no URL, because other users can read a command line, and a URL may be a "
                "secret; put it into a variable or a file, and give env:NAME or file:PATH"
            )
        case _:
            raise ConfigError(f"--notify needs {_FORMS}")
    return Receiver(option, "", _checked(url.strip(), option))


def _checked(url: str, option: str) -> str:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        fits = False
    if not fits or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"--notify {option} does not hold a URL that begins with https:// or http://")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"--notify {option} holds a URL with a user or a password, which Lockstep does not send; use a "
            "URL with a token, or exec:COMMAND with a program such as curl"
        )
    return url


class Notifier:
    """The notifier of a job, for the job's command.

    Attributes:
        descriptor: the descriptor of the socket to it.
    """

    def __init__(self, connection: socket.socket, job: JobIdentity) -> None:
        self.descriptor = connection.fileno()
        self._connection = connection
        self._job = job

    def end(self, status: int) -> None:
        """Tell the notifier how the job has ended, in case its process could not."""
        text = f"{self._job.job}: ended with status {status}; its process did not say why"
        ended = Notification(what="finished" if status == 0 else "failed", text=text, status=status)
        with contextlib.suppress(OSError):
            self._connection.send(encode(ended), socket.MSG_DONTWAIT)


@contextmanager
def notifier_beside(
    receiver: Receiver, job: JobIdentity, *, is_continued: bool = False
) -> Iterator[Notifier | None]:
    """Deliver messages about a job in a separate process, which ends after the block.

    The value is None if no process can be started; a note says so.

    Args:
        receiver: receives the messages.
        job: the job.
        is_continued: whether an engine continues the job if all processes here are killed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush_streams()
    try:
        process = os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        note(f"--notify {receiver.option}: no process can be started: {error.strerror}")
        yield None
        return
    if process == 0:
        _become_notifier(theirs, receiver, job, is_continued)
    theirs.close()
    try:
        yield Notifier(ours, job)
    finally:
        ours.close()
        ended = os.pidfd_open(process)
        if not wait_for([ended], LIMIT):
            note(f"--notify {receiver.option}: not all messages were taken within {LIMIT:g} s")
        os.close(ended)
        kill_family(process)


def _become_notifier(
    connection: socket.socket, receiver: Receiver, job: JobIdentity, is_continued: bool
) -> NoReturn:
    try:
        # Signals of the terminal and of a service manager are for the command.
        os.setsid()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # Among them are locks of the command.
        close_other_descriptors(connection.fileno())
        _serve(connection, receiver, job, is_continued)
    except BaseException as error:
        note(f"--notify {receiver.option}: the notifier failed: {type(error).__name__}")
    finally:
        os._exit(0)


def _serve(connection: socket.socket, receiver: Receiver, job: JobIdentity, is_continued: bool) -> None:
    """Deliver messages until all processes of the job have closed the connection."""
    has_ended, patience = False, 0.0
    stalls_at: float | None = None
    steps: int | None = None

    def tell(notification: Notification) -> None:
        fields = msgspec.to_builtins(notification)
        fields.pop("type")
        identity = {"format": FORMAT, "time": round(time.time(), 3), **msgspec.structs.asdict(job)}
        deliver(receiver, msgspec.json.encode(identity | fields))

    while True:
        left = None if stalls_at is None else max(0.0, stalls_at - time.monotonic())
        if not wait_for([connection.fileno()], left):
            stalls_at = None
            text = f"{job.job}: no step was completed for {patience:.0f} s"
            tell(Notification(what="stalled", text=text, steps=steps))
            continue
        packet = connection.recv(_LARGEST)
        if not packet:
            break
        match message := decode(packet):
            case ProgressMade(patience=None):
                stalls_at, steps = None, message.steps
            case ProgressMade(patience=float(seconds)):
                stalls_at, patience, steps = time.monotonic() + seconds, seconds, message.steps
            case Notification(status=None):
                tell(message)
            case Notification() if not has_ended:
                has_ended, stalls_at = True, None
                tell(message)
    if not (has_ended or is_continued):
        text = f"{job.job}: all processes of the job on {job.host} were killed"
        tell(Notification(what="failed", text=text))


def deliver(receiver: Receiver, message: bytes) -> None:
    """Give a message to a receiver within `LIMIT`; a note says if that fails."""
    content = os.memfd_create("lockstep-message")
    try:
        os.write(content, message)
        os.lseek(content, 0, os.SEEK_SET)
        process = os.fork()
        if process == 0:
            _become_sender(receiver, message, content)
        ended = os.pidfd_open(process)
        in_time = bool(wait_for([ended], LIMIT))
        os.close(ended)
        if not in_time:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    except OSError as error:
        note(f"--notify {receiver.option}: a message is lost: {error.strerror}")
        return
    finally:
        os.close(content)
    if not in_time:
        note(f"--notify {receiver.option}: a message is lost: it was not taken within {LIMIT:g} s")
    elif status and receiver.command:
        note(f"--notify {receiver.option}: the command {describe_exit(status)}")


def _become_sender(receiver: Receiver, message: bytes, content: int) -> NoReturn:
    try:
        os.setsid()
        if receiver.command:
            for number in (*STOP_SIGNALS, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(content, 0)
            # The output of the command is about the job, like the notes.
            os.dup2(2, 1)
            os.execv("/bin/sh", ["/bin/sh", "-c", receiver.command])
        if problem := post(receiver.url, message):
            note(f"--notify {receiver.option}: a message is lost: {problem}")
    except BaseException as error:
        note(f"--notify {receiver.option}: a message is lost: {type(error).__name__}")
    finally:
        os._exit(1)


def post(url: str, message: bytes) -> str:
    """Send a message to a URL; return why it was not taken, without the URL, and empty if it was.

    The certificate of a server is verified. A redirection is not followed: it may lead anywhere.
    """
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    class Stays(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: object) -> None:
            return None

    encrypted = urllib.request.HTTPSHandler(context=ssl.create_default_context())
    opener = urllib.request.build_opener(Stays, encrypted)
    headers = {"Content-Type": "application/json", "User-Agent": f"lockstep/{__version__}"}
    request = urllib.request.Request(url, message, headers, method="POST")
    try:
        with opener.open(request, timeout=LIMIT):
            return ""
    except urllib.error.HTTPError as error:
        if 300 <= error.code < 400:
            return f"the server redirects (status {error.code}), which is not followed; give the final URL"
        return f"the server answered with status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        detail = getattr(reason, "verify_message", "") or getattr(reason, "strerror", "")
        return detail or type(reason).__name__
