"""The agent's side of the fork server, `lockstep.launcher.fork_server_main`."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.launcher.import_scan import NOTHING, ImportScan, scan_imports
from lockstep.protocol.fork import READY, ForkRequest, ForkServerSetup, encode_fork
from lockstep.protocol.job_spec import JobSpec
from lockstep.system.child_process import command_of, connected
from lockstep.system.environment import job_environment, parent_variable
from lockstep.system.event_loop import wait_for
from lockstep.worker.script import Script

_PATIENCE = 30.0
_MOST_ANSWER = 4096


@dataclass(frozen=True)
class ForkServerPlan:
    """The settings that all workers of a job share.

    Attributes:
        arguments: the program, `[-m] target arguments...`.
        environment: the part of the environment that they share.
        inherited: descriptors that workers inherit with the same numbers.
        scan: the modules that workers will import.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    inherited: tuple[int, ...] = ()
    scan: ImportScan = NOTHING

    @classmethod
    def of(cls, spec: JobSpec) -> "ForkServerPlan":
        """Return the plan of a job."""
        script = Script(spec.target, spec.module, spec.arguments)
        source = script.source()
        # A framework may look for GPUs when it is imported, and each worker must see only its own GPUs.
        scanned = source if not spec.devices else None
        environment = job_environment(spec.seed, spec.threads, backend=spec.backend)
        scan = scan_imports(scanned, script.folder, environment) if scanned else NOTHING
        return cls(script.command_line, environment, spec.inherited, scan)

    def without_imports(self) -> "ForkServerPlan":
        """Return the same plan without imports."""
        return replace(self, scan=NOTHING)


class ForkServer:
    """The fork server of a job.

    Args:
        process: the server's process.
        connection: this end of the socket to it.
        environment: the environment with which it was started.
    """

    def __init__(
        self, process: "subprocess.Popen[bytes]", connection: socket.socket, environment: Mapping[str, str]
    ) -> None:
        self.ready = False
        self._process = process
        self._connection = connection
        self._environment = environment

    @classmethod
    def begin(cls, plan: ForkServerPlan) -> "ForkServer":
        """Start it.

        Raises:
            OSError: the process cannot be started.
        """
        with connected() as (mine, theirs):
            scan = plan.scan
            setup = ForkServerSetup(os.getpid(), theirs.fileno(), scan.imports, scan.folder)
            environment = {**plan.environment, **scan.settings, **parent_variable(setup.written())}
            # This saves the server's output, which each worker repeats.
            stdout, stderr = (os.memfd_create("lockstep-output", os.MFD_CLOEXEC) for _ in range(2))
            try:
                process = subprocess.Popen(
                    command_of("lockstep.launcher.fork_server_main", *plan.arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=environment,
                    pass_fds=(theirs.fileno(), *plan.inherited),
                    start_new_session=True,
                )
            finally:
                for descriptor in (stdout, stderr):
                    os.close(descriptor)
        return cls(process, mine, environment)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the server is ready or has ended."""
        return self._connection.fileno()

    def has_ended(self) -> bool:
        """Read its messages, and return whether it has ended."""
        if not wait_for([self.fileno()], 0.0):
            return False
        self.ready = self._receive() == READY or self.ready
        return not self.ready or bool(wait_for([self.fileno()], 0.0))

    def fork(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> int:
        """Let the server fork a worker that becomes a child of this process; return its process id.

        Raises:
            OSError: the fork failed.
        """
        request = encode_fork(ForkRequest(_changes(self._environment, environment)))
        socket.send_fds(self._connection, [request], list(descriptors))
        if not wait_for([self.fileno()], _PATIENCE):
            self._process.kill()
            raise OSError(
                f"the fork server (process {self._process.pid}) has not forked within {_PATIENCE:g} s"
            )
        answer = self._receive()
        if answer.isdigit():
            return int(answer)
        raise OSError(answer.decode() or f"the fork server (process {self._process.pid}) has ended")

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(_MOST_ANSWER)
        except ConnectionError:
            return b""


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    changes: dict[str, str | None] = {name: None for name in before if name not in after}
    return changes | {name: value for name, value in after.items() if before.get(name) != value}
