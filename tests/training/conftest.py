import contextlib
import fcntl
import gc
import hashlib
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import pytest
from packaging.version import Version

from command_server import IMPORTS_OF_JOBS, CommandServers
from lockstep.collectives.plan import ReducePlan
from lockstep.launcher.import_scan import imports_for_training
from lockstep.observability.bus import Bus
from lockstep.observability.events import WORKER_EVENTS, Event
from lockstep.parameter_server.order import read_order
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.system.environment import job_environment
from lockstep.system.memory import return_freed_memory
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext
from thread_hub import Hub

HERE = Path(__file__).parent


def _backends() -> list[str]:
    """JAX and TensorFlow always, PyTorch where it is installed; `BACKENDS` names others, or "all"."""
    known = ["jax", "tensorflow", "torch"]
    asked = os.environ.get("BACKENDS", "")
    if asked:
        return known if asked == "all" else asked.split()
    return known if find_spec("torch") else known[:2]


def _knows_flags() -> bool:
    """Whether the installed TensorFlow knows the flags with which XLA optimizes little; 2.19 does not."""
    for name in ("tensorflow-cpu", "tensorflow"):
        with contextlib.suppress(PackageNotFoundError):
            return Version(version(name)) >= Version("2.21")
    return False


BACKENDS = _backends()
QUICKEST = "torch" if "torch" in BACKENDS else BACKENDS[0]
"""PyTorch compiles nothing."""
REPLICAS_IN_PROCESS = 3
_MUCH_MEMORY = 2 << 30
"""Bytes by which a test process may grow. It has about 0.9 GiB when its first test begins."""
PATIENCE = 1200.0
"""The time limit of a process, in seconds, on a shared machine."""


@dataclass(frozen=True)
class Run:
    """The results of a command."""

    status: int
    stdout: str
    stderr: str
    folder: Path
    script: str = ""
    backend: str = ""

    def log(self, worker: int) -> list[str]:
        return (self.folder / f"worker-{worker}.log").read_text().splitlines()

    @property
    def last_line(self) -> str:
        """Lockstep's last line, without the duration of the run."""
        return re.sub("^lockstep: finished in .*?: ", "", self.stderr.splitlines()[-1])

    def marked(self, worker: int, mark: str) -> list[str]:
        """The lines of a worker's log that start with `mark`."""
        return [line for line in self.log(worker) if line.startswith(mark)]


class Memory:
    """The resident memory of this process, compared with that at an earlier time."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.note()

    def note(self) -> None:
        self._before = self._process.memory_info().rss

    def growth(self) -> int:
        """Return the growth since the last note, in bytes."""
        return int(self._process.memory_info().rss) - self._before


@pytest.fixture(scope="session")
def plain(
    commands: CommandServers,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    keeps_code: dict[str, str],
) -> Callable[..., str]:
    """Run a script of this folder without the command; return its output; `optimized` as in `lean`."""

    def run(script: str, *arguments: str, backend: str = "jax", optimized: bool = False) -> str:
        command = [str(HERE / script), *arguments]
        variables = environment | lean(HERE / script, backend, optimized=optimized) | keeps_code
        variables["KERAS_BACKEND"] = backend
        result = commands.run(command, variables, PATIENCE, ("keras", backend))
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="session")
def launch(
    commands: CommandServers,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Run]:
    """Run a script of this folder with `lockstep run`; `optimized` as in `lean`."""

    def run(options: str, script: str, *arguments: str, backend: str = "jax", optimized: bool = False) -> Run:
        folder = tmp_path_factory.mktemp("run")
        command = ["-m", "lockstep", "run", "--backend", backend, "--run-dir", str(folder)]
        command += [*options.split(), str(HERE / script), *arguments]
        variables = environment | lean(HERE / script, backend, optimized=optimized)
        importing = job_environment(0, 1, variables, backend=backend)
        imports = (*IMPORTS_OF_JOBS, *imports_for_training(backend))
        result = commands.run(command, variables, PATIENCE, imports, importing)
        return Run(result.returncode, result.stdout, result.stderr, folder, script, backend)

    return run


@pytest.fixture(scope="session")
def run_tests(
    commands: CommandServers, environment: dict[str, str], lean: Callable[..., dict[str, str]]
) -> Callable[[str, str], None]:
    """Run a test file, and tests of private parts, in a process that has imported another backend."""

    def run(file: str, backend: str) -> None:
        private = HERE / "test_private_parts.py"
        names = (
            "test_private_modules_have_the_parts_in_use",
            "test_a_private_part_exists",
            "test_a_moved_module_is_described_with_the_file_to_change",
        )
        arguments = ["-q", "-p", "no:cacheprovider", file, *(f"{private}::{name}" for name in names)]
        program = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
        # The process is a fork of a server of jobs.
        variables = environment | {"KERAS_BACKEND": backend} | lean(HERE / "together.py", backend)
        if backend == "tensorflow" and _knows_flags():
            # It compiles Keras's steps with XLA, too.
            variables["XLA_FLAGS"] = lean(HERE / "together.py", "jax")["XLA_FLAGS"]
        importing = job_environment(0, 1, variables, backend=backend)
        imports = (*IMPORTS_OF_JOBS, *imports_for_training(backend))
        result = commands.run(["-c", program], variables, PATIENCE, imports, importing)
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]

    return run


@pytest.fixture
def repeat(
    request: pytest.FixtureRequest,
    commands: CommandServers,
    environment: dict[str, str],
    lean: Callable[..., dict[str, str]],
    tmp_path: Path,
) -> Callable[..., Run]:
    """Repeat a run with parameter servers in as many processes, and in one; return the first repetition.

    The bits and the orders of the calls are equal. A test that is not slow may leave out one of the two.
    """
    is_slow = request.node.get_closest_marker("slow") is not None

    def again(run: Run, calls: Sequence[int], *, left_out: Literal["", "several", "one"] = "") -> Run:
        found = []
        if is_slow or left_out != "several":
            found.append(repeated(run, calls, tmp_path / "again"))
        if is_slow or left_out != "one":
            found.append(repeated(run, calls, tmp_path / "one", "--one-process"))
            assert "in one process; " in found[-1].stderr
        return found[0]

    def repeated(run: Run, calls: Sequence[int], folder: Path, *options: str) -> Run:
        command = ["-m", "lockstep", "rerun", *options, str(run.folder), "--run-dir", str(folder)]
        variables = environment | lean(HERE / run.script, run.backend)
        importing = job_environment(0, 1, variables, backend=run.backend)
        imports = (*IMPORTS_OF_JOBS, *imports_for_training(run.backend))
        result = commands.run(command, variables, PATIENCE, imports, importing)
        assert result.returncode == 0, result.stderr
        assert "the models at the end are equal to the last bit" in result.stdout
        for name in ("chief", "ps-0", "ps-1"):
            orders = [
                [read_order(one / "order" / name, call) for call in calls] for one in (run.folder, folder)
            ]
            assert orders[0] == orders[1]
        return Run(result.returncode, result.stdout, result.stderr, folder, run.script, run.backend)

    return again


@pytest.fixture(scope="session")
def undisturbed_run(launch: Callable[..., Run], shared_folder: Path) -> Callable[..., Run]:
    """Like `launch` for undisturbed runs, each only once for all processes of a test run.

    In the arguments, `{folder}` is a folder of its own for each run.
    """

    def run(options: str, script: str, *arguments: str, backend: str = "jax") -> Run:
        asked = repr((options, script, arguments, backend))
        known = shared_folder / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
        with known.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            if not text:
                folder = tempfile.mkdtemp(dir=shared_folder)
                given = [argument.format(folder=folder) for argument in arguments]
                text = json.dumps(asdict(launch(options, script, *given, backend=backend)), default=str)
                file.write(text)
        found = json.loads(text)
        return Run(**found | {"folder": Path(found["folder"])})

    return run


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends that are tested, or one that a test chooses, if it is installed."""
    name: str = request.param
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return name


@pytest.fixture(
    scope="session",
    params=[name if name == "jax" else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS],
)
def thorough_backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends that are tested; all but JAX in slow tests only."""
    name: str = request.param
    return name


@pytest.fixture(
    scope="session",
    params=[name if name == QUICKEST else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS],
)
def quickest_backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends that are tested; all but the one whose jobs take least time in slow tests only.

    It is for parts of Lockstep that are alike on all backends: a job on JAX takes two to four times as long.
    """
    name: str = request.param
    return name


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name == "tensorflow" else name for name in BACKENDS
    ],
)
def quicker_backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends that are tested; TensorFlow, which traces graphs for long, in slow tests only."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def published() -> list[Event]:
    """The events that this process's job has published for its agent."""
    return []


@pytest.fixture(scope="session", autouse=True)
def _compiles_quickly(lean: Callable[..., dict[str, str]], compiled_code: Path) -> None:
    """Set XLA's flags; JAX reads them once in a process, here unless a test has used it already.

    What tests of one process compile, other processes and later test runs load.
    """
    if os.environ["KERAS_BACKEND"] != "jax":
        return
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", lean(Path(__file__), "jax")["XLA_FLAGS"])
        # By default it would reserve most of a GPU, which the workers of the tests need.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_compilation_cache_dir", str(compiled_code))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        jax.jit(lambda number: number + 1)(1.0)


@pytest.fixture(scope="session")
def memory() -> Memory:
    """The memory of this process."""
    return Memory()


@pytest.fixture(autouse=True)
def _frees_compiled_code(memory: Memory) -> Iterator[None]:
    """Let JAX forget what it has compiled once that takes much memory; otherwise it keeps all of it."""
    yield
    if (jax := sys.modules.get("jax")) and memory.growth() > _MUCH_MEMORY:
        jax.clear_caches()
        # Also among the objects that earlier tests have exempted.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return_freed_memory()
        memory.note()


@pytest.fixture(autouse=True)
def _equal_models() -> None:
    """Number the names of layers anew, and seed what initializers draw from, for any order of the tests.

    Some orders of variables are those of their names. With some weights, a loss is too small for a relative
    bound.
    """
    random.seed(0)
    np.random.seed(0)
    if keras := sys.modules.get("keras"):
        keras.utils.clear_session(free_memory=False)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def nothing_exchanged(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Let no row be small enough to be exchanged; return what takes the reason out of a note."""
    from lockstep.keras.fit import trials

    monkeypatch.setattr(trials, "LARGEST_EXCHANGE", -1)
    return lambda note: re.sub(r" \(its rows, 0 MiB a step, [a-z -]+\)", "", note)


@pytest.fixture(scope="session", autouse=True)
def job_of_one_worker(published: list[Event]) -> Job:
    """Make this process the only worker of a job with several replicas."""
    view = place(REPLICAS_IN_PROCESS, (0,))
    hub = Hub(ReducePlan.of(view))
    events = Bus(SystemClock(), 0)
    events.subscribe(lambda entry: published.append(entry.event), *WORKER_EVENTS)
    context = JobContext(0, events, JobSettings(threads=1))
    entered = Job(context, (view, hub.member(0)))
    job.enter(entered)
    return entered
