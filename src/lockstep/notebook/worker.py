"""What the workers of `lockstep.launch` run: a function, which they are given in memory that they inherit.

    python -m lockstep.notebook.worker ERRAND RESULT

Both are numbers of descriptors.
"""

import sys
from collections.abc import Sequence

from lockstep.notebook.transport import Giver, ResultBox, unpack
from lockstep.worker import job


def main(arguments: Sequence[str]) -> None:
    """Run the function, and give what it returned."""
    call_file, result = map(int, arguments)
    # A function that looks there finds what it would in a program without arguments.
    del sys.argv[1:]
    call = unpack(call_file)
    value = call()
    ResultBox(result).put(value, Giver.CHIEF if job.is_chief() else Giver.WORKER)


if __name__ == "__main__":
    main(sys.argv[1:])
