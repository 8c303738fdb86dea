"""The overhead of fault tolerance without faults: this tree against the last commit without fault tolerance.

    overhead.py [--sessions N] [--turns N] [--steps N]

The tutorial's CNN on JAX with two workers, from this tree and from the last commit in which a job could not
continue without a worker. Workers are pinned and have one thread per core and 64 images per replica.
"""

import sys

from programs import Work
from trees import compare, of_commit, parser, this_tree
from turns import FailedError

BEFORE = "7a8b40afeac90531480bc5015e15b2b0d25ddec1"
"""The last commit before views, with which a job continues without a lost worker."""
SESSIONS = 3
TURNS = 20
STEPS = 40


def main(sessions: int = SESSIONS, turns: int = TURNS, steps: int = STEPS) -> None:
    try:
        compare(
            Work.of("cnn", turns, steps),
            sessions,
            ("this tree", f"without fault tolerance ({BEFORE[:7]})"),
            (this_tree, of_commit(BEFORE)),
            "fault tolerance: the tutorial's CNN on jax, no faults",
            "0.98",
        )
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    arguments = parser(__doc__, SESSIONS, TURNS, STEPS)
    options = arguments.parse_args()
    main(options.sessions, options.turns, options.steps)
