"""Running a script or a module as `python` itself would."""

import builtins
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from lockstep.errors import (
    ConfigError,
    DisagreementError,
    InputError,
    LockstepError,
    SupersededError,
    with_code,
)
from lockstep.protocol.job_spec import BACKEND_NAMES
from lockstep.system.cuda import LimitedReader, Machine, ask_driver, cuda_of, faults_of, shown_gpus, too_old
from lockstep.worker.program_sources import is_program, library_name

_PACKAGE = f"{Path(__file__).parents[1]}/"
_HELPERS = (contextlib.__file__, functools.__file__)
_BACKENDS = {*BACKEND_NAMES, "jaxlib"}
_OUT_OF_MEMORY = ("OutOfMemoryError", "ResourceExhaustedError")
_OF_GPU = re.compile("cuda|nvidia|cudnn|nccl", re.IGNORECASE)
_DRIVER_PATIENCE = 3.0
"""Seconds that a worker that has failed waits for the driver of its GPUs."""
_IN_A_GRAPH = "Graph execution error:"
_AROUND = ("in user code:", "Exception encountered when calling ")
"""How errors begin that TensorFlow and Keras raise again with their own text around the original one."""
_RAISED = re.compile(r"\s*[\w.]+: ")
_HIGHLIGHTED = re.compile("\x1b\\[1m(.+?)(\x1b\\[0m)?$")
"""A line with an error in a text of TensorFlow, and one in a text of Keras."""
_CONVERTED = re.compile(r'File "([^"]+)", line (\d+), in .*  \*$', re.MULTILINE)
_NO_CAUSES = ("[[", "File ", "Detected at node", "0 successful operations", "0 derived errors")
"""How lines of TensorFlow's errors begin that name the place of a failure, not the cause."""


@dataclass(frozen=True)
class Script:
    """The script or module to run.

    Attributes:
        target: path of a script, or name of a module.
        module: whether it is a module (`python -m`).
        arguments: the rest of `sys.argv`.
    """

    target: str
    module: bool
    arguments: tuple[str, ...] = ()

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> "Script":
        """Parse `[-m] target arguments...`."""
        module = arguments[0] == "-m"
        target, *rest = arguments[1:] if module else arguments
        return cls(target, module, tuple(rest))

    @property
    def command_line(self) -> tuple[str, ...]:
        """The command line, as `parse` accepts it."""
        return (*(("-m",) if self.module else ()), self.target, *self.arguments)

    def check(self) -> None:
        """Check that it exists, without running or importing anything.

        Raises:
            ConfigError: it cannot be found, or a name is not valid UTF-8.
        """
        try:
            refuse_undecodable(self.target, *self.arguments, self.folder, Path.cwd())
        except FileNotFoundError:
            raise ConfigError("the current folder no longer exists; change to another one") from None
        if self.module:
            find_module(self.target, [str(Path.cwd()), *sys.path])
        else:
            _check_file(Path(self.target))

    @property
    def folder(self) -> Path:
        """The folder in which the program searches for modules first."""
        return Path.cwd() if self.module else Path(os.path.realpath(self.target)).parent

    def source(self) -> Path | None:
        """Return the file with its Python code, or None if there is none."""
        if not self.module:
            return Path(self.target)
        origin = find_module(self.target, [str(self.folder), *sys.path]).origin
        return Path(origin) if origin is not None and origin.endswith(".py") else None

    def run(self) -> None:
        """Run the program, with `__main__`, `sys.argv` and `sys.path` as `python` sets them."""
        sys.path.insert(0, str(self.folder))
        main = ModuleType("__main__")
        attributes = self._module_attributes() if self.module else self._file_attributes()
        sys.argv[:] = [self.target if not self.module else attributes["__file__"], *self.arguments]
        vars(main).update(attributes, __annotations__={}, __builtins__=builtins)
        sys.modules["__main__"] = main
        exec(self._code(attributes), vars(main))

    def _file_attributes(self) -> dict[str, Any]:
        path = str(Path(self.target).absolute())
        return {
            "__file__": path,
            "__cached__": None,
            "__loader__": SourceFileLoader("__main__", path),
            "__spec__": None,
        }

    def _module_attributes(self) -> dict[str, Any]:
        spec = find_module(self.target, sys.path)
        return {
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__loader__": spec.loader,
            "__package__": spec.parent,
            "__spec__": spec,
        }

    def _code(self, attributes: dict[str, Any]) -> CodeType:
        if not self.module:
            path = attributes["__file__"]
            return compile(attributes["__loader__"].get_data(path), path, "exec", dont_inherit=True)
        spec: ModuleSpec = attributes["__spec__"]
        # `python -m` imports the parent packages before it runs the module.
        if spec.parent:
            importlib.import_module(spec.parent)
        code: CodeType = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        return code


def refuse_undecodable(*names: str | Path | None) -> None:
    """Raise ConfigError for names that are not valid UTF-8, which messages and checkpoints require."""
    for name in names:
        try:
            os.fspath(name or "").encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{os.fsencode(name or '')!r} is not UTF-8; names and arguments must be"
            ) from None


def find_module(name: str, path: Sequence[str]) -> ModuleSpec:
    """Find the file that `python -m name` would run, without importing the parent packages.

    Raises:
        ConfigError: there is no such module, or it is a package without `__main__`.
    """
    spec: ModuleSpec | None = None
    search: Sequence[str] | None = path
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:end]), search) if search is not None else None
        if spec is None:
            raise ConfigError(f"-m {name}: there is no module {'.'.join(parts[:end])!r} here or installed")
        search = spec.submodule_search_locations
    if spec is None or search is None:
        return _runnable(name, spec)
    main = _find(f"{name}.__main__", search)
    if main is None:
        raise ConfigError(f"-m {name}: it is a package without a module `__main__`; name one of its modules")
    return _runnable(name, main)


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the script's first frame on, or None if all frames are Lockstep's."""
    lockstep_files = (
        str(Path(__file__)),
        f"{_PACKAGE}launcher/worker_main.py",
        f"{_PACKAGE}functions/worker.py",
    )
    while trace is not None and trace.tb_frame.f_code.co_filename in lockstep_files:
        trace = trace.tb_next
    return trace


def program_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` with only the program's own frames, or None if it has none."""
    return _linked([each for each in _steps(trace) if is_program(each.tb_frame.f_code.co_filename)])


def hide_internals(error: BaseException) -> None:
    """Remove Lockstep's frames from the tracebacks of an error and of the errors that led to it.

    Keras's frames are removed too, unless the program has disabled Keras's own filter. An error that
    Lockstep's own code has raised keeps all its frames, because it may be a bug.
    """
    config = getattr(sys.modules.get("keras"), "config", None)
    hides_keras = config is not None and config.is_traceback_filtering_enabled()
    seen = set[int]()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        frames = list(_steps(each.__traceback__))
        if frames and frames[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE):
            continue
        shown = [
            frame
            for frame, internal in zip(frames, _internal(frames, hides_keras), strict=True)
            if not internal
        ]
        each.__traceback__ = _linked(shown or frames[-1:])
        errors += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _internal(frames: Sequence[TracebackType], hides_keras: bool) -> Iterator[bool]:
    """Yield whether each frame belongs to Lockstep or Keras, or to a Python helper that these have called."""
    internal = False
    for frame in frames:
        file = frame.tb_frame.f_code.co_filename
        helper = internal and file in _HELPERS
        internal = helper or file.startswith(_PACKAGE) or (hides_keras and library_name(file) == "keras")
        yield internal


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(frames: Sequence[TracebackType]) -> TracebackType | None:
    """Return a traceback of these frames."""
    linked = None
    for frame in reversed(frames):
        linked = TracebackType(linked, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return linked


def is_of_machine(error: BaseException) -> bool:
    """Whether the machine may have caused an error of the script, which another worker may not have.

    Errors that backends define count, because devices cause them.
    """
    if isinstance(error, LockstepError):
        return not isinstance(error, InputError | DisagreementError | SupersededError)
    of_backend = type(error).__module__.partition(".")[0] in _BACKENDS
    return of_backend or not isinstance(error, Exception) or isinstance(error, OSError | MemoryError)


def device_memory_hint(error: BaseException, gpus: Sequence[str], users: int = 1) -> str:
    """Return a hint to show after a backend's error that a device has too little memory, if it is one.

    Args:
        error: the error of the script.
        gpus: the worker's GPUs; empty if it computes on the CPU.
        users: the number of workers that use the same GPU.
    """
    kind = type(error)
    # JAX has one class for all errors of devices.
    out_of_memory = kind.__name__ in _OUT_OF_MEMORY or str(error).startswith("RESOURCE_EXHAUSTED")
    if kind.__module__.partition(".")[0] not in _BACKENDS or not out_of_memory:
        return ""
    device = f"GPU {' or '.join(gpus)}" if gpus else "the device"
    device += f", which {users} workers share," if gpus and users > 1 else ""
    fewer = "fewer workers per GPU (--devices)" if gpus else "fewer workers"
    return f"; {device} has too little free memory for this worker: use smaller batches, or {fewer}"


def gpus_within_patience() -> tuple[str, ...]:
    """Return the names of the GPUs of this machine, or an empty tuple if its driver hangs."""
    machine = LimitedReader(ask_driver).within(_DRIVER_PATIENCE)
    return shown_gpus(None, machine.gpus).names if machine is not None else ()


def gpu_hint(error: BaseException, gpus: Sequence[str], read: Callable[[], Machine]) -> str:
    """Return a hint on the GPUs or their driver to show after an error of a backend, if there is one.

    It names GPUs of the worker that cannot be used any more, or a driver that is too old for the backend.

    Args:
        error: the error of the script.
        gpus: the worker's GPUs.
        read: reads the GPUs of this machine; it may hang.
    """
    of_backend = type(error).__module__.partition(".")[0] in _BACKENDS
    if not gpus or not (of_backend or _OF_GPU.search(str(error))):
        return ""
    machine = LimitedReader(read).within(_DRIVER_PATIENCE)
    if machine is None:
        return f"; NVIDIA's driver has not answered within {_DRIVER_PATIENCE:g} s"
    if faults := faults_of(gpus, machine.gpus or ()):
        return f"; {' and '.join(faults.values())} (sudo dmesg | grep -i xid shows why)"
    loaded = sorted(name for name in BACKEND_NAMES if name in sys.modules)
    old = next(filter(None, (too_old(machine.driver, name, cuda_of(name)) for name in loaded)), "")
    return f"; {old}" if old else ""


def summarize(error: BaseException) -> str:
    """Describe an error in one line, without the code of a SyntaxError, notes and further lines.

    If TensorFlow reports only that executing a graph failed, and how the graph was built, the line ends with
    the failure in the graph. Text that Keras or TensorFlow have put around an error is left out.
    """
    texts = [text for text in traceback.format_exception_only(error) if not text.startswith(" ")]
    first, *others = texts[0].strip().split("\n")
    if first.endswith(_AROUND[0]):
        first = next((line.strip() for line in others if _RAISED.match(line)), first)
    if _AROUND[1] in first:
        cause = next((match[1] for line in others if (match := _HIGHLIGHTED.search(line))), "")
        return f"{first} {cause}".strip()
    if not first.endswith(_IN_A_GRAPH):
        return first
    causes = [line for line in others if line.strip() and not line.lstrip().startswith(_NO_CAUSES)]
    return f"{first} {causes[-1].strip()}" if causes else first


def summarize_own(error: LockstepError) -> str:
    """Describe an error of Lockstep in one line, with the line of the program that led to it."""
    shown = error
    while str(shown).startswith(_AROUND) and isinstance(shown.__context__, LockstepError):
        shown = shown.__context__
    line = program_line(error)
    return f"{' '.join(with_code(shown).split())}{f' ({line})' if line else ''}"


def program_line(error: BaseException) -> str | None:
    """Return the innermost line of the program at which an error was raised, such as `train.py:12`."""
    return _converted_line(error) or _line(error.__traceback__)


def keep_original(error: LockstepError) -> None:
    """Save an error that is raised in a place from which a library forwards only the text."""
    _originals[:] = [error]


def original_of(error: BaseException) -> BaseException:
    """Return the error of Lockstep that a library has converted into its own, or else `error` itself."""
    for original in _originals:
        if not isinstance(error, LockstepError) and str(original) in str(error):
            return original
    return error


_originals: list[LockstepError] = []
"""The last error that `keep_original` saved."""


def _converted_line(error: BaseException) -> str | None:
    """Return the line of a function that TensorFlow has converted, which appears only in the error's text."""
    lines = [
        f"{Path(file).name}:{number}" for file, number in _CONVERTED.findall(str(error)) if is_program(file)
    ]
    return lines[-1] if lines else None


def _line(trace: TracebackType | None) -> str | None:
    """Return the program's innermost line."""
    lines = [
        f"{Path(frame.f_code.co_filename).name}:{number}"
        for frame, number in traceback.walk_tb(trace)
        if is_program(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else None


def _runnable(name: str, spec: ModuleSpec | None) -> ModuleSpec:
    compiled = spec is None or spec.origin == "built-in" or isinstance(spec.loader, ExtensionFileLoader)
    if spec is None or compiled or not hasattr(spec.loader, "get_code"):
        raise ConfigError(f"-m {name}: it has no Python code to run")
    return spec


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    top = "." not in name
    for finder in sys.meta_path:
        if finder is importlib.machinery.PathFinder:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
        else:
            spec = finder.find_spec(name, None if top else path)
        if spec is not None:
            return spec
    return None


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a Python script")
    if not path.exists():
        raise ConfigError(f"there is no script {path} (looked in {Path.cwd()})")
    if not path.is_file():
        raise ConfigError(f"the script {path} is not a regular file; every worker must be able to open it")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {path} cannot be read")
