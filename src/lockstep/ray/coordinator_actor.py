"""The actor that keeps one coordinator of a job alive, and an agent on each node of the cluster."""

import contextlib
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ray._private.state import state as ray_state
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import CoordinatorListens, StartCoordinator, WorkersFound
from lockstep.ray.agent_actor import AgentActor
from lockstep.ray.placement import WorkerNeeds, places
from lockstep.ray.sealing import Opener, Sealed, seal
from lockstep.transport.keys import JobKey

NAMESPACE = "lockstep"
LEASE = 5.0
"""Seconds without contact to the cluster's control store after which the coordinator is killed: agents pause
after `HOLD`, and Ray starts this actor elsewhere only after both."""
_LOOK_EVERY = 0.5
_SETTLED = 10.0
"""Seconds for the agents of the first nodes to start, after which a job begins with those that there are."""
_PATIENCE = 5.0
_LISTENS = 60.0
_FOLLOWED = 15.0
"""Seconds without a call of the command after which the job stops."""
_FAREWELL = 30.0
"""Seconds for the command to take the last output."""
_MOST_OUTPUT = 8 << 20


@dataclass(frozen=True)
class RayJob:
    """A job on a cluster, as its command describes it.

    Attributes:
        name: of the job, unique in the cluster.
        words: the arguments of `lockstep` with which each coordinator is started.
        workers: number of workers.
        needs: of each worker.
        folder: of the script on all nodes; None for that of each actor, which a runtime environment sets.
        environment: the variables of the user that can change what a script computes.
        detached: whether the job continues without its command.
    """

    name: str
    words: tuple[str, ...]
    workers: int
    needs: WorkerNeeds
    folder: str | None
    environment: dict[str, str]
    detached: bool = False

    def actor(self, part: str) -> str:
        """Return the name of an actor of this job."""
        return f"{self.name}/{part}"


class Shown(NamedTuple):
    """What a coordinator has written since the last question.

    Attributes:
        run: identifies the actor's process: after a restart, positions begin again at 0.
        position: for the next question.
        output: pairs of 1 for stdout or 2 for stderr, and bytes.
        status: the exit status of the job, once it has ended and all output is shown; None before.
    """

    run: str
    position: int
    output: list[tuple[int, bytes]]
    status: int | None


@dataclass
class _Node:
    """A node with an agent.

    Attributes:
        actor: that runs it.
        workers: how many it offers.
        key: the answer to the question for its public key, until the agent has begun.
        begun: whether the agent has begun.
        retires: whether the agent was told that its node will go soon.
    """

    actor: Any
    workers: int
    key: Any = None
    begun: bool = False
    retires: bool = False


@dataclass
class _Output:
    """What the coordinator writes, until the command takes it."""

    _first: int = 0
    _chunks: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def add(self, number: int, data: bytes) -> None:
        """Append what was written to a stream; waits while the command is far behind."""
        with self._changed:
            self._chunks.append((number, data))
            while sum(len(chunk) for _, chunk in self._chunks) > _MOST_OUTPUT:
                # Nobody may read it: the run folder has it too.
                self._first += 1
                self._chunks.pop(0)
            self._changed.notify_all()

    def after(self, position: int, patience: float) -> tuple[int, list[tuple[int, bytes]]]:
        """Return the next position, and what comes after a position; wait a while for something."""
        with self._changed:
            self._changed.wait_for(lambda: self._first + len(self._chunks) > position, patience)
            done = max(0, position - self._first)
            del self._chunks[:done]
            self._first += done
            return self._first + len(self._chunks), list(self._chunks)


class CoordinatorActor:
    """Starts the coordinator of a job, and the next one if Ray starts this actor again."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._run = secrets.token_hex(8)
        self._again = ray.get_runtime_context().was_current_actor_reconstructed
        self._output = _Output()
        self._coordinator: EngineProcess | None = None
        self._address = ""
        self._key = ""
        self._nodes: dict[str, _Node] = {}
        self._status: int | None = None
        self._stops: list[int] = []
        self._told = 0
        self._begun = self._reached = self._followed = time.monotonic()
        _internal_kv_put(self._fence, self._run.encode(), overwrite=True, namespace=NAMESPACE.encode())
        for work in (self._lead, self._guard):
            threading.Thread(target=work, daemon=True).start()

    @property
    def _fence(self) -> bytes:
        return f"lockstep/{self._job.name}".encode()

    # What the command calls.

    def show(self, run: str, position: int) -> Shown:
        """Return what follows a position of the output; waits up to a second for something."""
        self._followed = time.monotonic()
        position = position if run == self._run else 0
        status = self._status
        following, output = self._output.after(position, 0.0 if status is not None else 1.0)
        return Shown(self._run, following, output, status if not output else None)

    def stop(self, number: int) -> None:
        """Pass a signal on to the coordinator."""
        self._stops.append(number)
        if self._coordinator is not None:
            self._coordinator.signal(number)

    # The coordinator.

    def _lead(self) -> None:
        """Run the job to its end."""
        try:
            self._key = self._known_key() if self._again else JobKey.generate().text
            while self._status is None:
                self._renew()
                self._look()
                time.sleep(_LOOK_EVERY)
        except BaseException as error:
            self._output.add(2, f"lockstep: the actor of the coordinator failed: {error!r}\n".encode())
            self._status = self._status or 1
        self._end()

    def _known_key(self) -> str:
        """Return the key of the job, which its agents have; a new one if none has it."""
        prefix = self._job.actor("agent/")
        for named in ray.util.list_named_actors():
            if not named.startswith(prefix):
                continue
            opener = Opener()
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                actor = ray.get_actor(named)
                workers: Any = ray.get(actor.workers.remote(), timeout=_PATIENCE)
                sealed = ray.get(actor.sealed_key.remote(opener.public), timeout=_PATIENCE)
                if sealed is not None:
                    self._nodes[named.removeprefix(prefix).partition("/")[0]] = _Node(
                        actor, workers, begun=True
                    )
                    self._key = opener.open(Sealed(*sealed))
        return self._key or JobKey.generate().text

    def _renew(self) -> None:
        """Ask the cluster's control store whether this is the newest coordinator."""
        holder = _internal_kv_get(self._fence, namespace=NAMESPACE.encode())
        if holder != self._run.encode():
            os._exit(1)
        self._reached = time.monotonic()

    def _guard(self) -> None:
        """Kill the coordinator when the control store is out of reach."""
        while self._status is None:
            time.sleep(_LOOK_EVERY)
            coordinator = self._coordinator
            if coordinator is not None and time.monotonic() - self._reached > LEASE:
                self._coordinator = None
                coordinator.end()

    def _look(self) -> None:
        """Start what is missing, and see what has ended."""
        coordinator = self._coordinator
        if coordinator is None:
            self._start()
        elif coordinator.status is not None:
            self._status = coordinator.status
            return
        self._place_agents()
        if not self._job.detached and time.monotonic() - self._followed > _FOLLOWED and not self._stops:
            self._output.add(2, b"lockstep: the command was lost, so the job stops\n")
            self.stop(signal.SIGTERM)

    def _start(self) -> None:
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        start = StartCoordinator(self._key, f"{address}:0", self._again)
        folder = self._job.folder or str(Path.cwd())
        made = EngineProcess(self._job.words, start, folder, self._job.environment, self._output.add)
        self._again, self._told = True, 0
        until = time.monotonic() + _LISTENS
        while made.process.poll() is None and time.monotonic() < until:
            self._renew()
            report = made.receive(_LOOK_EVERY)
            if isinstance(report, CoordinatorListens):
                self._address = report.address
                for node in self._nodes.values():
                    if node.begun:
                        node.actor.follow.remote(self._address)
                break
        self._coordinator = made
        for number in self._stops:
            made.signal(number)

    # The agents.

    def _place_agents(self) -> None:
        needs, job = self._job.needs, self._job
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
        for name in [name for name in self._nodes if name not in alive]:
            del self._nodes[name]
        draining = ray_state.get_draining_nodes()
        room = {name: 0 if name in draining else needs.fit(node["Resources"]) for name, node in alive.items()}
        there = {name: node.workers for name, node in self._nodes.items() if name not in draining}
        for name, workers in places(job.workers, room, there).items():
            actor: Any = (
                ray.remote(AgentActor)
                .options(
                    name=job.actor(f"agent/{name}/{secrets.token_hex(4)}"),
                    namespace=NAMESPACE,
                    lifetime="detached",
                    max_restarts=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(name, soft=False),
                    **_options(needs.of(workers)),
                )
                .remote()
            )
            self._nodes[name] = _Node(actor, workers, actor.public_key.remote())
        for name, node in list(self._nodes.items()):
            self._tend(name, node)
            if name in draining and node.begun and not node.retires:
                node.retires = True
                node.actor.retire.remote("Ray drains its node")
        begun = sum(node.workers for node in self._nodes.values() if node.begun)
        waits = any(not node.begun for node in self._nodes.values())
        waits = waits and time.monotonic() - self._begun < _SETTLED
        found = begun if begun >= job.workers or not waits else 0
        if found != self._told and self._coordinator is not None:
            self._told = found
            self._coordinator.send(WorkersFound(found))

    def _tend(self, name: str, node: _Node) -> None:
        """Let the agent of a node begin, or follow this coordinator; forget it if its actor is lost."""
        try:
            if node.begun:
                if not ray.wait([answer := node.actor.workers.remote()], timeout=0.2)[0]:
                    return
                ray.get(answer)
                return
            if not self._address or not ray.wait([node.key], timeout=0.0)[0]:
                return
            sealed = seal(self._key, ray.get(node.key))
            job = self._job
            ray.get(
                node.actor.begin.remote(sealed, self._address, node.workers, job.folder, job.environment),
                timeout=_PATIENCE,
            )
            node.begun = True
        except ray.exceptions.GetTimeoutError:
            return
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.RayTaskError):
                self._output.add(2, f"lockstep: no agent on node {name}: {error.cause}\n".encode())
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(node.actor, no_restart=True)
            self._nodes.pop(name, None)

    # The end.

    def _end(self) -> None:
        if self._coordinator is not None:
            self._coordinator.end()
        for node in self._nodes.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(node.actor, no_restart=True)
        until = time.monotonic() + (_FAREWELL if not self._job.detached else 0.0)
        while time.monotonic() < min(until, self._followed + _FOLLOWED):
            time.sleep(_LOOK_EVERY)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(ray.get_actor(self._job.actor("coordinator"), NAMESPACE), no_restart=True)


def _options(needs: dict[str, float]) -> dict[str, Any]:
    """Return resources as options of an actor."""
    own = dict(needs)
    return {"num_cpus": own.pop("CPU", 0.0), "num_gpus": own.pop("GPU", 0.0), "resources": own}
