"""The cluster of the pods of a Kubernetes job."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from lockstep.cluster.resolver import ClusterResolver
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import UnfitError
from lockstep.system.prose import install_command

_PATIENCE = 10.0
"""Seconds to wait for the server to accept a connection, and to answer."""


class KubernetesExecutableLocation(Enum):
    """The location of this process, which determines how it finds the API server, and its identity there.

    `WITHIN_CLUSTER`: in a pod, with the pod's service account. `OFF_CLUSTER`: outside, with kubectl's
    configuration.

    Example:
        >>> from lockstep.cluster_resolver import KubernetesExecutableLocation
        >>> KubernetesExecutableLocation.OFF_CLUSTER.value
        1
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Finds pods by their labels, through the official client `kubernetes`.

    Kubernetes does not identify the task of this process: set `task_type` and `task_id`. Addresses are those
    of pods, not of nodes, which several pods may share.

    Example:
        >>> from lockstep.cluster_resolver import KubernetesClusterResolver
        >>> resolver = KubernetesClusterResolver({"worker": ["job-name=digits"]}, tf_server_port=2222)
        >>> resolver.task_type, resolver.task_id = "worker", 0

        In a pod, `resolver.cluster_spec()` then lists the pods of the Job `digits`.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        """Store the arguments of the request.

        Args:
            job_to_label_mapping: the label selectors of each job, such as `{"worker": ["job-name=a"]}`;
                by default `{"worker": ["job-name=tensorflow"]}`.
            tf_server_port: the port of every task.
            rpc_layer: the protocol prefix of addresses; None if there is none.
            override_client: a `kubernetes.client.CoreV1Api` to use, configured by the caller.
            executable_location: where this process runs; ignored with `override_client`.

        Raises:
            ValueError: `executable_location` is not a `KubernetesExecutableLocation`.
        """
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise ValueError(
                f"executable_location is {executable_location!r}, expected a KubernetesExecutableLocation"
            )
        self._selectors = job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._client = override_client
        self._location = executable_location

    def cluster_spec(self) -> ClusterSpec:
        """Request the pods and return their addresses, sorted by name for each selector.

        Raises:
            UnfitError: the client is not installed or not configured, the server refuses or does not answer
                within 10 seconds, a selector has no pods, or a pod is not running.
        """
        with self._connected() as client:
            return ClusterSpec(
                {
                    job: [address for selector in selectors for address in self._addresses(client, selector)]
                    for job, selectors in self._selectors.items()
                }
            )

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        if self._client is not None:
            yield self._client
            return
        client, _ = _library()
        with client.ApiClient(_configuration(self._location)) as connection:
            yield client.CoreV1Api(connection)

    def _addresses(self, client: Any, selector: str) -> list[str]:
        pods = sorted(_pods(client, selector), key=lambda pod: str(pod.metadata.name))
        if not pods:
            raise UnfitError(
                f"Kubernetes has no pods with the label {selector!r}, expected one per task: "
                f"see `kubectl get pods --all-namespaces --selector {selector}`"
            )
        return [f"{_host(pod)}:{self._port}" for pod in pods]


def _pods(client: Any, selector: str) -> Any:
    _library()
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    # This is a pair, because clients up to at least version 35 ignore a single float.
    patience = (_PATIENCE, _PATIENCE)
    request = f"asked for the pods with the label {selector!r}"
    try:
        pods = client.list_pod_for_all_namespaces(label_selector=selector, _request_timeout=patience).items
        if any(pod.metadata is None or pod.status is None for pod in pods or ()):
            raise ValueError("a pod has no metadata or no status")
        return pods or []
    except ApiException as error:
        raise UnfitError(
            f"The API server of Kubernetes, {request}, answered {error.status or 'nothing'}: "
            f"{_reason(error)}. This process must be allowed to list pods in all namespaces"
        ) from None
    except (HTTPError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UnfitError(
            f"The API server of Kubernetes, {request}, gave no usable answer within {_PATIENCE:g} s: {error}"
        ) from None


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)


def _host(pod: Any) -> str:
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        raise UnfitError(
            f"the pod {pod.metadata.name!r} is {pod.status.phase}, at {pod.status.pod_ip or 'no address'}, "
            "expected Running: try again when all pods of the job are running"
        )
    address = str(pod.status.pod_ip)
    return f"[{address}]" if ":" in address else address


def _configuration(location: KubernetesExecutableLocation) -> Any:
    client, config = _library()
    from yaml import YAMLError

    configuration = client.Configuration()
    configuration.retries = False
    try:
        if location is KubernetesExecutableLocation.WITHIN_CLUSTER:
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(client_configuration=configuration)
    except (config.ConfigException, OSError, YAMLError) as error:
        raise UnfitError(
            f"The client of Kubernetes finds no API server for {location.name}: {error}. "
            "In a pod, executable_location must be WITHIN_CLUSTER; elsewhere it must be OFF_CLUSTER, and "
            "`kubectl cluster-info` must work"
        ) from None
    return configuration


def _library() -> tuple[Any, Any]:
    try:
        from kubernetes import client, config
    except ImportError:
        raise UnfitError(
            f"KubernetesClusterResolver needs the package `kubernetes`: {install_command('kubernetes')}"
        ) from None
    return client, config
