"""What a process of `lockstep run --tf-config` is for, given the `TF_CONFIG` of its pod. Pure."""

from lockstep.cluster.tf_config import TRAINING, parse, training_tasks
from lockstep.errors import ConfigError
from lockstep.hosts.task_place import TaskPlace, TaskRole


def find_place(text: str | None, here: int = 1) -> TaskPlace:
    """Return the place of the process with this `TF_CONFIG`, of which each task runs `here` workers.

    Raises:
        ConfigError: there is none, or it is invalid.
    """
    if text is None:
        raise ConfigError(
            "--tf-config needs the variable TF_CONFIG, which names the tasks of the job and the one of this "
            "process; without it, use -n, --hosts or --listen"
        )
    config = parse(text)
    tasks = training_tasks(config.cluster)
    name = f"{config.task_type} {config.task_id}"
    workers = len(tasks) * here
    if config.task_type == "ps":
        return TaskPlace(TaskRole.SERVER, name, "", "", workers)
    if config.task_type not in TRAINING:
        return TaskPlace(TaskRole.EVALUATOR, name, "", "", workers)
    address = config.cluster.task_address(config.task_type, config.task_id)
    if len(tasks) == 1:
        return TaskPlace(TaskRole.ALONE, name, address, "", workers, here)
    kind, index, first = tasks[0]
    begins = (config.task_type, config.task_id) == (kind, index)
    role = TaskRole.COORDINATOR if begins else TaskRole.AGENT
    return TaskPlace(role, name, address, first, workers, here)
