"""The role of a process of `lockstep run --tf-config`, given the `TF_CONFIG` of its pod. Pure."""

from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import TRAINING, parse, training_tasks
from lockstep.errors import ConfigError
from lockstep.hosts.task_place import TaskPlace, TaskRole
from lockstep.protocol.rendezvous import Task
from lockstep.system.prose import count
from lockstep.transport.addresses import is_loopback, split_address


def find_place(text: str | None, here: int = 1, servers: int = 0) -> TaskPlace:
    """Return the place of the process with this `TF_CONFIG`.

    Args:
        text: the text of the variable; None if it is not set.
        here: the number of workers of each task.
        servers: the number of parameter servers of the job, which must be that of the tasks `ps`. If it is 0,
            these tasks have nothing to do.

    Raises:
        ConfigError: the variable is not set or invalid, or does not fit the parameter servers.
    """
    if text is None:
        raise ConfigError(
            "--tf-config needs the variable TF_CONFIG, which names the tasks of the job and the one of this "
            "process; without it, use -n, --hosts or --listen"
        )
    config = parse(text)
    tasks = training_tasks(config.cluster)
    if servers:
        tasks += _servers(config.cluster, servers, here)
    name = f"{config.task_type} {config.task_id}"
    workers = len(tasks) * here
    if config.task_type == "ps" and not servers:
        return TaskPlace(TaskRole.IDLE_SERVER, name, "", "", workers)
    if config.task_type not in (*TRAINING, "ps"):
        return TaskPlace(TaskRole.EVALUATOR, name, "", "", workers)
    address = config.cluster.task_address(config.task_type, config.task_id)
    if len(tasks) == 1:
        return TaskPlace(TaskRole.ALONE, name, address, "", workers, here)
    everyone = tuple(Task(*task, place=task[2]) for task in tasks)
    number = [(task.kind, task.index) for task in everyone].index((config.task_type, config.task_id))
    local = [task for task in everyone if _is_loopback(task.address)]
    if local and len(local) < len(everyone):
        raise ConfigError(
            f"the cluster of TF_CONFIG has {local[0]}, an address that other hosts cannot reach; give the "
            "name or IP address of that host in its network"
        )
    return TaskPlace(
        role=TaskRole.AGENT if number else TaskRole.COORDINATOR,
        name=name,
        address=address,
        coordinator=everyone[0].address,
        workers=workers,
        here=here,
        tasks=everyone,
        task=number,
    )


def _is_loopback(address: str) -> bool:
    host, _ = split_address(address)
    try:
        return is_loopback(host)
    except ValueError:
        return host.lower() == "localhost"


def _servers(cluster: ClusterSpec, servers: int, here: int) -> tuple[tuple[str, int, str], ...]:
    """Return the tasks of parameter servers.

    Raises:
        ConfigError: the cluster has a different number of them, or no chief or worker, or `here` is not 1.
    """
    indices = cluster.task_indices("ps") if "ps" in cluster.jobs else []
    if len(indices) != servers:
        raise ConfigError(
            f"--ps {servers}, but the cluster of TF_CONFIG has {count(len(indices), 'task')} ps"
        )
    if not {"chief", "worker"} <= set(cluster.jobs):
        raise ConfigError("with --ps, the cluster of TF_CONFIG needs a task chief, and at least one worker")
    if here != 1:
        raise ConfigError("with --ps, each task of TF_CONFIG is one process: omit --workers-here")
    return tuple(("ps", index, cluster.task_address("ps", index)) for index in indices)
