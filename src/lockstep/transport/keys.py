"""The key of a job over several hosts, and the credentials that every holder of it can make.

From the key's 32 random bytes and its expiry, every holder derives the same certificate authority and the
same key for greetings, so only the key must be distributed. The authority has an Ed25519 key, whose
signatures are deterministic, so its certificate is the same for all holders.
"""

import contextlib
import datetime
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import ConfigError, UnfitError
from lockstep.protocol.credentials import Credentials
from lockstep.system.environment import KEY_FILE
from lockstep.system.files import open_regular
from lockstep.system.prose import install_command

MODE = 0o600
"""The mode of a key file."""
DEFAULT_DAYS = 30
"""How many days a key is valid by default."""

_BYTES = 32
_DAY = 24 * 3600
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_LINE = re.compile(r"lockstep-key 1 (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ) ([0-9a-f]{64})\n?", re.ASCII)
_VERSION = re.compile(r"lockstep-key (\d{1,9}) ", re.ASCII)
_MOST_TEXT = 4096
_BEGINNING = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
"""When every certificate becomes valid: the clocks of hosts differ."""


def key_needed(why: str) -> ConfigError:
    """Return the error of a job that needs a key and has none, for the reason `why`."""
    return ConfigError(
        f"{why}, so the job needs a key: make one with lockstep key FILE, copy the file to each host, "
        f"and set {KEY_FILE} to its path there"
    )


@dataclass(frozen=True)
class JobKey:
    """The key of a job. A process that holds it can join the job, and act as any of its hosts.

    Attributes:
        secret: the random bytes.
        expires: seconds since 1970, after which no connection is accepted.
    """

    secret: bytes = field(repr=False)
    expires: int

    @classmethod
    def generate(cls, days: float = DEFAULT_DAYS, now: Callable[[], float] = time.time) -> "JobKey":
        """Return a new key that is valid for `days`."""
        return cls(secrets.token_bytes(_BYTES), int(now() + days * _DAY))

    @classmethod
    def parse(cls, text: str, source: str, now: Callable[[], float] = time.time) -> "JobKey":
        """Return the key in a line; see `text`.

        Args:
            text: the line.
            source: the name of the text in messages.
            now: the wall clock.

        Raises:
            ConfigError: the line is not a key, or the key has expired.
        """
        match = _LINE.fullmatch(text)
        if match is None:
            version = _VERSION.match(text)
            if version is not None and version[1] != "1":
                raise ConfigError(
                    f"{source} contains a key of format {version[1]}, which this version of Lockstep does "
                    "not know; install the version that made it"
                )
            raise ConfigError(f"{source} does not contain a key; make one with lockstep key FILE")
        try:
            expires = datetime.datetime.strptime(match[1], _TIME).replace(tzinfo=datetime.UTC)
        except ValueError:
            raise ConfigError(f"{source} contains a key whose expiry, {match[1]}, is not a time") from None
        key = cls(bytes.fromhex(match[2]), int(expires.timestamp()))
        if now() >= key.expires:
            raise ConfigError(
                f"the key in {source} expired on {key.expiry}; make another with lockstep key FILE, and copy "
                "it to all hosts"
            )
        return key

    @classmethod
    def read(cls, path: Path, now: Callable[[], float] = time.time) -> "JobKey":
        """Return the key in a file.

        Raises:
            ConfigError: the file cannot be read, others may use it, it contains no key, or the key has
                expired.
        """
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                status = os.fstat(file.fileno())
                text = file.read(_MOST_TEXT).decode(errors="replace")
        except OSError as error:
            raise ConfigError(f"the key file {path} cannot be read: {error.strerror}") from None
        if status.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"the key file {path} belongs to another user (id {status.st_uid}), who can replace it"
            )
        # Kubernetes lets the group of a pod's user read root's files. Only root can make such a file.
        shared = stat.S_IRGRP if status.st_uid == 0 != os.geteuid() else 0
        if (mode := stat.S_IMODE(status.st_mode)) & 0o077 & ~shared:
            raise ConfigError(
                f"other users may use the key file {path} (mode {mode:o}); run chmod 600 {path}, and make "
                "another key if others may have read it"
            )
        return cls.parse(text, str(path), now)

    def write(self, path: Path) -> None:
        """Write the key to a new file that only this user may read.

        Raises:
            ConfigError: the file exists, or cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
        except FileExistsError:
            raise ConfigError(
                f"{path} exists; give the name of a new file, or delete this one first"
            ) from None
        except OSError as error:
            raise ConfigError(f"the key file {path} cannot be written: {error.strerror}") from None
        try:
            with os.fdopen(descriptor, "w") as file:
                os.fchmod(descriptor, MODE)
                file.write(self.text)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise ConfigError(f"the key file {path} cannot be written: {error.strerror}") from None

    @property
    def text(self) -> str:
        """The key as the line of a file; secret."""
        return f"lockstep-key 1 {self._expiry.strftime(_TIME)} {self.secret.hex()}\n"

    @property
    def expiry(self) -> str:
        """The time at which the key expires, for users."""
        return self._expiry.strftime("%Y-%m-%d %H:%M UTC")

    @property
    def _expiry(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.expires, datetime.UTC)

    def derive(self, purpose: str) -> bytes:
        """Return 32 bytes for a purpose, which every holder of the key can derive; secret.

        Raises:
            ImportError: the package cryptography is not installed.
        """
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        # This includes the expiry: with another expiry, the key is a different key.
        info = f"lockstep 1 {purpose} {self.expires}".encode()
        return HKDF(hashes.SHA256(), length=_BYTES, salt=None, info=info).derive(self.secret)

    def mint(self, *, encrypted: bool = True) -> Credentials:
        """Return new credentials, which expire with the key.

        Args:
            encrypted: whether connections are encrypted; otherwise the credentials only sign greetings.

        Raises:
            UnfitError: the package cryptography is not installed.
        """
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
        except ImportError:
            raise UnfitError(
                "jobs over several hosts need the package cryptography, which is not installed: "
                f"{install_command('hosts')}"
            ) from None

        greeting_key = self.derive("greetings")
        if not encrypted:
            return Credentials(greeting_key, self.expires)
        authority = Ed25519PrivateKey.from_private_bytes(self.derive("authority"))
        identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"lockstep {identifier.digest.hex()}")])
        issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)

        def certify(owner: Ed25519PrivateKey, subject: x509.Name, serial: int) -> x509.CertificateBuilder:
            return (
                x509.CertificateBuilder()
                .subject_name(subject)
                .issuer_name(issuer)
                .public_key(owner.public_key())
                .serial_number(serial)
                .not_valid_before(_BEGINNING)
                .not_valid_after(self._expiry)
            )

        def usage(*, signs: bool, certifies: bool) -> x509.KeyUsage:
            return x509.KeyUsage(
                digital_signature=signs,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=certifies,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            )

        root = (
            certify(authority, issuer, 1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage(signs=False, certifies=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(authority, None)
        )
        process_key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lockstep process")])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        leaf = (
            certify(process_key, name, x509.random_serial_number())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage(signs=True, certifies=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(process_key.public_key()), critical=False
            )
            .add_extension(issued_by, critical=False)
            .sign(authority, None)
        )
        pem = serialization.Encoding.PEM
        return Credentials(
            greeting_key,
            self.expires,
            root.public_bytes(pem),
            leaf.public_bytes(pem),
            process_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        )
