"""The actor that keeps one coordinator of a job alive, and an agent on each node of the cluster."""

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ray
from lockstep.errors import UnfitError, with_code
from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import (
    CoordinatorListens,
    LeaseOver,
    LeaseRenewed,
    StartCoordinator,
    WorkersFound,
)
from lockstep.ray.agent_actor import AgentActor, AgentState
from lockstep.ray.control_store import NAMESPACE, ControlStore
from lockstep.ray.function_run import FunctionRun, Outcome, SentFunction
from lockstep.ray.node import end_with_raylet
from lockstep.ray.placement import WorkerNeeds, places
from lockstep.ray.sealing import JobSecrets, Opener, Sealed, seal
from lockstep.system.prose import count
from lockstep.transport.keys import JobKey

LEASE = 5.0
"""Seconds without contact to the cluster's control store after which the coordinator ends: agents pause after
`HOLD`, and Ray starts this actor elsewhere only after both."""
_LOOK_EVERY = 0.5
_LOOK_FIRST = 0.1
_NOTICED = 20.0
"""Seconds from the loss of an agent until Ray has noticed if its node is dead."""
_SETTLED = 10.0
"""Seconds for the agents of the first nodes to start, after which a job begins with those that there are."""
_PATIENCE = 5.0
_ANSWERS = 20.0
"""Seconds for agents to answer a coordinator that was started again; one that does not is given up."""
_FOLLOWED = 15.0
"""Seconds without a call of the command after which the job stops."""
_LAST_WORDS = 10.0
"""Seconds for a coordinator to end after an agent has heard that the job is over."""
_FAREWELL = 30.0
"""Seconds for the command to take the last output."""
_MOST_OUTPUT = 8 << 20


@dataclass(frozen=True)
class RayJob:
    """A job on a cluster, as its command describes it.

    Attributes:
        name: the name of the job, unique in the cluster.
        words: the arguments of `lockstep` with which each coordinator is started.
        workers: number of workers.
        needs: the resources of each worker.
        folder: the folder of the script on all nodes; None for the folder of each actor, which a runtime
            environment sets.
        environment: the variables of the user that can change the results of a script.
        detached: whether the job continues without its command.
        function: the function that workers run; None if they run a script.
        is_given_variables: whether the command passes variables, sealed, before the job begins.
    """

    name: str
    words: tuple[str, ...]
    workers: int
    needs: WorkerNeeds
    folder: str | None
    environment: dict[str, str]
    detached: bool = False
    function: SentFunction | None = None
    is_given_variables: bool = False

    def actor(self, part: str) -> str:
        """Return the name of an actor of this job."""
        return f"{self.name}/{part}"


class Shown(NamedTuple):
    """The output of a coordinator since the last question.

    Attributes:
        run: the id of the actor's process, because positions begin again at 0 after a restart.
        position: the position for the next question.
        output: pairs of 1 for stdout or 2 for stderr, and bytes.
        status: the exit status of the job, after it has ended and all output has been shown; None before.
    """

    run: str
    position: int
    output: list[tuple[int, bytes]]
    status: int | None


@dataclass
class _Node:
    """A node with an agent.

    Attributes:
        actor: the actor that runs it.
        workers: the number of workers that it offers.
        key: the answer to the question for its public key, until the agent has begun.
        begun: whether the agent has begun.
        retires: whether the agent was told that its node is about to leave.
        submitted: the time at which its actor was submitted.
        noted: whether the user knows that it waits.
    """

    actor: Any
    workers: int
    key: Any = None
    begun: bool = False
    retires: bool = False
    submitted: float = field(default_factory=time.monotonic)
    noted: bool = False


@dataclass
class _Output:
    """The output of the coordinator, until the command takes it."""

    _first: int = 0
    _chunks: list[tuple[int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def add(self, number: int, data: bytes) -> None:
        """Append bytes of a stream; wait while the command is far behind."""
        with self._changed:
            self._chunks.append((number, data))
            while sum(len(chunk) for _, chunk in self._chunks) > _MOST_OUTPUT:
                # Nobody may be reading it, and the run folder also has it.
                self._first += 1
                self._chunks.pop(0)
            self._changed.notify_all()

    def after(self, position: int, patience: float) -> tuple[int, list[tuple[int, bytes]]]:
        """Return the next position, and the output after a position; wait for a while if there is none."""
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
        self._output = _Output()
        self._coordinator: EngineProcess | None = None
        self._address = ""
        self._gave_up = False
        self._key = ""
        self._nodes: dict[str, _Node] = {}
        self._lost: dict[str, float] = {}
        self._over: tuple[int, float] | None = None
        self._status: int | None = None
        self._forgotten = False
        self._ending = threading.RLock()
        self._stops: list[int] = []
        self._told = 0
        self._store = ControlStore(job.name, self._run)
        self._begun = self._followed = time.monotonic()
        end_with_raylet()
        self._again = self._store.take()
        self._opener = Opener()
        # If this actor was restarted, the agents have them.
        waits = job.is_given_variables and not self._again
        self._variables: dict[str, str] | None = None if waits else {}
        folder = job.folder or str(Path.cwd())
        self._function = FunctionRun(job.function, folder, self._again) if job.function is not None else None
        self._lease = self._begun + LEASE
        for work in (self._lead, self._hold_lease):
            threading.Thread(target=work, daemon=True).start()

    # The methods that the command calls.

    def show(self, run: str, position: int) -> Shown:
        """Return the output after a position; wait for up to a second if there is none."""
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

    def public_key(self) -> bytes:
        """Return the key for which the variables of the command must be sealed."""
        return self._opener.public

    def take_variables(self, sealed: Sealed) -> None:
        """Take the variables of the command; see `RayJob`."""
        self._variables = self._opener.open(Sealed(*sealed)).variables

    def outcome(self) -> Outcome:
        """Return how the job of a function has ended, after `show` has returned a status."""
        assert self._function is not None
        return self._function.outcome

    def _say(self, text: str) -> None:
        self._output.add(2, f"lockstep: {text}\n".encode())

    # The coordinator.

    def _lead(self) -> None:
        """Run the job to its end."""
        try:
            if self._again:
                self._retried(self._find_agents)
                if (status := self._store.status()) is not None:
                    self._finish(status)
            self._key = self._key or JobKey.generate().text
            while self._status is None:
                self._retried(self._look)
                time.sleep(_LOOK_FIRST if self._is_starting() else _LOOK_EVERY)
            self._end()
        except UnfitError as error:
            self._fail(with_code(error), forgotten=True)
        except BaseException as error:
            self._fail(f"the actor of the coordinator failed: {error!r}")

    def _is_starting(self) -> bool:
        """Whether the coordinator, or agents of the first nodes, are about to begin."""
        begun = all(node.begun for node in self._nodes.values())
        return not self._address or (not begun and time.monotonic() - self._begun < _SETTLED)

    def _retried(self, act: Callable[[], None]) -> None:
        """Carry out an action; repeat it while the control store is out of reach."""
        while True:
            try:
                return act()
            except ray.exceptions.RayError:
                time.sleep(_LOOK_EVERY)

    def _hold_lease(self) -> None:
        """Let the coordinator run as long as this is the newest process of this actor.

        If the control store is out of reach for too long, the coordinator ends by itself.
        """
        try:
            while self._status is None:
                looked = time.monotonic()
                if not self._store.is_newest():
                    os._exit(1)
                self._lease = looked + LEASE
                if (coordinator := self._coordinator) is not None:
                    coordinator.send(LeaseRenewed(self._lease))
                time.sleep(_LOOK_EVERY)
        except UnfitError as error:
            self._fail(with_code(error), forgotten=True)

    def _look(self) -> None:
        """Start missing processes, and detect the ends of others."""
        if self._variables is None:
            if time.monotonic() - self._begun > _FOLLOWED:
                self._fail("the command was lost before it gave the variables of --env or --notify")
        elif self._coordinator is None:
            self._start(self._variables)
        elif (status := self._coordinator.status) is not None:
            self._hear(self._coordinator)
            if not self._gave_up and not self._coordinator.was_killed:
                self._finish(status)
                return
            self._coordinator.end()
            self._coordinator = None
        elif self._over is not None and time.monotonic() - self._over[1] > _LAST_WORDS:
            # This coordinator was started after another one had ended the job.
            self._finish(self._over[0])
            return
        else:
            self._hear(self._coordinator)
        self._place_agents()
        if not self._job.detached and time.monotonic() - self._followed > _FOLLOWED and not self._stops:
            self._say("the command was lost, so the job stops")
            self.stop(signal.SIGTERM)

    def _start(self, variables: dict[str, str]) -> None:
        while time.monotonic() > self._lease:
            # Without contact to the control store, a coordinator would end at once.
            time.sleep(_LOOK_EVERY)
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        start = StartCoordinator(self._key, f"{address}:0", self._again, self._lease)
        folder = self._job.folder or str(Path.cwd())
        begin = self._function.start if self._function is not None else EngineProcess
        environment = {**self._job.environment, **variables}
        made = begin(self._job.words, start, folder, environment, self._output.add)
        self._coordinator, self._again, self._gave_up = made, True, False
        self._address, self._told = "", 0
        for number in self._stops:
            made.signal(number)

    def _hear(self, coordinator: EngineProcess) -> None:
        """Act on the reports of the coordinator."""
        while (report := coordinator.receive(0.0)) is not None:
            match report:
                case CoordinatorListens(address):
                    self._address = address
                    for node in self._nodes.values():
                        if node.begun:
                            node.actor.follow.remote(address)
                case LeaseOver():
                    self._gave_up = True

    # The agents that an earlier process of this actor has started.

    def _find_agents(self) -> None:
        """Take over the live agents, and the secrets of the job; find out whether they know of its end."""
        prefix = self._job.actor("agent/")
        questions: dict[Any, tuple[str, Any, Opener]] = {}
        for named_actor in ray.util.list_named_actors(all_namespaces=True):
            named = named_actor["name"]
            if named_actor["namespace"] == NAMESPACE and named.startswith(prefix):
                opener = Opener()
                with contextlib.suppress(ValueError):
                    actor = ray.get_actor(named, NAMESPACE)
                    questions[actor.state.remote(opener.public)] = named, actor, opener
        answered, _ = (
            ray.wait(list(questions), num_returns=len(questions), timeout=_ANSWERS) if questions else ([], [])
        )
        for question, (named, actor, opener) in questions.items():
            state = AgentState(0, None, None)
            if question in answered:
                with contextlib.suppress(ray.exceptions.RayError):
                    state = AgentState(*ray.get(question))
            if state.secrets is None:
                # It is lost, or has no useful state.
                _kill(actor)
                continue
            secrets = opener.open(Sealed(*state.secrets))
            self._key, self._variables = secrets.key, secrets.variables
            node = named.removeprefix(prefix).partition("/")[0]
            self._nodes[node] = _Node(actor, state.workers, begun=True)
            if state.status is not None:
                self._store.record_end(state.status)

    # The agents.

    def _place_agents(self) -> None:
        needs, job = self._job.needs, self._job
        nodes = self._store.nodes()
        for name in [name for name in self._nodes if name not in nodes]:
            del self._nodes[name]
        draining = self._store.draining()
        room = {name: 0 if name in draining else needs.fit(had) for name, had in nodes.items()}
        lost = {name for name, when in self._lost.items() if time.monotonic() - when < _NOTICED}
        there = {
            name: node.workers
            for name, node in self._nodes.items()
            if name not in draining and (node.begun or name not in lost)
        }
        added = places(job.workers, {name: room[name] for name in room if name not in lost}, there)
        # If no other node has room, the agent may be the only loss of this node.
        again = {name: room[name] for name in room if name in lost and name not in self._nodes}
        added |= places(job.workers, again, there | added)
        for name, workers in added.items():
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
                .remote(job.function.call if job.function is not None else None)
            )
            self._nodes[name] = _Node(actor, workers, actor.public_key.remote())
        for name, node in list(self._nodes.items()):
            self._tend(name, node)
            if name in draining and node.begun and not node.retires:
                node.retires = True
                node.actor.retire.remote("Ray drains its node")
        begun = sum(node.workers for node in self._nodes.values() if node.begun)
        waits, now = False, time.monotonic()
        for name, node in self._nodes.items():
            if node.begun:
                continue
            waits = waits or now - self._begun < _SETTLED
            if now - node.submitted > _SETTLED and not node.noted:
                node.noted = True
                missing = count(node.workers, "worker")
                self._say(f"node {name} is not free for {missing} yet; the job uses it when it is")
        workers_found = begun if begun >= job.workers or not waits else 0
        if workers_found != self._told and self._coordinator is not None:
            self._told = workers_found
            self._coordinator.send(WorkersFound(workers_found))

    def _tend(self, name: str, node: _Node) -> None:
        """Let the agent of a node begin, or follow this coordinator; forget it if its actor is lost."""
        try:
            if node.begun:
                if not ray.wait([answer := node.actor.known_end.remote()], timeout=0.2)[0]:
                    return
                if (status := ray.get(answer)) is not None and self._over is None:
                    self._over = status, time.monotonic()
                return
            if not self._address or not ray.wait([node.key], timeout=0.0)[0]:
                return
            sealed = seal(JobSecrets(self._key, self._variables or {}), ray.get(node.key))
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
                self._say(f"no agent on node {name}: {error.cause}")
            _kill(node.actor)
            self._nodes.pop(name, None)
            self._lost[name] = time.monotonic()

    # The end.

    def _finish(self, status: int) -> None:
        """Note that the job has ended. A restarted actor reads the note."""
        self._store.record_end(status)
        if self._function is not None:
            self._function.conclude(status, [node.actor for node in self._nodes.values()])
        self._status = status

    def _fail(self, why: str, forgotten: bool = False) -> None:
        with self._ending:
            if self._status is None:
                self._say(why)
                self._forgotten, self._status = forgotten, 1
        self._end()

    def _end(self) -> None:
        """End all processes of the job, then this actor, when the command has taken the status."""
        with self._ending:
            if self._coordinator is not None:
                self._coordinator.end()
            ends = [node.actor.end.remote() for node in self._nodes.values()]
            if ends:
                ray.wait(ends, num_returns=len(ends), timeout=_PATIENCE)
            # A control store that has lost its data does not know any actor, and Ray aborts a process that
            # names one.
            for node in self._nodes.values() if not self._forgotten else ():
                _kill(node.actor)
            until = time.monotonic() + (_FAREWELL if not self._job.detached else 0.0)
            while time.monotonic() < min(until, self._followed + _FOLLOWED):
                time.sleep(_LOOK_EVERY)
            if not self._forgotten:
                with contextlib.suppress(ray.exceptions.RayError, ValueError):
                    _kill(ray.get_actor(self._job.actor("coordinator"), NAMESPACE))
            os._exit(0)


def _kill(actor: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        ray.kill(actor, no_restart=True)


def _options(needs: dict[str, float]) -> dict[str, Any]:
    """Return resources as options of an actor."""
    custom = dict(needs)
    return {"num_cpus": custom.pop("CPU", 0.0), "num_gpus": custom.pop("GPU", 0.0), "resources": custom}
