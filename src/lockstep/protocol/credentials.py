"""The credentials with which a process proves that it belongs to a job."""

import os
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    # Every agent and worker imports this module, and few of them connect to another host.
    import ssl

_UNKNOWN_KEY = (
    "UNKNOWN_CA",
    "DECRYPT_ERROR",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_REQUIRED",
)
_EXPIRED = 10
"""OpenSSL's code of a certificate that has expired."""

KEY_EXPIRED = "the key of the job has expired: make another with lockstep key FILE, and copy it to all hosts"


class Credentials(msgspec.Struct, frozen=True):
    """What an agent gives to its workers instead of the key of the job; nothing else can be derived from it.

    Attributes:
        greeting_key: signs greetings.
        expires: seconds since 1970, after which no new connection is accepted.
        authority: the certificate of the job's certificate authority, as PEM; empty if connections are not
            encrypted.
        certificate: the certificate of this holder, as PEM.
        private_key: of the certificate, as PEM.
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

    def server_context(self) -> "ssl.SSLContext":
        """Return the context of the end that accepts connections."""
        import ssl

        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        # No session is resumed, and a ticket that arrives after the other end has closed resets a connection.
        context.num_tickets = 0
        return context

    def client_context(self) -> "ssl.SSLContext":
        """Return the context of the end that opens connections."""
        import ssl

        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> "ssl.SSLContext":
        import ssl

        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The authority belongs to this job alone, so names have no meaning.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.authority.decode())
        # `load_cert_chain` reads only files.
        memory = os.memfd_create("lockstep-certificate", os.MFD_CLOEXEC)
        try:
            os.write(memory, self.certificate + self.private_key)
            context.load_cert_chain(f"/proc/self/fd/{memory}")
        finally:
            os.close(memory)
        return context


def describe_tls_error(error: "ssl.SSLError") -> str:
    """Say why the other end of an encrypted connection is not trusted, or does not trust this one."""
    import ssl

    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        expired = error.verify_code == _EXPIRED
    else:
        expired = "CERTIFICATE_EXPIRED" in reason
    if expired:
        return KEY_EXPIRED
    if isinstance(error, ssl.SSLCertVerificationError) or any(sign in reason for sign in _UNKNOWN_KEY):
        return "its key is not the key of this job"
    return f"it does not encrypt the connection as this version of Lockstep does ({reason or error})"
