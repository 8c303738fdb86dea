"""The cost of recording digests: this tree against the same tree without the digest log.

    digests.py [--model NAME] [--sessions N] [--turns N] [--steps N]

Two workers on JAX, pinned, with one thread per core. In the tree without the log, workers have no subscriber
to digests, so they hash nothing.
"""

import argparse
import sys

from models import MODELS
from programs import Work
from trees import compare, this_tree, without
from turns import FailedError

RECORDS = ("lockstep/launcher/worker_main.py", "    events.subscribe(client.report, *WORKER_DIGESTS)\n")
SESSIONS = 2
TURNS = 25
STEPS = {"cnn": 60, "mlp": 1500}
TO_REACH = {"cnn": "0.99", "mlp": "0.97"}


def measure(model: str, sessions: int, turns: int, steps: int | None = None) -> None:
    compare(
        Work.of(model, turns, steps or STEPS.get(model)),
        sessions,
        ("recorded", "not recorded"),
        (this_tree, without(*RECORDS)),
        f"digests: {model} on jax, two workers",
        TO_REACH.get(model, "0.99"),
    )


def main() -> None:
    try:
        for model in STEPS:
            measure(model, SESSIONS, TURNS)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="cnn")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--turns", type=int, default=TURNS, help="turns per session; at least 2")
    parser.add_argument("--steps", type=int, help="steps per turn")
    options = parser.parse_args()
    try:
        measure(options.model, options.sessions, options.turns, options.steps)
    except FailedError as error:
        sys.exit(str(error))
