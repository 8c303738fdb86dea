"""The agent's side of the process that workers are forked from, `lockstep.parent`."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.config import job_environment, parent_variable
from lockstep.control.birth import READY, Birth, Upbringing, encode_birth
from lockstep.control.foresight import NOTHING, Foresight, foresee
from lockstep.control.script import Script
from lockstep.control.spec import JobSpec

_PATIENCE = 30.0
_MOST_ANSWER = 4096


@dataclass(frozen=True)
class Plan:
    """What all workers of a job have in common.

    Attributes:
        arguments: what they run, `[-m] target arguments...`.
        environment: of all of them.
        inherited: descriptors that they find at the same numbers.
        foresight: what they will import.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    inherited: tuple[int, ...] = ()
    foresight: Foresight = NOTHING

    @classmethod
    def of(cls, spec: JobSpec) -> "Plan":
        """Return that of a job."""
        script = Script(spec.target, spec.module, spec.arguments)
        source = script.source()
        # A framework may look for GPUs when it is imported, and each worker is to see its own.
        known = source if not spec.devices else None
        environment = job_environment(spec.seed, spec.threads, backend=spec.backend)
        foresight = foresee(known, script.folder, environment) if known else NOTHING
        return cls(script.command_line, environment, spec.inherited, foresight)

    def without_imports(self) -> "Plan":
        """Return the same, with nothing to import."""
        return replace(self, foresight=NOTHING)


class Parent:
    """The parent of a job's workers.

    Args:
        process: that it is.
        connection: this end of the socket to it.
        environment: with which it was started.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", connection: socket.socket, environment: Mapping[str, str]
    ) -> None:
        self.ready = False
        self._process = process
        self._connection = connection
        self._environment = environment

    @classmethod
    def begin(cls, plan: Plan) -> "Parent":
        """Start it.

        Raises:
            OSError: the machine cannot.
        """
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        foresight = plan.foresight
        told = Upbringing(os.getpid(), theirs.fileno(), foresight.imports, foresight.folder)
        environment = {**plan.environment, **foresight.settings, **parent_variable(told.written())}
        # What it writes is kept for its workers, which say it.
        stdout, stderr = (os.memfd_create("lockstep-said", os.MFD_CLOEXEC) for _ in range(2))
        try:
            process = subprocess.Popen(
                # -P: the folder we happen to be in must not hide modules that Lockstep needs.
                [sys.executable, "-P", "-m", "lockstep.parent", *plan.arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=(theirs.fileno(), *plan.inherited),
                start_new_session=True,
            )
        except OSError:
            mine.close()
            raise
        finally:
            for descriptor in (stdout, stderr):
                os.close(descriptor)
            theirs.close()
        return cls(process, mine, environment)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when it is ready, or gone."""
        return self._connection.fileno()

    def is_gone(self) -> bool:
        """Hear what it says, and tell whether it has ended."""
        if not select.select([self._connection], [], [], 0)[0]:
            return False
        self.ready = self._hear() == READY or self.ready
        return not self.ready or bool(select.select([self._connection], [], [], 0)[0])

    def fork(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Have it fork a worker that becomes a child of this process; return its process id.

        Raises:
            OSError: it cannot.
        """
        birth = encode_birth(Birth(_changes(self._environment, environment)))
        socket.send_fds(self._connection, [birth], list(descriptors))
        if not select.select([self._connection], [], [], _PATIENCE)[0]:
            self._process.kill()
            raise OSError(
                f"the fork server (process {self._process.pid}) has not forked within {_PATIENCE:g} s"
            )
        answer = self._hear()
        if answer.isdigit():
            return int(answer)
        raise OSError(answer.decode() or f"the fork server (process {self._process.pid}) has ended")

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _hear(self) -> bytes:
        try:
            return self._connection.recv(_MOST_ANSWER)
        except ConnectionError:
            return b""


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {name: None for name in before if name not in after}
    return changes | {name: value for name, value in after.items() if before.get(name) != value}
