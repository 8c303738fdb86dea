"""The role of a process of `lockstep run --slurm`, given the variables that `srun` sets for its task."""

from collections.abc import Callable

from lockstep.cluster.slurm_step import SlurmTask
from lockstep.errors import ConfigError, NetworkError
from lockstep.hosts.task_place import TaskPlace, TaskRole
from lockstep.system.prose import count
from lockstep.topology import split_evenly
from lockstep.transport.addresses import is_loopback, resolve_host

_FIRST_PORT = 20000
"""Ports from here to 29999: Linux takes those of outgoing connections from 32768."""
_PORTS = 10000
_STRIDE = 1009
"""The distance of the ports of two steps of a job. Jobs that share a host often have consecutive ids."""
_PATIENCE = 20.0
"""Seconds for a name server."""

Resolve = Callable[[str], str]
"""Returns the IP address of a host, or raises NetworkError."""


def own_place(workers: int | None) -> TaskPlace:
    """Return the place of this task's process, after resolving the names that it needs.

    Args:
        workers: see `find_place`.

    Raises:
        ConfigError: as `find_place` and `check_names`.
    """
    task = SlurmTask.read()
    place = find_place(task, workers)
    check_names(task, lambda host: str(resolve_host(host, 0, _PATIENCE)[1][0]))
    return place


def find_place(task: SlurmTask, workers: int | None) -> TaskPlace:
    """Return the place of the process of a task. Pure.

    Args:
        task: the task of the process.
        workers: the workers of the job, divided evenly among the hosts; None for one on each.

    Raises:
        ConfigError: a host has several tasks, or would have no worker.
    """
    hosts = len(task.hosts)
    crowded = next((host for host, tasks in task.hosts if tasks > 1), None)
    if crowded is not None:
        raise ConfigError(
            f"--slurm needs one task on each host, which starts all workers there, but {crowded} has "
            "several: use srun --ntasks-per-node=1 --cpus-per-task=..., and -n for the number of all workers"
        )
    workers = hosts if workers is None else workers
    if workers < hosts:
        raise ConfigError(
            f"{count(workers, 'worker')} cannot run on the {hosts} hosts of this Slurm step; use fewer "
            f"hosts, or ask for {hosts} workers or more"
        )
    here, name = split_evenly(workers, hosts)[task.node], task.hosts[task.node][0]
    coordinator = f"{task.hosts[0][0]}:{port_of(task)}"
    begins = TaskRole.COORDINATOR if hosts > 1 else TaskRole.ALONE
    role = begins if task.node == 0 else TaskRole.AGENT
    address = f"{name}:0" if role is TaskRole.AGENT else coordinator
    standby = f"{task.hosts[1][0]}:{port_of(task)}" if hosts > 1 else ""
    return TaskPlace(role, name, address, coordinator, workers, here, standby=standby)


def port_of(task: SlurmTask) -> int:
    """Return the port of the coordinator, which every task of a step computes by itself. Pure."""
    return _FIRST_PORT + (task.job + _STRIDE * task.step) % _PORTS


def check_names(task: SlurmTask, resolve: Resolve) -> None:
    """Check that this host can resolve the name of the coordinator's host, and that others can reach it.

    Raises:
        ConfigError: the name cannot be resolved, or only this host can use its address.
    """
    if len(task.hosts) == 1:
        return
    first, last = task.hosts[0][0], task.hosts[-1][0]
    host = task.hosts[task.node][0]
    try:
        address = resolve(first)
        if task.node == 0 and is_loopback(address) and not is_loopback(resolve(last)):
            raise ConfigError(
                f"{first} is {address} on this host, where no other host can connect: let the name "
                "lead to an address of its network (see /etc/hosts)"
            )
    except NetworkError as error:
        raise ConfigError(
            f"--slurm needs the names of the hosts in SLURM_STEP_NODELIST; on {host}, {error}"
        ) from None
