"""The actor that runs the agent of one node."""

import os
import threading
import time
from pathlib import Path

import ray
from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import CoordinatorMoved, Retire, StartAgent
from lockstep.ray.sealing import Opener, Sealed, seal

_UNUSED = 60.0
"""Seconds without an agent after which this actor ends: there is no coordinator that needs it."""


class AgentActor:
    """Starts an agent on its node, and the next one if that ends."""

    def __init__(self) -> None:
        self._opener = Opener()
        self._key = ""
        self._agent: EngineProcess | None = None
        self._retires = ""
        self._used = time.monotonic()
        threading.Thread(target=self._end_unused, daemon=True).start()

    def public_key(self) -> bytes:
        """Return the key for which the key of the job must be sealed."""
        return self._opener.public

    def begin(
        self, key: Sealed, coordinator: str, workers: int, folder: str | None, environment: dict[str, str]
    ) -> None:
        """Start the agent.

        Args:
            key: of the job.
            coordinator: HOST:PORT.
            workers: how many it offers.
            folder: of the script; None for that of this process.
            environment: see `EngineProcess`.

        Raises:
            OSError: it cannot be started.
        """
        self._key = self._opener.open(key)
        self._start(coordinator, workers, folder, environment)

    def _start(self, coordinator: str, workers: int, folder: str | None, environment: dict[str, str]) -> None:
        if self._agent is not None:
            self._agent.end()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        start = StartAgent(self._key, coordinator, workers, address)
        self._agent = EngineProcess(["agent"], start, folder or str(Path.cwd()), environment)
        self._begun = workers, folder, environment
        if self._retires:
            self.retire(self._retires)

    def retire(self, reason: str) -> None:
        """Tell the agent that this node will go soon, for `reason`."""
        self._retires = reason
        if self._agent is not None:
            self._agent.send(Retire(reason))

    def follow(self, coordinator: str) -> None:
        """Tell the agent where the coordinator is now; start another agent if it has ended."""
        self._used = time.monotonic()
        if self._agent is not None and self._agent.status is None:
            self._agent.send(CoordinatorMoved(coordinator))
        elif self._agent is not None:
            self._start(coordinator, *self._begun)

    def workers(self) -> int:
        """Return how many workers the agent offers; 0 if there is none."""
        return self._begun[0] if self._agent is not None else 0

    def sealed_key(self, public: bytes) -> Sealed | None:
        """Return the key of the job for a coordinator that was started again; None without a key."""
        return seal(self._key, public) if self._key else None

    def end(self) -> None:
        """End the agent and its workers."""
        if self._agent is not None:
            self._agent.end()

    def _end_unused(self) -> None:
        while True:
            time.sleep(1.0)
            if self._agent is not None and self._agent.status is None:
                self._used = time.monotonic()
            elif time.monotonic() - self._used > _UNUSED:
                os._exit(0)
