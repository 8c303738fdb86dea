"""The newest checkpoints of a job's hosts, and the choice of the one to resume from. Pure."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from lockstep.errors import ConfigError


class JobFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts that a checkpoint records about its job; older checkpoints lack some, which get defaults."""

    replicas: Annotated[int, msgspec.Meta(ge=1)]
    seed: Annotated[int, msgspec.Meta(ge=0)]
    threads: Annotated[int, msgspec.Meta(ge=0)]
    input: str = ""
    backend: str = ""
    libraries: dict[str, str] = {}


class HeldCheckpoint(msgspec.Struct, frozen=True):
    """The newest complete checkpoint in a folder of one host.

    Attributes:
        step: training steps since the start of the job.
        digest: a hash of the state; equal for checkpoints of one step of one job.
        job: the facts that it records about its job.
        finished: whether the job finished with it.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    digest: str
    job: JobFacts
    finished: bool = False

    def is_same(self, other: "HeldCheckpoint | None") -> bool:
        """Whether another host holds the same state."""
        return other is not None and (self.step, self.digest) == (other.step, other.digest)


def choose_newest(names: Sequence[str], held: Sequence[HeldCheckpoint | None]) -> int | None:
    """Return the position of the first host with the newest checkpoint, or None if no host has one.

    Args:
        names: the names of the hosts, for messages.
        held: the newest complete checkpoint of each host, or None.

    Raises:
        ConfigError: two hosts have checkpoints of the same step of different jobs.
    """
    chosen = None
    for position, checkpoint in enumerate(held):
        best = held[chosen] if chosen is not None else None
        if checkpoint is not None and (best is None or checkpoint.step > best.step):
            chosen = position
    best = held[chosen] if chosen is not None else None
    for name, checkpoint in zip(names, held, strict=True):
        if (
            best is not None
            and checkpoint is not None
            and checkpoint.step == best.step
            and not checkpoint.is_same(best)
        ):
            assert chosen is not None
            raise ConfigError(
                f"the checkpoints of step {checkpoint.step} on {names[chosen]} and {name} belong to "
                "different jobs; remove those of one host, or give another folder"
            )
    return chosen
