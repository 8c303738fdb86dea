"""A channel between two processes of one machine: a SOCK_SEQPACKET socket, one JSON message per packet."""

import array
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from lockstep.protocol.channel import Attachment, PeerGone, Unreadable, decoded, too_long
from lockstep.system.event_loop import wait_for
from lockstep.system.passed_descriptors import receive_descriptors

MAX_TEXT = 64 * 1024
"""Maximum bytes of UTF-8 of a text in a message; the middle of a longer text is cut out."""

MAX_PACKET = 512 * 1024
"""Maximum bytes of an encoded message."""

_MAX_ATTACHMENTS = 4

Out = TypeVar("Out", bound=msgspec.Struct)
In = TypeVar("In")


class PacketChannel(Generic[Out, In]):
    """One end of a socket; see `Channel`.

    Args:
        connection: this end of the socket.
        incoming: the union of the types of messages that arrive here.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        self._connection = connection
        self._decoder: PacketDecoder[In] = PacketDecoder(incoming)

    def send(self, message: Out, patience: float = 0.0) -> bool:
        """Send a message; see `Channel`."""
        attachments: list[Attachment] = []
        try:
            packet = encode(message, attachments)
            descriptors = array.array("i", [attachment.descriptor for attachment in attachments])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)] if descriptors else []
            if patience:
                wait_for([], patience, writable=[self._connection.fileno()])
            # `socket.send_fds` is not used, because it ignores its flags in Python 3.11.
            self._connection.sendmsg([packet], ancillary, socket.MSG_DONTWAIT)
        except (OSError, ValueError, RecursionError):
            return False
        return True

    def receive(self) -> In | Unreadable | PeerGone | None:
        """Return the next message, if any; see `Channel`."""
        while True:
            try:
                packet, descriptors = receive_descriptors(
                    self._connection, MAX_PACKET, _MAX_ATTACHMENTS, socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The peer closed its end with unread messages. This error occurs once, before its messages.
                continue
            except OSError:
                return PeerGone()
            attachments = [Attachment(descriptor) for descriptor in descriptors]
            if not packet:
                return PeerGone()
            try:
                return self._decoder.decode(packet, attachments)
            except ValueError as error:
                return Unreadable(str(error))

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end; safe to call more than once."""
        with contextlib.suppress(OSError):
            self._connection.close()


def encode(message: msgspec.Struct, attachments: list[Attachment] | None = None) -> bytes:
    """Return the packet of `message`; long texts are cut, and values of unknown types become their `repr`.

    Args:
        message: the message to encode.
        attachments: receives the attachments of the message; the packet refers to them by index.

    Raises:
        ValueError: the packet would exceed `MAX_PACKET`.
    """
    collected = [] if attachments is None else attachments

    def encode_other(value: Any) -> Any:
        if isinstance(value, Attachment):
            collected.append(value)
            return len(collected) - 1
        if isinstance(value, Path):
            return os.fspath(value)
        return repr(value)

    # Bytes stay bytes here, because long texts are cut.
    builtins = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=encode_other)
    packet = msgspec.json.encode(_clean(builtins))
    if len(packet) > MAX_PACKET:
        raise ValueError(too_long(len(packet), MAX_PACKET))
    return packet


class PacketDecoder(Generic[In]):
    """Decodes packets; for use by one thread.

    Args:
        kinds: the union of the types of messages.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder: msgspec.json.Decoder[In] = msgspec.json.Decoder(kinds, dec_hook=self._decode_other)
        self._arrived: Sequence[Attachment] = ()

    def decode(self, packet: bytes, attachments: Sequence[Attachment] = ()) -> In:
        """Return the message of a packet, with the attachments that arrived with it.

        Raises:
            ValueError: the packet does not contain a message of these types.
        """
        self._arrived = attachments
        try:
            return decoded(self._decoder, packet)
        finally:
            self._arrived = ()

    def _decode_other(self, kind: type, value: Any) -> Any:
        if kind is Path and isinstance(value, str):
            return Path(value)
        if kind is not Attachment or not isinstance(value, int) or value < 0:
            raise ValueError(f"no attachment: {value!r}")
        return self._arrived[value] if value < len(self._arrived) else Attachment.missing()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, dict):
        return {_clip(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def _clip(text: str) -> str:
    # A lone surrogate, such as one in an undecodable file name, does not have a UTF-8 encoding.
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= MAX_TEXT:
        return encoded.decode()
    mark = b"\n... (cut) ...\n"
    half = (MAX_TEXT - len(mark)) // 2
    return (encoded[:half] + mark + encoded[-half:]).decode(errors="ignore")
