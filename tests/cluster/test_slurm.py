"""The cluster of a Slurm job step, from the variables that `srun` sets."""

import os
from typing import Any

import pytest

from lockstep.cluster.slurm import SlurmClusterResolver
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def step(
    monkeypatch: pytest.MonkeyPatch, rank: int, hosts: str, tasks: str, number: int, **more: str
) -> None:
    """Set the variables that `srun` sets for one task of a step."""
    variables = {
        "PROCID": rank,
        "STEP_NODELIST": hosts,
        "STEP_TASKS_PER_NODE": tasks,
        "STEP_NUM_TASKS": number,
    }
    for name, value in (variables | more).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_all_tasks_are_workers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch, 1, "gpu[09-10],cpu1", "1(x3)", 3)
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({"worker": ["gpu09:8888", "gpu10:8888", "cpu1:8888"]})
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert resolver.num_accelerators() == {"GPU": 0}
    assert resolver.environment == ""


def test_hosts_keep_the_order_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch, 0, "n[8-10]", "1(x3)", 3)
    assert SlurmClusterResolver().cluster_spec().job_tasks("worker") == ["n8:8888", "n9:8888", "n10:8888"]


@pytest.mark.parametrize(
    ("rank", "task"), [(0, ("ps", 0)), (1, ("worker", 0)), (2, ("worker", 1)), (4, ("worker", 3))]
)
def test_jobs_take_tasks_in_the_order_of_their_names(
    monkeypatch: pytest.MonkeyPatch, rank: int, task: Any
) -> None:
    step(monkeypatch, rank, "n[1-3]", "2(x2),1", 5, LOCALID=str(rank % 2))
    resolver = SlurmClusterResolver(jobs={"worker": 4, "ps": 1}, port_base=5000)
    expected = {"ps": ["n1:5000"], "worker": ["n1:5001", "n2:5000", "n2:5001", "n3:5000"]}
    assert resolver.cluster_spec() == ClusterSpec(expected)
    assert resolver.get_task_info() == task
    assert resolver.master() == f"grpc://{expected[task[0]][task[1]]}"


def test_the_address_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch, 0, "n[1-3]", "1(x3)", 3)
    resolver = SlurmClusterResolver(jobs={"ps": 1, "worker": 2})
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://n3:8888"
    resolver.rpc_layer = "ab"
    assert resolver.master("ps", 0) == "ab://n1:8888"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://n1:8888"
    resolver.task_type = None
    assert resolver.master() == ""


@pytest.mark.parametrize("given", [2, {"n1": 2, "n2": 2}])
def test_tasks_per_node_can_be_given(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    step(monkeypatch, 3, "n[1-2]", "3,1", 4)
    resolver = SlurmClusterResolver(tasks_per_node=given)
    expected = ["n1:8888", "n1:8889", "n2:8888", "n2:8889"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": expected})


@pytest.mark.parametrize(
    ("visible", "options", "own"),
    [
        ("4,5,6,7", {}, "6,7"),
        ("4,5,6", {}, "5"),
        ("4,5,6,7", {"gpus_per_task": 1}, "5"),
        ("4,5,6,7", {"gpus_per_node": 2}, "5"),
        ("", {"gpus_per_node": 4}, "2,3"),
        ("", {"gpus_per_node": 4, "gpus_per_task": 1}, "1"),
        ("GPU-a,GPU-b", {}, "GPU-b"),
        ("", {}, ""),
    ],
)
def test_each_task_sees_its_own_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, options: Any, own: str
) -> None:
    step(monkeypatch, 1, "n[1-2]", "2,1", 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resolver = SlurmClusterResolver(**options)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    for _ in range(2):
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == own
    assert resolver.num_accelerators() == {"GPU": len([gpu for gpu in own.split(",") if gpu])}


def test_auto_set_gpu_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    step(monkeypatch, 0, "n1", "2", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert SlurmClusterResolver(auto_set_gpu=False).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_process_outside_slurm_raises() -> None:
    with pytest.raises(
        ConfigError, match="SLURM_PROCID is not set: this is not a task of a Slurm job step; st"
    ):
        SlurmClusterResolver()


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"STEP_NUM_TASKS": None}, {}, "SLURM_STEP_NUM_TASKS is not set"),
        ({"STEP_NODELIST": None}, {}, "SLURM_STEP_NODELIST is not set"),
        ({"STEP_TASKS_PER_NODE": None}, {}, "SLURM_STEP_TASKS_PER_NODE is not set"),
        ({"PROCID": "x"}, {}, "SLURM_PROCID is 'x', expected a whole number, 0 or more"),
        ({"PROCID": "4"}, {}, "SLURM_PROCID is 4, but the 4 tasks are numbered from 0"),
        ({"STEP_NODELIST": "n[1"}, {}, r"Slurm's list of hosts, 'n\[1', is not a list of hosts"),
        (
            {"STEP_NODELIST": "n1"},
            {},
            "SLURM_STEP_NODELIST has 1 host, SLURM_STEP_TASKS_PER_NODE has 2",
        ),
        ({"STEP_TASKS_PER_NODE": "x"}, {}, "Slurm's list of tasks is 'x'"),
        (
            {"LOCALID": "1"},
            {},
            "SLURM_PROCID 2 is task 1 of its host, expected task 0: the tasks are not num",
        ),
        ({}, {"jobs": {"worker": 3}}, "have 3 tasks, but Slurm started 4: their sum must be"),
        ({}, {"jobs": {}, "tasks_per_node": 0}, "have 0 tasks, but Slurm started 0"),
        (
            {},
            {"gpus_per_node": 3, "gpus_per_task": 2},
            "2 tasks on a host with 2 GPUs each need more than its 3",
        ),
        ({}, {"gpus_per_node": 1}, r"2 tasks on a host cannot divide its 1 GPU \(0\)"),
    ],
)
def test_invalid_variables_and_arguments_are_named(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], options: Any, message: str
) -> None:
    step(monkeypatch, 2, "n[1-2]", "2(x2)", 4)
    for name, value in changed.items():
        if value is None:
            monkeypatch.delenv(f"SLURM_{name}")
        else:
            monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(ConfigError, match=message):
        SlurmClusterResolver(**options)
