"""The tasks of a cluster and their addresses, by job."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import BackendError

Tasks = Sequence[str] | Mapping[int, str] | Mapping[str, str]


@runtime_checkable
class ClusterDef(Protocol):
    """A cluster as a `tf.train.ClusterDef`: jobs, each with its `name` and its `tasks` by index."""

    @property
    def job(self) -> Iterable[Any]:
        """The jobs."""


class ClusterSpec:
    """A set of tasks with their addresses, organized into jobs such as "worker" and "ps".

    It has the methods of `tf.train.ClusterSpec`. Names and addresses are `str`.

    Example:
        >>> import lockstep
        >>> cluster = lockstep.ClusterSpec({"worker": ["a:2222", "b:2222"], "ps": {1: "c:2222"}})
        >>> cluster.num_tasks("worker"), cluster.task_address("worker", 1), cluster.job_tasks("ps")
        (2, 'b:2222', [None, 'c:2222'])
    """

    def __init__(self, cluster: "Mapping[str, Tasks] | ClusterSpec | ClusterDef") -> None:
        """Copy the cluster.

        Args:
            cluster: for each job, the addresses of its tasks in order, or a mapping from the index of a task
                to its address (indices may be omitted); or a `ClusterSpec`, including TensorFlow's; or a
                `tf.train.ClusterDef`.

        Raises:
            TypeError: `cluster` is none of these.
            ValueError: an index is not a whole number, 0 or more.
        """
        jobs: object = cluster
        if isinstance(cluster, ClusterDef):
            jobs = {job.name: dict(job.tasks.items()) for job in cluster.job}
        elif hasattr(cluster, "as_dict"):
            jobs = cluster.as_dict()
        if not isinstance(jobs, Mapping):
            raise TypeError(
                f"a cluster is {type(cluster).__name__}, expected a dict from the names of jobs to "
                "the addresses of their tasks, a ClusterSpec, or a tf.train.ClusterDef"
            )
        self._jobs = {_job(job): _indexed(job, tasks) for job, tasks in jobs.items()}

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        return self._jobs == (other._jobs if isinstance(other, ClusterSpec) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        jobs = self.as_dict()
        return f"ClusterSpec({ {job: jobs[job] for job in sorted(jobs)} })"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return for each job a list of addresses, or a dict by index if indices are omitted.

        A job without tasks is an empty dict.
        """
        return {job: _compact(tasks) for job, tasks in self._jobs.items()}

    def as_cluster_def(self) -> Any:
        """Return the cluster as a `tf.train.ClusterDef`, TensorFlow's protocol buffer.

        Raises:
            BackendError: the program has not imported TensorFlow.
        """
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is None:
            raise BackendError(
                "as_cluster_def returns a protocol buffer of TensorFlow, which this program has not "
                "imported: add `import tensorflow` first"
            )
        return tensorflow.train.ClusterSpec(self.as_dict()).as_cluster_def()

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Raises:
            ValueError: there is no such job.
        """
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, ascending.

        Raises:
            ValueError: there is no such job.
        """
        return sorted(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Raises:
            ValueError: there is no such job, or no such task in it.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise ValueError(f"no task {task_index!r} in job {job_name!r}: it has {sorted(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job's tasks by index, None for an omitted index.

        Raises:
            ValueError: there is no such job.
        """
        tasks = self._tasks(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _tasks(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"no job {job_name!r} in the cluster: it has {self.jobs}")
        return self._jobs[job_name]


def _job(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of a job is {name!r}, expected a str")
    return name


def _indexed(job: str, tasks: object) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        return {index: _address(job, address) for index, address in enumerate(tasks)}
    if isinstance(tasks, Mapping):
        return {_index(job, index): _address(job, address) for index, address in tasks.items()}
    raise TypeError(
        f"the tasks of job {job!r} are {tasks!r}, expected a list of addresses or "
        "a dict from index to address"
    )


def _index(job: str, index: object) -> int:
    if isinstance(index, int) and index >= 0:
        return int(index)
    if isinstance(index, str) and index.isascii() and index.isdigit():
        return int(index)
    raise ValueError(f"an index in job {job!r} is {index!r}, expected a whole number, 0 or more")


def _address(job: str, address: object) -> str:
    if not isinstance(address, str):
        raise TypeError(f"an address in job {job!r} is {address!r}, expected a str such as 'host:2222'")
    return address


def _compact(tasks: dict[int, str]) -> list[str] | dict[int, str]:
    indices = sorted(tasks)
    if indices and indices[-1] + 1 == len(indices):
        return [tasks[index] for index in indices]
    return {index: tasks[index] for index in indices}
