"""`ClusterSpec`: its methods and its errors."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import BackendError

CLUSTER = {
    "worker": ["w0:2222", "w1:2222", "w2:2222"],
    "ps": ["p0:2222", "p1:2222"],
    "sparse": {3: "s3:2222", 0: "s0:2222"},
}


def test_methods_of_a_cluster() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec.as_dict() == CLUSTER
    assert list(spec.as_dict()["sparse"]) == [0, 3]
    assert spec.jobs == ["worker", "ps", "sparse"]
    assert [spec.num_tasks(job) for job in spec.jobs] == [3, 2, 2]
    assert [spec.task_indices(job) for job in spec.jobs] == [[0, 1, 2], [0, 1], [0, 3]]
    assert spec.task_address("worker", 2) == "w2:2222"
    assert spec.task_address("sparse", 3) == "s3:2222"
    assert spec.job_tasks("ps") == ["p0:2222", "p1:2222"]
    assert spec.job_tasks("sparse") == ["s0:2222", None, None, "s3:2222"]


def test_repr_is_sorted_by_name() -> None:
    spec = ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": {1: "p1:1"}, "none": []})
    assert repr(spec) == "ClusterSpec({'none': {}, 'ps': {1: 'p1:1'}, 'worker': ['w0:1', 'w1:1']})"


def test_equal_clusters() -> None:
    assert ClusterSpec({}) == ClusterSpec({})
    assert ClusterSpec({"job": {0: "a:1"}}) == ClusterSpec({"job": ["a:1"]})
    assert ClusterSpec({"job": {"0": "a:1"}}) == ClusterSpec({"job": ("a:1",)})
    assert ClusterSpec(ClusterSpec(CLUSTER)) == ClusterSpec(ClusterSpec(CLUSTER).as_dict())
    assert ClusterSpec({"job": ["a:1"]}) == {"job": {0: "a:1"}}


@pytest.mark.parametrize(
    "other", [{}, {"other": ["a:1", "b:1"]}, {"job": ["a:1", "c:1"]}, {"job": ["b:1", "a:1"]}, {"job": []}]
)
def test_different_clusters(other: Any) -> None:
    assert ClusterSpec(other) != ClusterSpec({"job": ["a:1", "b:1"]})


def test_a_cluster_accepts_a_protocol_buffer_without_tensorflow() -> None:
    jobs = [SimpleNamespace(name="ps", tasks={1: "p1:1"}), SimpleNamespace(name="worker", tasks={0: "w0:1"})]
    assert ClusterSpec(SimpleNamespace(job=jobs)) == ClusterSpec({"ps": {1: "p1:1"}, "worker": ["w0:1"]})


def test_a_cluster_copies_its_argument() -> None:
    tasks = ["a:1"]
    spec = ClusterSpec({"job": tasks})
    tasks.append("b:1")
    spec.as_dict()["more"] = []
    assert spec.as_dict() == {"job": ["a:1"]}


def test_a_cluster_without_jobs_is_false() -> None:
    assert not ClusterSpec({})
    assert ClusterSpec({"job": []})


def test_a_job_may_have_no_tasks() -> None:
    spec = ClusterSpec({"job": []})
    assert (spec.as_dict(), spec.num_tasks("job"), spec.job_tasks("job")) == ({"job": {}}, 0, [])


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_an_unknown_job_raises(method: str) -> None:
    with pytest.raises(
        ValueError, match=r"no job 'boss' in the cluster: it has \['worker', 'ps', 'sparse'\]"
    ):
        getattr(ClusterSpec(CLUSTER), method)("boss")


def test_an_unknown_task_raises() -> None:
    with pytest.raises(ValueError, match="no job 'boss' in the cluster"):
        ClusterSpec(CLUSTER).task_address("boss", 0)
    with pytest.raises(ValueError, match=r"no task 2 in job 'sparse': it has \[0, 3\]"):
        ClusterSpec(CLUSTER).task_address("sparse", 2)


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (None, TypeError, "a cluster is NoneType, expected a dict"),
        (["a:1"], TypeError, "a cluster is list, expected a dict"),
        ({1: ["a:1"]}, TypeError, "the name of a job is 1, expected a str"),
        ({"job": "a:1"}, TypeError, "the tasks of job 'job' are 'a:1', expected a list of addresses"),
        ({"job": [1]}, TypeError, "an address in job 'job' is 1, expected a str"),
        ({"job": {0: None}}, TypeError, "an address in job 'job' is None, expected a str"),
        ({"job": {-1: "a:1"}}, ValueError, "an index in job 'job' is -1, expected a whole number"),
        ({"job": {"x": "a:1"}}, ValueError, "an index in job 'job' is 'x', expected a whole number"),
    ],
)
def test_invalid_clusters_raise(cluster: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


def test_a_protocol_buffer_needs_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(BackendError, match="add `import tensorflow` first"):
        ClusterSpec(CLUSTER).as_cluster_def()
