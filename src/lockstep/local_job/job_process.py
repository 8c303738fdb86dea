"""The process of a job's coordinator and agent, as the command sees it.

The command forks it, passes signals on to it, and ends the processes that it leaves behind if it dies.

Both processes watch each other, and both are subreapers, so that processes that a script started and left
behind are also found and ended. When the command is killed, the agent ends everything. When the job's process
is killed, the kernel ends the workers (`PR_SET_PDEATHSIG`), and the command ends the rest. Only if both are
killed at once can a process that a script left behind outlive them; workers cannot. This does not use ports
or files.

A stopped job has one budget, `--grace`: the coordinator gives it to the chief for its step and a checkpoint,
and the command waits that much longer for the agent. Output never stops a job: a failure to write to a
terminal or a file is reported once, and later output is dropped.
"""

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from lockstep.errors import LockstepError, UnfitError, with_code
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.job_spec import AFTER_GRACE
from lockstep.system.descendants import LinuxDescendants, children_now
from lockstep.system.event_loop import wait_for
from lockstep.system.exit_status import STOP_SIGNALS, describe_exit, shell_status, signal_name, unkillable
from lockstep.system.notes import note
from lockstep.system.prctl import adopt_orphans, die_with, keep_priority
from lockstep.system.prose import os_error
from lockstep.system.standard_streams import flush_streams
from lockstep.transport.packet_channel import PacketChannel

_SECOND_STOP_PATIENCE = 2.0
"""Seconds after a second signal until the process of the job counts as hung."""

Serve = Callable[[StopChannel], int]
"""Runs a job, given its channel to the command; returns the exit status."""


def run_in_job_process(serve: Serve, grace: float, lifeline: int | None) -> int:
    """Run a job in a new process; return its exit status once no process of the job remains.

    Args:
        serve: runs the job in that process.
        grace: seconds that the job may take for a checkpoint after a signal.
        lifeline: a pipe at whose end all processes of the job are killed; None if there is none.

    Raises:
        UnfitError: the process cannot be started.
    """
    heard = tuple(number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
    # A signal must wait until both processes have their handlers: otherwise it would end only one of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    spare = children_now()
    adopt_orphans()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush_streams()
    parent = os.getpid()
    try:
        process = os.fork()
    except OSError as error:
        raise UnfitError(f"no process can be started: {error.strerror}") from None
    if process == 0:
        mine.close()
        if lifeline is not None:
            # Even if it is stopped, it ends with this process.
            die_with(parent)
        _become_job_process(PacketChannel(theirs, StopRequest), serve)
    theirs.close()
    with mine:
        watch = _Watch(process, PacketChannel(mine, StopRequest), LinuxDescendants(spare), grace, lifeline)
        return watch.run(heard)


def _become_job_process(command: StopChannel, serve: Serve) -> None:
    status = 1
    try:
        os.setsid()
        keep_priority()
        adopt_orphans()
        for number in STOP_SIGNALS:
            # The command forwards signals. SIG_IGN is not used, because the workers would inherit it.
            signal.signal(number, _no_op)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        status = serve(command)
    except LockstepError as error:
        note(with_code(error))
        status = 2
    except OSError as error:
        note(os_error(error))
        status = 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


class _Watch:
    """Waits for the process of a job to end, and passes signals on to it."""

    def __init__(
        self,
        process: int,
        channel: StopChannel,
        descendants: LinuxDescendants,
        grace: float,
        lifeline: int | None,
    ) -> None:
        self._process = process
        self._channel = channel
        self._descendants = descendants
        self._grace = grace
        self._lifelines = () if lifeline is None else (lifeline,)
        self._released = False
        self._stopped_by: int | None = None
        self._deadline: float | None = None

    def run(self, heard: Sequence[int]) -> int:
        """Return the job's exit status; `heard` are the signals to pass on."""
        ended = os.pidfd_open(self._process)
        wake, woken = socket.socketpair()
        with wake, woken:
            wake.setblocking(False)
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            for number in heard:
                signal.signal(number, _no_op)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            in_time = self._wait(ended, woken)
            signal.set_wakeup_fd(-1)
        os.close(ended)
        return self._conclude(in_time)

    def _wait(self, ended: int, woken: socket.socket) -> bool:
        """Return whether the process ended by itself; it may hang after a signal, or lose its lifeline."""
        while True:
            patience = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready = wait_for([ended, woken.fileno(), *self._lifelines], patience)
            if ended in ready:
                return True
            if ready.intersection(self._lifelines):
                self._released = True
                return False
            if not ready:
                return False
            for number in woken.recv(64):
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        patience = self._grace + AFTER_GRACE if self._stopped_by is None else _SECOND_STOP_PATIENCE
        self._stopped_by = self._stopped_by or number
        self._deadline = min(time.monotonic() + patience, self._deadline or math.inf)
        # If this cannot be sent, because the process has ended or is far behind, the deadline applies.
        self._channel.send(StopRequest(number))

    def _conclude(self, in_time: bool) -> int:
        if not in_time:
            os.kill(self._process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
        left = self._descendants.end(grace=0)
        if left:
            note(unkillable(left))
        if self._released:
            # The process that held the lifeline also read the notes.
            return shell_status(status)
        if not in_time and self._stopped_by is not None:
            name = signal_name(self._stopped_by)
            note(
                f"stopped by {name}; the coordinator (process {self._process}) did not respond in time and "
                "was killed"
            )
            return 128 + self._stopped_by
        if status < 0:
            note(f"the coordinator (process {self._process}) {describe_exit(status)}, which ended the job")
        return shell_status(status)


def _no_op(number: int, frame: FrameType | None) -> None:
    """Do nothing, because a signal arrives through the wakeup descriptor, or is ignored."""
