"""The messages of the coordinator to the notifier of `lockstep run --notify`: JSON, one per packet."""

from collections.abc import Mapping
from typing import Literal

import msgspec

What = Literal["finished", "failed", "stopped", "not_replaced", "nan", "stalled"]


class Notification(msgspec.Struct, frozen=True, kw_only=True, tag="notification"):
    """News for a person who does not watch the job.

    Attributes:
        what: its kind; `not_replaced`: a lost worker is not replaced; `nan`: a metric is not a finite number.
        text: the same in one line.
        status: the exit status of the job; None while it runs.
        steps: training steps that are known to be completed; None if none is.
        workers: number of members; None if it is unknown.
        metrics: the newest value of each metric; None for one that is not a finite number.
    """

    what: What
    text: str
    status: int | None = None
    steps: int | None = None
    workers: int | None = None
    metrics: Mapping[str, float | None] = {}


class ProgressMade(msgspec.Struct, frozen=True, tag="progress"):
    """Training continues, or a call of the script has ended.

    Attributes:
        patience: seconds without another sign of progress after which the job counts as stalled; None if the
            job may be silent for any time.
        steps: training steps so far; None if they are unknown.
    """

    patience: float | None
    steps: int | None


NotifierMessage = Notification | ProgressMade

_messages: msgspec.json.Decoder[NotifierMessage] = msgspec.json.Decoder(NotifierMessage)


def encode(message: NotifierMessage) -> bytes:
    """Return the packet of a message."""
    return msgspec.json.encode(message)


def decode(packet: bytes) -> NotifierMessage:
    """Return the message in a packet.

    Raises:
        ValueError: the packet is not an encoded message.
    """
    try:
        return _messages.decode(packet)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
