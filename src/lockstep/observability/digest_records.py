"""The records of the digest log, in which a worker describes the bits of training.

The tag and the fields of a class are a row of docs/run-folder.md, which a test compares.
"""

from typing import get_args

import msgspec

DIGEST_FORMAT = 1
"""The format of the digest log."""

HASH_DIGITS = 16
"""Digits of the hash of an array in the digest log."""


class ProgramRecorded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="program"):
    """Everything except data on which a run's bits depend, for one worker; published when it changes.

    Attributes:
        format: the format of the digest log.
        seed: the seed of the job.
        replicas: R.
        threads: number of threads that compute one replica.
        input: how the workers read datasets: `divided` or `joint`.
        backend: the Keras backend.
        versions: the versions of Python, of Keras and its libraries, and of packages that the program's own
            source files import, by name.
        flags: environment variables that can change the results of a script, by name.
        processor: the kind of the processor.
        features: the instruction sets of the processor, separated by spaces.
        sources: SHA-256 of the program's own source files, by path; below the script's folder relative to it.
        script: the path of the script in `sources`; empty if there is none.
        keras: values of Keras's configuration, by the name of the function of `keras.config`.
        variables: for each environment variable that is set and that the program's source names, 4 digits of
            a hash of its value, or `set` for a possible secret; None in earlier versions.
    """

    format: int = DIGEST_FORMAT
    seed: int
    replicas: int
    threads: int
    input: str
    backend: str
    versions: dict[str, str]
    flags: dict[str, str]
    processor: str
    features: str
    sources: dict[str, str]
    script: str
    keras: dict[str, str] = {}
    variables: dict[str, str] | None = None


class SettingsRecorded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="settings"):
    """The settings of a distributed call, its model, optimizer, loss and callbacks, when it begins.

    Published for the first call of a method, and for each call whose settings differ from those of the
    previous one.

    Attributes:
        call: its call, such as `fit 1`.
        trained: number of training steps before the call.
        settings: short texts by name.
    """

    call: str
    trained: int
    settings: dict[str, str]


class NamesRecorded(msgspec.Struct, frozen=True, tag_field="event", tag="names"):
    """The names of the arrays of partials and totals, or of variables, in the order of their hashes.

    Attributes:
        key: the key of this list of names in `StepDigests`.
        names: the names of the arrays.
    """

    key: str
    names: tuple[str, ...]


class StepDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Hashes (XXH3, hexadecimal) of the part of one step that one worker has computed.

    A hash of several arrays is the hash of their 8-byte hashes in the order of their names. `..._parts` has
    the hashes of the arrays, 16 digits each, without separators.

    Attributes:
        step: number of training steps of the job, with this one if it trains, in all calls.
        call: its call, such as `fit 1`.
        number: the number of the step in its call, from 1.
        trains: whether it is a training step.
        shapes: the dtypes and shapes of the arrays of the whole batch, of the first step of a call.
        examples: the examples of each replica that this worker has computed, by replica.
        inputs: the examples of each replica, as they were read.
        rows: the examples of each replica in at most 1024 parts of equal numbers of rows, 8 digits per part.
        names: key of the names of partials and total.
        partials: the partial of each replica that this worker has computed.
        partial_parts: the same by array.
        total: the sum of all partials; empty if not recorded.
        total_parts: the same by array.
        variables: key of the names of the variables.
        before: the weights, layer state and optimizer's variables before the step; empty if not recorded.
        before_parts: the same by variable.
        after: the same after the step, before anything else changes them.
        after_parts: the same by variable.
    """

    step: int
    call: str
    number: int
    trains: bool = True
    shapes: tuple[str, ...] = ()
    examples: dict[int, int] = {}
    inputs: dict[int, str] = {}
    rows: dict[int, str] = {}
    names: str = ""
    partials: dict[int, str] = {}
    partial_parts: dict[int, str] = {}
    total: str = ""
    total_parts: str = ""
    variables: str = ""
    before: str = ""
    before_parts: str = ""
    after: str = ""
    after_parts: str = ""


class DigestsRecorded(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="digests"):
    """Hashes of steps of a worker, in the order in which it has completed them.

    Attributes:
        serial: number of this event among those of its worker's process, from 1. A missing number is a lost
            event.
        stride: the stride of the last step; steps whose number it does not divide are not recorded.
        steps: the steps.
    """

    serial: int
    stride: int
    steps: tuple[StepDigests, ...]


WorkerDigest = ProgramRecorded | SettingsRecorded | NamesRecorded | DigestsRecorded
"""What a worker records of the bits of a training; the coordinator publishes it again."""

WORKER_DIGESTS: tuple[type[WorkerDigest], ...] = get_args(WorkerDigest)
"""The events in the digest log, after the `job` event of each run."""
