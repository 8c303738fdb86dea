"""How workers join a job while its program schedules functions."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.keras.numbered_calls import NumberedCalls
from lockstep.keras.parameter_server.function_log import FunctionLog, limit
from lockstep.keras.randomness import random_states
from lockstep.keras.state.journal import CallLog
from lockstep.keras.state.resumable_calls import Resumption
from lockstep.keras.state.snapshots import Part, Snapshots
from lockstep.worker.job import Job


class FunctionJoining:
    """How workers join during the functions of one call: the chief's log, and how a joiner uses it.

    Args:
        job: the job of the process.
        snapshots: the snapshots of the process.
        calls: the calls of the process; the functions were numbered last.

    Attributes:
        log: the calls of the functions: on the chief, its own; in a worker that joins, those of the chief;
            None in other processes.
        replays: whether this worker joins, and has not arrived at the present call of the chief.
    """

    def __init__(self, job: Job, snapshots: Snapshots, calls: NumberedCalls) -> None:
        self._job, self._snapshots, self._calls = job, snapshots, calls
        self._position = calls.outermost
        self._resumable = snapshots.resumable
        resumption = self._resumable.resumption
        self.replays = resumption is not None
        self.log: FunctionLog | None = None
        if resumption is not None:
            self.log = self._received_log(resumption)
            snapshots.models.load(self.log.models)
        elif job.is_chief and job.settings.order is None:
            self._logs[self._position] = self.log = FunctionLog()

    @property
    def in_script(self) -> bool:
        """Whether the program is not in a call such as `fit` or `evaluate`."""
        return len(self._calls.stack) == 1

    @property
    def follows_training(self) -> bool:
        """Whether earlier calls have changed variables."""
        methods = self._calls.methods
        return bool(methods.get("fit")) or methods.get("functions", 0) > 1

    def values_of_models(self) -> dict[str, Any]:
        """Return the values of all compiled models, by name."""
        return self._snapshots.values_of_models()

    def limit_memory(self) -> None:
        """On the chief: drop the oldest values from the logs if they take too much memory."""
        if limit([log for log in self._logs.values() if isinstance(log, FunctionLog)]):
            self.close(
                "the results of its functions take too much memory to keep them for a worker that joins"
            )

    def close(self, reason: str) -> None:
        """On the chief: admit no more workers, and drop the log."""
        self._job.joiners.close(reason)
        self._logs.clear()
        self.log = None

    def admit(self, peers: Callable[[], Mapping[str, Any]]) -> int | None:
        """On the chief: let workers join; see `Joiners.admit`.

        Args:
            peers: returns the facts about the processes; see `Mesh.peers`.
        """
        parts = {"random": Part(random_states), "peers": Part(peers)}
        return self._job.joiners.admit(lambda whole: self._snapshots.take_apart(whole, parts))

    def join(self) -> FunctionLog:
        """Become a member of the job, if this worker is not yet one, and return the newest log.

        Raises:
            PeerLostError: the job is over.
        """
        if self._job.joins:
            self._resumable.join_apart()
            resumption = self._resumable.resumption
            assert resumption is not None
            self.log = self._received_log(resumption)
        assert self.log is not None
        return self.log

    def arrive(self, call: str) -> Mapping[str, Any]:
        """Take part from now on, at the present call of the chief; return the facts about the processes."""
        self.replays = False
        return self._snapshots.join_apart(call)

    @property
    def _logs(self) -> dict[int, CallLog]:
        return self._resumable.journal.logs

    def _received_log(self, resumption: Resumption) -> FunctionLog:
        """Return the log that the chief has sent."""
        return FunctionLog.unpacked(resumption.journal.packed_logs[self._position])
