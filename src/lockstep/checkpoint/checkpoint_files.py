"""One checkpoint: a folder with the arrays and the manifest. docs/checkpoints.md describes the format."""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from lockstep.checkpoint.copy_check import CopyCheck, checksum_of
from lockstep.checkpoint.durable import reason, sync, write_file
from lockstep.checkpoint.values import plain, storable
from lockstep.errors import CheckpointError, UnknownFormatError
from lockstep.system.files import read_regular

Array = npt.NDArray[Any]

STATE = "state.safetensors"
MANIFEST = "manifest.json"
FILES = (STATE, MANIFEST)
"""The files of a checkpoint; with the last one, it is complete."""
_FORMAT = 1
_SEAL = b'{"checksum": "'
_SEALED = b'",\n'
_LAST_TIME = 253402300799
"""The end of the year 9999, in seconds since 1970."""


@dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        step: training steps since the start of the job; orders checkpoints.
        manifest: JSON data, which may include non-finite floats.
        arrays: the arrays by name, in any shape; the dtypes are bool, integers of 8 to 64 bits, float16,
            float32, float64 and bfloat16.
        checks: facts about the arrays before they were copied, by name; empty if changes of copies need not
            be detected.
    """

    step: int
    manifest: Mapping[str, Any]
    arrays: Mapping[str, Array]
    checks: Mapping[str, CopyCheck] = field(default_factory=dict)


class Outline(msgspec.Struct, frozen=True):
    """The manifest of a checkpoint, apart from the format; the sizes on the disk agree with it.

    Attributes:
        step: the step of the contents.
        time: the time at which it was written, in seconds since 1970.
        manifest: the manifest of the contents.
        arrays: (dtype, shape, checksum) by name.
        bytes: the size of the file with the arrays.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    time: Annotated[float, msgspec.Meta(ge=0, le=_LAST_TIME)]
    manifest: dict[str, Any]
    arrays: dict[str, tuple[str, list[int], str]]
    bytes: Annotated[int, msgspec.Meta(ge=0)]


def check_names(arrays: Mapping[str, Array]) -> None:
    """Check that all arrays can be saved.

    Raises:
        CheckpointError: the format does not support the name or the dtype of an array.
    """
    for name, array in arrays.items():
        if name == "__metadata__" or not plain(name):
            raise CheckpointError(f"a checkpoint cannot hold an array named {name!r}")
        if not storable(array.dtype):
            raise CheckpointError(f"a checkpoint cannot hold the array {name!r}: its dtype is {array.dtype}")


def write_folder(folder: Path, contents: Contents, time: float) -> None:
    """Write a checkpoint to an empty folder, the manifest last, and flush everything to the disk.

    Raises:
        CheckpointError: an array has changed since it was copied.
        OSError, SafetensorError: the checkpoint cannot be written.
        TypeError, ValueError: the manifest contains values that JSON cannot represent.
    """
    # This copies only non-contiguous arrays.
    arrays = {name: np.asarray(array, order="C") for name, array in contents.arrays.items()}
    facts = {name: _facts(array) for name, array in arrays.items()}
    for name, check in contents.checks.items():
        if facts[name][2] != check.checksum:
            raise CheckpointError(
                f"the copy of the array {name!r} for the checkpoint of step {contents.step} has changed: the "
                "processor or the memory of this host is at fault"
            )
    body: dict[str, Any] = {
        "format": _FORMAT,
        "step": contents.step,
        "time": time,
        "arrays": facts,
        "manifest": dict(contents.manifest),
    }
    json.dumps(body["manifest"])  # This raises an error before the arrays are written.
    state = folder / STATE
    save_file(arrays, state)
    # The library creates files that only the owner can read.
    state.chmod(folder.stat().st_mode & 0o666)
    sync(state)
    body["bytes"] = state.stat().st_size
    write_file(folder / MANIFEST, sealed(json.dumps(body, separators=(",", ":")).encode()[1:]))
    sync(folder)


def load(path: Path) -> Contents:
    """Read and verify the checkpoint in the folder `path`.

    Raises:
        CheckpointError: it is damaged or incomplete, or cannot be read; the message names the file and the
            fault. If its format is that of another version, this is an `UnknownFormatError`.
    """
    outline = read_outline(path)
    state = path / STATE
    try:
        # The file is not mapped: if the disk fails, this must raise an error, not kill the process.
        arrays = load_file(state, backend="pread")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{state} cannot be read: {reason(error)}") from None
    except AttributeError as error:
        # The file has a dtype that NumPy does not support.
        raise CheckpointError(f"{state} cannot be read: {error}") from None
    if arrays.keys() != outline.arrays.keys():
        different = sorted(arrays.keys() ^ outline.arrays.keys())
        raise CheckpointError(
            f"{state} is damaged: {MANIFEST} and this file differ in the arrays {different}"
        )
    check_names(arrays)
    for name, array in arrays.items():
        if _facts(array) != outline.arrays[name]:
            raise CheckpointError(
                f"{state} is damaged: the array {name!r} differs from the one that was written"
            )
    return Contents(outline.step, outline.manifest, {name: arrays[name] for name in outline.arrays})


def read_outline(path: Path) -> Outline:
    """Read and verify the manifest in the folder `path`, and compare the sizes of the files with it.

    Raises:
        CheckpointError: as for `load`.
    """
    file, state = path / MANIFEST, path / STATE
    try:
        data = read_regular(file)
    except FileNotFoundError:
        raise CheckpointError(
            f"{file} is missing: it is written last, so this checkpoint is incomplete"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from None
    outline = _unseal(data, file)
    try:
        status = state.stat()
    except OSError as error:
        raise CheckpointError(f"{state} cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{state} cannot be read: it is not a regular file")
    if status.st_size != outline.bytes:
        raise CheckpointError(f"{state} is damaged: it has {status.st_size} bytes instead of {outline.bytes}")
    return outline


def _facts(array: Array) -> tuple[str, list[int], str]:
    return array.dtype.name, list(array.shape), checksum_of(array)


def sealed(text: bytes) -> bytes:
    """Return the contents of a manifest's file: the checksum of `text`, and `text`."""
    return _SEAL + xxhash.xxh3_128_hexdigest(text).encode() + _SEALED + text


def _unseal(data: bytes, file: Path) -> Outline:
    head, sealed, text = data.partition(_SEALED)
    if not sealed or head != _SEAL + xxhash.xxh3_128_hexdigest(text).encode():
        raise CheckpointError(f"{file} is damaged: its content does not match its checksum")
    try:
        body: dict[str, Any] = json.loads(b"{" + text)
        version = body.get("format")
        if type(version) is int and version != _FORMAT:
            raise UnknownFormatError.of(file, version, _FORMAT)
        if version != _FORMAT:
            raise ValueError(f"its format is {version!r:.80}")
        return msgspec.convert(body, Outline)
    except RecursionError:
        raise CheckpointError(f"{file} is not a manifest of Lockstep: it is nested too deeply") from None
    except ValueError as error:
        # The checksum is correct, so the file is not damaged, but Lockstep did not write it.
        raise CheckpointError(f"{file} is not a manifest of Lockstep: {error}") from None
