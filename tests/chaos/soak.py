"""Kills thousands of workers and prints a table of the results; the status is 1 if any job failed.

    soak.py [--jobs N] [--programs N] [--first-seed N] [--backends NAME...]

First N jobs of each kind without a framework (`harness.py`), then real training on each backend: a worker is
lost, and then another one at a named point, for every point. Last N random programs on each backend
(`tests/fuzz`), which lose no workers; `--first-seed` selects others than the last soak has run.
"""

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos_faults import POINTS, WHILE_JOINING, WHILE_OTHERS_JOIN

HERE = Path(__file__).parent
SURVIVAL = HERE.parent / "training" / "survival.py"
BACKENDS = ("jax", "tensorflow", "torch")
FUZZ = HERE.parent / "fuzz" / "fuzz.py"
FIRST_SEED = 1000
"""The first seed of the random programs by default: `make test-ci` runs lower ones."""
FIRST = "2:3:after apply"
"""The first loss of a job, from which the other workers recover."""


@dataclass
class Row:
    """The results of some jobs."""

    name: str
    jobs: int = 0
    killed: int = 0
    replaced: int = 0
    failed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        numbers = f"{self.jobs:6} {self.killed:7} {self.replaced:9} {self.failed:7}"
        return f"{self.name:38} {numbers} {self.seconds:8.0f} s"


def without_framework(name: str, jobs: int, *options: str) -> Row:
    """Run jobs of the harness."""
    row, begun = Row(name), time.monotonic()
    for seed in range(0, jobs, 50):
        number = min(50, jobs - seed)
        command = [sys.executable, str(HERE / "harness.py"), "--seed", str(seed), "--jobs", str(number)]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        counts = dict(re.findall(r"(\w+) (\d+)", done.stdout.splitlines()[-1] if done.stdout else ""))
        row.jobs += number
        row.killed += int(counts.get("lost", 0))
        row.replaced += int(counts.get("replaced", 0))
        row.failed += int(counts.get("failed", number))
        if done.returncode:
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    row.seconds = time.monotonic() - begun
    return row


def cases() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield options and faults: a kill at each named point, of the chief if it passes the point."""
    for point in POINTS:
        yield "-n 4 --max-restarts 0", (FIRST, f"0:3:{point}")
    for point in WHILE_OTHERS_JOIN:
        worker = 1 if point == "waiting for the change" else 0
        yield (
            "-n 3 --replicas 4 --min-workers 3 --checkpoint {kept} --checkpoint-every 3",
            (
                FIRST,
                f"{worker}:3:{point}",
            ),
        )
    for point in WHILE_JOINING:
        yield "-n 3 --replicas 4 --min-workers 3", (FIRST, f"3:0:{point}")


def train(backend: str, options: str, *faults: str) -> tuple[set[str], int, int]:
    """Train; return the results and the numbers of killed and of replaced workers."""
    with tempfile.TemporaryDirectory(prefix="lockstep-soak-") as name:
        folder = Path(name)
        (folder / "files").mkdir()
        command = [sys.executable, "-m", "lockstep", "run", "--backend", backend]
        command += ["--run-dir", str(folder / "run"), *options.format(kept=folder / "kept").split()]
        command += [str(SURVIVAL), str(folder / "files"), *faults]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        logs = [path.read_text() for path in (folder / "run").glob("worker-*.log")]
        events = (folder / "run" / "events.jsonl").read_text()
    results = {line for log in logs for line in log.splitlines() if line.startswith("result ")}
    if done.returncode:
        results.add(f"status {done.returncode}: {done.stderr[-2000:]}")
    return results, events.count('"status":-9'), events.count('"event":"joined"')


def with_backend(backend: str) -> Row:
    """Kill real workers at every named point."""
    row, begun = Row(f"training on {backend}"), time.monotonic()
    expected, _, _ = train(backend, "-n 1 --replicas 4")
    for options, faults in cases():
        results, killed, replaced = train(backend, options, *faults)
        row.jobs += 1
        row.killed += killed
        row.replaced += replaced
        if results != expected or killed < len(faults):
            row.failed += 1
            print(f"{backend} {options} {faults}: {killed} killed, {results} and not {expected}")
    row.seconds = time.monotonic() - begun
    return row


def with_programs(backend: str, programs: int, first: int) -> Row:
    """Run random programs; print the number of verdicts of each kind, and the faults."""
    row, begun = Row(f"random programs on {backend}", jobs=programs), time.monotonic()
    seeds = f"{first}:{first + programs}"
    command = [sys.executable, str(FUZZ), "--backend", backend, "--seeds", seeds]
    done = subprocess.run(command, capture_output=True, text=True)
    counts = dict(re.findall(r"^programs \d+ (faults) (\d+)$", done.stdout, re.MULTILINE))
    row.failed = int(counts.get("faults", programs))
    verdicts = re.findall(r"^\w+ seeds \d+ to \d+: (\{.*\})", done.stdout, re.MULTILINE)
    print(f"{row.name}: seeds {seeds}: {verdicts[-1] if verdicts else 'none'}")
    if row.failed or done.returncode:
        print(done.stdout, done.stderr[-3000:], sep="\n")
    row.seconds = time.monotonic() - begun
    return row


def main() -> int:
    """Run all jobs; print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=600)
    parser.add_argument("--programs", type=int, default=1000, help="on each backend")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    installed = [name for name in BACKENDS if importlib.util.find_spec(name)]
    parser.add_argument("--backends", nargs="*", default=installed)
    options = parser.parse_args()
    print(f"{'':38} {'jobs':>6} {'killed':>7} {'replaced':>9} {'failed':>7}", flush=True)
    rows = []
    for name, arguments in (("the protocol", ()), ("the protocol, losses replaced", ("--replace",))):
        rows.append(without_framework(name, options.jobs, *arguments))
        print(rows[-1], flush=True)
    for backend in options.backends:
        rows.append(with_backend(backend))
        print(rows[-1], flush=True)
        rows.append(with_programs(backend, options.programs, options.first_seed))
        print(rows[-1], flush=True)
    total = Row("all")
    for row in rows:
        total.jobs += row.jobs
        total.killed += row.killed
        total.replaced += row.replaced
        total.failed += row.failed
        total.seconds += row.seconds
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
