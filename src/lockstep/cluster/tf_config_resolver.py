"""The cluster that `TF_CONFIG` describes."""

from typing import Any

from lockstep.cluster.resolver import ClusterResolver, with_layer
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import load, parse_cluster, parse_index
from lockstep.errors import ConfigError
from lockstep.system.environment import tf_config_now


class TFConfigClusterResolver(ClusterResolver):
    """Reads `TF_CONFIG` on each access.

    Values that `TF_CONFIG` does not have are None, or a cluster without jobs. The strict reader is
    `lockstep.cluster.tf_config.parse`. Each method and property raises `ConfigError` if `TF_CONFIG` is not a
    JSON object.

    Example:
        >>> import os
        >>> from lockstep.cluster_resolver import TFConfigClusterResolver
        >>> cluster = '"cluster": {"worker": ["a:1", "b:1"]}'
        >>> os.environ["TF_CONFIG"] = f'{{{cluster}, "task": {{"type": "worker", "index": 1}}}}'
        >>> resolver = TFConfigClusterResolver()
        >>> resolver.task_type, resolver.task_id, resolver.master()
        ('worker', 1, 'b:1')
        >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        """Store values that override those in `TF_CONFIG`.

        Args:
            task_type: the job of this process.
            task_id: its index in the job.
            rpc_layer: the protocol prefix of addresses.
            environment: the environment of the cluster; not read from `TF_CONFIG`.
        """
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster. It has no jobs if `TF_CONFIG` has no cluster.

        Raises:
            ConfigError: `TF_CONFIG` does not describe a cluster.
        """
        return parse_cluster(_fields().get("cluster", {}))

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default of this process.

        The "session_master" of `TF_CONFIG` comes first. A cluster with at most one task has the address "".

        Raises:
            ConfigError: neither the arguments nor `TF_CONFIG` name a task.
            ValueError: there is no such task.
        """
        fields = _fields()
        if "session_master" in fields:
            return str(fields["session_master"])
        cluster = self.cluster_spec()
        if not cluster.jobs or (len(cluster.jobs) == 1 and cluster.num_tasks(cluster.jobs[0]) <= 1):
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise ConfigError(
                "TF_CONFIG lists several tasks, but does not say which one this process is: add "
                '"task": {"type": "worker", "index": 0}, or give task_type and task_id'
            )
        rpc_layer = self.rpc_layer if rpc_layer is None else rpc_layer
        return with_layer(cluster.task_address(task_type, task_id), rpc_layer)

    def _default(self, name: str) -> Any:
        """Return the value in `TF_CONFIG`, or None if it has none."""
        if name == "rpc_layer":
            return _fields().get(name)
        task = _task()
        if name == "task_id":
            return parse_index(task["index"]) if "index" in task else None
        return None if (task_type := task.get("type")) is None else str(task_type)


def _fields() -> dict[str, Any]:
    return load(tf_config_now() or "{}")


def _task() -> dict[str, Any]:
    task = _fields().get("task", {})
    if not isinstance(task, dict):
        raise ConfigError(
            f"TF_CONFIG has {task!r} for 'task', expected an object with a 'type' and an 'index'"
        )
    return task
