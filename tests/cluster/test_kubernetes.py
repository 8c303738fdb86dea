"""The cluster of pods, requested through the official client from a test server."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.cluster import kubernetes as resolving
from lockstep.cluster.kubernetes import KubernetesClusterResolver, KubernetesExecutableLocation
from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import UnfitError

from .api_server import ApiServer, pod, serving

OFF = KubernetesExecutableLocation.OFF_CLUSTER
TENSORFLOW = {"job-name": "tensorflow"}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving(ApiServer([])) as server:
        yield server


def point_at(monkeypatch: pytest.MonkeyPatch, folder: Path, url: str) -> None:
    """Write a configuration of kubectl for a server where the client finds it."""
    file = folder / "config"
    file.write_text(
        f"""
apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
users: [{{name: test, user: {{token: of-kubectl}}}}]
"""
    )
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ApiServer) -> ApiServer:
    point_at(monkeypatch, tmp_path, f"http://127.0.0.1:{server.port}")
    return server


def test_running_pods_are_tasks_by_name(off: ApiServer) -> None:
    off.pods = [
        pod("tf-b", "10.1.2.4", **TENSORFLOW),
        pod("tf-a", "10.1.2.3", **TENSORFLOW),
        pod("other", "10.1.2.9"),
        pod("tf-0", "fd00::1", **TENSORFLOW),
    ]
    resolver = KubernetesClusterResolver(executable_location=OFF)
    expected = ["[fd00::1]:8470", "10.1.2.3:8470", "10.1.2.4:8470"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": expected})
    assert off.requests == [("/api/v1/pods?job-name=tensorflow", "Bearer of-kubectl")]


def test_each_call_sends_a_request(off: ApiServer) -> None:
    resolver = KubernetesClusterResolver(tf_server_port=5, executable_location=OFF)
    for number in (1, 2):
        off.pods.append(pod(f"tf-{number}", f"10.1.2.{number}", **TENSORFLOW))
        assert resolver.cluster_spec().num_tasks("worker") == number
    assert resolver.cluster_spec().task_address("worker", 1) == "10.1.2.2:5"


def test_several_jobs_with_several_labels(off: ApiServer) -> None:
    off.pods = [
        pod("w-1", "10.0.0.1", job="b"),
        pod("w-2", "10.0.0.2", job="a"),
        pod("w-3", "10.0.0.3", job="b"),
        pod("p-1", "10.0.0.4", role="ps"),
    ]
    resolver = KubernetesClusterResolver(
        {"worker": ["job=b", "job=a"], "ps": ["role=ps"]}, 1, None, None, OFF
    )
    workers = ["10.0.0.1:1", "10.0.0.3:1", "10.0.0.2:1"]
    assert resolver.cluster_spec() == ClusterSpec({"worker": workers, "ps": ["10.0.0.4:1"]})
    assert resolver.master("ps", 0) == "10.0.0.4:1"
    assert resolver.master("ps", 0, "ab") == "ab://10.0.0.4:1"


def test_the_address_of_this_process(off: ApiServer) -> None:
    off.pods = [pod(f"tf-{number}", f"10.0.0.{number}", **TENSORFLOW) for number in range(3)]
    resolver = KubernetesClusterResolver(executable_location=OFF)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 0
    assert resolver.master() == "grpc://10.0.0.0:8470"
    assert resolver.master("worker", 2) == "grpc://10.0.0.2:8470"
    with pytest.raises(ValueError, match="no task 3 in job 'worker'"):
        resolver.master("worker", 3)


def test_the_callers_client_is_used(server: ApiServer) -> None:
    from kubernetes import client

    server.pods = [pod("tf-0", "10.0.0.1", **TENSORFLOW)]
    with client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.port}")) as connection:
        resolver = KubernetesClusterResolver(override_client=client.CoreV1Api(connection))
        assert resolver.cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:8470"]})


@pytest.mark.parametrize(("phase", "address"), [("Pending", None), ("Failed", "10.0.0.2"), ("Running", None)])
def test_a_pod_that_is_not_running_raises(off: ApiServer, phase: str, address: str | None) -> None:
    off.pods = [pod("tf-0", "10.0.0.1", **TENSORFLOW), pod("tf-1", address, phase, **TENSORFLOW)]
    expected = f"the pod 'tf-1' is {phase}, at {address or 'no address'}, expected Running: try again"
    with pytest.raises(UnfitError, match=expected):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_no_pods_raise(off: ApiServer) -> None:
    off.pods = [pod("tf-0", "10.0.0.1", **TENSORFLOW)]
    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=tensorflow", "job=x"]}, executable_location=OFF
    )
    with pytest.raises(
        UnfitError, match="Kubernetes has no pods with the label 'job=x', expected one per task"
    ):
        resolver.cluster_spec()


@pytest.mark.parametrize("code", [401, 403, 500])
def test_a_refused_request_raises(off: ApiServer, code: int) -> None:
    off.refusal = (code, "pods is forbidden")
    with pytest.raises(UnfitError) as caught:
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()
    assert f"'job-name=tensorflow', answered {code}: pods is forbidden. This process must" in str(
        caught.value
    )
    assert len(off.requests) == 1


def test_an_answer_of_another_server_raises(off: ApiServer) -> None:
    off.page = "<html>a door to somewhere else</html>"
    with pytest.raises(UnfitError, match=r"gave no usable answer within 10 s: "):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


@pytest.mark.parametrize(
    "page",
    [
        "null",
        "[]",
        "5",
        '{"items": null}',
        '{"items": 5}',
        '{"items": [null]}',
        '{"items": [5]}',
        '{"items": [{"metadata": null, "status": null}]}',
        '{"items": [{"metadata": {"name": 5}, "status": {"phase": [], "podIP": {}}}]}',
        '{"items": ' + "[" * 100_000,
    ],
    ids=lambda page: page[:60],
)
def test_invalid_answers_raise(off: ApiServer, page: str) -> None:
    off.page = page
    with pytest.raises(UnfitError):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_an_unreachable_server_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    point_at(monkeypatch, tmp_path, f"http://127.0.0.1:{port}")
    with pytest.raises(UnfitError, match=r"gave no usable answer within 10 s: .*Connection refused"):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_a_server_that_does_not_answer_raises(monkeypatch: pytest.MonkeyPatch, off: ApiServer) -> None:
    off.answers.clear()
    monkeypatch.setattr(resolving, "_PATIENCE", 0.1)
    with pytest.raises(UnfitError, match=r"gave no usable answer within 0.1 s: .*timed out"):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()
    assert len(off.requests) <= 1


def test_an_older_client_does_not_wait_without_a_limit(
    monkeypatch: pytest.MonkeyPatch, off: ApiServer
) -> None:
    """Clients up to at least version 35 know a pair of limits, or a whole number, but ignore a float."""
    from kubernetes.client.rest import RESTClientObject

    class OlderRest(RESTClientObject):  # type: ignore[misc]
        def request(self, *args: Any, _request_timeout: Any = None, **kwargs: Any) -> Any:
            if not isinstance(_request_timeout, int | tuple):
                # It would wait without a limit: the server answers, so that the test fails at once.
                off.page = "an answer"
                off.answers.set()
                _request_timeout = None
            return super().request(*args, _request_timeout=_request_timeout, **kwargs)

    off.answers.clear()
    monkeypatch.setattr("kubernetes.client.rest.RESTClientObject", OlderRest)
    monkeypatch.setattr(resolving, "_PATIENCE", 0.1)
    with pytest.raises(UnfitError, match=r"gave no usable answer within 0.1 s: .*timed out"):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_a_missing_configuration_of_kubectl_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(UnfitError, match="finds no API server for OFF_CLUSTER: Invalid kube-config file"):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_an_invalid_configuration_of_kubectl_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_at(monkeypatch, tmp_path, '"{')
    with pytest.raises(UnfitError, match="finds no API server for OFF_CLUSTER: while scanning"):
        KubernetesClusterResolver(executable_location=OFF).cluster_spec()


def test_a_process_outside_a_pod_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(
        UnfitError, match="finds no API server for WITHIN_CLUSTER: Service host/port is not set"
    ):
        KubernetesClusterResolver().cluster_spec()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the server's certificate")
def test_a_process_in_a_pod_uses_its_service_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key, token = tmp_path / "ca.crt", tmp_path / "key", tmp_path / "token"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    name = ("-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1")
    command = ("openssl", "req", "-x509", *curve, *name, "-days", "2", "-keyout", key, "-out", certificate)
    subprocess.run(command, check=True, capture_output=True)
    token.write_text("of-the-pod")
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(certificate))
    server = ApiServer([pod("tf-0", "10.0.0.1", **TENSORFLOW)])
    server.secure(certificate, key)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    with serving(server):
        assert KubernetesClusterResolver().cluster_spec() == ClusterSpec({"worker": ["10.0.0.1:8470"]})
    assert server.requests == [("/api/v1/pods?job-name=tensorflow", "bearer of-the-pod")]


@pytest.mark.parametrize("location", [None, 0, "WITHIN_CLUSTER"])
def test_an_invalid_location_raises(location: Any) -> None:
    with pytest.raises(ValueError, match="expected a KubernetesExecutableLocation"):
        KubernetesClusterResolver(executable_location=location)


def test_a_missing_client_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UnfitError, match=r"pip install 'keras-lockstep\[kubernetes\]'"):
        KubernetesClusterResolver().cluster_spec()
