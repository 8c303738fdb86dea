"""The hosts that a user names: `node1,node2:2`. Pure."""

import re

from lockstep.errors import ConfigError
from lockstep.protocol.job_spec import JobHost

_ENTRY = re.compile(r"(?P<name>\[[^\[\]]+\]|[^:\[\],\s]+)(?::(?P<workers>\d{1,4}))?")
_MOST_WORKERS = 4096


def parse_hosts(text: str, option: str = "--hosts") -> tuple[JobHost, ...]:
    """Return the hosts in a list with commas: `NAME` or `NAME:WORKERS`, an IPv6 address in brackets.

    A name may have the form `user@name`.

    Raises:
        ConfigError: the list is invalid, or names a host twice.
    """
    hosts = []
    for entry in text.split(","):
        found = _ENTRY.fullmatch(entry.strip())
        if found is None or found["name"].startswith("-"):
            raise ConfigError(
                f"{option} {text!r}: {entry.strip()!r} is not a host; write node1,node2:2 for one worker on "
                "node1 and two on node2"
            )
        workers = int(found["workers"] or 1)
        if not 1 <= workers <= _MOST_WORKERS:
            raise ConfigError(f"{option} {text!r}: {found['name']} needs 1 to {_MOST_WORKERS} workers")
        hosts.append(JobHost(found["name"].strip("[]"), workers))
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{option} {text!r} names {twice} twice; write {twice}:2 for two workers there")
    return tuple(hosts)
