"""The interface of cluster resolvers, a resolver with a fixed cluster, and the union of several resolvers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from lockstep.cluster.spec import ClusterSpec
from lockstep.system.environment import visible_gpus


class ClusterResolver(ABC):
    """Lists the tasks of a cluster and identifies the task of this process, as in `tf.distribute`.

    A subclass implements `cluster_spec`. It may set `_task_type`, `_task_id`, `_rpc_layer`, `_environment`,
    or override `master` and the properties.

    Example:
        >>> from lockstep import ClusterSpec
        >>> from lockstep.cluster_resolver import ClusterResolver
        >>> class OneHost(ClusterResolver):
        ...     def cluster_spec(self):
        ...         return ClusterSpec({"worker": ["localhost:2222"]})
        >>> OneHost().master("worker", 0)
        'localhost:2222'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the current cluster."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this process, or "" if its task is unknown.

        Args:
            task_type: the job of the task.
            task_id: its index in the job.
            rpc_layer: the protocol, such as "grpc" for "grpc://host:2222"; None for the resolver's own.

        Raises:
            UnfitError: as for `cluster_spec`.
            ValueError: there is no such task.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        return with_layer(self.cluster_spec().task_address(task_type, task_id), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Return the number of GPUs that this process may use: `{"GPU": 2}`.

        Only this host is examined; the arguments exist for `tf.distribute` and have no effect.
        """
        return {"GPU": len(visible_gpus())}

    @property
    def environment(self) -> str | None:
        """The environment of the cluster; "" if unspecified."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as "worker", or None if unknown."""
        return self._default("task_type") if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if unknown."""
        return self._default("task_id") if self._task_id is None else int(self._task_id)

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol prefix of addresses that `master` returns, or None if there is none."""
        return self._default("rpc_layer") if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _default(self, name: str) -> Any:
        """Return the value of a property that was neither passed nor set."""
        return None


class SimpleClusterResolver(ClusterResolver):
    """Returns the values with which it was created.

    Example:
        >>> from lockstep import ClusterSpec
        >>> from lockstep.cluster_resolver import SimpleClusterResolver
        >>> cluster = ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = SimpleClusterResolver(cluster, task_type="worker", task_id=1, rpc_layer="grpc")
        >>> resolver.master("worker", 0)
        'grpc://a:2222'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        """Store the values.

        Args:
            cluster_spec: the cluster; TensorFlow's own `ClusterSpec` works too.
            master: the address that `master` returns if no task is named.
            task_type: the job of this process.
            task_id: its index in the job.
            environment: the environment of the cluster.
            num_accelerators: the devices of this process, such as `{"GPU": 2}`; None for an empty dict.
            rpc_layer: the protocol prefix of addresses.

        Raises:
            TypeError: `cluster_spec` is not a `ClusterSpec`, or `master` not a `str`.
        """
        if not hasattr(cluster_spec, "as_dict"):
            raise TypeError(f"cluster_spec is {cluster_spec!r}, expected a lockstep.ClusterSpec")
        if not isinstance(master, str):
            raise TypeError(f"master is {master!r}, expected a str")
        self._cluster_spec = ClusterSpec(cluster_spec)
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._cluster_spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the task if both arguments are given, otherwise the master's.

        Raises:
            ValueError: there is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
        return with_layer(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Return the value passed at creation, or an empty dict; the arguments have no effect."""
        return {} if self._num_accelerators is None else self._num_accelerators


class UnionResolver(ClusterResolver):
    """Unites the clusters of several resolvers. Everything else comes from the first one.

    Example:
        >>> from lockstep import ClusterSpec
        >>> from lockstep.cluster_resolver import SimpleClusterResolver, UnionResolver
        >>> a = SimpleClusterResolver(ClusterSpec({"worker": ["a:2222"]}))
        >>> b = SimpleClusterResolver(ClusterSpec({"worker": ["b:2222"]}))
        >>> UnionResolver(a, b).cluster_spec()
        ClusterSpec({'worker': ['a:2222', 'b:2222']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Store the resolvers.

        Args:
            resolvers: the resolvers, at least one.
            rpc_layer: overrides that of the first resolver.
            task_type: overrides that of the first resolver.
            task_id: overrides that of the first resolver.

        Raises:
            ValueError: there is no resolver.
            TypeError: one of them is not a `ClusterResolver`.
        """
        if not resolvers:
            raise ValueError("a union has no resolvers, expected at least one")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"a resolver of a union is {resolver!r}, expected a ClusterResolver")
        self._resolvers = resolvers
        self._rpc_layer = rpc_layer
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return all tasks of all resolvers.

        The addresses of a job that several resolvers list are concatenated in the order of the resolvers. If
        one of them omits indices, all tasks keep their indices.

        Raises:
            KeyError: two tasks that keep their indices have the same one.
        """
        jobs: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _join(job, parts) for job, parts in jobs.items()})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of the task if both arguments are given, otherwise the first resolver's master.

        Raises:
            ValueError: there is no such task.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return with_layer(address, rpc_layer or self._rpc_layer)
        return self._first.master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: Any = None
    ) -> Mapping[str, int]:
        """Return the value of the first resolver."""
        return self._first.num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str | None:
        """The value of the first resolver."""
        return self._first.environment

    def _default(self, name: str) -> Any:
        """Return the value of the first resolver."""
        return getattr(self._first, name)

    @property
    def _first(self) -> ClusterResolver:
        return self._resolvers[0]


def with_layer(address: str, rpc_layer: str | None) -> str:
    """Return the address with its protocol prefix, if any."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


def _join(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part]  # type: ignore[misc]
    joined: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        if twice := sorted(joined.keys() & tasks.keys()):
            raise KeyError(f"two resolvers have the tasks {twice} of job {job!r}, and one omits indices")
        joined |= tasks
    return joined
