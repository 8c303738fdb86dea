"""Train the same program with two workers and with one, and show that the results are equal.

make demo
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")
REPLICAS = 2
WANTED_ACCURACY = 0.95


def train(workers: int, folder: Path, arguments: list[str]) -> list[str]:
    """Run the classifier; return the log of each worker."""
    options = ["-n", str(workers), "--replicas", str(REPLICAS), "--run-dir", str(folder)]
    command = [sys.executable, "-m", "lockstep", "run", *options, str(SCRIPT), *arguments]
    print(f"\n$ lockstep {' '.join(command[3:])}", flush=True)
    subprocess.run(command, check=True)
    return [(folder / f"worker-{worker}.log").read_text() for worker in range(workers)]


def find(label: str, log: str) -> str:
    """Return what follows `label:` at the start of a line of `log`."""
    match = re.search(rf"^{re.escape(label)}[^:\n]*: (\S+)$", log, re.MULTILINE)
    if not match:
        sys.exit(f"demo: the log has no line {label!r}")
    return match.group(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits")
    arguments = ["--data", parser.parse_args().data]
    with tempfile.TemporaryDirectory() as folder:
        two = train(2, Path(folder) / "two-workers", arguments)
        one = train(1, Path(folder) / "one-worker", arguments)

    digests = [find("digest", log) for log in two + one]
    accuracy = float(find("accuracy on", two[0]))
    rates = [find("images/s", log) for log in (two[0], one[0])]
    print(f"\nimages/s: {rates[0]} with two workers, {rates[1]} with one")
    print(f"accuracy on held-out digits: {accuracy:.4f}")
    print(f"worker 0 of 2: {digests[0]}\nworker 1 of 2: {digests[1]}\nworker 0 of 1: {digests[2]}")
    if len(set(digests)) != 1:
        sys.exit("demo: the results differ")
    if accuracy < WANTED_ACCURACY:
        sys.exit(f"demo: the accuracy is below {WANTED_ACCURACY}")
    print("equal to the last bit")


if __name__ == "__main__":
    main()
