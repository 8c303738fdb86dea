"""How a member reaches the exchange of a view."""

import msgspec

from lockstep.protocol.channel import Attachment


class SharedMemory(msgspec.Struct, frozen=True, tag="shared memory"):
    """The members are processes of one host, and meet in memory.

    Attributes:
        control: the control segment of the view.
    """

    control: Attachment


Endpoint = SharedMemory
"""A union of one, until the members of a view are on several hosts."""
