"""The cluster of a Slurm job step."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from lockstep.cluster.resolver import ClusterResolver, with_layer
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.system.environment import show_gpus, slurm_variable, visible_gpus
from lockstep.system.prose import count

Hosts = list[tuple[str, int]]
"""The hosts of a step in Slurm's order, with the number of tasks on each."""


class SlurmClusterResolver(ClusterResolver):
    """Reads the variables that `srun` sets for each of its tasks.

    The tasks of the cluster are Slurm's, in the order of `SLURM_PROCID`. Each task of a host gets its own
    port, starting at `port_base`, and its share of the host's GPUs.
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
            rpc_layer: the protocol prefix of addresses; None for none.

        Raises:
            ConfigError: this is not a task of a Slurm job step, Slurm's variables are invalid, the requested
                tasks or GPUs do not exist, or the tasks are not numbered host by host.
        """
        rank = _number("PROCID")
        jobs = {"worker": _number("STEP_NUM_TASKS")} if jobs is None else jobs
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
        self._task_type, self._task_id = _slot(jobs, rank)
        self._gpus_per_task = gpus_per_task
        self._own_gpus = _own(gpus, gpus_per_task, local_rank) if auto_set_gpu else None
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the step's tasks; with `auto_set_gpu`, set `CUDA_VISIBLE_DEVICES`."""
        if self._own_gpus is not None:
            show_gpus(self._own_gpus)
        return self._cluster

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return the job of this process and its index there."""
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
        return list(tasks_per_node.items())
    names = expand_hosts(_variable("STEP_NODELIST"))
    if tasks_per_node is not None:
        return [(name, tasks_per_node) for name in names]
    tasks = expand_counts(_variable("STEP_TASKS_PER_NODE"))
    if len(tasks) != len(names):
        raise ConfigError(
            f"SLURM_STEP_NODELIST has {count(len(names), 'host')}, SLURM_STEP_TASKS_PER_NODE has "
            f"{len(tasks)}: start the script with `srun`, which sets both"
        )
    return list(zip(names, tasks, strict=True))


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


def _slot(jobs: Mapping[str, int], rank: int) -> tuple[str, int]:
    return [(job, index) for job in sorted(jobs) for index in range(jobs[job])][rank]


def _local_rank(hosts: Hosts, rank: int) -> int:
    local = [local for _, tasks in hosts for local in range(tasks)][rank]
    if slurm_variable("LOCALID") not in (None, str(local)):
        raise ConfigError(
            f"SLURM_PROCID {rank} is task {slurm_variable('LOCALID')} of its host, expected task {local}: "
            "the tasks are not numbered host by host. Start the script with `srun --distribution=block`"
        )
    return local


def _own(gpus: tuple[str, ...], per_task: int, local: int) -> tuple[str, ...]:
    return gpus[local * per_task : (local + 1) * per_task]


def _variable(name: str) -> str:
    value = slurm_variable(name)
    if value is None:
        raise ConfigError(
            f"SLURM_{name} is not set: this is not a task of a Slurm job step; start the script with `srun`"
        )
    return value


def _number(name: str) -> int:
    text = _variable(name)
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"SLURM_{name} is {text!r}, expected a whole number, 0 or more")
    return int(text)


_MAX_ENTRIES = 65536
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_PIECE = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list such as `node[01-03,7]`, in its order: node01, node02, node03, node7.

    The numbers of a range have at least as many digits as its first one. If a name has several brackets, the
    last one varies fastest.

    Raises:
        ConfigError: the text is not a list of hosts, or has more than 65,536.
    """
    names = _split(text)
    hosts = list(islice((host for name in names for host in _expand(text, name)), _MAX_ENTRIES + 1))
    if len(hosts) > _MAX_ENTRIES:
        raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
    return hosts


def expand_counts(text: str) -> list[int]:
    """Return the numbers of a list such as `2(x3),1`: 2, 2, 2, 1.

    Raises:
        ConfigError: the text is not such a list, or has more than 65,536 numbers.
    """
    found = [_COUNT.fullmatch(part) for part in text.split(",")]
    runs = [(int(match[1]), int(match[2] or 1)) for match in found if match]
    if len(runs) != len(found) or sum(times for _, times in runs) > _MAX_ENTRIES:
        raise ConfigError(
            f"Slurm's list of tasks is {text!r}, expected the tasks on each host, such as '2(x3),1'"
        )
    return [number for number, times in runs for _ in range(times)]


def _split(text: str) -> list[str]:
    names = _NAME.findall(text)
    if not names or ",".join(names) != text:
        raise _invalid(text, "is not a list of hosts")
    return names


def _expand(text: str, name: str) -> Iterator[str]:
    pieces, count = [], 1
    for match in _PIECE.finditer(name):
        pieces.append(_numbers(text, match[1]) if match[2] is None else [match[2]])
        count *= len(pieces[-1])
        if count > _MAX_ENTRIES:
            raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
    return map("".join, product(*pieces))


def _numbers(text: str, ranges: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not match or first > last:
            raise _invalid(text, f"has {part!r} in brackets")
        if len(numbers) + last - first >= _MAX_ENTRIES:
            raise _invalid(text, f"has more than {_MAX_ENTRIES} hosts")
        numbers.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return numbers


def _invalid(text: str, what: str) -> ConfigError:
    return ConfigError(
        f"Slurm's list of hosts, {text[:120]!r}, {what}: expected a list such as 'node[01-03,7],gpu1'"
    )
