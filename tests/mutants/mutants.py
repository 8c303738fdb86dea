"""Plants faults, one at a time, and finds the suites that catch them: `make mutants`.

Each fault of `faults.toml` replaces some lines of the product; most undo a past fix. A fault is planted in a
copy of the checkout, where its own tests run first: those that probably catch it. The faults that they miss
are then planted in one copy together, where the whole suite runs once, and each test that fails there runs
again with each of the faults alone. So a fault costs a minute, and all that are hard to catch cost one run.

Results are kept in `.mutants/results.json`, and a run that was stopped continues there.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import msgspec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

SUITES = {"make test": "not ci and not slow", "make test-ci": "ci and not slow"}
"""The suites, and the marks of their tests. A fault that the first one misses is tried on the next one."""
COPIES = 2
"""Number of faults that are tried at the same time."""
OWN_TESTS_LIMIT = 900.0
"""Seconds. A fault whose own tests take longer makes them hang, which is a way of being caught."""
NO_FAILURE = (0, 5)
"""Exit statuses of pytest: all tests passed, or none was selected."""
WRONG_USAGE = 4
"""The exit status of pytest for arguments that it does not accept."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault that the suites should catch.

    Attributes:
        name: what goes wrong.
        file: where, relative to the checkout.
        old: the lines to replace.
        new: the lines that replace them.
        fix: the commit that this undoes; empty if it undoes none.
        tests: files and tests that probably catch it.
    """

    name: str
    file: str
    old: str
    new: str
    fix: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The room of the file."""
        return Path(self.file).parts[2].removesuffix(".py")

    def planted_in(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: the text does not have the lines to replace exactly once.
        """
        if (times := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has the lines of the fault {self.name!r} {times} times instead of once: the "
                "file has changed, so change the fault in tests/mutants/faults.toml"
            )
        return text.replace(self.old, self.new)


class FaultList(msgspec.Struct):
    """The file with the faults."""

    fault: list[Fault]


def read_faults() -> list[Fault]:
    """Return the faults of the list."""
    faults: dict[str, list[Fault]] = msgspec.toml.decode(
        (HERE / "faults.toml").read_bytes(), type=dict[str, list[Fault]]
    )
    return faults["fault"]


@dataclass(frozen=True)
class Copy:
    """A copy of the checkout, whose tests import its own sources."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Copy":
        """Copy the files that git knows."""
        names = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, names.stdout.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
        return cls(folder)

    @contextlib.contextmanager
    def planted(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Plant faults, and remove them afterwards."""
        originals: dict[Path, str] = {}
        try:
            for fault in faults:
                path = self.folder / fault.file
                text = path.read_text()
                originals.setdefault(path, text)
                path.write_text(fault.planted_in(text))
            yield
        finally:
            for path, text in originals.items():
                path.write_text(text)

    def failures(self, *arguments: str, limit: float | None = None) -> list[str]:
        """Run tests; return those that failed, or a sentence if the run came to no end."""
        with tempfile.TemporaryDirectory() as scratch:
            command = [sys.executable, "-m", "pytest", "-q", "--tb=no", f"--basetemp={scratch}/files"]
            command += ["-o", f"cache_dir={scratch}/cache", *arguments]
            # Before the checkout that the environment has installed.
            path = [str(self.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
            try:
                run = subprocess.run(
                    command, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=limit
                )
            except subprocess.TimeoutExpired:
                return [f"no end within {limit:g} s"]
            record = Path(scratch, "cache", "v", "cache", "lastfailed")
            if record.exists():
                return list(json.loads(record.read_text()))
            if run.returncode == WRONG_USAGE:
                raise ValueError(run.stderr)
            return [] if run.returncode in NO_FAILURE else [f"exit status {run.returncode}"]


class Measurement:
    """Which suite catches which fault, by which test; kept on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self.caught: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}

    def is_open(self, fault: Fault, suite: str) -> bool:
        """Return whether a fault must still be tried on a suite."""
        return not any(self.caught.get(fault.name, {}).values()) and suite not in self.caught.get(
            fault.name, {}
        )

    def record(self, fault: Fault, suite: str, test: str) -> None:
        """Record the test of a suite that caught a fault; an empty text for none."""
        with self._lock:
            self.caught.setdefault(fault.name, {})[suite] = test
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(json.dumps(self.caught, indent=1) + "\n")
        print(f"{suite}: {fault.name}: {test or 'not caught'}", flush=True)

    def table(self, faults: Sequence[Fault]) -> str:
        """Return a Markdown table of the numbers of faults that the suites caught, by room."""
        rows = ["| room | faults | " + " | ".join(f"`{suite}`" for suite in SUITES) + " |"]
        rows.append("|---|" + "---|" * (len(SUITES) + 1))
        rooms = {
            room: [fault for fault in faults if fault.room == room]
            for room in sorted({f.room for f in faults})
        }
        for room, members in (rooms | {"all": list(faults)}).items():
            numbers, total = [], 0
            for suite in SUITES:
                total += sum(bool(self.caught.get(fault.name, {}).get(suite)) for fault in members)
                numbers.append(str(total))
            rows.append(f"| {room} | {len(members)} | {' | '.join(numbers)} |")
        return "\n".join(rows)


def try_own_tests(
    faults: Sequence[Fault], suite: str, copies: Sequence[Copy], measurement: Measurement
) -> list[Fault]:
    """Try each fault on its own tests, `COPIES` at a time; return those that were not caught."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def is_missed(fault: Fault) -> bool:
        copy = free.get()
        try:
            with copy.planted([fault]):
                failed = copy.failures("-x", "-m", SUITES[suite], *fault.tests, limit=OWN_TESTS_LIMIT)
        finally:
            free.put(copy)
        if failed:
            measurement.record(fault, suite, failed[0])
        return not failed

    with ThreadPoolExecutor(len(copies)) as pool:
        return [fault for fault, missed in zip(faults, pool.map(is_missed, faults), strict=True) if missed]


def try_whole_suite(faults: Sequence[Fault], suite: str, copy: Copy, measurement: Measurement) -> None:
    """Try faults together on a whole suite, and then each alone on the tests that failed."""
    if not faults:
        return
    print(f"{suite}, the whole suite with {len(faults)} faults at once", flush=True)
    shared = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    with copy.planted(faults):
        failed = copy.failures("-m", SUITES[suite], *shared)
    for fault in faults:
        again: list[str] = []
        if failed:
            with copy.planted([fault]):
                again = copy.failures("-x", *failed)
        measurement.record(fault, suite, again[0] if again else "")


def main() -> None:
    """Measure all suites, and print the table."""
    faults = read_faults()
    measurement = Measurement(ROOT / ".mutants" / "results.json")
    with tempfile.TemporaryDirectory() as folder:
        copies = [Copy.make(Path(folder, str(number))) for number in range(COPIES)]
        for suite in SUITES:
            left = [fault for fault in faults if measurement.is_open(fault, suite)]
            try_whole_suite(try_own_tests(left, suite, copies, measurement), suite, copies[0], measurement)
    print(measurement.table(faults))
    for fault in faults:
        if not any(measurement.caught[fault.name].values()):
            print(f"escaped: {fault.name} ({fault.file})")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    main()
