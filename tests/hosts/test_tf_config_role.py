"""What a task of `TF_CONFIG` is for."""

import json
from typing import Any

import pytest

from lockstep.errors import ConfigError
from lockstep.hosts.task_place import TaskPlace, TaskRole
from lockstep.hosts.tf_config_role import find_place
from lockstep.protocol.rendezvous import Task

CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}


TASKS = tuple(
    Task(kind, index, at, at)
    for kind, index, at in [("chief", 0, "a:1"), ("worker", 0, "b:1"), ("worker", 1, "c:1"), ("ps", 0, "d:1")]
)


def place(kind: str, index: int, cluster: Any = CLUSTER, here: int = 1, servers: int = 0) -> TaskPlace:
    config = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
    return find_place(config, here, servers)


def test_what_a_task_is_for() -> None:
    assert place("chief", 0) == TaskPlace(TaskRole.COORDINATOR, "chief 0", "a:1", "a:1", 3, 1, TASKS[:3], 0)
    assert place("worker", 1) == TaskPlace(TaskRole.AGENT, "worker 1", "c:1", "a:1", 3, 1, TASKS[:3], 2)
    without = {"worker": ["b:1", "c:1"]}
    assert place("worker", 0, without).role is TaskRole.COORDINATOR
    assert place("worker", 1, without).coordinator == "b:1"
    assert place("ps", 0).role is TaskRole.IDLE_SERVER
    assert place("evaluator", 0).role is TaskRole.EVALUATOR
    assert place("chief", 0, {"chief": ["a:1"], "ps": ["d:1"]}).role is TaskRole.ALONE
    with pytest.raises(ConfigError, match="--tf-config needs the variable TF_CONFIG"):
        find_place(None)


def test_what_a_task_is_for_in_a_job_with_parameter_servers() -> None:
    """The chief comes first, and the servers last."""
    chief, worker = place("chief", 0, servers=1), place("worker", 1, servers=1)
    assert chief == TaskPlace(TaskRole.COORDINATOR, "chief 0", "a:1", "a:1", 4, 1, TASKS, 0)
    assert worker == TaskPlace(TaskRole.AGENT, "worker 1", "c:1", "a:1", 4, 1, TASKS, 2)
    assert place("ps", 0, servers=1) == TaskPlace(TaskRole.AGENT, "ps 0", "d:1", "a:1", 4, 1, TASKS, 3)
    assert place("evaluator", 0, servers=1).role is TaskRole.EVALUATOR


def test_an_address_that_other_hosts_cannot_reach_is_refused() -> None:
    for local in ("localhost:1", "127.0.0.2:1", "[::1]:1"):
        with pytest.raises(
            ConfigError, match=r"has worker 0 \(.*\), an address that other hosts cannot reach"
        ):
            place("worker", 1, {"worker": [local, "b:1"]})
    assert place("worker", 1, {"worker": ["localhost:1", "127.0.0.1:2"]}).role is TaskRole.AGENT


@pytest.mark.parametrize(
    ("cluster", "here", "said"),
    [
        (CLUSTER, 1, "--ps 2, but the cluster of TF_CONFIG has 1 task ps"),
        ({"chief": ["a:1"], "worker": ["b:1"]}, 1, "--ps 2, but the cluster of TF_CONFIG has 0 tasks ps"),
        ({"worker": ["a:1", "b:1"], "ps": ["c:1", "d:1"]}, 1, "needs a task chief, and at least one worker"),
        ({"chief": ["a:1"], "ps": ["c:1", "d:1"]}, 1, "needs a task chief, and at least one worker"),
        ({**CLUSTER, "ps": ["d:1", "e:1"]}, 2, "each task of TF_CONFIG is one process: omit --workers-here"),
    ],
)
def test_a_cluster_that_does_not_fit_its_parameter_servers_is_refused(
    cluster: Any, here: int, said: str
) -> None:
    kind = "chief" if "chief" in cluster else "worker"
    with pytest.raises(ConfigError, match=said):
        place(kind, 0, cluster, here, servers=2)
