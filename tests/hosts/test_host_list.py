import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.hosts.host_list import parse_hosts
from lockstep.protocol.job_spec import JobHost


@pytest.mark.parametrize(
    ("text", "workers", "hosts"),
    [
        ("node1", None, [("node1", 1)]),
        ("node1,node2:2", None, [("node1", 1), ("node2", 2)]),
        (" node1 , me@node2:3", None, [("node1", 1), ("me@node2", 3)]),
        ("[fe80::1]:2,10.0.0.2", None, [("fe80::1", 2), ("10.0.0.2", 1)]),
        ("node1,node2", 5, [("node1", 3), ("node2", 2)]),
        ("node1,node2:2", 3, [("node1", 1), ("node2", 2)]),
    ],
)
def test_hosts_and_their_workers(text: str, workers: int | None, hosts: list[tuple[str, int]]) -> None:
    assert parse_hosts(text, workers) == tuple(JobHost(*host) for host in hosts)


@pytest.mark.parametrize(
    ("text", "workers", "reason"),
    [
        ("", None, "--hosts '': '' is not a host; write node1,node2:2"),
        ("node1,,node2", None, "'' is not a host"),
        ("node1:", None, "'node1:' is not a host"),
        ("node1:two", None, "'node1:two' is not a host"),
        ("fe80::1", None, "'fe80::1' is not a host"),
        ("-oProxyCommand=x", None, "'-oProxyCommand=x' is not a host"),
        ("node1:0", None, "each host needs at least one worker"),
        ("node1,node1:2", None, "names node1 twice; write node1:2 for two workers there"),
        ("node1,node2", 1, "1 worker cannot run on 2 hosts; name fewer hosts, or ask for 2 workers or more"),
        ("node1:2,node2:2", 3, "has 4 workers, but the job has 3"),
    ],
)
def test_invalid_lists_are_refused_with_the_reason(text: str, workers: int | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        parse_hosts(text, workers)


@given(st.text(), st.none() | st.integers(1, 9))
def test_any_text_is_a_list_or_refused(text: str, workers: int | None) -> None:
    try:
        hosts = parse_hosts(text, workers)
    except ConfigError:
        return
    assert all(host.workers >= 1 for host in hosts)
    assert workers in (None, sum(host.workers for host in hosts))
