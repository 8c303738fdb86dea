"""The command's side of a job: it starts the agent, passes signals on, and cleans up if the agent dies."""

import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from lockstep.errors import LockstepError, UnfitError
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import Stop
from lockstep.system.descendants import LinuxDescendants, children_now
from lockstep.system.exit_status import describe_exit, shell_status, signal_name, unkillable
from lockstep.system.notes import flush_streams, note
from lockstep.system.prctl import adopt_orphans
from lockstep.transport.packet_channel import PacketChannel

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOP_PATIENCE = 10.0
"""Seconds beyond the grace after which an agent that was told to stop is hung: it gives workers 3 to end and
1 to be killed, and 5 to what they have started."""
_HURRY_PATIENCE = 2.0


def run_under_agent(be_agent: Callable[[Channel[Stop, Stop]], int], grace: float) -> int:
    """Fork the process of coordinator and agent; return its exit status once no process of the job is left.

    Args:
        be_agent: what it does with its channel to this process; its result is the exit status.
        grace: seconds that it may take for a checkpoint after SIGTERM.

    Raises:
        UnfitError: no process can be started.
    """
    heard = tuple(number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN)
    # Until both sides have their handlers a signal must wait: it would end one of them only.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    spare = children_now()
    adopt_orphans()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flush_streams()
    try:
        agent = os.fork()
    except OSError as error:
        raise UnfitError(f"no process can be started: {error.strerror}") from None
    if agent == 0:
        mine.close()
        _become_agent(PacketChannel(theirs, Stop), be_agent)
    theirs.close()
    with mine:
        return _Watch(agent, PacketChannel(mine, Stop), LinuxDescendants(spare), grace).run(heard)


def fill_standard_descriptors() -> None:
    """Open what the caller closed (`>&-`): else a file of ours becomes the person's terminal."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def let_go_of_stdout() -> None:
    """Let what stdout has not taken be lost: it would be written again at the end of this process."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _become_agent(command: Channel[Stop, Stop], be_agent: Callable[[Channel[Stop, Stop]], int]) -> None:
    status = 1
    try:
        os.setsid()
        adopt_orphans()
        for number in _SIGNALS:
            # The command speaks for the person. Not SIG_IGN: the workers would inherit that.
            signal.signal(number, _no_op)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        status = be_agent(command)
    except (LockstepError, OSError) as error:
        note(str(error))
        status = 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


class _Watch:
    """Waits for the agent to end, and passes signals on."""

    def __init__(
        self, agent: int, channel: Channel[Stop, Stop], descendants: LinuxDescendants, grace: float
    ) -> None:
        self._agent = agent
        self._channel = channel
        self._descendants = descendants
        self._grace = grace
        self._stopped_by: int | None = None
        self._deadline: float | None = None

    def run(self, heard: Sequence[int]) -> int:
        """Return the job's exit status."""
        ended = os.pidfd_open(self._agent)
        wake, woken = socket.socketpair()
        with wake, woken:
            wake.setblocking(False)
            signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
            for number in heard:
                signal.signal(number, _no_op)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            in_time = self._wait(ended, woken)
            signal.set_wakeup_fd(-1)
        os.close(ended)
        return self._conclude(in_time)

    def _wait(self, ended: int, woken: socket.socket) -> bool:
        while True:
            patience = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            ready, _, _ = select.select([ended, woken.fileno()], [], [], patience)
            if ended in ready:
                return True
            if not ready:
                return False
            for number in woken.recv(64):
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        grace = self._grace if number == signal.SIGTERM else 0.0
        patience = grace + _STOP_PATIENCE if self._stopped_by is None else _HURRY_PATIENCE
        self._stopped_by = self._stopped_by or number
        self._deadline = min(time.monotonic() + patience, self._deadline or math.inf)
        # An agent that is gone, or so far behind that this is lost, is dealt with by the deadline.
        self._channel.send(Stop(number))

    def _conclude(self, in_time: bool) -> int:
        if not in_time:
            os.kill(self._agent, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self._agent, 0)[1])
        left = self._descendants.end(grace=0)
        if left:
            note(unkillable(left))
        if not in_time and self._stopped_by is not None:
            name = signal_name(self._stopped_by)
            note(
                f"stopped by {name}; the agent (process {self._agent}) did not respond in time and was killed"
            )
            return 128 + self._stopped_by
        if status < 0:
            note(f"the agent (process {self._agent}) {describe_exit(status)}; so was the whole job")
        return shell_status(status)


def _no_op(number: int, frame: FrameType | None) -> None:
    """The signal arrives through the wakeup descriptor, or not at all."""
