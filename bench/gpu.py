"""What Lockstep, and equal bits, cost on the first GPU of this machine; one call takes at most ten minutes.

    gpu.py [--backends NAMES] [--results FILE] [--seconds N] [--turns N] [--only TEXT] [--tiny]

Each row is written to FILE as soon as it is measured. The next call measures only rows that are missing
there, so a run with little time continues where the last one ended. At the end, all rows of this card are
printed as a table. A row counts only if the digests that must be equal are equal: otherwise this ends with
status 1.

Programs take turns, and ratios are of two turns beside each other. All of them have the settings with which
Lockstep makes operations deterministic, except where these are measured. `--tiny` tries the script itself,
with tiny models, also without a GPU; its figures mean nothing.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import turns
from lockstep.system.cuda import read_machine
from lockstep.system.environment import device_variables
from models import large
from programs import environment, run_lockstep
from report import Spread
from steps import gaps, of, usual, watching
from turns import FailedError, Program, take_turns

HERE = Path(__file__).parent
SECONDS = 540.0
"""Seconds after which no row begins: a machine is often lent for ten minutes."""
TURNS = 7
LOSSES = 3
EPOCHS = 4
"""Epochs of a job that loses a worker or writes a checkpoint: one compiles, one precedes the event."""


@dataclass(frozen=True)
class Settings:
    """What is measured on.

    Attributes:
        card: the name of the GPU; empty without one.
        tiny: whether the models are tiny.
        turns: the turns of each program.
    """

    card: str
    tiny: bool
    turns: int

    @property
    def devices(self) -> list[str]:
        """The options of `lockstep run` for the GPU."""
        return ["--devices", "0"] if self.card else []

    def variables(self, backend: str, *, deterministic: bool = True) -> dict[str, str]:
        """Return the variables of a program beside others on the GPU."""
        made = environment(backend, 1) | device_variables({}, "0" if self.card else "", shared=True)
        if not deterministic:
            for name in ("XLA_FLAGS", "TF_DETERMINISTIC_OPS", "CUBLAS_WORKSPACE_CONFIG"):
                made.pop(name)
        return made


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Attributes:
        label: what it is.
        values: of which the median is shown.
        unit: such as "ms"; empty for a ratio.
        to_reach: the value to reach; empty without one.
    """

    label: str
    values: list[float]
    unit: str = ""
    to_reach: str = ""


@dataclass(frozen=True)
class Row:
    """One measurement, which gives some rows of the table.

    Attributes:
        name: its name in the results.
        measure: measures it; raises FailedError if digests differ.
    """

    name: str
    measure: Callable[[Settings, Path], list[Figure]] = field(repr=False)


def rows(backends: list[str]) -> Iterator[Row]:
    """Yield the rows, those that a user asks for first before others."""
    for backend in backends:
        for model, dtype in (("transformer", "bfloat16"), ("resnet", "float32")):
            yield Row(f"{backend} {model} {dtype} alone", partial(alone, backend, model, dtype))
            yield Row(f"{backend} {model} {dtype} replicas", partial(replicas, backend, model, dtype))
        yield Row(f"{backend} classes float32", partial(classes, backend, "float32"))
        yield Row(f"{backend} kill", partial(kill, backend))
        yield Row(f"{backend} checkpoint", partial(checkpoint, backend))
    for backend in backends:
        for model, dtype in (("transformer", "float32"), ("resnet", "bfloat16")):
            yield Row(f"{backend} {model} {dtype} alone", partial(alone, backend, model, dtype))
            yield Row(f"{backend} {model} {dtype} replicas", partial(replicas, backend, model, dtype))
        yield Row(f"{backend} classes bfloat16", partial(classes, backend, "bfloat16"))


def model_of(settings: Settings, name: str) -> large.Model:
    return (large.TINY if settings.tiny else large.LARGE)[name]


def script(settings: Settings, name: str, model: str, dtype: str, kind: str, count: int) -> list[str]:
    """Return the words of `gpu_training.py` with the batches of `count` replicas."""
    measured = model_of(settings, model)
    model = f"tiny-{model}" if settings.tiny else model
    turns = EPOCHS - 1 if name == "steps" else settings.turns
    words = [name, model, dtype, kind, measured.batch * count, turns, measured.steps]
    return [str(HERE / "gpu_training.py"), *map(str, words)]


def plain(settings: Settings, backend: str, model: str, dtype: str, count: int) -> Program:
    words = script(settings, "plain", model, dtype, "plain", count)
    return Program("plain", [[sys.executable, *words]], 1, 1, settings.variables(backend))


def lockstep(
    settings: Settings, backend: str, model: str, dtype: str, workers: int, count: int, folder: Path
) -> Program:
    name = f"lockstep-{workers}"
    words = script(settings, name, model, dtype, "lockstep", count)
    made = run_lockstep(name, words, workers, count, backend, folder / name, settings.devices)
    # Other programs are on the GPU too.
    made.variables |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    return made


def ratios(program: Program, other: Program) -> list[float]:
    """Return the speed of a program relative to the other one, for each turn."""
    slowest = [[max(each["seconds"] for each in turn) for turn in made.answers] for made in (program, other)]
    return [theirs / mine for mine, theirs in zip(*slowest, strict=True)]


def equal_states(what: str, *programs: Program) -> None:
    """Raise FailedError unless all processes of all programs have the same weights after each turn."""
    for turn, answers in enumerate(zip(*(program.answers for program in programs), strict=True)):
        if len({each["weights"] for answer in answers for each in answer}) != 1:
            raise FailedError(f"{what}: the weights differ after turn {turn}")


def alone(backend: str, model: str, dtype: str, settings: Settings, folder: Path) -> list[Figure]:
    """One worker with one replica, against plain Keras with the same settings."""
    keras, one = (
        plain(settings, backend, model, dtype, 1),
        lockstep(settings, backend, model, dtype, 1, 1, folder),
    )
    take_turns(folder, [keras, one], settings.turns)
    equal_states(f"{backend}, {model}", keras, one)
    return [Figure("one worker, one replica / plain Keras", ratios(one, keras), "", "0.98")]


def replicas(backend: str, model: str, dtype: str, settings: Settings, folder: Path) -> list[Figure]:
    """Two replicas, against plain Keras with the whole batch; two workers that share the GPU against one."""
    keras = plain(settings, backend, model, dtype, 2)
    one, two = (lockstep(settings, backend, model, dtype, workers, 2, folder) for workers in (1, 2))
    take_turns(folder, [keras, one, two], settings.turns)
    equal_states(f"{backend}, {model}, two replicas", one, two)
    return [
        Figure("one worker, two replicas / plain Keras, whole batch", ratios(one, keras), "", "0.9"),
        Figure("two workers that share the GPU / one, two replicas", ratios(two, one), "", "0.9"),
    ]


def classes(backend: str, dtype: str, settings: Settings, folder: Path) -> list[Figure]:
    """Plain Keras, deterministic against not, by class of operations."""
    words = [dtype, str(settings.turns), "2" if settings.tiny else "20", "tiny" if settings.tiny else "large"]
    programs = [
        Program(
            name,
            [[sys.executable, str(HERE / "gpu_classes.py"), name, *words]],
            1,
            1,
            settings.variables(backend, deterministic=name == "deterministic"),
        )
        for name in ("deterministic", "not")
    ]
    take_turns(folder, programs, settings.turns)
    strict, free = ([turn[0] for turn in program.answers] for program in programs)
    figures = []
    for name in strict[0]:
        bits = [len({turn[name][1] for turn in turns}) for turns in (strict, free)]
        if bits[0] != 1:
            raise FailedError(f"{backend}, {name}: deterministic operations have {bits[0]} different results")
        times = [theirs[name][0] / mine[name][0] for mine, theirs in zip(strict, free, strict=True)]
        varies = "otherwise the bits vary" if bits[1] > 1 else "also otherwise equal bits here"
        figures.append(Figure(f"{name}: deterministic / not ({varies})", times))
    return figures


def job(settings: Settings, backend: str, folder: Path, *options: str, **variables: str) -> tuple[Any, str]:
    """Run a job that reports its steps; return the steps of the chief, and the digest."""
    words = script(settings, "steps", "transformer", "float32", "lockstep", 2)
    run = folder / "run"
    command = [sys.executable, "-m", "lockstep", "run", "--replicas", "2", "--threads-per-worker", "1"]
    command += ["--run-dir", str(run), *settings.devices, *options, *words]
    with watching(folder, environment(backend, 1) | variables) as watch:
        process = watch.start(command)
        while process.poll() is None:
            watch.receive(0.1)
        watch.receive(0.1)
        log = (folder / "log").read_text(errors="replace")
    events = (json.loads(line) for line in (run / "events.jsonl").read_text().splitlines())
    finished = [event for event in events if event["event"] == "finished"]
    if process.returncode or not finished or not finished[0]["digest"]:
        raise FailedError(f"a job on {backend} failed: {log[-2000:]}")
    first = next(step.pid for step in watch.steps if step.worker == 0)
    return of(first, watch.steps), finished[0]["digest"]


def kill(backend: str, settings: Settings, folder: Path) -> list[Figure]:
    """One of two workers that share the GPU is killed: how much longer the step takes in which it ends."""
    steps, pauses = model_of(settings, "transformer").steps, []
    (folder / "whole").mkdir()
    _, digest = job(settings, backend, folder / "whole", "-n", "1")
    for loss in range(1 if settings.tiny else LOSSES):
        at, where = 2 * steps + loss % steps, folder / f"loss-{loss}"
        where.mkdir()
        options = ("-n", "2", "--max-restarts", "0")
        taken, after = job(settings, backend, where, *options, KILL_AT=str(at))
        if after != digest:
            raise FailedError(f"{backend}: the loss of a worker has changed the digest")
        before = usual([step for step in taken if steps < step.number <= at])
        pause = next(gap for step, gap in zip(taken[1:], gaps(taken), strict=True) if step.number == at + 1)
        pauses.append(pause - before)
    return [Figure("a killed worker, to the end of the next step, beyond a step", pauses, "s", "0.3")]


def checkpoint(backend: str, settings: Settings, folder: Path) -> list[Figure]:
    """A checkpoint of the Transformer with Adam's state: how much longer the steps beside it take."""
    steps = model_of(settings, "transformer").steps
    every = steps + steps // 2
    for name in ("without", "with"):
        (folder / name).mkdir()
    _, digest = job(settings, backend, folder / "without", "-n", "1")
    files = folder / "checkpoints"
    options = ("-n", "1", "--checkpoint", str(files), "--checkpoint-every", str(every), "--keep", "1")
    taken, after = job(settings, backend, folder / "with", *options)
    if after != digest:
        raise FailedError(f"{backend}: checkpoints have changed the digest")
    size = sum(path.stat().st_size for path in files.rglob("*") if path.is_file())
    normal = usual([step for step in taken if step.number > steps])
    timed = {step.number: gap for step, gap in zip(taken[1:], gaps(taken), strict=True)}
    # After a checkpoint is due, it is copied during the next steps.
    due = [number for number in timed if number > steps and (number + 1) % every == 0]
    stalls = [sum(timed.get(at + more, normal) - normal for more in (0, 1, 2)) for at in due]
    label = f"a checkpoint of {size / 1e9:.2f} GB: the steps beside it take longer by"
    return [Figure(label, [1000 * stall for stall in stalls], "ms", "50")]


def measured_before(path: Path, settings: Settings) -> dict[str, list[Figure]]:
    """Return the rows that the file has of this card, by name."""
    measured = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if (entry["card"], entry["tiny"]) == (settings.card, settings.tiny):
            measured[entry["row"]] = [Figure(**figure) for figure in entry["figures"]]
    return measured


def append(path: Path, settings: Settings, row: Row, figures: list[Figure], seconds: float) -> None:
    entry = {"card": settings.card, "tiny": settings.tiny, "row": row.name, "seconds": round(seconds, 1)}
    with path.open("a") as file:
        file.write(json.dumps(entry | {"figures": [figure.__dict__ for figure in figures]}) + "\n")


def print_table(settings: Settings, wanted: list[Row], measured: dict[str, list[Figure]]) -> None:
    """Print a Markdown table of all measured rows, and the names of the others."""
    print(f"\nOn {settings.card or 'the CPU'}; medians, and the 10th and 90th percentiles:\n")
    print("| program | figure | median | to reach |\n|---|---|---|---|")
    for row in wanted:
        for figure in measured.get(row.name, ()):
            shown = f"{figure.values[0]:.2f}" if len(figure.values) == 1 else str(Spread.of(figure.values))
            print(f"| {row.name} | {figure.label} | {shown} {figure.unit} | {figure.to_reach} |")
    if missing := [row.name for row in wanted if row.name not in measured]:
        print(f"\nNot measured yet: {', '.join(missing)}. Run this again to continue.")


def main(settings: Settings, wanted: list[Row], path: Path, seconds: float) -> None:
    measured, begun, longest = measured_before(path, settings), time.monotonic(), 0.0
    failed = []
    for row in wanted:
        if row.name in measured:
            continue
        started = time.monotonic()
        if started - begun + longest > seconds:
            break
        print(f"{row.name} ...", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                figures = row.measure(settings, Path(folder))
            except FailedError as error:
                print(f"  failed: {error}", flush=True)
                failed.append(row.name)
                continue
        took = time.monotonic() - started
        longest = max(longest, took)
        for figure in figures:
            print(f"  {figure.label}: {statistics.median(figure.values):.3f} {figure.unit}", flush=True)
        append(path, settings, row, figures, took)
        measured[row.name] = figures
    print_table(settings, wanted, measured)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backends", default=os.environ.get("BACKENDS") or "jax torch", metavar="NAMES")
    parser.add_argument("--results", type=Path, default=Path("bench-gpu.jsonl"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N")
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose names contain TEXT")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        # The machine that tries the script may be busy.
        turns.CONNECT_SECONDS = turns.TURN_SECONDS = turns.END_SECONDS = 1800.0
    gpus = read_machine().gpus
    if not gpus and not options.tiny:
        sys.exit("this machine has no GPU; --tiny tries the script without one")
    measured_on = Settings((gpus[0].name or "GPU") if gpus else "", options.tiny, options.turns)
    wanted = [row for row in rows(options.backends.split()) if options.only in row.name]
    main(measured_on, wanted, options.results, options.seconds)
