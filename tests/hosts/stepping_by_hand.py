"""`stepping.py` as a worker that a user starts by hand: becomes one, and trains."""

from lockstep.rendezvous.take_part import take_part

take_part()

import stepping  # noqa: E402, F401
