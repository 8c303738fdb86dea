"""Options of strategies, named as in `tf.distribute`."""

from dataclasses import dataclass
from enum import Enum

from lockstep.errors import InputError
from lockstep.keras.replica_run.merges import Op


class ReduceOp(Enum):
    """How the values of replicas are combined.

    Example:
        >>> import lockstep
        >>> strategy = lockstep.get_strategy()
        >>> strategy.reduce(lockstep.ReduceOp.SUM, [1.0, 2.0], axis=None)
        [1.0, 2.0]
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def of(cls, operation: object) -> Op:
        """Return the operation for a member, TensorFlow's equivalent, or a name in any case.

        Raises:
            InputError: `operation` is none of these.
        """
        name = str(getattr(operation, "value", operation)).upper()
        if name not in cls.__members__:
            raise InputError(f"a reduction is ReduceOp.SUM or ReduceOp.MEAN, not {operation!r}")
        return "sum" if name == "SUM" else "mean"


class CommunicationImplementation(Enum):
    """How bytes move between workers. It does not affect the result.

    Example:
        >>> import lockstep
        >>> lockstep.CommunicationImplementation("RING")
        <CommunicationImplementation.RING: 'RING'>
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How workers exchange data.

    Attributes:
        bytes_per_pack: ignored, because shared memory does not need packs.
        timeout_seconds: the seconds for which others wait for a stuck worker; None for the job's timeout.
        implementation: how bytes move.

    Example:
        >>> import lockstep
        >>> options = lockstep.CommunicationOptions(timeout_seconds=120)
        >>> strategy = lockstep.MultiWorkerMirroredStrategy(communication_options=options)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise InputError(f"bytes_per_pack is {self.bytes_per_pack}; expected 0 or more")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise InputError(f"timeout_seconds is {self.timeout_seconds}; expected seconds, more than 0")
