"""What it costs to record: this tree against the same tree without measurements, or without digests.

    recording.py [--without NAME] [--model NAME] [--sessions N] [--turns N] [--steps N]

Two workers on JAX, pinned, with one thread per core. The other tree lacks the line in which a worker
subscribes: without `measurements` it reads no clock in a step, without `digests` it hashes nothing.
"""

import sys

from models import MODELS
from programs import Work
from trees import compare, parser, this_tree, without
from turns import FailedError

LINES = {
    "measurements": (
        "lockstep/observability/step_recorder.py",
        "        events.subscribe(self._add, StepEnded)\n",
    ),
    "digests": (
        "lockstep/launcher/worker_main.py",
        "    events.subscribe(client.report, *WORKER_DIGESTS, OrderRecorded)\n",
    ),
}
SESSIONS = 2
TURNS = 25
STEPS = {"cnn": 60, "mlp": 1500}
TO_REACH = {
    ("measurements", "cnn"): "0.99",
    ("measurements", "mlp"): "0.99",
    ("digests", "cnn"): "0.99",
    ("digests", "mlp"): "0.97",
}


def measure(left_out: str, model: str, sessions: int, turns: int, steps: int | None = None) -> None:
    compare(
        Work.of(model, turns, steps or STEPS.get(model)),
        sessions,
        (f"with {left_out}", f"without {left_out}"),
        (this_tree, without(*LINES[left_out])),
        f"recording {left_out}: {model} on jax, two workers",
        TO_REACH.get((left_out, model), "0.99"),
    )


def main() -> None:
    try:
        for left_out, model in TO_REACH:
            measure(left_out, model, SESSIONS, TURNS)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    arguments = parser(__doc__, SESSIONS, TURNS)
    arguments.add_argument("--without", choices=LINES, default="measurements")
    arguments.add_argument("--model", choices=MODELS, default="cnn")
    options = arguments.parse_args()
    try:
        measure(options.without, options.model, options.sessions, options.turns, options.steps)
    except FailedError as error:
        sys.exit(str(error))
