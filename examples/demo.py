"""Train the same program with two workers, with one, and with a killed chief, and compare the results.

make demo
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("digits.py")
REPLICAS = 2
WANTED_ACCURACY = 0.95


def train(workers: int, folder: Path, arguments: list[str], *, kill: bool = False) -> list[str]:
    """Run the classifier, with `kill` end its chief in the second epoch; return the log of each worker."""
    options = ["-n", str(workers), "--replicas", str(REPLICAS), "--run-dir", str(folder)]
    command = [sys.executable, "-m", "lockstep", "run", *options, str(SCRIPT), *arguments]
    print(f"\n$ lockstep {' '.join(command[3:])}", flush=True)
    with subprocess.Popen(command) as process:
        if kill:
            kill_chief(folder, process)
    if process.returncode:
        sys.exit(f"demo: the command ended with {process.returncode}")
    return [(folder / f"worker-{worker}.log").read_text() for worker in range(workers)]


def kill_chief(folder: Path, process: "subprocess.Popen[bytes]") -> None:
    """Kill worker 0 in its second epoch."""
    log = folder / "worker-0.log"
    while process.poll() is None:
        _, second, progress = (log.read_text() if log.exists() else "").partition("Epoch 2/")
        if second and "/step" in progress:
            events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
            (pid,) = (e["pid"] for e in events if e["event"] == "started" and e["worker"] == 0)
            print(f"\n$ kill -9 {pid}     # the chief, in the middle of the second epoch", flush=True)
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)


def find(label: str, log: str) -> str:
    """Return the text after `label:` at the start of a line of `log`."""
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
        killed = train(2, Path(folder) / "chief-killed", arguments, kill=True)

    digests = [find("digest", log) for log in [*two, *one, killed[1]]]
    accuracy = float(find("accuracy on", two[0]))
    rates = [find("images/s", log) for log in (two[0], one[0])]
    print(f"\nimages/s: {rates[0]} with two workers, {rates[1]} with one")
    print(f"accuracy on held-out digits: {accuracy:.4f}")
    print(f"worker 0 of 2: {digests[0]}\nworker 1 of 2: {digests[1]}\nworker 0 of 1: {digests[2]}")
    print(f"worker 1, after worker 0 was killed: {digests[3]}")
    if len(set(digests)) != 1:
        sys.exit("demo: the results differ")
    if accuracy < WANTED_ACCURACY:
        sys.exit(f"demo: the accuracy is below {WANTED_ACCURACY}")
    print("equal to the last bit")


if __name__ == "__main__":
    main()
