"""Losses of workers, agents, hosts and the command: what continues is exact, and nothing is left anywhere."""

from collections.abc import Sequence

from host_network import Host
from stepping_job import SteppingJob


def test_lost_workers(hosts: Sequence[Host]) -> None:
    """A worker of another host, the chief, and all workers of a host are replaced; the bits stay."""
    faults = ("1:1:before publishing:SIGKILL", "0:3:after apply:SIGKILL")
    job = SteppingJob(hosts, "--hosts node1,node2:2 --min-workers 3", 12, *faults)
    assert set(job.finish()) == {2, 3, 4}
