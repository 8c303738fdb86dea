"""Objects in a store such as Amazon S3, Google Cloud Storage or Azure Blob Storage, by the library obstore.

The library is imported when a store is opened. It reads credentials from the environment; this module never
has them. It repeats a request that fails, with growing pauses, and bounds the time for that.
"""

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from lockstep.errors import CheckpointError, ConfigError, UnfitError
from lockstep.system.environment import cache_folder
from lockstep.system.prose import install_command, printable

_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "file", "memory")
_PART = 8 << 20
"""Bytes of a part of an upload or a download, of which memory holds `_AT_ONCE`."""
_AT_ONCE = 4
_MOST_PARTS = 9000
"""S3 takes 10,000 parts of an object."""
_REQUEST_SECONDS = 120
"""For one request, with its part."""
_CONNECT_SECONDS = 10
RETRY_SECONDS = 60.0
"""How long a request that fails is repeated while a job runs; nothing else limits the repetitions."""
SHORT_RETRY_SECONDS = 8.0
"""The same if somebody waits for the request: a command, or a coordinator, which repeats it by itself."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15
"""Seconds before it is repeated; the pause doubles."""
_ANY_NUMBER = 2**31 - 1
_DENIED = re.compile(r"status code: 40[13]|\(code: AccessDenied\)")
"""The library has classes for these errors, but not for those of a list or of several deletions."""
_EXPIRED = re.compile(
    "expired|InvalidAccessKeyId|InvalidToken|SignatureDoesNotMatch|invalid_grant|invalid_client",
    re.IGNORECASE,
)
_SKEWED = re.compile("RequestTimeTooSkewed|Request date header too old")
_LACKING = re.compile(r"169\.254\.169\.254|metadata\.google|MissingAccount|Account must be specified")
_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_VARIABLES = {"s3": _AWS, "s3a": _AWS, "gs": "GOOGLE_APPLICATION_CREDENTIALS"}
"""Variables with credentials, by scheme; the other schemes are Azure's."""
_LONGEST_REASON = 300


class StoreLease(msgspec.Struct, frozen=True):
    """The right of a job to write checkpoints to a prefix of a store.

    Attributes:
        url: the prefix.
        job: an id of the job there, the same for all its workers.
        base: the tag of the head from which the job began; None if there was none.
        one_writer: whether the user guarantees that no other job writes there.
    """

    url: str
    job: str
    base: str | None = None
    one_writer: bool = False


class Conflict(Exception):
    """An object is not in the state that a conditional write expects."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a location of checkpoints is the URL of a store, not a folder."""
    return "://" in os.fspath(location)


def parse_url(url: str) -> str:
    """Return the URL of a prefix in a store, without slashes at its end.

    Raises:
        ConfigError: it does not name a store, or contains a part that may be a secret.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"{url.partition('?')[0]}: give a folder, or a URL that begins with s3://, gs://, az:// or file://"
        )
    account = rest.partition("/")[0].rpartition("@")[0]
    if "?" in rest or "#" in rest or ":" in account or (account and scheme not in ("abfs", "abfss")):
        raise ConfigError(
            f"{scheme}://...: give a URL of a bucket and a prefix only; set credentials in the environment, "
            "because a run records its options"
        )
    if not rest.strip("/") and scheme != "memory":
        raise ConfigError(f"{url}: name a bucket and a prefix, such as s3://bucket/job")
    return url.rstrip("/") if scheme != "memory" else url


def name_for(url: str) -> str:
    """Return a name for a local folder with the content of a prefix: the prefix's last part, and a hash."""
    last = re.sub("[^A-Za-z0-9._-]", "-", url.rpartition("/")[2])[:40]
    return f"{last}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def folder_for(url: str) -> Path:
    """Return the folder of this machine for the checkpoints of a prefix."""
    return cache_folder() / "checkpoints" / name_for(url)


def folder_of(location: str | os.PathLike[str]) -> Path:
    """Return the absolute local path for a folder, or a URL, that the user gave."""
    return folder_for(os.fspath(location)) if is_url(location) else Path(location).absolute()


class ObjectStore:
    """The objects below a URL.

    Each method raises CheckpointError if the store cannot be reached, or refuses the request; the message
    names the store and the reason, without any part of a request that may be a secret.

    Args:
        url: a result of `parse_url`.
        conditional: whether `replace` depends on the state of the object, so that of two writers one fails.
        retry_seconds: how long a request that fails is repeated; 0 for never.
        backing: the library's store; None to open that of the URL.

    Raises:
        UnfitError: obstore is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        conditional: bool = True,
        retry_seconds: float = RETRY_SECONDS,
        backing: Any = None,
    ) -> None:
        self.url = url
        self._conditional = conditional
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise UnfitError(f"{url} needs the package obstore: {install_command('store')}") from None
        self._obstore = obstore
        if backing is not None:
            self._store = backing
            return
        options: dict[str, Any] = {"mkdir": True, "automatic_cleanup": True}
        if not url.startswith(("file:", "memory:")):
            options = {
                "client_options": {
                    "allow_http": True,
                    "timeout": timedelta(seconds=_REQUEST_SECONDS),
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                },
                "retry_config": {
                    "max_retries": _ANY_NUMBER,
                    "retry_timeout": timedelta(seconds=retry_seconds),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE),
                        "max_backoff": timedelta(seconds=_LONGEST_PAUSE),
                        "base": 2,
                    },
                },
            }
        try:
            self._store = from_url(url, **({} if url.startswith("memory:") else options))
        except Exception as error:
            raise self._failed("opened", error) from None

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content of a small object, and its tag, which changes with it; None if absent."""
        try:
            result = self._obstore.get(self._store, name)
            return bytes(result.bytes()), _tag(result.meta)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", error) from None

    def replace(self, name: str, data: bytes, tag: str | None) -> str:
        """Write a small object that has a tag, or that does not exist if `tag` is None; return its new tag.

        The data must be those of one writer and one write, such as with a random token and a counter.

        Raises:
            Conflict: it has another tag. Never raised by a store that is not conditional.
        """
        mode: Any = "overwrite"
        if self._conditional:
            mode = "create" if tag is None else msgspec.json.decode(tag)
        try:
            return _tag(self._obstore.put(self._store, name, data, mode=mode, use_multipart=False))
        except (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError):
            pass
        except Exception as error:
            raise self._failed("written", error) from None
        content = self.read(name)
        if content is None or content[0] != data:
            raise Conflict
        # The library has repeated the request, because the answer to the first one was an error or lost.
        return content[1]

    def put(self, name: str, file: Path, size: int) -> None:
        """Upload a file of `size` bytes in parts; the object appears when it is complete."""
        part = max(_PART, -(-size // _MOST_PARTS))
        try:
            self._obstore.put(self._store, name, file, chunk_size=part, max_concurrency=_AT_ONCE)
        except Exception as error:
            raise self._failed("written", error) from None

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""
        try:
            return int(self._obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", error) from None

    def parts(self, name: str, size: int) -> Iterator[bytes]:
        """Yield an object of `size` bytes in parts.

        Raises:
            FileNotFoundError: there is no such object, or it is shorter.
        """
        for start in range(0, size, _PART):
            length = min(_PART, size - start)
            try:
                part = bytes(self._obstore.get_range(self._store, name, start=start, length=length))
            except FileNotFoundError:
                raise
            except Exception as error:
                failure = self._failed("read", error)
                # Each store has its own words for a range beyond the end.
                if (self.size(name) or 0) < start + length:
                    raise FileNotFoundError(name) from None
                raise failure from None
            if len(part) != length:
                raise FileNotFoundError(name)
            yield part

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist do not count."""
        for name in names:
            try:
                self._obstore.delete(self._store, name)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._failed("written", error) from None

    def names(self) -> list[str]:
        """Return the names of all objects; recent changes may be missing."""
        try:
            return [entry["path"] for page in self._obstore.list(self._store) for entry in page]
        except Exception as error:
            raise self._failed("read", error) from None

    def check_conditions(self) -> None:
        """Check that the store takes objects, and refuses a write whose condition does not hold.

        Raises:
            ConfigError: the store ignores conditions, or does not support them.
        """
        name = f"probe-{secrets.token_hex(8)}"
        try:
            is_conditional = self._keeps_conditions(name)
        except (Conflict, NotImplementedError):
            is_conditional = False
        except CheckpointError:
            # This error says more than the next one.
            with contextlib.suppress(CheckpointError):
                self.delete([name])
            raise
        self.delete([name])
        if not is_conditional:
            raise ConfigError(
                f"{self.url} does not support conditional writes, without which two jobs could damage "
                "each other's checkpoints there: use another store, or give --one-writer if no other job "
                "uses this URL"
            )

    def _keeps_conditions(self, name: str) -> bool:
        first = self.replace(name, b"1", None)
        if not self._conditional:
            return True
        refuses = self._refuses(name, None)
        # A conflict, if the store keeps only this condition.
        self.replace(name, b"2", first)
        return refuses and self._refuses(name, first)

    def _refuses(self, name: str, tag: str | None) -> bool:
        try:
            self.replace(name, b"3", tag)
        except Conflict:
            return True
        return False

    def _failed(self, action: str, error: Exception) -> CheckpointError | NotImplementedError:
        if isinstance(error, NotImplementedError):
            return NotImplementedError()
        text = str(error)
        why = _reason(text)
        if isinstance(error, FileNotFoundError):
            return CheckpointError(f"{self.url} cannot be {action}: {why or 'it does not exist'}; create it")
        if _SKEWED.search(text):
            return CheckpointError(
                f"{self.url} cannot be {action}: the clock of this machine is wrong ({why}); set it"
            )
        if _LACKING.search(text):
            variables = _VARIABLES.get(self.url.partition(":")[0], _AZURE)
            return CheckpointError(
                f"{self.url} cannot be {action}: this process has no credentials for the store; set them in "
                f"its environment, such as {variables}"
            )
        # Names of objects are in the text, too, but not in the reason.
        if _DENIED.search(text) or _EXPIRED.search(why):
            return CheckpointError(
                f"{self.url} cannot be {action}: the store refuses the credentials of this process ({why}); "
                "renew them in its environment, or give them the permission"
            )
        return CheckpointError(f"{self.url} cannot be {action}: {why}; check the store and the network")


def _tag(meta: Any) -> str:
    # The library rejects None.
    version = {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}
    return msgspec.json.encode(version).decode()


def _reason(text: str) -> str:
    """Return the reason in the library's error: no address or body of a request, which may hold secrets."""
    return printable(_message(text).strip().partition("\n")[0])[:_LONGEST_REASON]


def _message(text: str) -> str:
    if match := re.search(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>", text):
        return f"{match[1]}: {match[2]}"
    # A service that gives out credentials.
    code = re.search(r'"error": ?"([^"]*)"', text)
    if code and (match := re.search(r'"error_description": ?"([^"]*)"', text)):
        return f"{code[1]}: {match[1]}"
    if "kind: Connect" in text:
        return "no connection"
    if "kind: Timeout" in text:
        # A connection has less time than a request, and some requests are repeated.
        elapsed = re.search(r"elapsed: ([0-9.]+)s\b", text)
        return f"no answer within {float(elapsed[1]):.0f} s" if elapsed else "no answer in time"
    if match := re.search(r"status code: ([0-9]{3} [A-Za-z ]*)", text):
        return match[1]
    first = re.sub(r"\S+://\S+", "", text.partition("\n")[0]).partition(" - ")
    return first[2] or first[0]
