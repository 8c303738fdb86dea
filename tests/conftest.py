import ast
import contextlib
import gc
import os
import re
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))

import command_server
from command_server import CommandServers

# Tests decide on the results of code, never on its speed.
settings.register_profile("lockstep", deadline=None)
settings.load_profile("lockstep")

# Before anything imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
# TensorFlow's output during its import has times and process ids.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["LOCKSTEP_WITNESS"] = "off"
# By default, threads of PyTorch that wait for each other keep their cores, which other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_LONGEST = ("test_invariance.py", "test_whole_batch.py", "test_tensorflow.py", "test_witness.py")
"""Files that take half a minute or more. They begin first: the last one would keep only one core busy."""
_LONG = ("training", "byhand", "notebook", "fuzz")
"""Folders whose files take minutes: they run first, so that the test processes end at the same time."""
_WAITING = ("hosts", "ray", "collectives")
"""Folders whose tests often wait: their files run between those of the former, which use all cores."""

_SET_FOR_GOOD = ("jax_check_static_indices", "jax_compilation_cache_dir")
"""Options of JAX that a training of Lockstep sets for the rest of the process."""
_READ_FROM_ENVIRONMENT = (
    *("$LOCKSTEP_", "$KERAS_", "$JAX_", "$XLA_", "$CUDA_VISIBLE_", "$CUBLAS_", "$PYTHONHASHSEED", "$SLURM_"),
    # Libraries set other variables of TensorFlow when they are imported.
    *("$TF_CONFIG", "$TF_USE_LEGACY_KERAS", "$TF_DETERMINISTIC_OPS", "$TF_NUM_"),
)
"""How the names of variables begin that change what Lockstep or a backend does."""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_HERE = Path(__file__).parent
_EXAMPLES = _HERE.parent / "examples"
_BACKENDS = ("jax", "tensorflow", "torch")
_IMPORTED_BY_TESTS = ("keras", "tensorflow", "torch", "ray", "kubernetes")
"""Packages that collecting all tests imports, and that take long."""
_OPTIONAL = ("sklearn", "IPython", "jax", "tensorflow")
"""Packages that Keras or a backend imports if they are installed, even if they are not needed."""
_jaxlib = Version(version("jaxlib"))
_QUICK = "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
_QUICK += " --xla_backend_optimization_level=0"
if _jaxlib < Version("0.11"):
    # Later versions do not know this flag, and end the process.
    _QUICK += " --xla_cpu_use_fusion_emitters=false"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "ci and ..."`, import no file without this mark: two of three, in each test process."""
    if not config.option.markexpr.startswith("ci and ") or not collection_path.match("test_*.py"):
        return None
    sources = [collection_path, collection_path.with_name("conftest.py")]
    marked = any("mark.ci" in path.read_text() for path in sources if path.exists())
    # None leaves the decision to others.
    return None if marked else True


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Take the marks `ci("tensorflow")` from tests with other parameters than these."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    values = {value for value in parameters.values() if isinstance(value, str | int)}
    values |= {*item.callspec.id.split("-")} if parameters else set()
    item.own_markers[:] = [
        mark
        for mark in item.own_markers
        if mark.name not in ("ci", "slow") or not mark.args or values.intersection(mark.args)
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    kinds = {folder: kind for kind in (_LONG, _WAITING) for folder in kind}
    files: dict[tuple[str, ...], list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        files.setdefault(kinds.get(path.parent.name, ()), []).append(path)
    places = dict.fromkeys(files.get((), []), 1.0)
    for kind in (_LONG, _WAITING):
        found = files.get(kind, [])
        places |= {path: number / len(found) for number, path in enumerate(found)}
    places |= {path: _LONGEST.index(path.name) - len(_LONGEST) for path in places if path.name in _LONGEST}
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the processes of a run of all tests from one that has imported what they import."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    folder = tempfile.TemporaryDirectory(prefix="tests-")
    config.add_cleanup(folder.cleanup)
    server = Path(folder.name, "server")
    installed = [name for name in _IMPORTED_BY_TESTS if find_spec(name)]
    command_server.start_server(server, os.environ, installed)
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-P", command_server.__file__, str(server)])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exempt the objects of all modules from searches for garbage: millions that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session", autouse=True)
def _signals_end_processes() -> Iterator[None]:
    """A background job of a shell may ignore Ctrl-C, and one of `nohup` SIGHUP; processes of tests do not."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _process_state() -> dict[str, Any]:
    """The state of this process that tests of other files may use, by a name for messages."""
    state: dict[str, Any] = {f"${name}": value for name, value in os.environ.items()}
    # It is that of the present phase of a test.
    state.pop("$PYTEST_CURRENT_TEST", None)
    state |= {f"the handler of {signal.strsignal(each)}": signal.getsignal(each) for each in _SIGNALS}
    state |= {"the working directory": Path.cwd(), "sys.path": [*sys.path], "niceness": os.nice(0)}
    if jax := sys.modules.get("jax"):
        state |= {name: value for name, value in jax.config.values.items() if name not in _SET_FOR_GOOD}
    return state


def _patches() -> list[Any]:
    registry = sys.modules.get("lockstep.worker.patch_registry")
    return [*registry.PATCHES] if registry else []


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Fails a test after which others, in an order of files that a later run may have, would differ.

    What Lockstep replaces in Keras stays replaced: strategies of other tests need it.
    """
    before, patches = _process_state(), _patches()
    yield
    after = _process_state()
    changed = [name for name, value in before.items() if name not in after or after[name] != value]
    # Libraries, too, set variables when they are imported.
    changed += [name for name in after if name not in before and name.startswith(_READ_FROM_ENVIRONMENT)]
    assert not changed, f"the test has changed {', '.join(sorted(changed))}"
    left = {id(patch) for patch in _patches()}
    undone = [f"{patch.name} by {patch.by}" for patch in patches if id(patch) not in left]
    assert not undone, f"the test has undone replacements that others need: {', '.join(undone)}"


def _descriptors() -> set[tuple[int, int, int]]:
    """Return the open descriptors, each with the device and inode of its file: numbers are used again."""
    gc.collect()
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        # The descriptor of the folder itself is closed by now.
        with contextlib.suppress(OSError):
            status = os.fstat(int(path.name))
            found.add((int(path.name), status.st_dev, status.st_ino))
    return found


@pytest.fixture
def closes_descriptors() -> Iterator[None]:
    """Checks that a test leaves no descriptor open. Meanwhile, some of earlier tests may be closed."""
    before = _descriptors()
    # Afterwards, only the objects of the test are searched for garbage, not millions of earlier ones.
    gc.freeze()
    yield
    assert not _descriptors() - before


@pytest.fixture(scope="session")
def environment(shared_folder: Path, compiled_code: Path) -> Iterator[dict[str, str]]:
    """Variables that let jobs of tests share compiled code of JAX, outside of the user's own cache.

    They share it with later test runs, too, but nothing else of this cache.
    """
    kept, used = compiled_code.with_name("compiled-by-jobs"), shared_folder / "lockstep"
    # Only the first process of a run does this.
    with contextlib.suppress(FileExistsError):
        used.mkdir(mode=0o700)
        _share_code(kept, used)
    yield os.environ | {"XDG_CACHE_HOME": str(shared_folder)}
    _share_code(used, kept)
    # A worker removes entries if there are too many.
    for entry in kept.glob("jax-*/*"):
        if not (used / entry.relative_to(kept)).exists():
            entry.unlink(missing_ok=True)


def _share_code(source: Path, target: Path) -> None:
    """Let two caches of compiled code share their entries, which never change."""
    for entry in source.glob("jax-*/*-*[0-9a-f]"):
        same = target / entry.relative_to(source)
        same.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Other processes add and remove entries, and both folders may be on different disks.
        with contextlib.suppress(OSError):
            os.link(entry, same)


@pytest.fixture(scope="session")
def compiled_code(request: pytest.FixtureRequest, shared_folder: Path) -> Path:
    """Where JAX keeps the compiled code of tests, from one test run to the next; `make clean` removes it."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return cache.mkdir("compiled") if cache else shared_folder / "compiled"


@pytest.fixture(scope="session")
def keeps_code(compiled_code: Path) -> dict[str, str]:
    """Variables with which a script without the command keeps its compiled code there."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled_code),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[CommandServers]:
    """Runs commands in processes that have imported Keras and a backend already."""
    servers = CommandServers(tmp_path_factory.mktemp("output"), shared_folder)
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def lean() -> Callable[..., dict[str, str]]:
    """Variables for a script that finds only the optional packages that it imports.

    One that is neither a test nor an example, and does not import Keras, finds all. Importing other packages
    takes seconds in each process. Unless `optimized`, XLA optimizes little for JAX, which takes a third of
    the time: results that are compared must be compiled alike.
    """

    def variables(script: Path, backend: str, *, optimized: bool = False) -> dict[str, str]:
        compiling = {} if optimized or backend != "jax" else {"XLA_FLAGS": _QUICK}
        own = bool({_HERE, _EXAMPLES} & {*script.parents})
        imported = _imported(script, backend) if own or script.is_file() else set()
        if not own and "keras" not in imported:
            return compiling
        path = [str(_HERE / "lean"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        hidden = [name for name in _OPTIONAL if name not in {*imported, backend}]
        packages = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "HIDDEN_PACKAGES": ",".join(hidden)}
        return compiling | packages

    return variables


def _imported(script: Path, backend: str) -> set[str]:
    """Packages that a script imports on a backend, or a script or example that it imports or names."""
    found, scripts = set[str](), [script]
    for one in scripts:
        text = one.read_text()
        own = set(_imports(ast.parse(text), backend))
        near = own | set(re.findall(r"(\w+)\.py\b", text))
        for folder in (one.parent, _EXAMPLES):
            named = sorted(folder / f"{name}.py" for name in near)
            scripts += [other for other in named if other.exists() and other not in scripts]
        found |= own
    return found


def _imports(node: ast.AST, backend: str) -> Iterator[str]:
    """The packages of all import statements but those that a test for another backend guards."""
    if isinstance(node, ast.Import):
        yield from (name.name.partition(".")[0] for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield str(node.module).partition(".")[0]
    parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.If) and isinstance(node.test, ast.Compare):
        (operator,), (value, *_) = node.test.ops[:1], node.test.comparators
        if isinstance(operator, ast.Eq) and isinstance(value, ast.Constant) and value.value in _BACKENDS:
            parts = list(node.body if value.value == backend else node.orelse)
    for part in parts:
        yield from _imports(part, backend)


@pytest.fixture(scope="session")
def read_tensorboard() -> Callable[[Path], dict[str, list[tuple[int, float | str]]]]:
    """Return the steps and values by tag that TensorBoard's own backend finds in the folder of a run."""
    # With a module of this name, TensorBoard does not import TensorFlow.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder: Path) -> dict[str, list[tuple[int, float | str]]]:
        found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        tags = found.Tags()
        values: dict[str, list[tuple[int, float | str]]] = {}
        for tag in tags["scalars"]:
            values[tag] = [(one.step, one.value) for one in found.Scalars(tag)]
        for tag in tags["tensors"]:
            assert found.SummaryMetadata(tag).plugin_data.plugin_name == "text"
            values[tag] = [(one.step, one.tensor_proto.string_val[0].decode()) for one in found.Tensors(tag)]
        return values

    return read
