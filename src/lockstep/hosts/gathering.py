"""Waits until the agents of all hosts have described their hosts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import UnfitError
from lockstep.protocol.admin import StopChannel, StopRequest
from lockstep.protocol.channel import Channel, PeerGone, Unreadable
from lockstep.protocol.host import (
    ALIVE_EVERY,
    HostFacts,
    KeepAlive,
    Prepare,
    RemoteInstruction,
    RemoteReport,
)
from lockstep.system.clock import Clock
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import GATHERING_NOTE_EVERY


class Stopped(Exception):
    """The user has stopped this process before the job began.

    Attributes:
        signal: the signal; 0 if the command has ended.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


def heed_stop(command: StopChannel) -> None:
    """Raise Stopped if the user has stopped the job, or the command has ended."""
    match command.receive():
        case StopRequest(signal):
            raise Stopped(signal)
        case PeerGone():
            raise Stopped(0)


def turn(loop: EventLoop, command: StopChannel, seconds: float | None) -> None:
    """Turn `loop` once, for at most so many seconds (None: no limit); raise Stopped as `heed_stop` does."""
    loop.watch(command.fileno(), lambda: None)
    try:
        loop.turn(seconds)
    finally:
        loop.unwatch(command.fileno())
    heed_stop(command)


@dataclass(frozen=True)
class AwaitedHost:
    """A host whose agent has not described it yet.

    Attributes:
        name: the name of the host.
        channel: the channel to its agent.
        why_lost: returns why the channel has ended.
    """

    name: str
    channel: Channel[RemoteInstruction, RemoteReport]
    why_lost: Callable[[], str]


def gather_facts(
    hosts: Mapping[int, AwaitedHost],
    prepare: Prepare,
    command: StopChannel,
    *,
    loop: EventLoop,
    clock: Clock,
    patience: float,
    say: Callable[[str], None],
) -> dict[int, HostFacts]:
    """Send each agent the first message, and return the facts of each host.

    Args:
        hosts: the hosts, by their index in the job.
        prepare: the first message to each agent.
        command: the channel over which the job is stopped.
        loop: serves the channels.
        clock: for deadlines.
        patience: seconds without a message from a host until this gives up.
        say: shows a note.

    Raises:
        UnfitError: an agent ends or is silent; the message names its host.
        Stopped: the user has stopped the job.
    """
    facts: dict[int, HostFacts] = {}
    begun, due = clock.now(), clock.now() + GATHERING_NOTE_EVERY
    alive_due = begun + ALIVE_EVERY
    heard = dict.fromkeys(hosts, begun)
    for host in hosts.values():
        host.channel.send(prepare)
        loop.watch(host.channel.fileno(), lambda: None)
    loop.watch(command.fileno(), lambda: None)
    try:
        while len(facts) < len(hosts):
            for index, host in hosts.items():
                match host.channel.receive():
                    case HostFacts() as host_facts:
                        facts[index] = host_facts
                    case KeepAlive():
                        # It may be reading a large checkpoint.
                        heard[index] = clock.now()
                    case PeerGone():
                        raise UnfitError(f"host {host.name} cannot take part: {host.why_lost()}")
                    case Unreadable(error):
                        raise UnfitError(
                            f"host {host.name} sent an invalid message ({error}); install the same version "
                            "of Lockstep on all hosts, and make sure that no startup file of its shell "
                            "prints anything"
                        )
            heed_stop(command)
            now, missing = (
                clock.now(),
                " and ".join(hosts[index].name for index in hosts if index not in facts),
            )
            silent = [index for index in hosts if index not in facts and now - heard[index] >= patience]
            if silent:
                names = " and ".join(hosts[index].name for index in silent)
                raise UnfitError(f"no answer from the agent of {names} within {patience:g} s")
            if now >= due and missing:
                due = now + GATHERING_NOTE_EVERY
                say(f"waiting for the agent of {missing}, {now - begun:.0f} s")
            if now >= alive_due:
                alive_due = now + ALIVE_EVERY
                for host in hosts.values():
                    host.channel.send(KeepAlive())
            if missing:
                loop.turn(max(0.0, min(due, alive_due) - now))
    finally:
        for host in hosts.values():
            loop.unwatch(host.channel.fileno())
        loop.unwatch(command.fileno())
    return facts
