"""The hosts that a user names: `node1,node2:2`. Pure."""

import re

from lockstep.errors import ConfigError
from lockstep.protocol.job_spec import JobHost
from lockstep.system.prose import count
from lockstep.topology import split_evenly

_ENTRY = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\],\s]+)(?::(?P<workers>\d{1,4}))?")


def parse_hosts(text: str, workers: int | None = None) -> tuple[JobHost, ...]:
    """Return the hosts in a list with commas: `NAME` or `NAME:WORKERS`, an IPv6 address in brackets.

    A name may have the form `user@name`.

    Args:
        text: the list.
        workers: the number of workers of the job; None for the number in the list, at least one per host.

    Raises:
        ConfigError: the list is invalid, names a host twice, or has a different number of workers.
    """
    names, counts = [], []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None or match["name"].startswith("-"):
            raise ConfigError(
                f"--hosts {text!r}: {entry.strip()!r} is not a host; write node1,node2:2 for one worker on "
                "node1 and two on node2"
            )
        names.append(match["name"].strip("[]"))
        counts.append(int(match["workers"]) if match["workers"] is not None else None)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--hosts {text!r} names {twice} twice; write {twice}:2 for two workers there")
    if workers is not None and not any(counts):
        if workers < len(names):
            raise ConfigError(
                f"{count(workers, 'worker')} cannot run on {len(names)} hosts; name fewer hosts, or ask for "
                f"{len(names)} workers or more"
            )
        return tuple(map(JobHost, names, split_evenly(workers, len(names))))
    hosts = tuple(map(JobHost, names, (1 if there is None else there for there in counts)))
    if any(host.workers < 1 for host in hosts):
        raise ConfigError(f"--hosts {text!r}: each host needs at least one worker")
    total = sum(host.workers for host in hosts)
    if workers is not None and workers != total:
        raise ConfigError(f"--hosts {text!r} has {count(total, 'worker')}, but the job has {workers}")
    return hosts
