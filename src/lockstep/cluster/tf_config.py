"""`TF_CONFIG`: a cluster, and the task of this process."""

import json
import re
from dataclasses import dataclass
from typing import Any

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import ConfigError
from lockstep.system.prose import shortened

TASK_TYPES = ("chief", "worker", "ps", "evaluator")
TRAINING = ("chief", "worker")
"""The types whose tasks are replicas, in the order of the replicas."""

_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_HOST = re.compile(r"\[[^\s/\[\]]+\]|[^\s:/\[\]]+")
_LAST_PORT = 65535


@dataclass(frozen=True)
class TaskConfig:
    """A parsed `TF_CONFIG`.

    Attributes:
        cluster: all tasks. No index is omitted, and each address is unique and has a port.
        task_type: the type of this process's task, one of `TASK_TYPES`.
        task_id: its index in the job of that type; any index for an evaluator that the cluster does not list.
        rpc_layer: the protocol, such as "grpc"; None if it is not specified.
        environment: the environment, such as "cloud"; None if it is not specified.
    """

    cluster: ClusterSpec
    task_type: str
    task_id: int
    rpc_layer: str | None = None
    environment: str | None = None


def parse(text: str) -> TaskConfig:
    """Parse a `TF_CONFIG`.

    Raises:
        ConfigError: the text is not JSON, is incomplete, or contradicts itself; the message names the present
            and the expected value, and shows a correct one.
    """
    fields = load(text)
    if "cluster" not in fields:
        raise _invalid(f"has no 'cluster'; it has {_names(fields)}")
    cluster = parse_cluster(fields["cluster"])
    _check_jobs(cluster)
    _check_addresses(cluster)
    if "task" not in fields:
        raise _invalid(f"has no 'task', which identifies this process; it has {_names(fields)}")
    task_type, task_id = _task(cluster, fields["task"])
    return TaskConfig(
        cluster, task_type, task_id, _text_or_none(fields, "rpc_layer"), _text_or_none(fields, "environment")
    )


def training_tasks(cluster: ClusterSpec) -> tuple[tuple[str, int, str], ...]:
    """Return the type, index and address of each training task, in the order of the replicas.

    The chief comes first, then the workers by index; parameter servers and evaluators are not replicas.
    """
    return tuple(
        (job, index, cluster.task_address(job, index))
        for job in TRAINING
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    )


def load(text: str) -> dict[str, Any]:
    """Return the fields of a `TF_CONFIG` without checking them.

    Raises:
        ConfigError: `text` is not a JSON object.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"is {_short(text)}, which is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise _invalid(f"is {_short(text)}, which is JSON, but not an object")
    return fields


def parse_cluster(value: object) -> ClusterSpec:
    """Return the cluster that a `TF_CONFIG` describes, without checking its jobs and addresses.

    Raises:
        ConfigError: `value` does not describe a cluster.
    """
    if not isinstance(value, dict):
        raise _invalid(
            f"has {_short(value)} for 'cluster', expected an object from types of task to addresses"
        )
    try:
        return ClusterSpec(value)
    except (TypeError, ValueError) as error:
        raise _invalid(f"has an invalid 'cluster': {error}") from None


def parse_index(value: object) -> int:
    """Return the index of a task, which may be in quotes.

    Raises:
        ConfigError: `value` is not a whole number, 0 or more.
    """
    # TensorFlow also accepts "1", and templates use it.
    number = _whole(value if isinstance(value, str) else json.dumps(value))
    if number is None:
        raise _invalid(f"has {_short(value)} for the 'index' of 'task', expected a whole number, 0 or more")
    return number


def _check_jobs(cluster: ClusterSpec) -> None:
    if not any(cluster.num_tasks(job) for job in cluster.jobs):
        raise _invalid("has an empty 'cluster', expected the address of at least one task")
    for job in cluster.jobs:
        _check_type(job, "'cluster'")
        indices = cluster.task_indices(job)
        if indices != list(range(len(indices))):
            raise _invalid(f"has the {job} tasks {indices} in 'cluster', expected all from 0 on")
        if job in ("chief", "evaluator") and len(indices) > 1:
            raise _invalid(f"has {len(indices)} tasks of type '{job}' in 'cluster', expected at most one")


def _check_addresses(cluster: ClusterSpec) -> None:
    seen: dict[tuple[str, int], str] = {}
    for job in cluster.jobs:
        for index in cluster.task_indices(job):
            task = f"{job} {index}"
            pair = _host_and_port(cluster.task_address(job, index), task)
            if pair in seen:
                raise _invalid(
                    f"gives {cluster.task_address(job, index)!r} to {seen[pair]} and to {task}, "
                    "expected a different address for each task"
                )
            seen[pair] = task


def _host_and_port(address: str, task: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host):
        raise _invalid(
            f"gives the address {address!r} to {task}, expected a host and a port: 'host1:2222', "
            "or '[fd00::1]:2222' for an IPv6 address"
        )
    number = _whole(port)
    if number is None or not 0 < number <= _LAST_PORT:
        raise _invalid(f"gives the port {port!r} to {task}, in {address!r}, expected 1 to {_LAST_PORT}")
    return host.lower(), number


def _task(cluster: ClusterSpec, task: object) -> tuple[str, int]:
    if not isinstance(task, dict) or not {"type", "index"} <= set(task):
        raise _invalid(f"has {_short(task)} for 'task', expected an object with a 'type' and an 'index'")
    task_type, index = _check_type(task["type"], "'task'"), parse_index(task["index"])
    if task_type not in cluster.jobs:
        if task_type != "evaluator":
            raise _invalid(
                f"has a 'task' of type '{task_type}', but only {_names(cluster.jobs)} in 'cluster'"
            )
    elif index not in cluster.task_indices(task_type):
        number = cluster.num_tasks(task_type)
        raise _invalid(
            f"has {index} for the 'index' of 'task', but 'cluster' has {number} of type '{task_type}', "
            "counted from 0"
        )
    return task_type, index


def _check_type(value: object, where: str) -> str:
    if value == "master":
        raise _invalid(f"has the type 'master' in {where}, expected 'chief', the current name")
    if not isinstance(value, str) or value not in TASK_TYPES:
        raise _invalid(f"has the type {_short(value)} in {where}, expected one of {_names(TASK_TYPES)}")
    return value


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _text_or_none(fields: dict[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise _invalid(f"has {_short(value)} for '{name}', expected a string")
    return value


def _invalid(fault: str) -> ConfigError:
    return ConfigError(f"TF_CONFIG {fault}. Write it as {_EXAMPLE}")


def _names(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def _short(value: object) -> str:
    return shortened(repr(value), 120)
