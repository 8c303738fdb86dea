"""A job that agents of other hosts join. It waits until its hosts are complete, and then coordinates."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeVar

from lockstep.errors import ConfigError, NetworkError, UnfitError
from lockstep.hosts.gate import Gate
from lockstep.hosts.gathering import Stopped, turn
from lockstep.hosts.host_listener import own_credentials
from lockstep.hosts.job_on_hosts import Resumed, terminal_of
from lockstep.hosts.roster import OpenRoster
from lockstep.hosts.where import Listen
from lockstep.observability.exports import Exports
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.engine import HOLD, StartCoordinator
from lockstep.protocol.job_spec import JobHost, JobSpec
from lockstep.system.clock import SystemClock
from lockstep.system.environment import KEY_FILE
from lockstep.system.event_loop import EventLoop
from lockstep.system.notes import GATHERING_NOTE_EVERY
from lockstep.transport.addresses import is_loopback

_FIRST_NOTE = 1.0
_LOOK_EVERY = 1.0
_RETURN = 10.0
"""Seconds in which the agents that run a job connect to the coordinator that an engine has started again."""
_RETRY = 60.0
"""Seconds in which the name of this host may become known."""

Result = TypeVar("Result")


def run_listening(
    spec: JobSpec,
    where: Listen,
    resumed: Resumed,
    command: StopChannel,
    exports: Exports,
) -> int:
    """Run a job on this host and on those whose agents join it; return its exit status.

    Args:
        spec: the job, with the number of all workers and without hosts; its threads may be 0.
        where: the address and the limits of the wait for them.
        resumed: see `Resumed`.
        command: the channel over which the job is stopped.
        exports: the exports of the process of the coordinator.

    Raises:
        ConfigError: there is no key, the address cannot be used, the hosts do not fit together, or one cannot
            run the script.
        NetworkError: the address cannot be used.
        UnfitError: too few hosts have joined in time, or one was lost.
    """
    try:
        with EventLoop() as loop:
            return _ListeningJob(spec, where, command, loop).run(resumed, exports)
    except Stopped as stopped:
        return 128 + stopped.signal


@dataclass
class _ListeningJob:
    """A job on this host, and its wait for other hosts."""

    spec: JobSpec
    where: Listen
    command: StopChannel
    loop: EventLoop
    this_host: JobHost | None = None

    def __post_init__(self) -> None:
        self.console = terminal_of(self.spec)
        self.clock = SystemClock()
        engine = self.where.engine
        # Agents that run the job already come first.
        returns = engine is not None and isinstance(engine.start, StartCoordinator) and engine.start.again
        self.not_before = self.clock.now() + (_RETURN if returns else 0.0)

    def run(self, resumed: Resumed, exports: Exports) -> int:
        """See `run_listening`."""
        gate = Gate(self.roster, self.credentials(), self.command, self.console, self.loop)
        with closing(gate):
            self.retried(lambda: gate.listen(self.where.address))
            host, _ = gate.listener.host_and_port
            if _address(host).is_unspecified:
                raise ConfigError(
                    f"--listen {self.where.address} is not an address that other hosts can connect to; give "
                    "the one at which they reach this host"
                )
            self.this_host = JobHost(host, self.where.here)
            engine = self.where.engine
            if engine is not None:
                engine.watch(self.loop)
                engine.tell_address(gate.listener.listener.address)
            if self.where.task:
                self.console.say(f"{self.where.task} coordinates the job at {self.where.address}")
            try:
                gate.gather(self.narrator(gate))
            except Stopped as stopped:
                # A killed command may run again, and an engine may start another coordinator.
                if stopped.signal and engine is None:
                    gate.server.turn_away("the job was stopped before it began", again=True)
                raise
            # An engine can start another coordinator elsewhere while this host is cut off.
            spec = replace(self.spec, hold=HOLD if engine is not None else None)
            return gate.run(spec, resumed=resumed, exports=exports)

    def roster(self) -> OpenRoster:
        """Return the hosts of the job. With an engine, it begins with the workers that the engine has found.

        Parameter servers, which are the last workers, do not join later.
        """
        workers, engine, this_host = self.spec.workers, self.where.engine, self.this_host
        here = this_host if self.where.here else None
        if engine is None:
            address = _address(this_host.name) if this_host is not None else None
            host = "" if address is None or address.is_loopback else str(address)
            return OpenRoster(workers, here, host, self.where.tasks)
        begins_with = workers if self.spec.parameter_servers else min(workers, engine.workers)
        waits = not begins_with or self.clock.now() < self.not_before
        return OpenRoster(begins_with or workers, here, waits=waits, limited=False)

    def credentials(self) -> Credentials:
        """Return the credentials of this process; the name of this host may not be known yet."""
        address, engine = self.where.address, self.where.engine
        if engine is not None:
            return engine.key.mint(encrypted=not self.spec.plain)
        return self.retried(lambda: own_credentials(address, encrypted=not self.spec.plain))

    def retried(self, act: Callable[[], Result]) -> Result:
        """Return the result of `act`; repeat it for a while if the name of this host may be unknown yet."""
        begun = self.clock.now()
        said = begun - GATHERING_NOTE_EVERY + _FIRST_NOTE
        while True:
            try:
                return act()
            except NetworkError as error:
                now = self.clock.now()
                if not self.where.retries or now - begun >= _RETRY:
                    raise
                if now - said >= GATHERING_NOTE_EVERY:
                    said = now
                    self.console.say(f"waiting for the name of this host, {now - begun:.0f} s: {error}")
            turn(self.loop, self.command, 1.0)

    def narrator(self, gate: Gate) -> Callable[[str], float]:
        """Return a function that reports what the job waits for, and gives up at the limit."""
        begun, told = self.clock.now(), ""
        due = begun + _FIRST_NOTE
        patience, engine = self.where.patience, self.where.engine
        key = f"{KEY_FILE}=... " if gate.credentials.greeting_key else ""
        plain = " --plain" if self.spec.plain else ""
        address = gate.listener.listener.address
        join = "" if engine else f"{key}lockstep agent --join {address}{plain} [-n WORKERS]"
        if self.where.task and engine is None:
            join = "the same command"
        host, port = gate.listener.host_and_port
        passes = f"a firewall must let TCP connections to port {port} through"
        if is_loopback(host):
            passes = (
                f"only processes of this host reach {host}; for other hosts, give --listen another address"
            )

        def tell(missing: str) -> float:
            nonlocal told, due
            waited = (now := self.clock.now()) - begun
            # See `OpenRoster.missing`: the reason for which a task was refused comes last.
            awaited, separator, refusal = missing.partition("; ")
            why = separator + refusal
            if missing != told or now >= due:
                told = missing
                gate.server.keep_waiting(f"other hosts to join with {awaited}, {waited:.0f} s{why}")
            if waited >= patience:
                gate.server.turn_away(f"too few hosts have joined within {patience:g} s")
                advice = f"; run on each: {join}" if join else ""
                raise UnfitError(f"no host has joined with {awaited} within {patience:g} s{advice}{why}")
            if now >= due:
                due = now + GATHERING_NOTE_EVERY
                advice = f"; run there: {join} ({passes})" if join else ""
                text = f"waiting at {address} for other hosts to join with {awaited}, {waited:.0f} s"
                self.console.say(text + advice + why)
            until = min(due, begun + patience, max(now, self.not_before) + _LOOK_EVERY)
            return max(0.0, until - now)

        return tell


def _address(host: str) -> IPv4Address | IPv6Address:
    return ip_address(host.partition("%")[0])
