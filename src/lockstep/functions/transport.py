"""A function for other processes, and its result, in anonymous memory that only they inherit.

This is the only module that pickles. It does so for processes that this one or its parent starts, or for the
actors of a Ray cluster, where Ray itself passes pickled functions.

With `lockstep.launch`, the command is a child process that dies with its caller. With `lockstep.ray.fit`, the
actor of each agent holds function and result. Its agent and all workers of the node inherit them, so a worker
that starts later gets the same function, and a killed actor leaves nothing behind. At the end of the job, the
actor of the coordinator passes the chief's result to the caller.
"""

import dis
import fcntl
import inspect
import linecache
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, BinaryIO, NamedTuple

from lockstep.errors import InputError, UnfitError
from lockstep.system.prose import install_command

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_HEADER = struct.Struct("<QQB")
_PICKLING_FAILS = (pickle.PicklingError, TypeError, ValueError, AttributeError, RuntimeError)


class Giver(IntEnum):
    """The process that wrote a result. The command writes an error if no job started."""

    NONE = 0
    WORKER = 1
    CHIEF = 2
    COMMAND = 3


class Returned(NamedTuple):
    """The result of a function.

    Attributes:
        giver: the process that wrote it.
        value: the result of the function; from the command, an error.
        metrics: the last metrics that the function's callbacks reported.
    """

    giver: Giver
    value: Any
    metrics: dict[str, float]


NOTHING = Returned(Giver.NONE, None, {})


def pack(
    caller: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    named_arguments: Mapping[str, Any],
) -> int:
    """Return a descriptor of sealed memory with a call.

    The memory also contains the module search path of this process and the source of code that is not in a
    file, such as a notebook's cells.

    Args:
        caller: the public function that sends the call, for messages.
        function: the function to call.
        args: its arguments.
        kwargs: its keyword arguments.
        named_arguments: the same arguments, or parts of them, by their names in messages.

    Raises:
        InputError: a part cannot be pickled; the message names it.
        UnfitError: cloudpickle is not installed.
    """
    cloudpickle = _cloudpickle(caller)
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}

    def write(file: BinaryIO) -> None:
        pickle.dump((sys.path, sources), file)
        _dump(cloudpickle, (function, tuple(args), dict(kwargs), used_by_class_bodies(function)), file)

    try:
        return _sealed(write)
    except _PICKLING_FAILS as error:
        culprit = name_culprit(function, named_arguments, partial(_why_not, cloudpickle))
        raise InputError(f"{caller} cannot send this to its workers: {culprit or error}") from error


def hold(call: bytes) -> int:
    """Return a descriptor of sealed memory with a call, as `pack` does, from the bytes of that memory."""
    return _sealed(lambda file: file.write(call))


def _sealed(write: Callable[[BinaryIO], object]) -> int:
    descriptor = os.memfd_create("lockstep-call", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            write(file)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def held(descriptor: int) -> bytes:
    """Return the bytes of the memory of a descriptor."""
    return Path(f"/proc/self/fd/{descriptor}").read_bytes()


def unpack(descriptor: int) -> Callable[[], Any]:
    """Return the call in a descriptor's memory; search modules first in the folders of its sender."""
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        path, sources = pickle.load(memory)
        # On another host, packages may be in other folders. The first entry is the folder of the job.
        sys.path[:] = [*path, *(entry for entry in sys.path[1:] if entry not in path)]
        linecache.cache.update(sources)
        try:
            function, args, kwargs, variables = pickle.load(memory)
        except (ImportError, AttributeError) as error:
            error.add_note(
                "lockstep: the function needs a module that its caller has and this worker does not find; "
                "define the function in the calling program or in a module that workers can import"
            )
            raise
    for name, value in variables.items():
        plain(function).__globals__.setdefault(name, value)
    return partial(function, *args, **kwargs)


class ResultBox:
    """Memory into which workers write the function's result.

    Args:
        descriptor: the descriptor of the memory, from `create`.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def create(cls) -> "ResultBox":
        """Create an empty box."""
        descriptor = os.memfd_create("lockstep-result")
        os.ftruncate(descriptor, _HEADER.size)
        return cls(descriptor)

    def put(self, value: Any, giver: Giver, metrics: Mapping[str, float] | None = None) -> None:
        """Write a result; a worker writes only if there is none.

        The old result stays valid until the new one is complete, even if this process is killed.

        Args:
            value: see `Returned`.
            giver: this process.
            metrics: see `Returned`; None if there are none.

        Raises:
            InputError: the result cannot be pickled.
        """
        # The memory is opened again, because forked processes share the lock and the position of an open
        # file.
        with Path(f"/proc/self/fd/{self.descriptor}").open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if giver is Giver.WORKER and self._header()[2] != Giver.NONE:
                return
            start = file.seek(0, os.SEEK_END)
            try:
                _dump(_cloudpickle("a worker"), (value, dict(metrics or {})), file)
            except _PICKLING_FAILS as error:
                raise InputError(
                    f"the function returned {type(value).__name__}, which cannot be sent back "
                    f"({error}); return arrays, numbers, strings, or lists and dicts of them"
                ) from None
            length = file.tell() - start
            file.flush()
            os.pwrite(self.descriptor, _HEADER.pack(start, length, giver), 0)

    def read(self) -> Returned:
        """Return the current result."""
        start, _, giver = self._header()
        if giver == Giver.NONE:
            return NOTHING
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as memory:
            memory.seek(start)
            return Returned(Giver(giver), *pickle.load(memory))

    @property
    def giver(self) -> Giver:
        """The process that wrote the current result."""
        return Giver(self._header()[2])

    def packed(self) -> bytes:
        """Return the current result, if any, in a form that a program on another host can unpack."""
        start, length, giver = self._header()
        return bytes([giver]) + os.pread(self.descriptor, length, start)

    def close(self) -> None:
        """Close the memory, which is freed once all processes have closed it."""
        os.close(self.descriptor)

    def _header(self) -> tuple[int, int, int]:
        start, length, giver = _HEADER.unpack(os.pread(self.descriptor, _HEADER.size, 0))
        return start, length, giver


def unpack_result(packed: bytes) -> Returned:
    """Return the result in the bytes that `ResultBox.packed` has returned."""
    return Returned(Giver(packed[0]), *pickle.loads(memoryview(packed)[1:])) if packed[0] else NOTHING


def _cloudpickle(caller: str) -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        raise UnfitError(
            f"{caller} sends functions and results with cloudpickle, which is not installed: "
            f"{install_command('notebook')}"
        ) from None
    module: ModuleType = cloudpickle
    return module


def _dump(cloudpickle: ModuleType, value: Any, file: BinaryIO) -> None:
    """Pickle a value whose code keeps its file names for tracebacks, which cloudpickle 3.1.3 drops."""

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, CodeType):
                make, arguments = self.dispatch_table[CodeType](value)
                return _code, (value.co_filename, make, arguments)
            return super().reducer_override(value)

    Pickler(file).dump(value)


def _code(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def _why_not(cloudpickle: ModuleType, value: Any) -> str:
    """Return why a value cannot be pickled, or an empty string if it can."""
    try:
        cloudpickle.dumps(value)
    except _PICKLING_FAILS as error:
        return f"{type(error).__name__}: {error}"
    return ""


Why = Callable[[Any], str]
"""Returns why a value cannot be pickled; empty if it can."""


def name_culprit(function: Any, named_arguments: Mapping[str, Any], why: Why) -> str:
    """Return the part of a function or its arguments that cannot be pickled, and why, if one is found."""
    for name, value in named_arguments.items():
        if reason := why(value):
            return f"{name}, of type {type(value).__name__} ({reason}); pass the values from which it is made"
    if not why(function):
        return ""
    name = getattr(plain(function), "__name__", type(function).__name__)
    path, value = _follow(plain(function), why, [])
    if not path:
        return f"{name} ({why(function)})"
    culprit = f"{' -> '.join(path)}, which {name} uses, of type {type(value).__name__}"
    return f"{culprit} ({why(value)}); create it there"


def used_by_class_bodies(function: Any) -> dict[str, Any]:
    """Return the globals used in the bodies of classes that a notebook's or script's function defines.

    cloudpickle includes the globals that functions use, but not these.
    """
    used: dict[str, Any] = {}
    for each in _reached(plain(function), []):
        names = _loaded(each.__code__, "LOAD_NAME")
        used |= {name: each.__globals__[name] for name in names if name in each.__globals__}
    return {name: value for name, value in used.items() if not name.startswith("__")}


def plain(function: Any) -> Any:
    """Return the function below a bound method or a `functools.partial`."""
    return getattr(function, "__func__", getattr(function, "func", function))


def _reached(thing: Any, seen: list[Any]) -> Iterator[FunctionType]:
    """Yield the functions of `__main__` that a function or class can call."""
    if getattr(thing, "__module__", None) != "__main__" or any(thing is other for other in seen):
        return
    seen.append(thing)
    if isinstance(thing, FunctionType):
        yield thing
    for _, value in _used(thing):
        yield from _reached(value, seen)


def _follow(thing: Any, why: Why, seen: list[Any]) -> tuple[list[str], Any]:
    """Return the path of names to the innermost value that cannot be pickled, and that value."""
    seen.append(thing)
    for name, value in _used(thing):
        if not any(value is other for other in seen) and why(value):
            deeper, last = _follow(plain(value), why, seen)
            return [name, *deeper], last
    return [], thing


def _used(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that a function uses, or the members of a class of `__main__`."""
    if isinstance(thing, type) and thing.__module__ == "__main__":
        yield from vars(thing).items()
    if not isinstance(thing, FunctionType):
        return
    yield from inspect.getclosurevars(thing).nonlocals.items()
    for name in sorted(_loaded(thing.__code__, "LOAD_GLOBAL", "LOAD_NAME")):
        if name in thing.__globals__:
            yield name, thing.__globals__[name]
    for value in (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()):
        yield "a default", value


def _loaded(code: CodeType, *operations: str) -> set[str]:
    inner = [_loaded(constant, *operations) for constant in code.co_consts if isinstance(constant, CodeType)]
    names = {each.argval for each in dis.get_instructions(code) if each.opname in operations}
    return names.union(*inner)
