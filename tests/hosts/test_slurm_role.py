"""What a task of a Slurm job step is for. Pure."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.slurm_step import SlurmTask
from lockstep.errors import ConfigError, NetworkError
from lockstep.hosts.slurm_role import check_names, find_place, port_of
from lockstep.hosts.task_place import TaskPlace, TaskRole


def task(node: int, *hosts: str, job: int = 4242, step: int = 0) -> SlurmTask:
    return SlurmTask(job, step, node, node, tuple((host, 1) for host in hosts))


def test_the_task_of_the_first_host_coordinates() -> None:
    first, second, third = (find_place(task(node, "a", "b", "c"), 7) for node in range(3))
    coordinator, standby = "a:24242", "b:24242"
    assert first == TaskPlace(TaskRole.COORDINATOR, "a", "a:24242", coordinator, 7, 3, standby=standby)
    assert second == TaskPlace(TaskRole.AGENT, "b", "b:0", coordinator, 7, 2, standby=standby)
    assert third == TaskPlace(TaskRole.AGENT, "c", "c:0", coordinator, 7, 2, standby=standby)
    two = find_place(task(1, "a", "b"), None)
    assert two == TaskPlace(TaskRole.AGENT, "b", "b:0", coordinator, 2, 1, standby=standby)


def test_the_host_is_not_that_of_the_rank() -> None:
    """`srun --distribution=arbitrary` may start task 0 on another host than the first."""
    place = find_place(SlurmTask(1, 0, 0, 1, (("a", 1), ("b", 1))), None)
    assert (place.role, place.name) == (TaskRole.AGENT, "b")


def test_a_step_on_one_host_is_a_job_of_this_machine() -> None:
    for workers in (None, 4):
        place = find_place(task(0, "a"), workers)
        assert (place.role, place.workers, place.standby) == (TaskRole.ALONE, workers or 1, "")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 10**9), st.integers(0, 2**32 - 6))
def test_the_tasks_of_a_step_agree(hosts: int, more: int, job: int, step: int) -> None:
    names = [f"n{host}" for host in range(hosts)]
    places = [find_place(task(node, *names, job=job, step=step), hosts + more) for node in range(hosts)]
    assert len({(place.coordinator, place.workers) for place in places}) == 1
    assert sum(place.here for place in places) == places[0].workers == hosts + more
    assert all(place.here >= 1 for place in places)
    assert [place.role is TaskRole.AGENT for place in places] == [False] + [True] * (hosts - 1)


def test_ports() -> None:
    """Steps of a job, and of jobs with near ids, which may share a host, have different ones."""
    near = [port_of(task(0, "a", job=9_990 + job, step=step)) for job in range(100) for step in range(9)]
    assert len(set(near)) == len(near)
    assert all(20000 <= port <= 29999 for port in near)


def test_hosts_with_several_tasks_or_without_a_worker_are_refused() -> None:
    several = SlurmTask(1, 0, 0, 0, (("a", 1), ("b", 2)))
    with pytest.raises(ConfigError, match=r"--slurm needs one task on each host, .* but b has several: use"):
        find_place(several, None)
    with pytest.raises(ConfigError, match="2 workers cannot run on the 3 hosts of this Slurm step"):
        find_place(task(0, "a", "b", "c"), 2)


def names(known: dict[str, str]) -> Callable[[str], str]:
    def resolve(host: str) -> str:
        if host not in known:
            raise NetworkError(f"the host {host!r} cannot be resolved")
        return known[host]

    return resolve


def test_names() -> None:
    known = {"a": "10.0.0.1", "b": "10.0.0.2"}
    for node in range(2):
        check_names(task(node, "a", "b"), names(known))
        check_names(task(node, "a", "b"), names({"a": "127.0.0.1", "b": "127.0.0.1"}))
        with pytest.raises(ConfigError, match=f"on {'xb'[node]}, the host 'x' cannot be resolved"):
            check_names(task(node, "x", "b"), names(known))
    check_names(task(0, "x"), names(known))
    with pytest.raises(ConfigError, match=r"a is 127\.0\.1\.1 on this host, where no other host can connect"):
        check_names(task(0, "a", "b"), names({**known, "a": "127.0.1.1"}))
