"""Compares the hosts of a job, and computes the threads that all of them can give to a replica."""

import platform
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from lockstep.errors import ConfigError, LockstepError
from lockstep.protocol.host import HostFacts, Prepare
from lockstep.protocol.job_spec import JobHost, default_threads
from lockstep.system.cuda import version_of
from lockstep.system.environment import usable_cores
from lockstep.system.process_limits import open_files, processes_of_user_left, shortage
from lockstep.topology import place_on_hosts
from lockstep.transport.addresses import look_up, split_address
from lockstep.worker.program_sources import file_hash
from lockstep.worker.script import Script

_LIBRARIES = ("keras-lockstep", "keras", "numpy", "ml-dtypes")
_OF_BACKEND = {
    "jax": ("jax", "jaxlib"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tf-nightly"),
    "torch": ("torch",),
}


def own_facts(prepare: Prepare, address: str, port: int, problem: str = "") -> HostFacts:
    """Return the facts of this host for the job that `prepare` describes; imports no framework.

    Args:
        prepare: the first message of the coordinator.
        address: the address at which this process accepts connections of other hosts.
        port: its port.
        problem: why this host cannot run the job, if that is known.
    """
    script, digest = Script(prepare.target, prepare.module, prepare.arguments), ""
    try:
        script.check()
        source = script.source()
        digest = file_hash(source) or "" if source is not None else ""
    except LockstepError as error:
        problem = problem or str(error)
    return HostFacts(
        name=socket.gethostname(),
        python=platform.python_version(),
        machine=platform.machine(),
        libraries=_versions(prepare.backend),
        cores=usable_cores(),
        script=digest,
        address=address,
        port=port,
        incarnation=secrets.randbits(63),
        problem=problem,
        open_files=open_files(),
        processes_left=processes_of_user_left(),
    )


def _versions(backend: str | None) -> dict[str, str]:
    names = (*_LIBRARIES, *_OF_BACKEND.get(backend or "", ()))
    return {name: version for name in names if (version := version_of(name))}


def check_facts(hosts: Sequence[JobHost], facts: Sequence[HostFacts], target: str) -> None:
    """Check that the hosts can run their workers, and compute equal bits from the same program.

    Raises:
        ConfigError: a host cannot run the program, or hosts differ; the message names the hosts and the
            difference.
    """
    names = [host.name for host in hosts]
    for host, host_facts in zip(hosts, facts, strict=True):
        # The threads of the job follow from the cores of all hosts, and are not known yet.
        if problem := host_facts.problem or shortage(
            host.workers, 1, host_facts.open_files, host_facts.processes_left
        ):
            raise ConfigError(f"host {host.name}: {problem}")
    libraries = sorted({library for host_facts in facts for library in host_facts.libraries})
    looks: dict[str, Callable[[HostFacts], str]] = {
        "kinds of processor": lambda host_facts: host_facts.machine,
        "versions of Python": lambda host_facts: host_facts.python,
    }
    for library in libraries:
        looks[f"versions of {library}"] = lambda host_facts, name=library: host_facts.libraries.get(
            name, "none"
        )  # type: ignore[misc]
    for difference, look in looks.items():
        if len(groups := _groups(names, map(look, facts))) > 1:
            raise ConfigError(
                f"the hosts have different {difference}: {_text(groups)}; install the same on all hosts"
            )
    if len(groups := _groups(names, (host_facts.script for host_facts in facts))) > 1:
        parts = " and ".join(", ".join(there) for there in groups.values())
        raise ConfigError(f"{target} differs between {parts}; copy the same file to all hosts")


def check_standby(standby: str, hosts: Sequence[JobHost], facts: Sequence[HostFacts]) -> None:
    """Check that a coordinator can listen at the address of the standby, if that is one of these hosts.

    Raises:
        ConfigError: the host already listens at this address itself.
    """
    if not standby:
        return
    name, port = split_address(standby)
    for host, host_facts in zip(hosts, facts, strict=True):
        if host_facts.port != port:
            continue
        resolved = look_up(name, port)
        if not isinstance(resolved, str) and resolved[1][0] == host_facts.address:
            raise ConfigError(
                f"host {host.name} already listens at the address of --standby {standby}, for workers of "
                "other hosts; give --standby another port"
            )


def threads_for_all(hosts: Sequence[JobHost], facts: Sequence[HostFacts], replicas: int) -> int:
    """Return the threads that each replica can have on every host, if all compute at once."""
    ids = iter(range(sum(host.workers for host in hosts)))
    view = place_on_hosts(replicas, tuple(tuple(islice(ids, host.workers)) for host in hosts))
    there = [sum(len(view.replicas_of(worker)) for worker in workers) for workers in view.hosts]
    return default_threads(zip((host_facts.cores for host_facts in facts), there, strict=True))


def _groups(names: Sequence[str], values: Iterable[str]) -> Mapping[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=False):
        groups.setdefault(value, []).append(name)
    return groups


def _text(groups: Mapping[str, list[str]]) -> str:
    return ", ".join(f"{value} on {' and '.join(names)}" for value, names in groups.items())
