"""Every error that Lockstep raises on purpose::

    LockstepError
    |-- InputError             the user's input is wrong; the message names the remedy
    |   |-- ConfigError        a command line, an environment variable
    |   |-- ChangedError       a program whose settings differ from its checkpoint's
    |   |-- ScopeError         a model used outside the strategy it belongs to
    |   |-- DataError          an input that cannot be split over replicas
    |   `-- ModelError         a step that cannot be computed by replicas
    |-- PeerError              another worker is the cause
    |   |-- PeerLostError      it ended, or its script raised
    |   |-- PeerStuckError     it did not arrive in the stated time
    |   `-- DisagreementError  it computes something different from this worker
    |       `-- WrongStateError    the state was wrong; the job starts again from a checkpoint before that
    |-- UnfitError             this machine or environment does not support the request
    |   |-- BackendError       the Keras backend is missing or not supported
    |   |-- SharedMemoryError  too little memory to exchange gradients in
    |   |-- NetworkError       a connection to another host fails, or is refused
    |   |   `-- UnreachableError   the host cannot be reached at all
    |   `-- CheckpointError    a checkpoint cannot be written, is damaged, or belongs to another model
    |       `-- SupersededError     another job continues the training whose checkpoints this one saves
    |-- FunctionError          a scheduled function failed with an exception of a class unknown here
    |-- JobError               the job of a function ended without a result
    `-- InternalError          a bug in Lockstep

Errors of other libraries are mapped to these where they enter.

The name of a class is the code of its errors: a message on a terminal carries it, as in
`worker 1: DataError: batch 3 of the input has no rows`, and `lockstep explain DataError` explains it.
"""

import re
from typing import Self


class LockstepError(Exception):
    """The base of all errors that Lockstep raises on purpose."""


class InputError(LockstepError):
    """The user's input is wrong."""


class ConfigError(InputError):
    """A command line or an environment variable is wrong."""


class ChangedError(InputError):
    """A program's settings differ from those of the checkpoint that it would resume from."""


class ScopeError(InputError):
    """A model is used outside of its strategy, or has none."""


class DataError(InputError):
    """An input cannot be split over replicas."""


class ModelError(InputError):
    """Replicas cannot compute the step of a model."""


class PeerError(LockstepError):
    """Another worker is the cause."""


class PeerLostError(PeerError):
    """A worker ended, or its script raised, while others still needed it."""


class PeerStuckError(PeerError):
    """A worker did not arrive in the stated time."""


class DisagreementError(PeerError):
    """Workers compute different values.

    Attributes:
        workers: ids of the workers that differ from the chief; empty if unknown.
    """

    def __init__(self, message: str, workers: tuple[int, ...] = ()) -> None:
        super().__init__(message, workers)
        self.workers = workers

    def __str__(self) -> str:
        return str(self.args[0])


class WrongStateError(DisagreementError):
    """A state of the training was wrong in the memory of a worker, and an earlier checkpoint is left."""


class UnfitError(LockstepError):
    """This machine or environment does not support the request."""


class BackendError(UnfitError):
    """The Keras backend is missing or not supported."""


class SharedMemoryError(UnfitError):
    """There is too little shared memory to exchange gradients."""


class NetworkError(UnfitError):
    """A connection to another host fails, or is refused."""


class UnreachableError(NetworkError):
    """Another host cannot be reached at all, so a further attempt would also fail."""


class CheckpointError(UnfitError):
    """A checkpoint cannot be written, is damaged or incomplete, or belongs to another model."""


class SupersededError(CheckpointError):
    """Another job saves its checkpoints in the same place, and continues training."""


class UnknownFormatError(CheckpointError):
    """A checkpoint, or a run in an object store, has a format of another version.

    In this case, a checkpoint is not damaged, so no other checkpoint replaces it.
    """

    @classmethod
    def of(cls, where: object, written: object, read: int) -> Self:
        """Return the error for a file whose format is `written`, while this version reads `read`."""
        return cls(
            f"{where} has the format {written!r:.80}, but this Lockstep reads {read}; use the version that "
            "wrote it"
        )


class FunctionError(LockstepError):
    """A function of a `ClusterCoordinator` failed on a worker, with an exception that cannot be raised
    here."""


class JobError(LockstepError):
    """The job of `lockstep.launch` or `lockstep.ray.fit` ended without a result.

    Attributes:
        worker: the id of the worker that caused it, if any.
        traceback: the traceback of the exception that the function raised there, or empty.
    """

    def __init__(self, message: str, worker: int | None = None, traceback: str = "") -> None:
        super().__init__(message, worker, traceback)
        self.worker = worker
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.args[0]}\n\n{self.traceback}" if self.traceback else str(self.args[0])


class InternalError(LockstepError):
    """A bug in Lockstep."""


def with_code(error: Exception) -> str:
    """Return the message of an error; if Lockstep raised it on purpose, it begins with its code."""
    codes = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == __name__)
    return f"{code}: {error}" if (code := next(codes, "")) else str(error)


def code_in(message: str) -> str:
    """Return the first code in a message, or an empty string if it has none."""
    return next((name for name in re.findall(r"\b(\w+Error): ", message) if name in globals()), "")
