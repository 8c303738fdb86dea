"""The resolver of a cluster that consists of the tasks of a Slurm job step."""

from collections.abc import Mapping
from typing import Any

from lockstep.cluster.resolver import ClusterResolver, with_layer
from lockstep.cluster.slurm_step import Hosts, expand_hosts, hosts_of_step, number, required
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.system.environment import show_gpus, slurm_variable, visible_gpus
from lockstep.system.prose import count


class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that `srun` sets for each of its tasks.

    The tasks of the cluster are Slurm's, in the order of `SLURM_PROCID`. Each task of a host gets its own
    port, starting at `port_base`, and its share of the host's GPUs.

    Example:
        With the variables that `srun` sets for the second of two tasks on the hosts n1 and n2:

        >>> import os
        >>> step = {"PROCID": "1", "LOCALID": "0", "STEP_NUM_TASKS": "2"}
        >>> step |= {"STEP_NODELIST": "n[1-2]", "STEP_TASKS_PER_NODE": "1(x2)"}
        >>> os.environ.update({f"SLURM_{name}": value for name, value in step.items()})
        >>> from lockstep.cluster_resolver import SlurmClusterResolver
        >>> resolver = SlurmClusterResolver()
        >>> resolver.cluster_spec(), resolver.get_task_info()
        (ClusterSpec({'worker': ['n1:8888', 'n2:8888']}), ('worker', 1))
        >>> for name in step:
        ...     del os.environ[f"SLURM_{name}"]
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
    ) -> None:
        """Read the environment.

        Args:
            jobs: the number of tasks of each job; jobs take Slurm's tasks in the order of their names. By
                default, all tasks are workers.
            port_base: the port of the first task on a host.
            gpus_per_node: the number of GPUs per host; by default the GPUs that CUDA shows on this host.
            gpus_per_task: the number of GPUs per task; by default the host's GPUs are divided evenly.
            tasks_per_node: the number of tasks on every host, or on each host by name, in Slurm's order; by
                default the number that Slurm sets.
            auto_set_gpu: whether `cluster_spec` makes CUDA show this task only its own GPUs.
            rpc_layer: the protocol prefix of addresses; None if there is none.

        Raises:
            ConfigError: this is not a task of a Slurm job step, Slurm's variables are invalid, the requested
                tasks or GPUs do not exist, or the tasks are not numbered host by host.
        """
        rank = number("PROCID")
        jobs = {"worker": number("STEP_NUM_TASKS")} if jobs is None else jobs
        hosts = _hosts(tasks_per_node)
        _check_tasks(jobs, hosts, rank)
        local_rank = _local_rank(hosts, rank)
        most = max(tasks for _, tasks in hosts)
        gpus = _gpus(gpus_per_node)
        if gpus_per_task is None:
            gpus_per_task = _share(gpus, most, auto_set_gpu)
        if most * gpus_per_task > len(gpus):
            raise ConfigError(
                f"{count(most, 'task')} on a host with {count(gpus_per_task, 'GPU')} each need more than its "
                f"{count(len(gpus), 'GPU')}: lower gpus_per_task or the number of tasks"
            )
        self._cluster = _place(jobs, hosts, port_base)
        tasks = [(job, index) for job in sorted(jobs) for index in range(jobs[job])]
        self._task_type, self._task_id = tasks[rank]
        self._gpus_per_task = gpus_per_task
        first_gpu = local_rank * gpus_per_task
        self._own_gpus = gpus[first_gpu : first_gpu + gpus_per_task] if auto_set_gpu else None
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's tasks; with `auto_set_gpu`, set `CUDA_VISIBLE_DEVICES`."""
        if self._own_gpus is not None:
            show_gpus(self._own_gpus)
        return self._cluster

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process and its index in the job."""
        return self.task_type, self.task_id

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this process.

        Raises:
            ValueError: there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_layer(self._cluster.task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Return the number of GPUs of each task; the arguments have no effect."""
        return {"GPU": self._gpus_per_task}


def _hosts(tasks_per_node: int | Mapping[str, int] | None) -> Hosts:
    if isinstance(tasks_per_node, Mapping):
        return tuple(tasks_per_node.items())
    if tasks_per_node is not None:
        return tuple((name, tasks_per_node) for name in expand_hosts(required("STEP_NODELIST")))
    return hosts_of_step()


def _check_tasks(jobs: Mapping[str, int], hosts: Hosts, rank: int) -> None:
    requested, started = sum(jobs.values()), sum(tasks for _, tasks in hosts)
    if requested != started or started == 0:
        raise ConfigError(
            f"the jobs {dict(jobs)} have {count(requested, 'task')}, but Slurm started {started}: "
            "their sum must be the --ntasks of `srun`"
        )
    if rank >= started:
        raise ConfigError(f"SLURM_PROCID is {rank}, but the {count(started, 'task')} are numbered from 0")


def _gpus(number: int | None) -> tuple[str, ...]:
    visible = visible_gpus()
    if number is None or number <= len(visible):
        return visible[:number]
    return tuple(str(gpu) for gpu in range(number))


def _share(gpus: tuple[str, ...], tasks: int, auto_set_gpu: bool) -> int:
    if gpus and len(gpus) < tasks and auto_set_gpu:
        raise ConfigError(
            f"{count(tasks, 'task')} on a host cannot divide its {count(len(gpus), 'GPU')} "
            f"({', '.join(gpus)}): give auto_set_gpu=False if Slurm itself gives each task its GPUs "
            "or if tasks share a GPU; otherwise start fewer tasks"
        )
    return len(gpus) // tasks


def _place(jobs: Mapping[str, int], hosts: Hosts, port_base: int) -> ClusterSpec:
    addresses = iter([f"{host}:{port_base + local}" for host, tasks in hosts for local in range(tasks)])
    return ClusterSpec({job: [next(addresses) for _ in range(jobs[job])] for job in sorted(jobs)})


def _local_rank(hosts: Hosts, rank: int) -> int:
    local = [local for _, tasks in hosts for local in range(tasks)][rank]
    if slurm_variable("LOCALID") not in (None, str(local)):
        raise ConfigError(
            f"SLURM_PROCID {rank} is task {slurm_variable('LOCALID')} of its host, expected task {local}: "
            "the tasks are not numbered host by host. Start the script with `srun --distribution=block`"
        )
    return local
