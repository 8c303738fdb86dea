"""The times of a call: sums over the steps of its workers, and the load of their hosts. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from operator import add, attrgetter

import msgspec
from msgspec.structs import replace

from lockstep.observability.growth import GrowingMap
from lockstep.observability.host_loads import HostLoads
from lockstep.observability.measurements import STEP_PARTS, LoadMeasured, StepsMeasured

parts_of = attrgetter(*STEP_PARTS)
"""Returns the seconds of the parts of a step, in their order."""


class WorkerTimes(msgspec.Struct, frozen=True):
    """Sums over steps of one worker in one call, without its first step, which compiles.

    Attributes:
        steps: the number of steps.
        examples: the examples of their global batches.
        replicas: sum over steps of the replicas that the worker executed.
        parts: seconds by part.
        calls: seconds of the part `nested`, by the method of the nested calls.
        compiled: the number of steps that were compiled, because of new shapes of examples.
        compiling: seconds of the part `compute` in these steps.
        shapes: the number of steps that were compiled since the call began, including steps before these
            sums.
    """

    steps: int = 0
    examples: int = 0
    replicas: int = 0
    parts: Mapping[str, float] = msgspec.field(default_factory=lambda: dict.fromkeys(STEP_PARTS, 0.0))
    calls: Mapping[str, float] = {}
    compiled: int = 0
    compiling: float = 0.0
    shapes: int = 0

    def plus(self, measured: StepsMeasured) -> "WorkerTimes":
        """Return the sums with another measurement."""
        calls = self.calls
        for method, seconds in measured.calls.items():
            calls = {**calls, method: calls.get(method, 0.0) + seconds}
        return WorkerTimes(
            steps=self.steps + measured.count,
            examples=self.examples + measured.examples,
            replicas=self.replicas + measured.replicas * measured.count,
            parts=dict(zip(STEP_PARTS, map(add, self.parts.values(), parts_of(measured)), strict=True)),
            calls=calls,
            compiled=self.compiled + measured.compiled,
            compiling=self.compiling + measured.compiling,
            shapes=self.shapes + measured.compiled,
        )

    @property
    def seconds(self) -> float:
        """The duration of the steps."""
        return sum(self.parts.values())

    @property
    def busy(self) -> float:
        """The duration without waiting, summing, compiling and nested calls."""
        idle = sum(self.parts[part] for part in ("wait", "exchange", "nested"))
        return self.seconds - self.compiling - idle

    @property
    def pace(self) -> float:
        """Busy seconds per replica that the worker executes."""
        return self.busy / self.replicas if self.replicas else 0.0


def is_first(measured: StepsMeasured) -> bool:
    """Whether a measurement is that of the first step of a call, which compiles."""
    return measured.number == 1 and measured.count == 1


def shares(workers: Iterable[WorkerTimes]) -> dict[str, float]:
    """Return the share of each part in the time of all workers, between 0 and 1, if any time was measured."""
    sums = dict.fromkeys(STEP_PARTS, 0.0)
    for worker in workers:
        for part, seconds in worker.parts.items():
            sums[part] += seconds
    total = sum(sums.values())
    return {part: seconds / total for part, seconds in sums.items()} if total else {}


def scores(workers: Mapping[int, WorkerTimes]) -> dict[int, float]:
    """Return the pace of each worker relative to the fastest: 1.0 is the fastest, 0.5 takes twice as long."""
    paces = {worker: times.pace for worker, times in workers.items() if times.pace > 0}
    return {worker: min(paces.values()) / pace for worker, pace in paces.items()}


class CallTimes(msgspec.Struct, frozen=True):
    """The times of a call on all workers, and the load of their hosts meanwhile.

    Attributes:
        call: the name of the call; empty before the first call.
        workers: the times of each worker.
        ended: the workers that have ended the call.
        hosts: the load of each host, by its name.
        chief: the chief; None if it is not known.
    """

    call: str = ""
    workers: GrowingMap[WorkerTimes] = GrowingMap()
    ended: frozenset[int] = frozenset()
    hosts: Mapping[str, HostLoads] = {}
    chief: int | None = None

    def measured(self, worker: int, measured: StepsMeasured) -> "CallTimes":
        """Return the times with a measurement of a worker, which may be the first of another call."""
        if not measured.call.startswith(("fit", "steps", "functions")):
            return self
        times = self if measured.call == self.call else CallTimes(measured.call)
        if is_first(measured):
            return times
        sums = (times.workers.find(worker) or WorkerTimes()).plus(measured)
        return replace(times, workers=times.workers.plus(worker, sums))

    def loaded(self, load: LoadMeasured, throttled: Mapping[int, str]) -> "CallTimes":
        """Return the times with a measurement of a host, and the GPUs of workers with a lowered clock."""
        if not self.call:
            return self
        loads = (self.hosts.get(load.host) or HostLoads()).plus(load, throttled)
        return replace(self, hosts={**self.hosts, load.host: loads})

    def after_end(self, call: str, worker: int) -> "CallTimes":
        """Return the times after a worker has ended a call."""
        return replace(self, ended=self.ended | {worker}) if call == self.call else self

    def of(self, members: Sequence[int]) -> "CallTimes":
        """Return the times of only the members, the chief first. Others also use their hosts."""
        workers: GrowingMap[WorkerTimes] = GrowingMap()
        for worker in members:
            if (times := self.workers.find(worker)) is not None:
                workers = workers.plus(worker, times)
        return replace(self, workers=workers, chief=next(iter(members), None))
