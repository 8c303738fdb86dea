"""How a process waits until the coordinator admits it: its reports, and the limit of the wait."""

import socket
import time

from lockstep.errors import ConfigError, PeerStuckError
from lockstep.hosts.where import GATHERING
from lockstep.protocol.rendezvous import MAX_PACKET, Admitted, Answer, KeepWaiting, Rejected, decode_answer
from lockstep.system.event_loop import wait_for
from lockstep.system.notes import GATHERING_NOTE_EVERY, note
from lockstep.system.socket_owners import peer

_SOON = 1.0


class WaitMessages:
    """Reports every few seconds what a process waits for, and limits the wait. Pure.

    Args:
        name: the name of the process's task.
        now: the time at which the wait begins.
    """

    def __init__(self, name: str, now: float) -> None:
        self._awaited = "the other tasks"
        self._name = name
        self._since = now
        self._has_said = False
        # The last process does not wait, and does not report anything.
        self._due = now + _SOON

    def waits_for(self, awaited: str, now: float) -> None:
        """Note what the process waits for from now on. A change is reported at once."""
        if awaited != self._awaited and self._has_said:
            self._due = now
        self._awaited = awaited

    def line(self, now: float) -> str:
        """Return the line to show now, or an empty string before it is due.

        Raises:
            PeerStuckError: the wait exceeds its limit.
        """
        waited = now - self._since
        if waited >= GATHERING:
            raise PeerStuckError(
                f"{self._name} has waited {GATHERING:g} s for {self._awaited} and gives up; start all tasks "
                "of TF_CONFIG within that time"
            )
        if now < self._due:
            return ""
        self._due, self._has_said = now + GATHERING_NOTE_EVERY, True
        return f"{self._name} waits for {self._awaited}" + (f", {waited:.0f} s" if waited >= 1 else "")

    def left(self, now: float) -> float:
        """Return the seconds until the next line is due."""
        return max(0.0, self._due - now)


class RendezvousWait:
    """Waits for the answer of a coordinator, or of its successor if it ends.

    Args:
        name: the name of the process's task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._messages = WaitMessages(name, time.monotonic())

    def answer(self, connection: socket.socket) -> Admitted | None:
        """Wait until the process is admitted; return the admission.

        Returns:
            None if the coordinator has ended. Then another one is necessary.

        Raises:
            ConfigError: the process cannot take part, or cannot read the answer.
            PeerStuckError: the wait exceeded its limit.
        """
        pid = peer(connection)[0]
        self._messages.waits_for(f"an answer from the coordinator (process {pid})", time.monotonic())
        while True:
            self._say()
            if not wait_for([connection.fileno()], self._messages.left(time.monotonic())):
                continue
            try:
                packet = connection.recv(MAX_PACKET)
            except ConnectionError:
                return None
            if not packet:
                return None
            match self._understood(packet, pid):
                case KeepWaiting(awaited):
                    self._messages.waits_for(awaited, time.monotonic())
                case Rejected(reason):
                    raise ConfigError(reason)
                case admitted:
                    return admitted

    def _understood(self, packet: bytes, pid: int) -> Answer:
        try:
            return decode_answer(packet)
        except ValueError as error:
            raise ConfigError(
                f"{self._name} cannot read the answer of process {pid}, which holds the names of the job's "
                f"tasks ({error}); use the same version of Lockstep for all tasks, or stop that process"
            ) from None

    def _say(self) -> None:
        if line := self._messages.line(time.monotonic()):
            note(line)
