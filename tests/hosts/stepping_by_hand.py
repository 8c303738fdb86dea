"""`stepping.py` as a worker that a user starts by hand: becomes one, and trains."""

from lockstep.rendezvous.take_part import take_part

take_part()

import stepping  # noqa: E402, F401

from lockstep.observability.events import TrainingEnded  # noqa: E402
from lockstep.worker import job  # noqa: E402

this_job = job.current()
this_job.at_end(lambda: this_job.events.publish(TrainingEnded(7, "m", "ab")))
