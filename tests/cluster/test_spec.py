"""The tasks of a cluster: what is answered and what is refused."""

import sys
from typing import Any

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep.errors import BackendError

CLUSTER = {
    "worker": ["w0:2222", "w1:2222", "w2:2222"],
    "ps": ["p0:2222", "p1:2222"],
    "sparse": {3: "s3:2222", 0: "s0:2222"},
}


def test_all_that_it_answers() -> None:
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


def test_its_text_is_in_the_order_of_names() -> None:
    spec = ClusterSpec({"worker": ["w0:1", "w1:1"], "ps": {1: "p1:1"}, "none": []})
    assert repr(spec) == "ClusterSpec({'none': {}, 'ps': {1: 'p1:1'}, 'worker': ['w0:1', 'w1:1']})"


def test_what_is_equal() -> None:
    assert ClusterSpec({}) == ClusterSpec({})
    assert ClusterSpec({"job": {0: "a:1"}}) == ClusterSpec({"job": ["a:1"]})
    assert ClusterSpec({"job": {"0": "a:1"}}) == ClusterSpec({"job": ("a:1",)})
    assert ClusterSpec(ClusterSpec(CLUSTER)) == ClusterSpec(ClusterSpec(CLUSTER).as_dict())
    assert ClusterSpec({"job": ["a:1"]}) == {"job": {0: "a:1"}}


@pytest.mark.parametrize(
    "other", [{}, {"other": ["a:1", "b:1"]}, {"job": ["a:1", "c:1"]}, {"job": ["b:1", "a:1"]}, {"job": []}]
)
def test_what_is_not_equal(other: Any) -> None:
    assert ClusterSpec(other) != ClusterSpec({"job": ["a:1", "b:1"]})


def test_a_copy_is_its_own() -> None:
    tasks = ["a:1"]
    spec = ClusterSpec({"job": tasks})
    tasks.append("b:1")
    spec.as_dict()["more"] = []
    assert spec.as_dict() == {"job": ["a:1"]}


def test_only_one_without_jobs_is_false() -> None:
    assert not ClusterSpec({})
    assert ClusterSpec({"job": []})


def test_a_job_may_have_no_tasks() -> None:
    spec = ClusterSpec({"job": []})
    assert (spec.as_dict(), spec.num_tasks("job"), spec.job_tasks("job")) == ({"job": {}}, 0, [])


@pytest.mark.parametrize("method", ["num_tasks", "task_indices", "job_tasks"])
def test_a_job_that_is_not_there(method: str) -> None:
    with pytest.raises(
        ValueError, match=r"no job 'boss' in the cluster: it has \['worker', 'ps', 'sparse'\]"
    ):
        getattr(ClusterSpec(CLUSTER), method)("boss")


def test_a_task_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no job 'boss' in the cluster"):
        ClusterSpec(CLUSTER).task_address("boss", 0)
    with pytest.raises(ValueError, match=r"no task 2 in job 'sparse': it has \[0, 3\]"):
        ClusterSpec(CLUSTER).task_address("sparse", 2)


@pytest.mark.parametrize(
    ("cluster", "error", "said"),
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
def test_what_is_no_cluster(cluster: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        ClusterSpec(cluster)


def test_a_protocol_buffer_takes_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    with pytest.raises(BackendError, match="add `import tensorflow` first"):
        ClusterSpec(CLUSTER).as_cluster_def()
