"""Takeover by a restarted coordinator process: it continues the job of the agents that connect.

Without ssh, the process at the job's address can be lost as a whole, keeper and coordinator. The command that
is restarted there takes over. In a job whose workers are started by hand, the process of the first host takes
over when its tasks are restarted.

1. Each agent notices that the connection is closed, or silent, and connects to the same address again.
   Meanwhile, its workers continue training. It offers a `RunningJob`: what it knows of the job, with the
   newest record that it keeps.
2. The address is the lock: only one process can listen there, so there is only one successor. After the first
   such offer, it waits until the other hosts of that record have had the time to notice the loss
   (`wait_for_hosts`). It does not wait longer, because the workers of a host that is also lost will not
   connect.
3. The newest record counts. Agents that the record considers lost, and agents of another job, are refused
   (`taking_part`). Hosts that have not connected count as lost; they may return as new hosts.
4. A keeper starts a coordinator in a higher term, as after the loss of a coordinator alone. It asks the
   agents for their standing, and continues from there (`coordinator_process.py`, `continued`).

The workers of this host join like those of a new host: the old ones died with their agent.

The keeper and the first eight agents keep records. If all of these are lost together, no process can continue
the job, and the command reports that. If only the agents with the newest record are lost, an older record
counts. Then an agent that has carried out a later instruction cannot follow this record, and is left behind.
The job loses these workers but no step: the members of the next view agree on the state by themselves.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import cast

from lockstep.checkpoint.mirror import take_lease
from lockstep.coordinator.job_record import JobRecord, decode_record, newest
from lockstep.errors import ConfigError, UnfitError
from lockstep.hosts.agent_server import AgentServer, JoiningAgent
from lockstep.hosts.host_listener import HostListener
from lockstep.hosts.job_on_hosts import ThisHost, WorkersByHand, facts_here, start_here
from lockstep.hosts.keeper import ConnectedHost, Keeper
from lockstep.hosts.newcomers import Newcomers
from lockstep.observability.console import Console
from lockstep.observability.exports import NO_EXPORTS, Exports
from lockstep.protocol.admin import StopChannel
from lockstep.protocol.channel import Channel
from lockstep.protocol.host import (
    SILENCE,
    HostReport,
    Instruction,
    KeepRecord,
    RunningJob,
)
from lockstep.protocol.job_spec import Checkpoints, JobHost, JobSpec
from lockstep.protocol.rendezvous import Rejected
from lockstep.system.clock import Clock, SystemClock
from lockstep.system.event_loop import EventLoop
from lockstep.system.prose import count
from lockstep.system.run_folder import sign_claim

LEFT_BEHIND = "the job has continued without this host"
"""Why an agent that ran the job cannot go on with it."""

_SAME = ("target", "module", "arguments", "replicas", "seed")
"""The fields of a job that a command which continues it must give again."""
_NOTICED = 1.0
"""Seconds until an agent that has noticed the loss of the coordinator has connected again."""


def running_jobs(agents: Sequence[JoiningAgent]) -> list[tuple[JoiningAgent, RunningJob]]:
    """Return the agents that already run a job, each with its `RunningJob`."""
    offers = [(agent, agent.offer.running) for agent in agents if agent.offer is not None]
    return [(agent, running) for agent, running in offers if running is not None]


def missing_hosts(agents: Sequence[JoiningAgent], host_and_port: tuple[str, int]) -> list[str]:
    """Return the names of the hosts of a running job whose agents have not connected.

    Args:
        agents: the agents that have connected; at least one runs the job.
        host_and_port: the address and the port of this process, which the lost coordinator had.
    """
    running = [job for _, job in running_jobs(agents)]
    if (newest := _newest(running)) is None:
        return ["a host that keeps the record of the job"]
    _, record = newest
    there = {job.host for job in running}
    return [
        host.name
        for index, host in enumerate(record.hosts)
        if not host.lost
        and index not in there
        and (host.peer is None or (host.peer.address, host.peer.port) != host_and_port)
    ]


def wait_for_hosts(
    server: AgentServer, host_and_port: tuple[str, int], clock: Clock, turn: Callable[[float], object]
) -> None:
    """Wait for the other agents of a running job, which need time to notice that its coordinator was lost.

    Args:
        server: the server of the agents that have connected.
        host_and_port: the address and the port of this process.
        clock: for the deadline.
        turn: serves the agents for at most so many seconds.
    """
    until = clock.now() + SILENCE + _NOTICED
    while running_jobs(server.agents) and (names := missing_hosts(server.agents, host_and_port)):
        server.keep_waiting(f"{' and '.join(names)} to connect again")
        if (left := until - clock.now()) <= 0:
            return
        turn(left)


def taking_part(
    running: Sequence[tuple[JoiningAgent, RunningJob]], job: bytes, record: JobRecord
) -> dict[int, JoiningAgent]:
    """Return the agents of a job by their hosts, without agents of hosts that its record considers lost."""
    living = [index for index, host in enumerate(record.hosts) if not host.lost]
    return {
        there.host: agent for agent, there in running if there.prepare.job == job and there.host in living
    }


@dataclass(frozen=True)
class TakenOverJob:
    """A job that continues with another coordinator.

    Attributes:
        spec: the job as this command would begin it.
        here: the number of workers that this host should have, which join like those of a new host; 0 if it
            only coordinates.
        command: the channel over which the job is stopped.
        console: shows notes.
        loop: serves everything.
        listener: the listener for agents and workers of other hosts.
        agents: the agents that run the job.
        by_hand: the workers of this host, if a user starts all workers; None if agents start them.
        exports: the exports of the process of the coordinator.
    """

    spec: JobSpec
    here: int
    command: StopChannel
    console: Console
    loop: EventLoop
    listener: HostListener
    agents: Sequence[JoiningAgent]
    by_hand: WorkersByHand | None = None
    exports: Exports = NO_EXPORTS

    def run(self, accept: Callable[[Newcomers], None]) -> int:
        """Run the job to its end; return its exit status.

        Args:
            accept: called with the `Newcomers` that admits later agents.

        Raises:
            ConfigError: the agents do not run the job of this command.
            UnfitError: the hosts that keep the record of the job have not connected.
        """
        running = running_jobs(self.agents)
        newest = _newest([job for _, job in running])
        if newest is None:
            raise UnfitError("no host that has connected keeps the record of its job, so it cannot continue")
        kept, record = newest
        self._check(record.spec)
        prepare = next(job.prepare for _, job in running if job.kept == kept)
        agents = taking_part(running, prepare.job, record)
        for agent, _ in running:
            if agent not in agents.values():
                agent.channel.send(Rejected(LEFT_BEHIND, again=True))
        # From now on, both ends use only these messages.
        channels = {
            host: cast("Channel[Instruction, HostReport]", agent.channel) for host, agent in agents.items()
        }
        hosts = [
            ConnectedHost(host_record.name, host_record.peer, 0, 0, channels.get(index))
            for index, host_record in enumerate(record.hosts)
        ]
        facts = facts_here(prepare, self.listener, self.by_hand)
        before = tuple(
            JobHost(host_record.name, slots)
            for host_record, slots in zip(record.hosts, record.state.slots, strict=True)
        )
        names = [host.name for host in hosts if host.agent is not None]
        name_here = next(name for name in _names(self.listener.host_and_port[0]) if name not in names)
        spec = replace(
            record.spec,
            run_dir=self.spec.run_dir,
            hosts=(*before, *((JobHost(name_here, self.here),) if self.here else ())),
            checkpoints=self._checkpoints(record.spec, prepare.job),
        )
        living = sum(not host_record.lost for host_record in record.hosts)
        missing = f"; {len(channels)} of them continued it" if len(channels) < living else ""
        self.console.say(
            f"taking over a job of {count(living, 'host')} whose coordinator was lost{missing}; logs in "
            f"{spec.run_dir}"
        )
        children, clock = set[int](), SystemClock()
        newcomers = Newcomers(spec, prepare, facts, self.console.say, self.loop, clock)
        with ExitStack() as ends:
            ends.enter_context(closing(newcomers))
            if self.here:
                here, own_agent = start_here(
                    spec,
                    ThisHost(len(before), self.listener, facts),
                    prepare.job,
                    loop=self.loop,
                    console=self.console,
                    children=children,
                    by_hand=self.by_hand,
                    late=True,
                )
                ends.enter_context(closing(own_agent))
                hosts.append(here)
            for index, host in enumerate(hosts):
                if host.agent is None:
                    newcomers.note_loss(index)
            keeper = Keeper(
                kept=kept,
                hosts=hosts,
                command=self.command,
                loop=self.loop,
                clock=clock,
                console=self.console,
                run_dir=str(spec.run_dir),
                children=children,
                notifies=True,
                when_lost=newcomers.note_loss,
                exports=self.exports,
                address=self.listener.listener.address,
                shows_life=bool(spec.standby),
            )
            accept(newcomers)
            newcomers.serve(keeper.add_host, lambda: keeper.is_over, lambda: keeper.leads)
            return keeper.run()

    def _checkpoints(self, runs: JobSpec, job: bytes) -> Checkpoints | None:
        """Return the checkpoints of the job in the folder of this host, which several hosts may share."""
        here, begun = self.spec.checkpoints, runs.checkpoints
        if here is None or begun is None:
            return None
        sign_claim(here.folder, job.hex())
        if begun.store is not None:
            take_lease(here.folder, begun.store, begun.resume)
        return replace(here, resume=begun.resume, store=begun.store)

    def _check(self, runs: JobSpec) -> None:
        def saves(spec: JobSpec) -> str | None:
            return spec.checkpoints.given if spec.checkpoints is not None else None

        compared = {field: (getattr(self.spec, field), getattr(runs, field)) for field in _SAME}
        compared["--checkpoint"] = saves(self.spec), saves(runs)
        for field, (here, there) in compared.items():
            if here != there:
                raise ConfigError(
                    f"the agents that have joined run another job, whose {field} is {there!r}, not {here!r}: "
                    "stop them, or repeat the command that began their job"
                )


def _names(address: str) -> Iterator[str]:
    yield address
    yield from (f"{address} ({number})" for number in itertools.count(2))


def _newest(running: Sequence[RunningJob]) -> tuple[KeepRecord, JobRecord] | None:
    kept = newest(job.kept for job in running)
    if kept is None:
        return None
    try:
        return kept, decode_record(kept.record)
    except ValueError as error:
        raise UnfitError(f"an agent runs a job that cannot be continued: {error}") from None
