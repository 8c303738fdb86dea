"""The command `lockstep agent`: an agent on another host, and the process that watches it."""

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import UnfitError, with_code
from lockstep.hosts.agent_process import (
    AgentProcess,
    CoordinatorGone,
    HostRefused,
    LeftBehind,
    LeftOut,
    StartedWorkers,
)
from lockstep.hosts.engine_link import EngineLink
from lockstep.hosts.gathering import Stopped, heed_stop
from lockstep.hosts.host_listener import HostListener, own_credentials
from lockstep.hosts.joining import CoordinatorAddress
from lockstep.hosts.standby import Standby
from lockstep.hosts.where import GATHERING
from lockstep.local_job.job_process import run_in_job_process
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.credentials import Credentials
from lockstep.protocol.engine import StartAgent
from lockstep.protocol.host import (
    LEFT_OUT,
    MOST_QUEUED,
    SILENCE,
    BeginJob,
    HostOffer,
    Prepare,
    RemoteInstruction,
    RemoteReport,
)
from lockstep.protocol.rendezvous import Task
from lockstep.system.clock import SystemClock
from lockstep.system.environment import ssh_address
from lockstep.system.event_loop import EventLoop, wait_for
from lockstep.system.notes import note
from lockstep.system.prose import count
from lockstep.system.run_folder import temporary_folder
from lockstep.transport.addresses import join_address
from lockstep.transport.keys import JobKey
from lockstep.transport.stream_channel import StreamChannel

_NOTES = (1.0, 5.0)
"""Seconds until the first note of a wait, and from one to the next."""
_QUIET_NOTES = (10.0, 60.0)
"""The same for agents that were started with their coordinator, and may be many."""

_REFUSALS, _PAUSE = 10, 1.0
"""Number of attempts of an engine's agent while the coordinator closes each connection at once, and seconds
between two. A coordinator that dies does so. The engine starts another one, but no other agent."""


def run_over_pipes() -> int:
    """Run an agent that reads instructions from stdin and reports to stdout; return the exit status."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    # The output of a library must not mix with messages.
    os.dup2(2, 1)

    def serve(command: StopChannel, folder: Path, standby: Standby) -> int:
        clock, begun = SystemClock(), list[BeginJob]()
        with EventLoop() as loop:
            channel: StreamChannel[RemoteReport, RemoteInstruction] = StreamChannel(
                RemoteInstruction, reading, writing, most_queued=MOST_QUEUED
            )
            address = ssh_address() or socket.gethostbyname(socket.gethostname())

            def listen(prepare: Prepare) -> HostListener:
                key = JobKey.parse(prepare.key, "the message of the coordinator")
                credentials = key.mint(encrypted=prepare.encrypted)
                return HostListener.open(
                    join_address((address, 0)), credentials, note, loop=loop, clock=clock
                )

            process = AgentProcess(
                channel=channel,
                command=command,
                loop=loop,
                clock=clock,
                listen=listen,
                workers=StartedWorkers(folder, loop, children=standby.children),
                folder=folder,
                begins=begun.append,
                standby=standby,
            )
            try:
                return process.run()
            except LeftBehind as left:
                if process.address is None:
                    raise
                # Only the first command could start another agent here, and the standby leads the job now.
                note(f"{left}, and this host joins it again")
                at, credentials = process.address.address, process.address.credentials
        options = AgentOptions(at, begun[-1].here.workers)
        return _take_part(options, credentials, command, folder, note, standby, again=True)

    return _run(serve)


@dataclass(frozen=True)
class AgentOptions:
    """How an agent joins a job.

    Attributes:
        coordinator: HOST:PORT of the job.
        workers: the number of workers that this host offers.
        listen: HOST:PORT of this host for connections of workers of other hosts; empty for the address from
            which this host reaches the coordinator.
        port: the port if `listen` is empty; 0 for any free one.
        encrypted: whether connections are encrypted.
        patience: seconds until this stops trying to reach the coordinator.
        shows: whether the terminal of this process also shows the output of its workers.
        quiet: whether only the coordinator writes notes, because it has the same terminal.
        grace: seconds that the job may take for a checkpoint after a signal, if the coordinator gets each
            signal too and ends the job; None to leave the job at once.
        engine: the engine that has started this agent, if any.
        inherited: see `StartedWorkers`.
        tasks: see `HostOffer`.
        task: see `HostOffer`.
        others: more addresses at which the coordinator may be.
        leads_at: the address among these at which this host takes over the job if the coordinator is lost;
            empty if it does not take it over.
    """

    coordinator: str
    workers: int = 1
    listen: str = ""
    port: int = 0
    encrypted: bool = True
    patience: float = GATHERING
    shows: bool = False
    quiet: bool = False
    grace: float | None = None
    engine: EngineLink | None = None
    inherited: tuple[int, ...] = ()
    tasks: tuple[Task, ...] = ()
    task: int = 0
    others: tuple[str, ...] = ()
    leads_at: str = ""


def run_for_engine(engine: EngineLink) -> int:
    """Run the agent that an engine has started; return its exit status."""
    start = engine.start
    assert isinstance(start, StartAgent)
    here = join_address((start.address, 0))
    options = AgentOptions(
        start.coordinator, start.workers, here, quiet=True, engine=engine, inherited=start.inherited
    )
    return join_and_run(options)


def join_and_run(options: AgentOptions) -> int:
    """Join a job over the network, and run its workers on this host; return the exit status of the job.

    It is `LEFT_OUT` if the coordinator is lost, or does not let this host join a running job.

    Raises:
        ConfigError: there is no key, or it cannot be used.
        UnfitError: the process of the agent cannot be started.
    """
    if options.engine is not None:
        credentials = options.engine.key.mint(encrypted=options.encrypted)
    else:
        credentials = own_credentials(options.coordinator, encrypted=options.encrypted)
    say: Callable[[str], None] = _say_nothing if options.quiet else note

    def serve(command: StopChannel, folder: Path, standby: Standby) -> int:
        return _take_part(options, credentials, command, folder, say, standby)

    lifeline = None if options.engine is None else options.engine.LIFELINE
    return _run(serve, options.grace or 0.0, lifeline, options.leads_at)


def _take_part(
    options: AgentOptions,
    credentials: Credentials,
    command: StopChannel,
    folder: Path,
    say: Callable[[str], None],
    standby: Standby,
    *,
    again: bool = False,
) -> int:
    """Take part in a job, again whenever it has left this host behind; return the job's exit status."""
    refusals, others, first = 0, list(options.others), options.coordinator
    while True:
        try:
            at = replace(options, coordinator=first)
            status = _join(at, credentials, command, folder, say, others, standby=standby, again=again)
        except LeftBehind as left:
            note(f"{left}, and this host joins it again")
            # An engine may start another coordinator elsewhere.
            again, refusals = options.engine is None, 0
            continue
        except HostRefused:
            refusals += 1
            if (options.engine is None and not others) or refusals == _REFUSALS:
                raise
            if others:
                others.append(first)
                first = others.pop(0)
            wait_for([command.fileno()], _PAUSE)
            continue
        if status not in (0, LEFT_OUT):
            say(
                f"the job ended with exit status {status}; the host of its coordinator at "
                f"{options.coordinator} has the logs"
            )
        return status


def _say_nothing(text: str) -> None:
    """Leave notes to the coordinator."""


def _join(
    options: AgentOptions,
    credentials: Credentials,
    command: StopChannel,
    folder: Path,
    say: Callable[[str], None],
    others: list[str],
    *,
    standby: Standby,
    again: bool,
) -> int:
    """Take part in a job once; return its exit status. `others` has more addresses of its coordinators."""
    clock = SystemClock()
    with EventLoop() as loop:
        engine = options.engine
        first = engine.coordinator if engine else options.coordinator
        address = CoordinatorAddress(first, credentials, loop, others)
        if engine is not None:
            engine.watch(loop)
        connection = _connect(options, address, command, loop, clock, standby)
        here = options.listen or join_address((connection.getsockname()[0], options.port))
        channel = address.channel(connection)
        channel.send(HostOffer(options.workers, tasks=options.tasks, task=options.task))

        def begins(begin: BeginJob) -> None:
            if (standby := begin.spec.standby) and standby not in others:
                others.append(standby)
            room = count(begin.here.workers, "worker")
            say(f"joined {address.tried}, with room for {room}: {begin.spec.shape}")

        def listen(prepare: Prepare) -> HostListener:
            return HostListener.open(here, credentials, note, loop=loop, clock=clock)

        process = AgentProcess(
            channel=channel,
            command=command,
            loop=loop,
            clock=clock,
            listen=listen,
            workers=StartedWorkers(folder, loop, options.shows, options.inherited, standby.children),
            folder=folder,
            joined=True,
            say=say,
            grace=options.grace,
            waits=lambda awaited: say(f"joined {address.tried}; waiting for {awaited}"),
            begins=begins,
            address=address,
            engine=engine,
            patience=options.patience,
            again=again,
            standby=standby,
        )
        try:
            return process.run()
        except CoordinatorGone as gone:
            if engine is not None and channel.received and not process.begun:
                # The engine starts another coordinator, but no other agent.
                raise LeftBehind(str(gone)) from None
            raise


def _connect(
    options: AgentOptions,
    address: CoordinatorAddress,
    command: StopChannel,
    loop: EventLoop,
    clock: SystemClock,
    standby: Standby,
) -> socket.socket:
    """Return a connection to the coordinator.

    Raises:
        UnfitError: no connection was made within the limit; LeftOut if this host may lead the job.
        Stopped: this agent was stopped first.
    """
    dialer = address.dial()
    loop.watch(command.fileno(), lambda: None)
    first, every = _QUIET_NOTES if options.quiet else _NOTES
    begun, due = clock.now(), clock.now() + first
    try:
        while (connection := dialer.take()) is None:
            if options.engine is not None:
                address.address = options.engine.coordinator
            heed_stop(command)
            waited = (now := clock.now()) - begun
            if waited > SILENCE:
                # If the job has left this host behind, its coordinator may have ended before it led the job.
                standby.start(now)
            if waited >= options.patience:
                # A host that can begin to lead does so when its command runs again.
                raise (LeftOut if options.leads_at else UnfitError)(
                    f"the coordinator at {options.coordinator} did not answer in {options.patience:g} s: "
                    f"{dialer.failure}"
                )
            if now >= due and dialer.failure:
                due = now + every
                note(f"waiting for the coordinator, {waited:.0f} s: {dialer.failure}")
            loop.turn(max(0.0, min(max(due, now + 0.1), begun + options.patience) - now))
        return connection
    finally:
        loop.unwatch(command.fileno())
        dialer.close()


def _run(
    serve: Callable[[StopChannel, Path, Standby], int],
    grace: float = 0.0,
    lifeline: int | None = None,
    leads_at: str = "",
) -> int:
    """Run an agent in its own process, with a folder for its workers; return the exit status.

    Args:
        serve: runs it, given the channel of its command, the folder, and the standby of a job.
        grace: seconds that the job may take to end after a signal.
        lifeline: see `run_in_job_process`.
        leads_at: see `AgentOptions`.
    """

    def serve_in_folder(command: StopChannel) -> int:
        standby = Standby(leads_at)
        try:
            return serve(command, folder, standby)
        except (CoordinatorGone, LeftOut) as why:
            note(with_code(why))
            if isinstance(why, LeftOut):
                # The coordinator that has refused this host may be on it, and leads the other hosts.
                standby.outlast(command)
            return LEFT_OUT
        except Stopped as stopped:
            return 128 + stopped.signal
        finally:
            standby.close()
            # This works even if the process that watches this one was killed.
            shutil.rmtree(folder, ignore_errors=True)

    with temporary_folder() as folder:
        return run_in_job_process(serve_in_folder, grace, lifeline)
