"""The script of the workers of `lockstep.launch`: runs a function that it gets in inherited memory.

    python -m lockstep.notebook.worker CALL RESULT

CALL and RESULT are descriptors.
"""

import sys
from collections.abc import Sequence

from lockstep.notebook.transport import Giver, ResultBox, unpack
from lockstep.worker import job


def main(arguments: Sequence[str]) -> None:
    """Run the function, and write its result."""
    call_file, result = map(int, arguments)
    # The function sees no arguments, as in a program without any.
    del sys.argv[1:]
    call = unpack(call_file)
    value = call()
    ResultBox(result).put(value, Giver.CHIEF if job.is_chief() else Giver.WORKER)


if __name__ == "__main__":
    main(sys.argv[1:])
