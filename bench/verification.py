"""What verification costs: two workers with two replicas, with and without `--verify-every K`.

    verification.py [--every K] [--replicas one|all] [--model NAME] [--sessions N] [--turns N] [--steps N]

A verified step computes one replica more, on one of the workers, so it should take at most the time of two
computations: with every Kth step, at least K / (K + 1) of the rate. With `--every 1`, the ratio of the
processor times is that of a verified step.
"""

import sys

from models import MODELS
from programs import Work
from trees import compare, parser, this_tree
from turns import FailedError

EVERY = 10
SESSIONS = 2
TURNS = 25
STEPS = {"cnn": 60, "mlp": 1500}


def measure(
    every: int, model: str, sessions: int, turns: int, steps: int | None = None, replicas: str = "one"
) -> None:
    compare(
        Work.of(model, turns, steps or STEPS.get(model)),
        sessions,
        (f"--verify-every {every}, {replicas}", "without verification"),
        (this_tree, this_tree),
        f"verification: {model} on jax, two workers",
        f"{every / (every + 1):.2f}",
        (("--verify-every", str(every), "--verify-replicas", replicas), ()),
    )


def main() -> None:
    try:
        measure(EVERY, "cnn", SESSIONS, TURNS)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    arguments = parser(__doc__, SESSIONS, TURNS)
    arguments.add_argument("--every", type=int, default=EVERY, metavar="K")
    arguments.add_argument("--model", choices=MODELS, default="cnn")
    arguments.add_argument("--replicas", choices=("one", "all"), default="one")
    options = arguments.parse_args()
    try:
        measure(
            options.every, options.model, options.sessions, options.turns, options.steps, options.replicas
        )
    except FailedError as error:
        sys.exit(str(error))
