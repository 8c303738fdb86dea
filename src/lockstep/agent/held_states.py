"""The states for the joiners of a host: the chief gives them on its host, and other hosts fetch them.

The chief gives the state to its agent, which holds it until the next view and tells the coordinator its
number and its size (`StateGiven`). The coordinator never sees the bytes. An agent that needs the state
fetches it from the agent that holds it, once for all joiners of its host:

    coordinator             agent of the joiner               agent of the chief
    SendState          ->   connects: greeting STATE,    ->   listener: job, view, number; holds the state
                            mutual TLS
                            checks the size, receives    <-   sends pieces of 1 MB, then the hash of all
                            into memory, compares the hash
    (every 2 s)        <-   StateMoving
    next view          <-   StateArrived

The members wait until the state has arrived at the hosts of all joiners that are ready. Then the next view
begins, and joiners get the state as on one machine. Nothing crosses the network if no joiner is on another
host. A position travels in the same way (`SendPosition`).

A thread for each stream does the work, so the event loop never waits for it. A silent event loop would end
the job. TCP slows a sender that is faster than the receiver. The size is compared with the available memory
before memory is taken.

    lost                                        consequence
    the chief, after it has given the state     none for the stream: its agent has the state
    the joiner                                  the members continue, and a replacement starts
    the stream: it breaks, a piece takes more   the joiners of that host are killed and replaced;
    than 10 s, memory or the hash does not fit  the members continue
    time: not arrived within `--timeout`        the same for joiners that the state has not reached
    the view, while a position is on its way    the joiner asks again
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.agent.lane_connections import HostNetwork
from lockstep.errors import LockstepError
from lockstep.protocol.channel import Attachment
from lockstep.protocol.greeting import ConnectionKind, Greeting
from lockstep.protocol.worker import StateSource
from lockstep.system.event_loop import EventLoop
from lockstep.transport.addresses import join_address

Deliver = Callable[[Attachment | str], None]
"""Takes a state, or why there is none."""

Tell = Callable[[StateSource, int, float], None]
"""Takes how many bytes of a state have arrived, in how many seconds."""

_PATIENCE = 10.0
"""Seconds to connect to another host."""
_TELL_EVERY = 2.0
"""Seconds between two reports on a state that arrives."""


class _NotNeeded(Exception):
    """The stream of a state is no longer needed."""


@dataclass
class _Fetch:
    """A state that is being fetched, and its receivers with whether each also needs it in later views."""

    source: StateSource
    receivers: list[tuple[Deliver, bool]]
    outcome: Attachment | str = "its stream has ended unexpectedly"
    ended: bool = False
    received: int = 0
    seconds: float = 0.0

    def outlives_view(self) -> bool:
        """Drop the receivers that do not need the state in later views; return whether others remain."""
        self.receivers = [receiver for receiver in self.receivers if receiver[1]]
        return bool(self.receivers)


class HeldStates:
    """Holds the states of the current view, and exchanges them with the agents of other hosts.

    Args:
        host: the index of this host in the job.
        network: how this host reaches others; None if the job has one host.
        loop: delivers the states that have arrived.
        tell: called regularly for each state that takes long to arrive.
    """

    def __init__(self, host: int, network: HostNetwork | None, loop: EventLoop, tell: Tell) -> None:
        self._host = host
        self._network = network
        self._loop = loop
        self._tell = tell
        self._term, self._view = 1, 0
        self._held: dict[int, Attachment] = {}
        self._fetches: dict[tuple[int, int], _Fetch] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        if network is not None:
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            loop.watch(self._wake, self._deliver)
            network.connections.give_state = self._give

    def hold(self, state: Attachment) -> int:
        """Hold a state that was given in the current view; return its number."""
        number = len(self._held) + 1
        self._held[number] = state
        return number

    def release(self, state: Attachment) -> None:
        """Release a state that is not needed; the kernel takes long to free gigabytes."""
        threading.Thread(target=os.close, args=(state.take(),), name="release", daemon=True).start()

    def find(self, number: int) -> Attachment | None:
        """Return a state of the current view, if it is held."""
        return self._held.get(number)

    def begin_view(self, term: int, view: int) -> None:
        """Begin a view: release the states that only the last view needed."""
        self._term, self._view = term, view
        released = [self._held, self._fetches]
        self._held = {}
        self._fetches = {key: fetch for key, fetch in self._fetches.items() if fetch.outlives_view()}
        if any(released):
            # This uses a thread, like `release`.
            threading.Thread(target=released.clear, name="release", daemon=True).start()

    def fetch(self, source: StateSource, deliver: Deliver, *, lasts: bool = False) -> None:
        """Get a state: from this host if it is held here, otherwise from the host that has it.

        Args:
            source: the state.
            deliver: called once, unless a view begins earlier.
            lasts: whether to call `deliver` even if a view begins earlier.
        """
        key = source.view, source.number
        held = self._held.get(source.number) if source.view == self._view else None
        if held is not None:
            deliver(held)
        elif source.host == self._host or self._network is None:
            deliver(f"view {source.view} has ended")
        elif key in self._fetches:
            self._fetches[key].receivers.append((deliver, lasts))
        else:
            self._fetches[key] = fetch = _Fetch(source, [(deliver, lasts)])
            self._start(self._receive, fetch, self._network)

    def close(self) -> None:
        """End all streams, and release everything; safe to call more than once."""
        if self._closed:
            return
        self._closed = True
        self._fetches.clear()
        for thread in self._threads:
            thread.join()
        self._held.clear()
        if self._network is not None:
            self._loop.unwatch(self._wake)
            os.close(self._wake)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=act, args=arguments, name="state", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _receive(self, fetch: _Fetch, network: HostNetwork) -> None:
        # Imported late, like in `_send`: few agents need them.
        from lockstep.transport.dial import dial
        from lockstep.transport.state_stream import receive_state

        source, greeting = fetch.source, self._greeting(fetch.source, network)

        begun = time.monotonic()

        def check() -> None:
            if self._fetches.get((source.view, source.number)) is not fetch:
                raise _NotNeeded
            if (seconds := time.monotonic() - begun) - fetch.seconds >= _TELL_EVERY:
                fetch.seconds = seconds
                os.eventfd_write(self._wake, 1)

        def arrived(received: int) -> None:
            fetch.received = received

        try:
            address = join_address((source.address, source.port))
            connection = dial(address, greeting, network.credentials, _PATIENCE, check, reach=_PATIENCE)
            with contextlib.closing(connection):
                fetch.outcome = receive_state(connection, source.size, check, arrived)
        except _NotNeeded:
            return
        except LockstepError as error:
            fetch.outcome = str(error)
        finally:
            fetch.ended = True
            os.eventfd_write(self._wake, 1)

    def _greeting(self, source: StateSource, network: HostNetwork) -> Greeting:
        return Greeting(
            ConnectionKind.STATE,
            network.job,
            self._term,
            source.view,
            host=self._host,
            lane=source.number,
            receiver=source.host,
        )

    def _deliver(self) -> None:
        os.eventfd_read(self._wake)
        for key, fetch in list(self._fetches.items()):
            if fetch.ended:
                del self._fetches[key]
                if isinstance(fetch.outcome, Attachment) and fetch.source.view == self._view:
                    self._held[fetch.source.number] = fetch.outcome
                for deliver, _ in fetch.receivers:
                    deliver(fetch.outcome)
            elif fetch.seconds:
                self._tell(fetch.source, fetch.received, fetch.seconds)

    def _give(self, greeting: Greeting, connection: socket.socket) -> str | None:
        """Send a state over a connection that asks for it."""
        if greeting.receiver != self._host:
            return "its greeting is a copy of one for another host"
        state = self._held.get(greeting.lane) if greeting.view == self._view else None
        if state is None or self._network is None or self._closed:
            return f"the state that it asks for is not held: view {greeting.view} has ended"
        self._start(self._send, connection, state, self._network)
        return None

    def _send(self, connection: socket.socket, state: Attachment, network: HostNetwork) -> None:
        from lockstep.transport.dial import accept
        from lockstep.transport.state_stream import send_state

        def check() -> None:
            if self._closed:
                raise _NotNeeded

        # The other host reports why it has not received the state.
        with (
            contextlib.suppress(LockstepError, _NotNeeded),
            contextlib.closing(accept(connection, network.credentials, _PATIENCE, check)) as accepted,
        ):
            send_state(accepted, state, check)
