"""How a member's call is written into its slot of the control segment. Pure; fixed sizes, no pickle."""

import struct

from lockstep.collectives.calls import CollectiveCall
from lockstep.collectives.shared.control_segment import SLOT

_CALL = struct.Struct("<16sB64si16sH")
_LENGTH = struct.Struct("<Q")
WHAT_LIMIT = 512
"""Bytes of UTF-8 that a call's name has in a slot; the rest is cut off."""
_WHAT = _LENGTH.size + _CALL.size
assert _WHAT + WHAT_LIMIT <= SLOT


def encode(call: CollectiveCall, length: int) -> bytes:
    """Return a slot that says that a member makes `call` with a blob of `length` bytes."""
    what = call.what.encode("utf-8", "replace")[:WHAT_LIMIT]
    fields = (call.kind.encode(), len(call.check), call.check, call.root, call.layout, len(what))
    return _LENGTH.pack(length) + _CALL.pack(*fields) + what


def decode(slot: bytes) -> tuple[CollectiveCall, int]:
    """Return the call and the length of the blob from a slot (and what follows it)."""
    (length,) = _LENGTH.unpack_from(slot)
    kind, checked, check, root, layout, named = _CALL.unpack_from(slot, _LENGTH.size)
    what = slot[_WHAT : _WHAT + named].decode("utf-8", "ignore")
    call = CollectiveCall(kind.rstrip(b"\0").decode(), what, check[:checked], root, layout)
    return call, length
