"""A function that the workers of a job on a cluster run, as the actor of the coordinator handles it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from lockstep.errors import ConfigError, JobError, LockstepError
from lockstep.functions.history import RunHistory
from lockstep.functions.transport import Giver, ResultBox
from lockstep.hosts.engine_process import EngineProcess
from lockstep.protocol.engine import StartCoordinator
from lockstep.ray.node import ANSWERS_WITHIN

_COMMAND = "lockstep.notebook.command"


@dataclass(frozen=True)
class SentFunction:
    """A function that workers run instead of a script.

    Attributes:
        call: the function and its arguments, packed.
        run_dir: the folder of the run, as the job's arguments give it.
    """

    call: bytes
    run_dir: str


class Outcome(NamedTuple):
    """The end of the job of a function.

    Attributes:
        error: None if there is a result.
        result: the return value of the function, packed.
        folder: the folder of the run, absolute.
        node: the address of the node that has it.
    """

    error: LockstepError | None
    result: bytes
    folder: str
    node: str


class FunctionRun:
    """Starts coordinators of the job of a function, and gets its result from the agents.

    Args:
        function: the function that the workers run.
        folder: the working folder of all processes.
        again: whether the job has begun before.

    Attributes:
        outcome: the outcome of the job, after `conclude`.
    """

    def __init__(self, function: SentFunction, folder: str, again: bool) -> None:
        self._run_folder = Path(folder) / function.run_dir
        self._refusal = ResultBox.create()
        self._node = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._history = RunHistory(self._run_folder, f" on {self._node}", whole=again)
        self.outcome = Outcome(JobError("the job has ended early; see its output above"), b"", "", self._node)

    def start(
        self,
        words: Sequence[str],
        start: StartCoordinator,
        folder: str,
        environment: dict[str, str],
        show: Callable[[int, bytes], None],
    ) -> EngineProcess:
        """Start a coordinator; see `EngineProcess`.

        Raises:
            ConfigError: there is no such folder.
            OSError: it cannot be started.
        """
        if not Path(folder).is_dir():
            error = ConfigError(
                f"the folder {folder}, where the function runs, does not exist on the node {self._node}; "
                "start the program in one that all nodes have, or give Ray a working_dir"
            )
            self.outcome = self.outcome._replace(error=error)
            raise error
        box = self._refusal.descriptor
        return EngineProcess(
            ("0", "", str(box), *words),
            start,
            folder,
            environment,
            show,
            inherited=(box,),
            program=_COMMAND,
        )

    def conclude(self, status: int, agents: Sequence[Any]) -> None:
        """Find the outcome of a job that has ended.

        Args:
            status: the exit status of the coordinator.
            agents: the actors of the agents.
        """
        refusal = self._refusal.read()
        error: LockstepError | None = None
        result: bytes | None = b""
        if refusal.giver is Giver.COMMAND:
            error = refusal.value
        elif status == 0 and (result := _result_of(agents)) is None:
            logs = f"logs in {self._run_folder} on {self._node}"
            error = JobError(f"the node with the function's result was lost after the job had ended; {logs}")
        elif not result:
            error = self._history.error(status)
        self.outcome = Outcome(error, result or b"", str(self._run_folder), self._node)


def _result_of(agents: Sequence[Any]) -> bytes | None:
    """Return the result of the chief, or that of another worker if the chief's is lost.

    It is empty if no worker has one, and None if an agent that may have one is lost.
    """
    givers: list[tuple[Giver, Any]] = []
    without = b"" if agents else None
    for agent in agents:
        try:
            givers.append((ray.get(agent.giver.remote(), timeout=ANSWERS_WITHIN), agent))
        except ray.exceptions.RayError:
            without = None
    for giver, agent in sorted(givers, key=lambda pair: pair[0], reverse=True):
        if giver is Giver.NONE:
            break
        try:
            return bytes(ray.get(agent.result.remote(), timeout=ANSWERS_WITHIN))
        except ray.exceptions.RayError:
            without = None
    return without
