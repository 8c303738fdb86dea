"""The credentials with which a process proves that it belongs to a job."""

import msgspec

KEY_EXPIRED = "the key of the job has expired: make another with lockstep key FILE, and copy it to all hosts"


class Credentials(msgspec.Struct, frozen=True):
    """The credentials that an agent gives to its workers instead of the key of the job.

    The key cannot be derived from them.

    Attributes:
        greeting_key: signs greetings.
        expires: seconds since 1970, after which no new connection is accepted.
        authority: the certificate of the job's certificate authority, as PEM; empty if connections are not
            encrypted.
        certificate: the certificate of this holder, as PEM.
        private_key: the private key of the certificate, as PEM.
    """

    greeting_key: bytes
    expires: int
    authority: bytes = b""
    certificate: bytes = b""
    private_key: bytes = b""

    def __repr__(self) -> str:
        return f"Credentials(expires={self.expires}, encrypted={self.encrypted})"

    def __rich_repr__(self) -> list[tuple[str, object]]:
        return [("expires", self.expires), ("encrypted", self.encrypted)]

    @property
    def encrypted(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.authority)
