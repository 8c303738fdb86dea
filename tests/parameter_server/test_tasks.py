"""The tasks of a job with parameter servers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.parameter_server.tasks import Tasks


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
