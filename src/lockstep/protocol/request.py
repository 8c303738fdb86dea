"""What the agent asks of the members of a view: the notice that it leaves for them."""

from enum import IntEnum


class Request(IntEnum):
    """What the agent asks of the members of a view.

    The chief says where the training is (POSITION), or all leave the view at the end of the step, and the
    chief gives the whole state to those who join (CHANGE).
    """

    NOTHING = 0
    POSITION = 1
    CHANGE = 2
