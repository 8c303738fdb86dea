"""Runs random small Keras programs to find results that violate Lockstep's guarantees.

    python tests/fuzz/fuzz.py --backend jax --seeds 0:1000

Each seed gives one program, always the same (`fuzz_specs.py`; `fuzz_text.py` writes its text). It runs on
1, 2 and 3 workers with 3 replicas, and with plain Keras on the same global batches, if that computes the same
or raises the same error; a custom loop runs under `tf.distribute` instead, or on all rows at once. With
`--quick`, most programs run on 2 workers only, and all are changed to cost less (`fuzz_rules.quicker`).
`fuzz_oracle.py` compares

* SHA-256 digests of weights, optimizers, metrics, histories and predictions: equal on all workers for all W;
* the values themselves: if they differ by more than rounding, a note must name the part of the program that
  is computed per replica (`fuzz_rules.inexact` has the other differences that are documented).

A refusal by name, the same for all W, is correct. Any other difference is a fault: the fuzzer drops features
of the program while the fault remains, and prints the smallest program. `--show` prints programs without
running them.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from fuzz_oracle import Line, Verdict, judge
from fuzz_rules import inexact, quicker, settled, tolerance
from fuzz_specs import Spec, draw, simpler, size
from fuzz_text import text
from packaging.version import Version

REPLICAS = 3
CHUNK = 100
"""Programs that one process runs: its memory grows with their number."""

WORKER = Path(__file__).with_name("fuzz_worker.py")
LEAN = Path(__file__).parents[1] / "lean"
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if Version(version("jaxlib")) < Version("0.11"):
    # Later versions do not know this flag, and end the process.
    _QUICK += " --xla_cpu_use_fusion_emitters=false"


def python(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run `python command...` in a process of its own; return its output."""
    command = [sys.executable, *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    return done.stdout


@dataclass(frozen=True)
class Bench:
    """Runs programs.

    Attributes:
        backend: Keras's.
        folder: for files, including JAX's compilation cache.
        quick: XLA compiles without optimizing; programs run on 2 workers, and every third one on one, too.
        processes: the number of concurrent runs.
        call: runs `python command...` in an environment, and returns its output.
    """

    backend: str
    folder: Path
    quick: bool = False
    processes: int = 2
    call: Callable[[Sequence[str], Mapping[str, str]], str] = python

    def numbers(self, specs: Mapping[int, Spec]) -> dict[int, list[int]]:
        """Return the seeds of the programs that run on each number of workers."""
        if self.quick:
            # Kinds of programs alternate with another period, so each kind has such programs.
            return {2: list(specs), 1: [seed for seed in specs if seed % 3 == 0]}
        return {workers: list(specs) for workers in (1, 2, 3)}

    def run(self, specs: Mapping[int, Spec]) -> dict[int, Verdict]:
        """Run settled programs; return a verdict on each."""
        place = Path(tempfile.mkdtemp(dir=self.folder))
        for kind in ("lockstep", "saved-plain", "saved-lockstep"):
            (place / kind).mkdir()
        for seed, spec in specs.items():
            (place / "lockstep" / f"{seed:07}.py").write_text(text(spec, self.backend))
        with concurrent.futures.ThreadPoolExecutor(self.processes) as pool:
            first = pool.submit(self._plain, place, specs)
            # The other workers find the code that one has compiled.
            numbers = self.numbers(specs)
            jobs = {w: pool.submit(self._job, place, w, seeds) for w, seeds in numbers.items()}
            plain, runs = first.result(), {w: job.result() for w, job in jobs.items()}
        verdicts = {}
        for seed in specs:
            lines = {
                f"W = {w}": [runs[w][worker].get(seed) for worker in range(w)]
                for w, seeds in numbers.items()
                if seed in seeds
            }
            saved = [place / f"saved-{kind}" / f"{seed:07}.npz" for kind in ("lockstep", "plain")]
            # Of other programs, only the errors of plain Keras count, not its values.
            exact = inexact(specs[seed], self.backend) is None
            arrays = (saved[0], saved[1]) if exact and all(map(Path.exists, saved)) else None
            verdicts[seed] = judge(lines, plain.get(seed), arrays, tolerance(specs[seed]))
        shutil.rmtree(place)
        return verdicts

    def _job(self, place: Path, workers: int, seeds: Sequence[int]) -> list[dict[int, Line]]:
        """Run all programs on some workers; restart after one that ends the job; return all lines."""
        found: list[dict[int, Line]] = [{} for _ in range(workers)]
        left = list(seeds)
        saves = workers == next(iter(self.numbers({})))
        while left:
            folder = Path(tempfile.mkdtemp(dir=place))
            command = ["-m", "lockstep", "run", "--backend", self.backend, "-n", str(workers)]
            command += ["--replicas", str(REPLICAS), "--threads-per-worker", "1", "--timeout", "120"]
            command += ["--max-restarts", "0", "--run-dir", str(folder), str(WORKER)]
            command += ["--save", str(place / "saved-lockstep")] if saves else []
            self.call([*command, str(place / "lockstep"), *map(str, left)], self._environment)
            logs = [folder / f"worker-{worker}.log" for worker in range(workers)]
            said = [_lines(log.read_text(errors="replace") if log.exists() else "") for log in logs]
            # Workers that are out of step continue separately: their later lines do not count.
            done = max(min(max(lines, default=0) for lines in said), left[0])
            for lines, new in zip(found, said, strict=True):
                lines.update({seed: line for seed, line in new.items() if seed <= done})
            left = [seed for seed in left if seed > done]
        return found

    def _plain(self, place: Path, specs: Mapping[int, Spec]) -> dict[int, Line]:
        """Run programs with plain Keras; restart after one that ends the process; return its lines."""
        programs = Path(tempfile.mkdtemp(dir=place))
        for seed, spec in specs.items():
            (programs / f"{seed:07}.py").write_text(text(spec, self.backend, plain=True))
        found: dict[int, Line] = {}
        left = list(specs)
        while left:
            command = [str(WORKER), "--plain", "--save", str(place / "saved-plain"), str(programs)]
            found |= _lines(self.call([*command, *map(str, left)], self._environment))
            left = [seed for seed in left if seed > max([left[0], *found])]
        return found

    @property
    def _environment(self) -> dict[str, str]:
        environment = os.environ | {
            "KERAS_BACKEND": self.backend,
            "XDG_CACHE_HOME": str(self.folder / "compiled"),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self.quick:
            # No program needs these packages, which Keras and TensorFlow import if they find them.
            unused = {"IPython", "sklearn", "jax"} - {self.backend}
            environment |= {
                "HIDDEN_PACKAGES": ",".join(sorted(unused)),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(LEAN), os.environ.get("PYTHONPATH")])),
                "XLA_FLAGS": _QUICK,
            }
        return environment


def _lines(printed: str) -> dict[int, Line]:
    """Return a worker's line on each program."""
    found = {}
    for line in printed.splitlines():
        if line.startswith("program "):
            _, seed, said = line.split(" ", 2)
            found[int(seed)] = json.loads(said)
    return found


def shrink(bench: Bench, spec: Spec, kind: str) -> tuple[Spec, Verdict]:
    """Return the smallest program found with a fault of the same kind, and its verdict."""
    (verdict,) = bench.run({0: spec}).values()
    while verdict.kind == kind:
        others = {settled(other, bench.backend): None for other in simpler(spec)}
        smaller = sorted((other for other in others if size(other) < size(spec)), key=size)
        verdicts = bench.run(dict(enumerate(smaller[:60])))
        failing = [i for i, other in verdicts.items() if other.kind == kind]
        if not failing:
            break
        spec, verdict = smaller[failing[0]], verdicts[failing[0]]
    return spec, verdict


def fuzz(bench: Bench, seeds: Sequence[int], *, shrinks: bool = True) -> collections.Counter[str]:
    """Run the programs of seeds and print each fault; return the number of verdicts of each kind."""
    counts: collections.Counter[str] = collections.Counter()
    messages: dict[str, list[int]] = {}
    specs = {seed: settled(draw(seed), bench.backend) for seed in seeds}
    if bench.quick:
        specs = {seed: quicker(seed, spec, bench.backend) for seed, spec in specs.items()}
    for start in range(0, len(seeds), CHUNK):
        begun, before = time.monotonic(), _processors()
        verdicts = bench.run({seed: specs[seed] for seed in seeds[start : start + CHUNK]})
        faults = {seed: specs[seed] for seed, verdict in verdicts.items() if verdict.is_fault}
        # Without a seed, a shuffle depends on the number of earlier calls in the process.
        for seed, again in (bench.run(faults) if faults else {}).items():
            if not again.is_fault:
                verdicts[seed] = Verdict("follows", verdicts[seed].says)
        counts.update(verdict.kind for verdict in verdicts.values())
        for seed, verdict in verdicts.items():
            if verdict.kind in QUOTED and verdict.says:
                messages.setdefault(f"{verdict.kind}: {verdict.says[:160]}", []).append(seed)
        seconds, used = time.monotonic() - begun, _processors() - before
        found = f"{bench.backend} seeds {min(verdicts)} to {max(verdicts)}: {dict(counts)}"
        print(f"{found}, {seconds:.0f} s, {used:.0f} s of processors", flush=True)
        for seed, verdict in verdicts.items():
            if verdict.is_fault:
                report(bench, seed, specs[seed], verdict, shrinks=shrinks)
    for message, found_by in sorted(messages.items(), key=lambda item: -len(item[1])):
        print(f"{len(found_by):5} {message} (seed {found_by[0]})", flush=True)
    return counts


def _processors() -> float:
    """Return the processor seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


QUOTED = ("same", "true", "named", "refused", "invalid", "follows")


def report(bench: Bench, seed: int, spec: Spec, verdict: Verdict, *, shrinks: bool) -> None:
    """Print a fault, and the smallest program that has it."""
    print(f"{bench.backend} seed {seed} {verdict.kind}: {verdict.says}", flush=True)
    if shrinks:
        spec, verdict = shrink(bench, spec, verdict.kind)
        print(f"smallest: {verdict.kind}: {verdict.says}\n{spec}\n{text(spec, bench.backend)}", flush=True)


def main() -> int:
    """Run the programs that the command line selects; return 1 if there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="jax", choices=["jax", "tensorflow", "torch"])
    parser.add_argument("--seeds", default="0:40", help="FIRST:STOP, or one")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument(
        "--quick", action="store_true", help="as in make test-ci: 2 workers, programs that cost less"
    )
    parser.add_argument("--no-shrink", action="store_true", help="print faults as they were found")
    options = parser.parse_args()
    first, _, stop = options.seeds.partition(":")
    seeds = range(int(first), int(stop or int(first) + 1))
    if options.show:
        for seed in seeds:
            spec = settled(draw(seed), options.backend)
            print(f"# seed {seed}: {spec}", f"# inexact: {inexact(spec, options.backend)}", sep="\n")
            print(text(spec, options.backend))
        return 0
    with tempfile.TemporaryDirectory(prefix="lockstep-fuzz-") as name:
        counts = fuzz(Bench(options.backend, Path(name), options.quick), seeds, shrinks=not options.no_shrink)
    faults = sum(number for kind, number in counts.items() if Verdict(kind).is_fault)
    print(f"programs {len(seeds)} faults {faults}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
