"""The actor that runs the agent of one node."""

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import ray
from lockstep.functions.transport import Giver, ResultBox, hold
from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import CoordinatorMoved, EndKnown, Retire, StartAgent
from lockstep.ray.node import end_with_raylet
from lockstep.ray.sealing import JobSecrets, Opener, Sealed, seal

_UNUSED = 600.0
"""Seconds without a call of a coordinator's actor after which this one ends, and the agent with it. Ray needs
less to start another coordinator."""
_LOOK_EVERY = 1.0


class AgentState(NamedTuple):
    """The answer of an agent's actor to the actor of a restarted coordinator.

    Attributes:
        workers: the number of workers that the agent offers; 0 if no agent has begun.
        secrets: the secrets of the job, sealed; None if no agent has begun.
        status: the exit status of the job, if the agent knows that it has ended; None otherwise.
    """

    workers: int
    secrets: Sealed | None
    status: int | None


class AgentActor:
    """Starts an agent on its node, and the next one if that ends.

    Args:
        call: the call of the function that workers run, in bytes; None if they run a script.
    """

    def __init__(self, call: bytes | None = None) -> None:
        self._box = ResultBox.create()
        # All workers of this node inherit the memory of the call and of the result, whenever they start.
        self._inherited = (hold(call), self._box.descriptor) if call is not None else ()
        self._opener = Opener()
        self._secrets = JobSecrets("", {})
        self._agent: EngineProcess | None = None
        self._retires = ""
        self._status: int | None = None
        self._used = time.monotonic()
        end_with_raylet()
        threading.Thread(target=self._end_unused, daemon=True).start()

    def public_key(self) -> bytes:
        """Return the key for which the secrets of the job must be sealed."""
        return self._opener.public

    def begin(
        self, secrets: Sealed, coordinator: str, workers: int, folder: str | None, environment: dict[str, str]
    ) -> None:
        """Start the agent.

        Args:
            secrets: the secrets of the job. This process keeps them for another coordinator's actor.
            coordinator: HOST:PORT.
            workers: the number of workers that it offers.
            folder: the folder of the script; None for the folder of this process.
            environment: see `EngineProcess`.

        Raises:
            OSError: it cannot be started.
        """
        self._secrets = self._opener.open(secrets)
        self._start(coordinator, workers, folder, environment)

    def _start(self, coordinator: str, workers: int, folder: str | None, environment: dict[str, str]) -> None:
        if self._agent is not None:
            self._agent.end()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        start = StartAgent(self._secrets.key, coordinator, workers, address, self._inherited)
        self._agent = EngineProcess(
            ["agent"], start, folder or str(Path.cwd()), environment, inherited=self._inherited
        )
        self._begun = workers, folder, environment
        if self._retires:
            self.retire(self._retires)

    def retire(self, reason: str) -> None:
        """Tell the agent that this node is about to leave, for `reason`."""
        self._retires = reason
        if self._agent is not None:
            self._agent.send(Retire(reason))

    def follow(self, coordinator: str) -> None:
        """Tell the agent where the coordinator is now; start another agent if it has ended before the job."""
        self._hear()
        if self._agent is not None and self._agent.status is None:
            self._agent.send(CoordinatorMoved(coordinator))
        elif self._agent is not None and self._status is None:
            self._start(coordinator, *self._begun)

    def known_end(self) -> int | None:
        """Return the exit status of the job, or None if the agent does not know that it has ended."""
        self._hear()
        return self._status

    def state(self, public: bytes) -> AgentState:
        """Return the state for another coordinator; the secrets of the job in it are sealed for `public`."""
        self._hear()
        if self._agent is None:
            return AgentState(0, None, None)
        return AgentState(self._begun[0], seal(self._secrets, public), self._status)

    def giver(self) -> Giver:
        """Return which worker of this node has written the function's result."""
        return self._box.giver

    def result(self) -> bytes:
        """Return the result of the function, packed."""
        return self._box.packed()

    def end(self) -> None:
        """End the agent and its workers, and this actor."""
        if self._agent is not None:
            self._agent.end()
        os._exit(0)

    def _hear(self) -> None:
        self._used = time.monotonic()
        while self._agent is not None and (report := self._agent.receive(0.0)) is not None:
            if isinstance(report, EndKnown):
                self._status = report.status

    def _end_unused(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            if time.monotonic() - self._used > _UNUSED:
                # Processes of the agent end with this one.
                os._exit(0)
