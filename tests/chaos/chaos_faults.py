"""Faults that a worker causes in itself at named points of the protocol."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.checkpoint import checkpoint_files as folder
from lockstep.checkpoint.scheduler import CheckpointScheduler
from lockstep.collectives.contract import Span
from lockstep.collectives.shared import barrier, communicator, futex
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.packed_reduce import PackedReduce
from lockstep.collectives.shared.slice_reduce import SliceReduce
from lockstep.transport.state_memory import MemoryTransport
from lockstep.worker.membership import AgentMembership

POINTS = (
    "before publishing",
    "halfway through publishing",
    "published",
    "arrived",
    "halfway through summing",
    "summed",
    "after reduce",
    "after apply",
    "between two parts",
    "growing the memory",
    "in a gather",
    "before the next view",
    "in the next view",
)
WHILE_OTHERS_JOIN = (
    "reporting the state",
    "halfway through reporting",
    "state reported",
    "waiting for the change",
    "saving a checkpoint",
    "writing a checkpoint",
)
"""Points of members while workers join, and of the chief while it saves checkpoints."""
WHILE_JOINING = (
    "asking for the position",
    "after the position",
    "asking to join",
    "joined",
)
"""Points of joiners."""

BEFORE_UPDATING = ("state restored", "workers met", "slots compared")
"""Further points of joiners, if the members divide the update of a step; on JAX, slots are not compared."""

WHILE_UPDATING = (
    "filling the state",
    "before a shard",
    "halfway through keeping a block",
    "before a block is written",
    "halfway through a block",
    "after a shard",
    "waiting for the others",
    "before the new weights",
)
"""Points of members that divide the update of a step."""

KINDS = ("SIGKILL", "SIGSEGV", "SIGSTOP", "exception")
JOINER_KINDS = ("SIGKILL", "SIGSEGV", "differs")
"""A worker that differs computes from other data than the others from then on."""


@dataclass(frozen=True)
class Fault:
    """A fault of a worker, due when it first passes a point in `step` or a later one."""

    worker: int
    step: int
    point: str
    kind: str = "SIGKILL"


class ScriptError(Exception):
    """An error that the script raises on one worker only."""


class Faults:
    """The faults of one worker.

    Attributes:
        step: the current step of the worker.
        differs: whether it computes from other data than the others.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = list(faults)
        self.step = 0
        self.differs = False

    def passing(self, point: str) -> None:
        """Cause the first fault that is due at `point`."""
        for fault in self._faults:
            if fault.point == point and fault.step <= self.step:
                self._faults.remove(fault)
                if fault.kind == "differs":
                    self.differs = True
                else:
                    strike(fault.kind)
                return


def kill_here(wanted: bytes) -> None:
    """Kill the other processes on this host with a text in the command line, but no `sshd` that listens."""
    own = Path("/proc/self/ns/net").stat().st_ino
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if pid != os.getpid() and (entry / "ns/net").stat().st_ino == own:
                text = (entry / "cmdline").read_bytes()
                if wanted in text and (b"sshd: " not in text or b"[listener]" not in text):
                    os.kill(pid, signal.SIGKILL)


def strike(kind: str) -> None:
    """Kill this process or its host, stop it for a while, or raise."""
    if kind == "host":
        kill_here(b"")
        kind = "SIGKILL"
    if kind == "exception":
        raise ScriptError
    if kind == "SIGSTOP":
        # A stopped process cannot continue itself.
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.05; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), getattr(signal, kind))


def prepare(faults: Faults) -> None:
    """Insert the points into the code of the protocol."""

    def halfway(name: str, sums: str, point: str, after: str) -> None:
        original = getattr(SliceReduce, name)

        def wrapped(self: SliceReduce, *args: Any) -> None:
            every = getattr(self, sums)
            middle = len(every) // 2
            original(replace(self, **{sums: every[:middle]}), *args)
            faults.passing(point)
            original(replace(self, **{sums: every[middle:]}), *args)
            faults.passing(after)

        setattr(SliceReduce, name, wrapped)

    def restart(self: Any, *args: Any, **kwargs: Any) -> Any:
        total = reduce(self, *args, **kwargs)
        faults.passing("after reduce")
        return total

    reduces_of_parts = Buffers.slice_reduces

    def in_parts(self: Buffers, *args: Any) -> Any:
        reduces, total = reduces_of_parts(self, *args)

        def parts() -> Iterator[SliceReduce]:
            for number, part in enumerate(reduces):
                if number:
                    faults.passing("between two parts")
                yield part

        return parts(), total

    publish, add_up = PackedReduce.publish, PackedReduce.sum

    def published(self: PackedReduce, partials: Mapping[Span, Any], adder: Any) -> None:
        spans = list(partials)
        middle = len(spans) // 2
        publish(self, {span: partials[span] for span in spans[:middle]}, adder)
        faults.passing("halfway through publishing")
        publish(self, {span: partials[span] for span in spans[middle:]}, adder)
        faults.passing("published")

    def summed(self: PackedReduce, adder: Any) -> None:
        middle = len(self.total) // 2
        add_up(replace(self, total=self.total[:middle]), adder)
        faults.passing("halfway through summing")
        add_up(replace(self, total=self.total[middle:]), adder)
        faults.passing("summed")

    adder_of = futex.adder

    def arriving(address: int) -> Callable[[], None]:
        arrive = adder_of(address)

        def arrived() -> None:
            arrive()
            faults.passing("arrived")

        return arrived

    reduce = communicator.SharedCommunicator.reduce
    communicator.SharedCommunicator.reduce = restart  # type: ignore[method-assign]
    halfway("publish", "local_sums", "halfway through publishing", "published")
    halfway("sum", "total", "halfway through summing", "summed")
    Buffers.slice_reduces = in_parts  # type: ignore[method-assign]
    PackedReduce.publish = published  # type: ignore[method-assign]
    PackedReduce.sum = summed  # type: ignore[method-assign]
    futex.adder = arriving
    around(faults, communicator.SharedCommunicator, "_on_all_members", before="growing the memory")
    around(faults, communicator.SharedCommunicator, "gather", before="in a gather")
    around(faults, barrier.Barrier, "_receive", before="in a gather")
    around(faults, AgentMembership, "next_view", before="before the next view", after="in the next view")
    around(faults, AgentMembership, "hand_over", before="reporting the state", after="state reported")
    around(faults, MemoryTransport, "publish", after="halfway through reporting")
    around(faults, AgentMembership, "position", before="asking for the position", after="after the position")
    around(faults, AgentMembership, "join", before="asking to join", after="joined")
    around(faults, communicator.SharedCommunicator, "barrier", before="waiting for the change")
    around(faults, CheckpointScheduler, "after_step", before="saving a checkpoint")
    around(faults, folder, "save_file", before="writing a checkpoint")


def prepare_update(faults: Faults) -> None:
    """Insert the points of the divided update."""
    import keras

    from lockstep.collectives.shared import divided_state
    from lockstep.keras.fit import divided_update
    from lockstep.keras.state.snapshots import Snapshots

    update: Any
    if keras.backend.backend() == "jax":
        from lockstep.keras.backends.jax_blocks import JaxBlockUpdate as update
    else:
        from lockstep.keras.backends.torch_blocks import TorchBlockUpdate as update

        # The slots are updated in place, before the weights are copied.
        around(faults, update, "_apply", after="halfway through a block")

    copy_all = divided_state.copy_all

    def copied(targets: Sequence[Any], sources: Sequence[Any]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target[: len(target) // 2] = source[: len(target) // 2]
        # New weights and slots, or else slots that are kept or restored.
        wrote = len(targets) == _SLOTS + 1
        faults.passing("halfway through a block" if wrote else "halfway through keeping a block")
        copy_all(targets, sources)

    calls: Any = divided_update
    gather = calls.gather

    def gathered(*args: Any) -> list[bytes]:
        # Whether this worker has updated its shards.
        if args[-1] in (b"\0", b"\1"):
            faults.passing("waiting for the others")
        return gather(*args)

    divided_state.copy_all = copied
    calls.gather = gathered
    around(faults, Snapshots, "restore", after="state restored")
    around(faults, divided_update.DividedUpdate, "_meet", after="workers met")
    around(faults, divided_update.DividedUpdate, "_compare_slots", after="slots compared")
    around(faults, update, "fill", after="filling the state")
    around(faults, update, "compute", before="before a block is written")
    around(faults, update, "finish", before="before the new weights")
    around(faults, divided_state.DividedState, "update", before="before a shard", after="after a shard")


_SLOTS = 2
"""The slots of Adam."""


def around(faults: Faults, owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Insert points before and after each call of a function."""
    original: Callable[..., Any] = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            faults.passing(before)
        result = original(*args, **kwargs)
        if after:
            faults.passing(after)
        return result

    setattr(owner, name, wrapped)
