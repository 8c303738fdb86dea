"""The certificate of the page that shows runs to browsers of other machines.

Browsers do not know the authority of a job, so the certificate is self-signed, and users compare its
fingerprint. Its private key follows from the key of the job, as an ECDSA key: browsers do not accept Ed25519.
"""

import contextlib
import datetime
import ipaddress
import ssl
from dataclasses import dataclass, field

from lockstep.errors import UnfitError
from lockstep.system.prose import install_command
from lockstep.transport.keys import JobKey
from lockstep.transport.tls import page_context

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The order of the group of P-256."""


@dataclass(frozen=True)
class PageCertificate:
    """A certificate with its private key, both as PEM, and the fingerprint that browsers show."""

    certificate: bytes
    private_key: bytes = field(repr=False)
    fingerprint: str

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the server."""
        return page_context(self.certificate, self.private_key)


def page_certificate(key: JobKey, *names: str) -> PageCertificate:
    """Return a new certificate for a page at these host names and IP addresses; it expires with the key.

    Raises:
        UnfitError: the package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        secret = int.from_bytes(key.derive("page"))
    except ImportError:
        raise UnfitError(
            "a page for other machines needs the package cryptography, which is not installed: "
            f"{install_command('hosts')}"
        ) from None
    owner = ec.derive_private_key(secret % (_ORDER - 1) + 1, ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lockstep page")])
    alternatives: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        with contextlib.suppress(ValueError):
            alternatives.append(x509.IPAddress(ipaddress.ip_address(name)))
            continue
        alternatives.append(x509.DNSName(name))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(owner.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime.fromtimestamp(key.expires, datetime.UTC))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(owner, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return PageCertificate(
        certificate.public_bytes(pem),
        owner.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        certificate.fingerprint(hashes.SHA256()).hex(":").upper(),
    )
