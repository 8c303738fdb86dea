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
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, Protocol

from lockstep.collectives.contract import Communicator, PeerWait, WaitPolicy
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
    """The argument of a script.

    Attributes:
        communicator: of this member.
        plan: of the view.
        position: of this member among the view's workers.
        releases: how often the script has waited for a release.
    """

    communicator: Communicator
    plan: ReducePlan
    position: int
    _await_release: Callable[[], object]
    releases: int = 0

    def proceed(self) -> None:
        """Wait until the test releases this member; each call needs a release of its own."""
        self._await_release()
        self.releases += 1


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended on one member.

    Attributes:
        value: what the script returned.
        error: what it raised, if anything.
        message: of the error.
        waits: the reports on waits of this member.
        releases: how often the script waited for a release.
    """

    value: Any = None
    error: type[BaseException] | None = None
    message: str = ""
    waits: tuple[PeerWait, ...] = ()
    releases: int = 0


class Control(Protocol):
    """What a test can do to running members."""

    def release(self, position: int) -> None: ...

    def abort(self, reason: str) -> None: ...

    def post_notice(self, notice: int) -> None: ...

    def signal(self, position: int, number: int) -> None: ...


Listener = Callable[[Control, int, PeerWait], None]
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


def _check_releases(control: "_ReleaseCount", outcomes: dict[int, Outcome]) -> None:
    """Raise an error if a member was released more often than its script waited for it.

    A member process would read the surplus message as its next task.
    """
    for position, outcome in outcomes.items():
        if outcome.error is not ProcessLookupError and outcome.releases != control.releases[position]:
            raise AssertionError(
                f"member {position} was released {control.releases[position]} times, "
                f"but waited {outcome.releases} times"
            )


def perform(script: Script, member: Member, args: Sequence[Any], waits: list[PeerWait]) -> Outcome:
    try:
        value = script(member, *args)
    except BaseException as error:
        return Outcome(None, type(error), str(error), tuple(waits), member.releases)
    return Outcome(value, None, "", tuple(waits), member.releases)


class _ReleaseCount:
    """Counts the releases of each member."""

    def __init__(self) -> None:
        self.releases: Counter[int] = Counter()


class Threads:
    """Members are threads of this process, connected by a `Hub`."""

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
        """Run `script` on all members; release the `absent` ones when the others have ended.

        Raises:
            AssertionError: a member was released more often than its script waited for it.
        """
        settings = settings or Settings()
        events: queue.Queue[tuple[int, PeerWait | Outcome]] = queue.Queue()
        position_of = threading.local()
        waits: list[list[PeerWait]] = [[] for _ in plan.workers]

        def observe(waiting: PeerWait) -> None:
            waits[position_of.value].append(waiting)
            events.put((position_of.value, waiting))

        clock = TickingClock(settings.clock_step) if settings.clock_step else None
        control = _ThreadControl(Hub(plan, settings.policy, observe, clock))

        def serve_member(position: int) -> None:
            position_of.value = position
            member = Member(control.hub.member(position), plan, position, control.gate(position).acquire)
            events.put((position, perform(script, member, args, waits[position])))

        threads = [
            threading.Thread(target=serve_member, args=(position,), daemon=True)
            for position in range(plan.members)
        ]
        for thread in threads:
            thread.start()
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < plan.members:
            position, event = events.get(timeout=DEADLINE)
            if isinstance(event, Outcome):
                outcomes[position] = event
                _release_last(control, plan, outcomes, absent)
            elif listen:
                listen(control, position, event)
        for thread in threads:
            thread.join()
        _check_releases(control, outcomes)
        return [outcomes[position] for position in range(plan.members)]

    def close(self) -> None:
        pass


class _ThreadControl(_ReleaseCount):
    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.hub = hub
        self._gates: dict[int, threading.Semaphore] = {}

    def gate(self, position: int) -> threading.Semaphore:
        return self._gates.setdefault(position, threading.Semaphore(0))

    def release(self, position: int) -> None:
        self.releases[position] += 1
        self.gate(position).release()

    def abort(self, reason: str) -> None:
        self.hub.abort(reason)

    def post_notice(self, notice: int) -> None:
        self.hub.post_notice(notice)

    def signal(self, position: int, number: int) -> None:
        raise NotImplementedError("threads receive no signals")


class Processes:
    """Members are processes that live as long as the world and join one view after another."""

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
        """Run `script` on all members; release the `absent` ones when the others have ended.

        Raises:
            AssertionError: a member was released more often than its script waited for it.
        """
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
            running = {self._members[at][1]: at for at in range(plan.members) if at not in outcomes}
            ready = wait(list(running), timeout=end - time.monotonic())
            if not ready:
                raise TimeoutError(f"members {sorted(running.values())} do not end")
            for connection in ready:
                position = running[connection]
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
        _check_releases(control, outcomes)
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


class _ProcessControl(_ReleaseCount):
    def __init__(
        self, segment: ControlSegment, members: list[tuple[subprocess.Popen[bytes], Connection]]
    ) -> None:
        super().__init__()
        self._segment = segment
        self._members = members

    def release(self, position: int) -> None:
        self.releases[position] += 1
        self._members[position][1].send("proceed")

    def abort(self, reason: str) -> None:
        self._segment.abort(reason)

    def post_notice(self, notice: int) -> None:
        self._segment.post_notice(notice)

    def signal(self, position: int, number: int) -> None:
        process, _ = self._members[position]
        process.send_signal(number)
        if number == signal.SIGKILL:
            # Like the agent, which reaps a dead member before it notifies the others.
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
    """Join one view after another, until the test ends."""
    connection = Connection(fd)
    with contextlib.suppress(EOFError):
        while True:
            _join_view(connection, recv_handle(connection), recv_handle(connection))


def _join_view(connection: Connection, fd: int, pool_fd: int) -> None:
    plan, position, settings, script, args = connection.recv()
    waits: list[PeerWait] = []

    def observe(waiting: PeerWait) -> None:
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
