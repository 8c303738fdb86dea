"""How results and exceptions of scheduled functions travel."""

import contextlib
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy.typing as npt

from lockstep.checkpoint import values
from lockstep.errors import FunctionError, InputError
from lockstep.protocol.parameter_server import FunctionFailure, FunctionResult

Array = npt.NDArray[Any]


def pack_result(result: Any) -> tuple[FunctionResult, list[Array]]:
    """Return the result of a function as a message with arrays.

    Raises:
        InputError: a part of it cannot be sent.
    """
    try:
        kept, named = values.pack(result, "result")
    except TypeError as error:
        raise InputError(f"a scheduled function returns a value that cannot be sent: {error}") from None
    return FunctionResult(msgspec.json.encode(kept), tuple(named)), [*named.values()]


def unpack_results(results: Iterable[FunctionResult], arrays: Sequence[Array]) -> list[Any]:
    """Return the results of functions, given the arrays of all of them."""
    unpacked = []
    for result in results:
        result_arrays, arrays = arrays[: len(result.names)], arrays[len(result.names) :]
        packed = msgspec.json.decode(result.packed)
        unpacked.append(values.unpack(packed, dict(zip(result.names, result_arrays, strict=True))))
    return unpacked


def describe_failure(error: Exception, step: int, worker: int) -> FunctionFailure:
    """Return a message about the exception of a function."""
    error_class, arguments = type(error), b""
    with contextlib.suppress(TypeError):
        packed, arrays = values.pack(list(error.args), "")
        arguments = b"" if arrays else msgspec.json.encode(packed)
    return FunctionFailure(
        error_class.__module__, error_class.__qualname__, str(error), arguments, step, worker
    )


def report_failure(error: Exception, step: int, function: Any, worker: int) -> FunctionFailure:
    """Write the traceback of a function's exception to the log, and return a message about it."""
    print(f"function {step + 1} ({name_of(function)}) raises an exception:", file=sys.stderr)
    traceback.print_exception(error)
    return describe_failure(error, step, worker)


def name_of(function: Any) -> str:
    """Return the name of a function, for messages."""
    return getattr(function, "__name__", type(function).__name__)


def raise_failure(failure: FunctionFailure) -> NoReturn:
    """Raise the exception of a function, with its class if this process knows it."""
    error_class: Any = sys.modules.get(failure.module)
    for name in failure.name.split("."):
        error_class = getattr(error_class, name, None)
    error: Exception | None = None
    if isinstance(error_class, type) and issubclass(error_class, Exception):
        packed_arguments = msgspec.json.decode(failure.arguments) if failure.arguments else [failure.message]
        # Errors of TensorFlow also have a node and an operation.
        for arguments in (values.unpack(packed_arguments, {}), (None, None, failure.message)):
            with contextlib.suppress(Exception):
                error = error_class(*arguments)
                break
    if error is None:
        error = FunctionError(f"{failure.module}.{failure.name}: {failure.message}")
    error.add_note(
        f"function {failure.step + 1} raised this on worker {failure.worker}, whose log has the traceback"
    )
    raise error
