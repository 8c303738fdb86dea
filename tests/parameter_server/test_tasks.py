"""The tasks of a job with parameter servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parameter_server.tasks import ServerPlace, Tasks


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_job_is_a_chief_its_workers_and_its_servers(workers: int, servers: int) -> None:
    tasks = Tasks(1 + workers + servers, servers)
    assert [tasks.of(process) for process in range(tasks.processes)] == [
        ("chief", 0),
        *(("worker", index) for index in range(workers)),
        *(("ps", index) for index in range(servers)),
    ]
    assert list(tasks.workers) == [p for p in range(tasks.processes) if tasks.of(p)[0] == "worker"]
    for index in range(servers):
        assert tasks.of(tasks.id_of_server(index)) == ("ps", index)


def test_the_chief_may_be_alone_with_servers() -> None:
    tasks = Tasks(3, 2)
    assert not tasks.workers
    assert [tasks.of(process) for process in range(3)] == [("chief", 0), ("ps", 0), ("ps", 1)]


@pytest.mark.parametrize(
    ("process", "name"),
    [
        (0, "the chief"),
        (1, "worker 1"),
        (3, "worker 3"),
        (4, "parameter server 0"),
        (5, "parameter server 1"),
    ],
)
def test_messages_name_workers_by_process_and_servers_by_index(process: int, name: str) -> None:
    assert Tasks(6, 2).name(process) == name


@given(st.data(), st.integers(1, 6), st.integers(1, 4))
def test_the_next_servers_take_the_place_of_lost_ones(data: st.DataObject, servers: int, hosts: int) -> None:
    tasks = Tasks(1 + servers, servers)
    left = data.draw(st.sets(st.integers(1, servers), min_size=1))
    host_of = {process: data.draw(st.integers(0, hosts - 1)) for process in (0, *left)}
    there = [[process for process in host_of if host_of[process] == host] for host in range(hosts)]
    for index, (process, standby) in enumerate(tasks.places(there)):
        own = tasks.id_of_server(index)
        passed = [one for one in range(own, own + servers) if 1 + (one - 1) % servers == process]
        between = range(own, passed[0])
        assert process in left
        assert not any(1 + (one - 1) % servers in left for one in between)
        others = left - {process}
        assert standby in (others or {None})
        elsewhere = {one for one in others if host_of[one] != host_of[process]}
        assert not elsewhere or standby in elsewhere


def test_each_server_keeps_what_the_one_before_it_processes() -> None:
    assert Tasks(6, 3).places([range(6)]) == (ServerPlace(3, 4), ServerPlace(4, 5), ServerPlace(5, 3))
    assert Tasks(6, 3).places([(0, 4, 5)]) == (ServerPlace(4, 5), ServerPlace(4, 5), ServerPlace(5, 4))
    assert Tasks(2, 1).places([(0, 1)]) == (ServerPlace(1, None),)


def test_only_processes_that_have_the_rows_of_a_lost_server_take_its_place() -> None:
    tasks, hosts = Tasks(5, 4), [(0, 2), (3, 4)]
    # Server 0 is lost. If only one process has rows, a server of another host becomes the standby.
    holders = [(3,), (2, 4), (3, 4), (4, 2)]
    assert tasks.places(hosts, holders) == (
        ServerPlace(3, 2),
        ServerPlace(2, 4),
        ServerPlace(3, 4),
        ServerPlace(4, 2),
    )
