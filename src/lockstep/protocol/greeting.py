"""The greeting: the first bytes of a connection between hosts, before encryption.

    magic  version  kind  job  term  view  incarnation  host  lane  receiver  nonce  |  HMAC-SHA256 of all

It states the purpose of the connection, and proves that the sender holds the key of the job. So a listener
refuses a stranger after `SIZE` bytes, and knows which worker gets the connection. A recorded greeting that is
sent again does not prove anything: the listener refuses copies, and an encrypted connection checks
certificates next.
"""

import hmac
import struct
from enum import IntEnum

import msgspec

MAGIC = b"LOCKSTEP"
VERSION = 1
NONCE = 16
"""Bytes of a nonce."""
JOB = 16
"""Bytes of the id of a job."""

_HEAD = struct.Struct(f">8sHH{JOB}sIIQHHH{NONCE}s")
_PROOF = "sha256"
_PROOF_SIZE = 32
SIZE = _HEAD.size + _PROOF_SIZE
"""Bytes of a greeting."""


class ConnectionKind(IntEnum):
    """The purpose of a connection."""

    CONTROL = 1
    """An agent and the coordinator."""
    LANE = 2
    """Data from a worker of the sender's host to the worker that has the same lane on the receiver's host."""
    STATE = 3
    """A state from the receiver's host, for joiners on the sender's host."""
    QUESTIONS = 4
    """Questions from a worker of the sender's host to the worker `lane` of the receiver's host; see
    `lockstep.transport.array_channel`."""


class Greeting(msgspec.Struct, frozen=True):
    """The first message of a connection: its sender and its purpose.

    Attributes:
        kind: the kind of the connection.
        job: the id of the job, `JOB` bytes; zeros if the sender does not know it yet.
        term: the term of the view.
        view: the number of the view; 0 if the connection does not belong to a view.
        incarnation: the incarnation of the agent of the sender's host.
        host: the index of the sender's host in the view.
        lane: the number of the lane, of the state, or of the worker that answers questions.
        nonce: random bytes, which `connect` chooses.
        receiver: the index of the host that accepts the connection, so that no other host accepts a copy.
    """

    kind: ConnectionKind
    job: bytes = bytes(JOB)
    term: int = 0
    view: int = 0
    incarnation: int = 0
    host: int = 0
    lane: int = 0
    nonce: bytes = bytes(NONCE)
    receiver: int = 0


def encode_greeting(greeting: Greeting, key: bytes) -> bytes:
    """Return the `SIZE` bytes of a greeting, signed with `key`.

    Raises:
        ValueError: a number or a text does not fit.
    """
    if len(greeting.job) != JOB or len(greeting.nonce) != NONCE:
        raise ValueError(f"the job has {JOB} bytes, and the nonce {NONCE}")
    try:
        head = _HEAD.pack(
            MAGIC,
            VERSION,
            greeting.kind,
            greeting.job,
            greeting.term,
            greeting.view,
            greeting.incarnation,
            greeting.host,
            greeting.lane,
            greeting.receiver,
            greeting.nonce,
        )
    except struct.error as error:
        raise ValueError(str(error)) from None
    return head + _prove(head, key)


def may_begin(data: bytes | bytearray) -> bool:
    """Whether these may be the first bytes of a greeting of any version."""
    return MAGIC.startswith(data[: len(MAGIC)])


def decode_greeting(data: bytes, key: bytes) -> Greeting:
    """Return the greeting of `SIZE` bytes, if it was signed with `key`.

    Raises:
        ValueError: it was not signed with the key; the message says why the sender is refused.
    """
    if not may_begin(data) or len(data) != SIZE:
        raise ValueError("it is not a process of Lockstep")
    _, version, kind, job, term, view, incarnation, host, lane, receiver, nonce = _HEAD.unpack_from(data)
    if version != VERSION:
        raise ValueError(
            f"its version of Lockstep greets in format {version}, this one in format {VERSION}: install the "
            "same version of Lockstep on all hosts"
        )
    if not hmac.compare_digest(_prove(data[: _HEAD.size], key), data[_HEAD.size :]):
        raise ValueError("its key is not the key of this job")
    try:
        kind = ConnectionKind(kind)
    except ValueError:
        raise ValueError(f"it asks for an unknown kind of connection ({kind})") from None
    return Greeting(
        kind=kind,
        job=job,
        term=term,
        view=view,
        incarnation=incarnation,
        host=host,
        lane=lane,
        nonce=nonce,
        receiver=receiver,
    )


def _prove(head: bytes, key: bytes) -> bytes:
    return hmac.digest(key, head, _PROOF)
