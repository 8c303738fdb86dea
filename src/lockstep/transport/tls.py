"""The encryption of connections: TLS 1.3 with certificates that are made for the job."""

import os
import ssl

from lockstep.protocol.credentials import KEY_EXPIRED, Credentials
from lockstep.system.files import closed_after

_UNKNOWN_KEY = (
    "UNKNOWN_CA",
    "DECRYPT_ERROR",
    "BAD_CERTIFICATE",
    "CERTIFICATE_UNKNOWN",
    "CERTIFICATE_REQUIRED",
)
_EXPIRED = 10
"""OpenSSL's code of a certificate that has expired."""


def job_context(credentials: Credentials, *, accepted: bool) -> ssl.SSLContext:
    """Return the context of an end of a connection between hosts; `accepted` means the accepting one."""
    context = _context(accepted, credentials.certificate, credentials.private_key)
    # The authority belongs only to this job, so names have no meaning.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.authority.decode())
    if accepted:
        # Sessions are not resumed, and a ticket that arrives after the other end has closed resets a
        # connection.
        context.num_tickets = 0
    return context


def page_context(certificate: bytes, private_key: bytes) -> ssl.SSLContext:
    """Return the context of a server to which browsers connect; both arguments are PEM."""
    return _context(True, certificate, private_key)


def _context(accepted: bool, certificate: bytes, private_key: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepted else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # `load_cert_chain` reads only files.
    with closed_after(os.memfd_create("lockstep-certificate", os.MFD_CLOEXEC)) as memory:
        os.write(memory, certificate + private_key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    return context


def describe_tls_error(error: ssl.SSLError) -> str:
    """Explain why the other end of an encrypted connection is not trusted, or does not trust this one."""
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
