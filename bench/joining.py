"""How long a joining worker delays the others, and how soon a killed worker is replaced.

    joining.py [BACKEND] [--joins N] [--model MODEL] [--update UPDATE]

The tutorial's CNN, whose state is 33 MB, and models whose states are 203 MB and 1.5 GB. In turn, `lockstep
scale` adds a third worker to two, and one of two workers, the chief or the other, is killed and replaced. The
joiner starts while the others train. Without a core of its own, as a third worker on two cores, it slows them
down before it joins, so the steps of that time are shown as well. Processes are not pinned and have one
thread each.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import large_model
from programs import environment
from recovery import kill
from report import print_row
from steps import Step, Watch, gaps, of, usual, watching
from turns import FailedError

HERE = Path(__file__).parent
JOINS = 5
MODELS = {"cnn": "33 MB", **large_model.SHOWN}
"""The sizes of their states."""
WORKERS = 2
STEPS = 200
"""The steps of an epoch: more than are measured, so that no epoch ends."""
AROUND = {"cnn": 30, "large": 30, "larger": 8}
"""The steps of each worker before the request or the kill, and those of the joiner."""
CHANCE_SECONDS = 0.3
SETTLED = 3
COMMAND_SECONDS = 60.0
LOCKSTEP = [sys.executable, "-m", "lockstep"]


@dataclass(frozen=True)
class Join:
    """The measurements of one join, in seconds.

    Attributes:
        before: a step before the request or the kill.
        starting: a step while the joiner starts.
        after: a step with the joiner.
        change: the step at whose end the joiner is admitted, and its first step, in which the others wait
            until it has loaded the state.
        longest: the longest step from the request or the kill to the first step with the joiner.
        wait: from the request or the kill to the end of the joiner's first step.
    """

    before: float
    starting: float
    after: float
    change: float
    longest: float
    wait: float


def join(
    backend: str,
    model: str,
    update: str,
    replicas: int,
    cause: Callable[[Watch, str], float],
    chance: random.Random,
) -> Join:
    """Start a job of two workers, let another worker join at a random instant, and wait for its steps.

    Args:
        backend: of Keras.
        model: the name of the model.
        update: the option of the command.
        replicas: of the job.
        cause: makes a worker join the job of this name; returns the time of that.
        chance: chooses the instant.
    """
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-bench-") as name,
        watching(Path(name), environment(backend, 1)) as watch,
    ):
        job = Path(name).name
        options = ["-n", str(WORKERS), "--replicas", str(replicas), "--update", update]
        options += ["--threads-per-worker", "1"]
        script = [str(HERE / "recovery_lockstep.py"), model, str(STEPS)]
        watch.start([*LOCKSTEP, "run", *options, "--run-dir", str(Path(name) / job), *script])
        watch.until(lambda: watch.have_taken(WORKERS, AROUND[model]), "starting")
        watch.receive_for(chance.uniform(0, CHANCE_SECONDS))
        pids = {step.pid for step in watch.steps}
        caused = cause(watch, job)

        def of_joiner(step: Step) -> bool:
            return step.pid not in pids and step.view > 1

        watch.until(lambda: watch.have_taken(1, AROUND[model], of_joiner), "joining")
    return analyze(watch.steps, list(filter(of_joiner, watch.steps)), caused)


def scale(watch: Watch, job: str) -> float:
    requested = time.monotonic()
    command = [*LOCKSTEP, "scale", job, "3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    if result.returncode:
        raise FailedError(f"lockstep scale: {result.stderr}")
    return requested


def lose(place: int) -> Callable[[Watch, str], float]:
    """Kill the worker at this position of the view."""

    def cause(watch: Watch, job: str) -> float:
        pids = {step.worker: step.pid for step in watch.steps}
        killed, _ = kill(pids[sorted(pids)[place]])
        return killed

    return cause


def analyze(steps: list[Step], joiner_steps: list[Step], caused: float) -> Join:
    view = joiner_steps[0].view
    chief = min((step for step in steps if step.view == view), key=lambda step: step.worker).pid
    ours = of(chief, steps)
    with_joiner = [step for step in ours if step.view == view]
    without = [step for step in ours if step.view == view - 1 and step.time > caused]
    # The workers change at the end of a step, before they report it.
    last, admitted, first = without[-1], *with_joiner[:2]
    return Join(
        before=usual([step for step in ours if step.time < caused][SETTLED:]),
        starting=usual(without),
        after=usual(with_joiner[SETTLED:]),
        change=first.time - last.time,
        longest=max(gaps([*without, admitted, first])),
        wait=next(step.time for step in joiner_steps if step.number > admitted.number) - caused,
    )


def report(kind: str, joins: list[Join], wait: str, to_reach: str) -> None:
    print_row(f"{kind}: a step before", [join.before for join in joins], "ms")
    print_row(f"{kind}: a step while the joiner starts", [join.starting for join in joins], "ms")
    print_row(f"{kind}: a step after", [join.after for join in joins], "ms")
    added = [join.change - join.starting - join.after for join in joins]
    print_row(f"{kind}: the steps before and after it joins, minus usual ones", added, "ms", "100")
    longest = [join.longest - join.before for join in joins]
    print_row(f"{kind}: the longest step until then, minus one before", longest, "ms")
    print_row(f"{kind}: {wait}", [join.wait for join in joins], "s", to_reach)


def measure(backend: str, model: str, update: str, count: int) -> None:
    chance = random.Random(0)
    scaled: list[Join] = []
    replaced: list[Join] = []
    for number in range(count):
        scaled.append(join(backend, model, update, 3, scale, chance))
        replaced.append(join(backend, model, update, WORKERS, lose(number % 2), chance))
    size = f"state of {MODELS[model]}, {update} update"
    print(f"a worker joins on {backend}, {size}, {count} times each: median (p10-p90)")
    report("2 workers to 3", scaled, "request to the joiner's first step", "")
    report("1 of 2 killed", replaced, "kill to the joiner's first step", "1.00")


def main(
    backend: str = "jax", models: Iterable[str] = MODELS, update: str = "whole", count: int = JOINS
) -> None:
    try:
        for model in models:
            measure(backend, model, update, count)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", default="jax", help="jax, tensorflow or torch")
    parser.add_argument("--model", choices=MODELS, help="all by default")
    parser.add_argument("--update", choices=("whole", "divided"), default="whole", help="of `lockstep run`")
    parser.add_argument("--joins", type=int, default=JOINS, help="joins of each kind; at least 2")
    given = parser.parse_args()
    main(given.backend, [given.model] if given.model else MODELS, given.update, given.joins)
