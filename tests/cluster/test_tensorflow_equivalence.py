"""Clusters and resolvers give the same answers as the classes of TensorFlow."""

import json
import os
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.cluster.slurm_step import expand_counts, expand_hosts

DENSE = {"ps": ["p0:1", "p1:1"], "worker": ["w0:1", "w1:1", "w2:1"]}
CONFIG = {"cluster": DENSE, "task": {"type": "ps", "index": 1}, "rpc_layer": "grpc"}
CLUSTERS = st.dictionaries(
    st.sampled_from(["chief", "ps", "worker"]),
    st.one_of(
        st.lists(st.text("abc:1", min_size=1), min_size=1, max_size=4),
        st.dictionaries(st.integers(0, 5), st.text("abc:1", min_size=1), min_size=1, max_size=4),
    ),
)


@cache
def sides() -> tuple[SimpleNamespace, SimpleNamespace]:
    import tensorflow as tf

    theirs = tf.distribute.cluster_resolver
    return (
        SimpleNamespace(spec=lockstep.ClusterSpec, resolvers=lockstep.cluster_resolver),
        SimpleNamespace(spec=tf.train.ClusterSpec, resolvers=theirs),
    )


def answer(ask: Callable[[], Any]) -> Any:
    """Return the result, clusters as dicts, or the type of the error."""
    try:
        value = ask()
    except (KeyError, TypeError, ValueError) as error:
        return type(error)
    return value.as_dict() if hasattr(value, "as_dict") else value


def same(ask: Callable[[SimpleNamespace], Any]) -> Any:
    """Return the answer of both sides, which must be equal."""
    first, second = (answer(lambda side=side: ask(side)) for side in sides())
    assert first == second
    return first


@pytest.mark.ci
def test_a_cluster_accepts_one_of_tensorflow() -> None:
    _, theirs = sides()
    for jobs in (DENSE, {"worker": {2: "w2:1", 5: "w5:1"}}, {}):
        assert lockstep.ClusterSpec(theirs.spec(jobs)) == lockstep.ClusterSpec(jobs)
        assert lockstep.ClusterSpec(theirs.spec(jobs).as_cluster_def()) == lockstep.ClusterSpec(jobs)
        resolver = lockstep.cluster_resolver.SimpleClusterResolver(theirs.spec(jobs))
        assert resolver.cluster_spec() == lockstep.ClusterSpec(jobs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CLUSTERS, st.sampled_from(["chief", "ps", "worker", "boss"]), st.integers(-1, 6))
def test_methods_of_a_cluster(cluster: Any, job: str, index: int) -> None:
    for ask in (
        lambda spec: spec,
        lambda spec: sorted(spec.jobs),
        bool,
        repr,
        lambda spec: spec.num_tasks(job),
        lambda spec: spec.task_indices(job),
        lambda spec: spec.job_tasks(job),
        lambda spec: spec.task_address(job, index),
        lambda spec: spec.as_cluster_def(),
        lambda spec: spec == type(spec)(spec.as_dict()),
        lambda spec: spec != type(spec)(spec),
        lambda spec: type(spec)(spec.as_cluster_def()),
        lambda spec: spec == type(spec)(DENSE),
        lambda spec: spec == cluster,
    ):
        same(lambda side, ask=ask: ask(side.spec(cluster)))


@pytest.mark.parametrize(
    "cluster", [None, [], "a:1", {"job": "a:1"}, {"job": [1]}, {1: ["a:1"]}, {"job": None}]
)
def test_invalid_clusters(cluster: Any) -> None:
    assert same(lambda side: side.spec(cluster)) is TypeError


@pytest.mark.parametrize("task", [(), ("worker",), ("worker", 1), ("ps", 3, "http")])
def test_a_server_accepts_the_protocol_buffers_of_tensorflow(task: Any) -> None:
    from tensorflow.python.training.server_lib import _make_server_def

    cluster = lockstep.ClusterSpec({"ps": {3: "p3:1"}, "worker": ["w0:1", "w1:1"]}).as_cluster_def()
    whole = _make_server_def(cluster, "worker", 1, "ab", None)
    for definition in (cluster, whole):

        def theirs(definition: Any = definition) -> str:
            made = _make_server_def(definition, *(task + (None,) * 3)[:3], None)
            tasks = {job.name: job.tasks for job in made.cluster.job}
            return f"{made.protocol}://{tasks[made.job_name][made.task_index]}"

        assert answer(lambda given=definition: lockstep.Server(given, *task).target) == answer(theirs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(CLUSTERS, CLUSTERS)
def test_methods_of_a_union(first: Any, second: Any) -> None:
    def union(side: SimpleNamespace) -> Any:
        simple = side.resolvers.SimpleClusterResolver
        return side.resolvers.UnionResolver(
            simple(side.spec(first), task_type="ps", task_id=1, rpc_layer="grpc", master="m:1"),
            simple(side.spec(second), task_type="worker", task_id=2),
        )

    same(lambda side: union(side).cluster_spec())
    for name in ("task_type", "task_id", "rpc_layer", "environment"):
        same(lambda side, name=name: getattr(union(side), name))
    for task in ((), ("worker",), ("worker", 1), ("worker", 1, "ab")):
        same(lambda side, task=task: union(side).master(*task))


@pytest.mark.parametrize("task", [(), ("ps",), ("worker", 2), ("worker", 3), ("boss", 0), ("ps", 0, "ab")])
@pytest.mark.parametrize("master", ["", "m:1"])
def test_the_master_of_a_simple_resolver(task: Any, master: str) -> None:
    same(
        lambda side: side.resolvers.SimpleClusterResolver(
            side.spec(DENSE), master=master, rpc_layer="grpc"
        ).master(*task)
    )


@pytest.mark.parametrize(
    "given", [{}, {"task_type": "worker", "task_id": 2, "rpc_layer": "ab", "environment": "x"}]
)
@pytest.mark.parametrize(
    "config",
    [
        {},
        CONFIG,
        CONFIG | {"task": {"type": "worker", "index": "0"}},
        CONFIG | {"session_master": "m:1"},
        CONFIG | {"cluster": {"worker": {"1": "w1:1", "2": "w2:1"}}},
        {"cluster": {"worker": ["w0:1"]}},
        {"cluster": {"7": ["w0:1"], "8": ["w1:1"]}, "task": {"type": 7, "index": 0}},
    ],
)
def test_values_from_tf_config(monkeypatch: pytest.MonkeyPatch, config: Any, given: Any) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    for name in ("task_type", "task_id", "rpc_layer", "environment"):
        same(lambda side, name=name: getattr(side.resolvers.TFConfigClusterResolver(**given), name))
    same(lambda side: side.resolvers.TFConfigClusterResolver(**given).cluster_spec())
    for task in ((), ("worker", 1), ("worker", 9), ("worker", 1, "http")):
        same(lambda side, task=task: side.resolvers.TFConfigClusterResolver(**given).master(*task))


@pytest.mark.parametrize("rank", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"jobs": {"worker": 4, "ps": 1}, "port_base": 5000},
        {"gpus_per_node": 4},
        {"gpus_per_node": 4, "gpus_per_task": 1, "auto_set_gpu": False},
        {"tasks_per_node": {"n01": 2, "n02": 2, "x": 1}, "rpc_layer": "ab"},
    ],
)
def test_values_from_slurm(monkeypatch: pytest.MonkeyPatch, rank: int, options: Any) -> None:
    variables = {"PROCID": rank, "STEP_NODELIST": "n[01-02],x", "STEP_TASKS_PER_NODE": "2(x2),1"}
    for name, value in (variables | {"STEP_NUM_TASKS": 5}).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))

    def resolved(side: SimpleNamespace) -> Any:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        resolver = side.resolvers.SlurmClusterResolver(**options)
        return (
            resolver.cluster_spec().as_dict(),
            resolver.get_task_info(),
            (resolver.task_type, resolver.task_id, resolver.rpc_layer),
            (resolver.master(), resolver.master("worker", 0), resolver.master("worker", 0, "http")),
            resolver.num_accelerators(),
            os.environ["CUDA_VISIBLE_DEVICES"],
        )

    same(resolved)


@pytest.mark.parametrize(
    "text", ["n1", "n[1,3]", "n[1-2],m5,o[3-4,6,7-9]", "n[0001-0003],o[009-011]", "n[8-11]"]
)
def test_lists_of_hosts(text: str) -> None:
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    assert expand_hosts(text) == slurm_cluster_resolver.expand_hostlist(text)


@pytest.mark.parametrize("text", ["2", "2,1,3", "3(x2),2,11(x4)", "13(x10)"])
def test_lists_of_counts(text: str) -> None:
    from tensorflow.python.distribute.cluster_resolver import slurm_cluster_resolver

    assert expand_counts(text) == slurm_cluster_resolver.expand_tasks_per_node(text)
