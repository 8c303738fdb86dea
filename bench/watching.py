"""What it costs to watch a run: two workers with all views, against two workers with none.

    watching.py [--model NAME] [--sessions N] [--turns N] [--steps N]

One job writes TensorBoard's files and serves figures as OpenMetrics, which a client reads every 15 s;
`lockstep top` follows it, and `lockstep ui` serves its page, whose data and charts a client requests every
2 s, as a browser does. The other job has none of this. The views also take processor time in the turns of
the other job, so the rates do not show it: the rows show it in milliseconds per second of the run.
"""

import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from models import MODELS
from programs import Work
from results import require
from trees import compare, parser, this_tree
from turns import FailedError, Program, free_ports, stop

SESSIONS = 2
TURNS = 25
STEPS = {"cnn": 60, "mlp": 1500}
PAGE_EVERY = 2.0
METRICS_EVERY = 15.0
MOST_PERCENT = 1


class Client(threading.Thread):
    """Requests what a browser with the page of a run, and a collector of its figures, request."""

    def __init__(self, address: str, metrics: str) -> None:
        super().__init__(daemon=True)
        self._address = urllib.parse.urlsplit(address)
        self._metrics = metrics
        # Like a browser, it keeps the connection.
        self._connection = http.client.HTTPConnection(self._address.netloc)
        self._cookie: dict[str, str] = {}
        self.ready, self.ended = threading.Event(), threading.Event()

    def run(self) -> None:
        self._connection.request("GET", f"/?{self._address.query}")
        answer = self._connection.getresponse()
        answer.read()
        self._cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
        (run,) = [one["id"] for one in self._get("runs")["runs"]]
        known: dict[str, str] = {}
        parts: dict[str, Any] = {}
        versions: dict[str, Any] = {}
        count = 0
        while not self.ended.wait(PAGE_EVERY):
            news = self._get("run", run=run, have=",".join(map(":".join, known.items())))
            known |= news["digests"]
            parts |= news["parts"]
            for spec in parts.get("charts", ()):
                if versions.get(spec["id"]) != spec["version"]:
                    versions[spec["id"]] = spec["version"]
                    self._get("chart", run=run, chart=spec["id"], axis="step", points="600", smoothing="0.6")
                    self.ready.set()
            count += 1
            if count % round(METRICS_EVERY / PAGE_EVERY) == 0:
                with suppress(OSError):
                    urllib.request.urlopen(self._metrics).read()

    def _get(self, path: str, **query: str) -> Any:
        self._connection.request("GET", f"/api/{path}?{urllib.parse.urlencode(query)}", headers=self._cookie)
        return json.loads(self._connection.getresponse().read())


@contextmanager
def watching(folder: Path, port: int, spent: dict[str, float]) -> Iterator[None]:
    """Watch the run in a folder, once it is there; add the processor time of each view to `spent`.

    The time until the page has shown a first chart, in which the views start, is not added.
    """
    command = [sys.executable, "-m", "lockstep"]
    views: dict[str, subprocess.Popen[str]] = {}
    clients: list[Client] = []
    ended = threading.Event()

    def begin() -> None:
        while not (folder / "events.jsonl").exists():
            if ended.wait(0.1):
                return
        views["lockstep top"] = subprocess.Popen(
            [*command, "top", "--json", str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        page = views["lockstep ui"] = subprocess.Popen(
            [*command, "ui", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert page.stdout is not None
        words = (word for line in page.stdout for word in line.split())
        address = next(word for word in words if word.startswith("http://")).rstrip(";")
        clients.append(Client(address, f"http://127.0.0.1:{port}/metrics"))
        clients[0].start()
        while not (clients[0].ready.wait(0.1) or ended.is_set()):
            pass
        for name, process in views.items():
            spent[name] = spent.get(name, 0.0) - processor_time(process.pid)

    starting = threading.Thread(target=begin, daemon=True)
    starting.start()
    try:
        yield
    finally:
        ended.set()
        starting.join()
        for client in clients:
            client.ended.set()
        for name, process in views.items():
            spent[name] = spent.get(name, 0.0) + processor_time(process.pid)
            stop(process)
        require(bool(clients and clients[0].ready.is_set()), "the page has shown no chart")


def processor_time(process: int) -> float:
    times = psutil.Process(process).cpu_times()
    return float(times.user + times.system)


class JobTimes(threading.Thread):
    """Follows the processor time of a job's processes without its workers, from the end of its first turn."""

    def __init__(self, program: Program) -> None:
        super().__init__(daemon=True)
        self._program = program
        self.ended = threading.Event()
        self.first: float | None = None
        self.last = 0.0

    def run(self) -> None:
        while not self.ended.wait(1.0):
            with suppress(psutil.Error, IndexError):
                command = psutil.Process(self._program.children[0].pid)
                own = [one for one in (command, *command.children()) if "lockstep" in one.cmdline()]
                self.last = sum(processor_time(one.pid) for one in own)
                if self.first is None and self._program.answers:
                    self.first = self.last


@dataclass
class Watch:
    """Watches the first of two jobs in each session.

    Attributes:
        port: of its metrics.
        spent: the processor time of each view, in seconds.
        elapsed: the time of all sessions, in seconds.
    """

    port: int
    spent: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0

    @contextmanager
    def session(self, folder: Path, programs: list[Program]) -> Iterator[None]:
        times = [JobTimes(program) for program in programs]
        for one in times:
            one.start()
        began = time.monotonic()
        with watching(folder, self.port, self.spent):
            yield
        self.elapsed += time.monotonic() - began
        for one in times:
            one.ended.set()
        watched, unwatched = (one.last - (one.first or 0.0) for one in times)
        files = "TensorBoard's files and the metrics"
        self.spent[files] = self.spent.get(files, 0.0) + watched - unwatched


def measure(model: str, sessions: int, turns: int, steps: int | None = None) -> None:
    """Print the rates, their paired ratio, and the processor time of each view.

    Raises:
        FailedError: a program failed, or the bits differ.
    """
    watch = Watch(*free_ports(1))
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-board-") as board:
        compare(
            Work.of(model, turns, steps or STEPS.get(model)),
            sessions,
            ("with all views", "without"),
            (this_tree, this_tree),
            f"watching: {model} on jax, two workers",
            "0.99",
            (("--tensorboard", board, "--metrics-port", str(watch.port)), ()),
            beside=watch.session,
        )
    cores = psutil.cpu_count() or 1
    for name, seconds in watch.spent.items():
        print(f"  {name}: {1000 * seconds / watch.elapsed:.1f} ms of processor time per second")
    share = 100 * sum(watch.spent.values()) / watch.elapsed / cores
    print(f"  together {share:.2f} % of {cores} cores   to reach {MOST_PERCENT} %")


def main() -> None:
    try:
        measure("cnn", SESSIONS, TURNS)
    except FailedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    arguments = parser(__doc__, SESSIONS, TURNS)
    arguments.add_argument("--model", choices=MODELS, default="cnn")
    options = arguments.parse_args()
    try:
        measure(options.model, options.sessions, options.turns, options.steps)
    except FailedError as error:
        sys.exit(str(error))
