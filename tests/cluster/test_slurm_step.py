"""The task of a Slurm job step, from the variables that `srun` sets."""

import pytest

from lockstep.cluster.slurm_step import STEP_VARIABLES, SlurmTask
from lockstep.errors import ConfigError

STEP = {
    "JOB_ID": "12",
    "STEP_ID": "1",
    "PROCID": "2",
    "NODEID": "1",
    "STEP_NODELIST": "node[1,7],gpu5",
    "STEP_NUM_NODES": "3",
    "STEP_NUM_TASKS": "5",
    "STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_the_task_of_a_process() -> None:
    hosts = (("node1", 2), ("node7", 2), ("gpu5", 1))
    assert SlurmTask.read(STEP.get) == SlurmTask(job=12, step=1, rank=2, node=1, hosts=hosts)


def test_every_variable_is_needed() -> None:
    assert set(STEP_VARIABLES) == set(STEP)
    for name in STEP:
        with pytest.raises(ConfigError, match=f"SLURM_{name} is not set: this is not a task of a Slurm job"):
            SlurmTask.read({**STEP, name: None}.get)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JOB_ID", "x", "SLURM_JOB_ID is 'x', expected a whole number, 0 or more"),
        ("STEP_ID", "²", "SLURM_STEP_ID is '²', expected a whole number"),
        (
            "NODEID",
            "3",
            "SLURM_NODEID 3 of SLURM_STEP_NUM_NODES 3 does not fit the 3 hosts of SLURM_STEP_NOD",
        ),
        ("STEP_NUM_NODES", "2", "SLURM_NODEID 1 of SLURM_STEP_NUM_NODES 2 does not fit the 3 hosts"),
        (
            "PROCID",
            "5",
            "SLURM_PROCID 5 of SLURM_STEP_NUM_TASKS 5 does not fit the 5 tasks of SLURM_STEP_TAS",
        ),
        ("STEP_NUM_TASKS", "6", "SLURM_PROCID 2 of SLURM_STEP_NUM_TASKS 6 does not fit the 5 tasks"),
        ("STEP_NODELIST", "node[1-2]", "SLURM_STEP_NODELIST has 2 hosts, SLURM_STEP_TASKS_PER_NODE has 3"),
        ("STEP_NODELIST", "node[1-", "is not a list of hosts"),
        ("STEP_TASKS_PER_NODE", "2(x2", "Slurm's list of tasks is '2(x2'"),
    ],
)
def test_invalid_variables_are_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SlurmTask.read({**STEP, name: value}.get)
    assert message in str(caught.value)
