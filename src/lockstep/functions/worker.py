"""The script of workers that run a function, which they get in inherited memory.

    python -m lockstep.functions.worker CALL RESULT

CALL and RESULT are descriptors.
"""

import sys
from collections.abc import Sequence

from lockstep.functions.transport import Giver, ResultBox, unpack
from lockstep.worker import job, reports

WORKER = "lockstep.functions.worker"
"""The name of this module."""


def main(arguments: Sequence[str]) -> None:
    """Run the function, and write its result."""
    call_file, result = map(int, arguments)
    # The function gets no arguments, as in a program that is started without any.
    del sys.argv[1:]
    call = unpack(call_file)
    value = call()
    ResultBox(result).put(value, Giver.CHIEF if job.is_chief() else Giver.WORKER, reports.latest())


if __name__ == "__main__":
    main(sys.argv[1:])
