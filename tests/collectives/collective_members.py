"""Worlds that run one script on every member of a view: threads of this process, or processes."""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

from lockstep.collectives.contract import Communicator, Waiting, WaitPolicy
from lockstep.collectives.loopback import Hub
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.buffers import Buffers
from lockstep.collectives.shared.communicator import SharedCommunicator
from lockstep.collectives.shared.control_segment import ControlSegment
from lockstep.collectives.shared.pool import SharedPool
from lockstep.system.clock import SystemClock
from lockstep.system.memory import available_memory
from lockstep.topology import place

DEADLINE = 300.0


class TickingClock(SystemClock):
    """Advances by `step` seconds with every reading."""

    def __init__(self, step: float) -> None:
        self._step = step
        self._now = 0.0

    def now(self) -> float:
        self._now += self._step
        return self._now


@dataclasses.dataclass
class Member:
    """What a script sees."""

    communicator: Communicator
    plan: ReducePlan
    position: int
    proceed: Callable[[], None]
    """Blocks until the test releases this member."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended on one member."""

    value: Any = None
    error: type[BaseException] | None = None
    message: str = ""
    waits: tuple[Waiting, ...] = ()


class Control(Protocol):
    """What a test can do while members run."""

    def release(self, position: int) -> None: ...

    def abort(self, reason: str) -> None: ...

    def post_notice(self, notice: int) -> None: ...

    def signal(self, position: int, number: int) -> None: ...


Listener = Callable[[Control, int, Waiting], None]
Script = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    policy: WaitPolicy = dataclasses.field(default_factory=WaitPolicy)
    clock_step: float | None = None
    available: int | None = None


def plan_of(replicas: int, workers: Sequence[int] | int) -> ReducePlan:
    ids = tuple(range(workers)) if isinstance(workers, int) else tuple(workers)
    return ReducePlan.of(place(replicas, ids))


def _release_last(control: Control, plan: ReducePlan, ended: Collection[int], absent: Sequence[int]) -> None:
    if set(range(plan.members)) - set(ended) == set(absent):
        for position in absent:
            control.release(position)


def perform(script: Script, member: Member, args: Sequence[Any], waits: list[Waiting]) -> Outcome:
    try:
        value = script(member, *args)
    except BaseException as error:
        return Outcome(None, type(error), str(error), tuple(waits))
    return Outcome(value, waits=tuple(waits))


class Threads:
    """Members are threads, joined by a `Hub`."""

    name = "loopback"

    def run(
        self,
        plan: ReducePlan,
        script: Script,
        *args: Any,
        settings: Settings | None = None,
        listen: Listener | None = None,
        absent: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run `script` on all members; release those that are `absent` when the others have ended."""
        settings = settings or Settings()
        told: queue.Queue[tuple[int, Waiting | Outcome]] = queue.Queue()
        position_of = threading.local()
        waits: list[list[Waiting]] = [[] for _ in plan.workers]

        def observe(waiting: Waiting) -> None:
            waits[position_of.value].append(waiting)
            told.put((position_of.value, waiting))

        clock = TickingClock(settings.clock_step) if settings.clock_step else None
        control = _ThreadControl(Hub(plan, settings.policy, observe, clock))

        def go(position: int) -> None:
            position_of.value = position
            member = Member(control.hub.member(position), plan, position, control.go(position).acquire)
            told.put((position, perform(script, member, args, waits[position])))

        threads = [
            threading.Thread(target=go, args=(position,), daemon=True) for position in range(plan.members)
        ]
        for thread in threads:
            thread.start()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < plan.members:
            position, event = told.get(timeout=DEADLINE)
            if isinstance(event, Outcome):
                outcomes[position] = event
                _release_last(control, plan, outcomes, absent)
            elif listen:
                listen(control, position, event)
        for thread in threads:
            thread.join()
        return [outcomes[position] for position in range(plan.members)]

    def close(self) -> None:
        pass


class _ThreadControl:
    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._go: dict[int, threading.Semaphore] = {}

    def go(self, position: int) -> threading.Semaphore:
        return self._go.setdefault(position, threading.Semaphore(0))

    def release(self, position: int) -> None:
        self.go(position).release()

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def post_notice(self, notice: int) -> None:
        self.hub.post_notice(notice)

    def signal(self, position: int, number: int) -> None:
        raise NotImplementedError("a thread gets no signals")


class Processes:
    """Members are processes that live as long as the world and take part in one view after another."""

    name = "shared memory"

    def __init__(self) -> None:
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []

    def run(
        self,
        plan: ReducePlan,
        script: Script,
        *args: Any,
        settings: Settings | None = None,
        listen: Listener | None = None,
        absent: Sequence[int] = (),
    ) -> list[Outcome]:
        """Run `script` on all members; release those that are `absent` when the others have ended."""
        while len(self._members) < plan.members:
            self._members.append(_start())
        members = self._members[: plan.members]
        segment, pool = ControlSegment.create(plan.members), SharedPool.create()
        for position, (process, connection) in enumerate(members):
            send_handle(connection, segment.fd, process.pid)
            send_handle(connection, pool.fd, process.pid)
            connection.send((plan, position, settings or Settings(), script, args))
        try:
            return self._listen(_ProcessControl(segment, members), plan, listen, absent)
        except BaseException:
            self.close()
            raise
        finally:
            segment.close()
            pool.close()

    def _listen(
        self,
        control: "_ProcessControl",
        plan: ReducePlan,
        listen: Listener | None,
        absent: Sequence[int],
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + DEADLINE
        while len(outcomes) < plan.members:
            open_ones = {self._members[at][1]: at for at in range(plan.members) if at not in outcomes}
            ready = wait(list(open_ones), timeout=end - time.monotonic())
            if not ready:
                raise TimeoutError(f"members {sorted(open_ones.values())} do not end")
            for connection in ready:
                position = open_ones[connection]
                try:
                    event = connection.recv()
                except (EOFError, ConnectionResetError):
                    event = Outcome(error=ProcessLookupError, message="killed")
                    self._replace(position)
                if isinstance(event, Outcome):
                    outcomes[position] = event
                    _release_last(control, plan, outcomes, absent)
                elif listen:
                    listen(control, position, event)
        return [outcomes[position] for position in range(plan.members)]

    def _replace(self, position: int) -> None:
        process, connection = self._members[position]
        process.wait()
        connection.close()
        self._members[position] = _start()

    def close(self) -> None:
        for process, connection in self._members:
            process.kill()
            process.wait()
            connection.close()
        self._members.clear()


class _ProcessControl:
    def __init__(
        self, segment: ControlSegment, members: list[tuple[subprocess.Popen[bytes], Connection]]
    ) -> None:
        self._segment = segment
        self._members = members

    def release(self, position: int) -> None:
        self._members[position][1].send("proceed")

    def abort(self, reason: str) -> None:
        self._segment.abort(reason)

    def post_notice(self, notice: int) -> None:
        self._segment.post_notice(notice)

    def signal(self, position: int, number: int) -> None:
        process, _ = self._members[position]
        process.send_signal(number)
        if number == signal.SIGKILL:
            # As the agent does: a dead member is reaped before the others are notified.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    code = f"import collective_members; collective_members.serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    theirs.close()
    return process, ours


def serve(fd: int) -> None:
    """Take part in one view after another, until the test ends."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError):
        while True:
            _take_part(connection, recv_handle(connection), recv_handle(connection))


def _take_part(connection: Connection, fd: int, pool_fd: int) -> None:
    plan, position, settings, script, args = connection.recv()
    waits: list[Waiting] = []

    def observe(waiting: Waiting) -> None:
        waits.append(waiting)
        connection.send(waiting)

    segment = ControlSegment.attach(fd)
    clock = TickingClock(settings.clock_step) if settings.clock_step else None
    pool = SharedPool.attach(pool_fd, lambda: settings.available or available_memory())
    communicator = SharedCommunicator(segment, Buffers(pool), position, plan, settings.policy, observe, clock)
    member = Member(communicator, plan, position, connection.recv)
    outcome = perform(script, member, args, waits)
    communicator.close()
    segment.close()
    pool.close()
    connection.send(outcome)
