"""What a process of `lockstep run --tf-config` is for, given the `TF_CONFIG` of its pod. Pure."""

from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import TRAINING, parse, training_tasks
from lockstep.errors import ConfigError
from lockstep.hosts.task_place import TaskPlace, TaskRole
from lockstep.system.prose import count


def find_place(text: str | None, here: int = 1, servers: int = 0) -> TaskPlace:
    """Return the place of the process with this `TF_CONFIG`.

    Args:
        text: the text of the variable; None if it is not set.
        here: the number of workers of each task.
        servers: the number of parameter servers of the job: that of the tasks `ps`. Without any, these tasks
            have nothing to do.

    Raises:
        ConfigError: there is none, or it is invalid, or does not fit the parameter servers.
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
    first = tasks[0][2]
    number = [(kind, index) for kind, index, _ in tasks].index((config.task_type, config.task_id))
    role = TaskRole.AGENT if number else TaskRole.COORDINATOR
    return TaskPlace(
        role=role, name=name, address=address, coordinator=first, workers=workers, here=here, task=number
    )


def _servers(cluster: ClusterSpec, servers: int, here: int) -> tuple[tuple[str, int, str], ...]:
    """Return the tasks of parameter servers.

    Raises:
        ConfigError: the cluster has another number of them, or no chief or worker, or `here` is not 1.
    """
    found = cluster.task_indices("ps") if "ps" in cluster.jobs else []
    if len(found) != servers:
        raise ConfigError(f"--ps {servers}, but the cluster of TF_CONFIG has {count(len(found), 'task')} ps")
    if not {"chief", "worker"} <= set(cluster.jobs):
        raise ConfigError("with --ps, the cluster of TF_CONFIG needs a task chief, and at least one worker")
    if here != 1:
        raise ConfigError("with --ps, each task of TF_CONFIG is one process: omit --workers-here")
    return tuple(("ps", index, cluster.task_address("ps", index)) for index in found)
