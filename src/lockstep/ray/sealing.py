"""Passes the secrets of a job through Ray, whose object store and logs never contain them.

The receiver makes a pair of keys for one message (X25519, RFC 7748), and the sender seals the text for it:
HKDF-SHA256 of the shared secret (RFC 5869) gives the key of ChaCha20-Poly1305 (RFC 8439). This hides the text
from everything in Ray that stores or shows data. It does not protect against code that runs as an actor of
the same cluster, which could request the key itself.
"""

from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_NONCE = bytes(12)
"""Each key encrypts one message."""


class JobSecrets(msgspec.Struct, frozen=True):
    """The secrets that the actors of a job have and that Ray must not get.

    Attributes:
        key: the key of the job; empty before there is one.
        variables: variables of the command for the coordinator, by their names.
    """

    key: str
    variables: dict[str, str]

    def __repr__(self) -> str:
        return "JobSecrets"


class Sealed(NamedTuple):
    """Secrets that only the maker of one pair of keys can open.

    Attributes:
        public: the public key of the sender, 32 bytes.
        data: the encrypted secrets.
    """

    public: bytes
    data: bytes


class Opener:
    """Opens one message that is sealed for it.

    Attributes:
        public: the public key for sealing the message, 32 bytes.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def open(self, sealed: Sealed) -> JobSecrets:
        """Return the secrets.

        Raises:
            cryptography.exceptions.InvalidTag: the message is sealed for another opener, or has changed.
        """
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(sealed.public))
        text = _cipher(shared, sealed.public, self.public).decrypt(_NONCE, sealed.data, None)
        return msgspec.json.decode(text, type=JobSecrets)


def seal(secrets: JobSecrets, public: bytes) -> Sealed:
    """Seal secrets for the opener with a public key."""
    private = X25519PrivateKey.generate()
    text = msgspec.json.encode(secrets)
    key = private.public_key().public_bytes_raw()
    shared = private.exchange(X25519PublicKey.from_public_bytes(public))
    return Sealed(key, _cipher(shared, key, public).encrypt(_NONCE, text, None))


def _cipher(shared: bytes, sender: bytes, receiver: bytes) -> ChaCha20Poly1305:
    derive = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"lockstep ray " + sender + receiver)
    return ChaCha20Poly1305(derive.derive(shared))
