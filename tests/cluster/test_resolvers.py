"""Resolvers with a fixed cluster, unions of resolvers, and the resolver of `TF_CONFIG`."""

import json
from typing import Any

import pytest

from lockstep.cluster.resolver import ClusterResolver, SimpleClusterResolver, UnionResolver
from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config_resolver import TFConfigClusterResolver
from lockstep.errors import ConfigError

CLUSTER = {"ps": ["p0:2222", "p1:2222"], "worker": ["w0:2222", "w1:2222", "w2:2222"]}


class MinimalResolver(ClusterResolver):
    """A user's resolver with only the required methods."""

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(CLUSTER)

    def master(self, *arguments: Any, **options: Any) -> str:
        return ""


def simple(cluster: Any = CLUSTER, **options: Any) -> SimpleClusterResolver:
    return SimpleClusterResolver(ClusterSpec(cluster), **options)


def set_config(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> TFConfigClusterResolver:
    monkeypatch.setenv("TF_CONFIG", json.dumps(fields))
    return TFConfigClusterResolver()


@pytest.mark.parametrize(("visible", "count"), [("0,3", 2), ("", 0), ("-1", 0)])
def test_num_accelerators_counts_the_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert MinimalResolver().num_accelerators() == {"GPU": count}
    assert TFConfigClusterResolver().num_accelerators("worker", 1) == {"GPU": count}


def test_a_resolver_has_no_task_by_default() -> None:
    resolver = MinimalResolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment) == (
        None,
        None,
        None,
        "",
    )
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 1, "grpc"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")


def test_a_resolver_must_implement_two_methods() -> None:
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # type: ignore[abstract]


def test_a_simple_resolver_returns_its_arguments() -> None:
    resolver = simple(
        master="m:1",
        task_type="ps",
        task_id=1,
        environment="cloud",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id, resolver.environment) == ("ps", 1, "cloud")
    assert (resolver.num_accelerators(), simple().num_accelerators()) == ({"GPU": 8}, {})
    assert resolver.master() == resolver.master("worker") == resolver.master(task_id=0) == "grpc://m:1"
    assert resolver.master("worker", 0) == "grpc://w0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 2, "http"
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master("worker", 2) == "http://w2:2222"
    assert resolver.master("worker", 2, rpc_layer="ab") == "ab://w2:2222"


def test_invalid_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"cluster_spec is \{\}, expected a lockstep.ClusterSpec"):
        SimpleClusterResolver({})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="master is 1, expected a str"):
        simple(master=1)
    with pytest.raises(ValueError, match="a union has no resolvers"):
        UnionResolver()
    with pytest.raises(TypeError, match="a resolver of a union is 1, expected a ClusterResolver"):
        UnionResolver(simple(), 1)  # type: ignore[arg-type]


def test_a_union_has_the_properties_of_the_first_resolver() -> None:
    first = simple(
        task_type="ps", task_id=1, environment="cloud", num_accelerators={"GPU": 8}, rpc_layer="grpc"
    )
    union = UnionResolver(first, simple(task_type="worker", task_id=2, num_accelerators={"GPU": 1}))
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 1, "grpc")
    assert (union.environment, union.num_accelerators()) == ("cloud", {"GPU": 8})
    union.task_type, union.task_id, union.rpc_layer = "worker", 0, "http"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "http")
    assert first.task_type == "ps"
    given = UnionResolver(first, task_type="worker", task_id=0, rpc_layer="ab")
    assert (given.task_type, given.task_id, given.rpc_layer) == ("worker", 0, "ab")


def test_the_master_of_a_union() -> None:
    union = UnionResolver(simple({"ps": ["p0:1"]}, master="m:1"), simple({"worker": ["w0:1", "w1:1"]}))
    assert union.master() == "m:1"
    assert union.master("worker", 1) == "w1:1"
    assert union.master("worker", 1, rpc_layer="grpc") == "grpc://w1:1"


@pytest.mark.parametrize(
    ("clusters", "union"),
    [
        ([CLUSTER], CLUSTER),
        ([{"ps": ["p0:1"]}, {"worker": ["w0:1"]}], {"ps": ["p0:1"], "worker": ["w0:1"]}),
        ([{"w": ["a:1", "b:1"]}, {"w": ["c:1"]}], {"w": ["a:1", "b:1", "c:1"]}),
        ([{"w": {5: "a:1", 9: "b:1"}}, {"w": {3: "c:1"}}], {"w": {3: "c:1", 5: "a:1", 9: "b:1"}}),
        ([{"w": ["a:1", "b:1"]}, {"w": {3: "c:1"}}], {"w": {0: "a:1", 1: "b:1", 3: "c:1"}}),
        ([{"w": {1: "a:1", 3: "b:1"}}], {"w": {1: "a:1", 3: "b:1"}}),
    ],
)
def test_the_cluster_of_a_union_has_all_tasks(clusters: list[Any], union: Any) -> None:
    assert UnionResolver(*map(simple, clusters)).cluster_spec() == ClusterSpec(union)


@pytest.mark.parametrize("second", [{3: "b:1", 7: "c:1"}, [f"b{i}:1" for i in range(8)]])
def test_a_union_of_equal_indices_raises(second: Any) -> None:
    union = UnionResolver(simple({"w": {7: "a:1", 9: "d:1"}}), simple({"w": second}))
    with pytest.raises(KeyError, match=r"two resolvers have the tasks \[7\] of job 'w'"):
        union.cluster_spec()


def test_tf_config_is_read_on_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = set_config(
        monkeypatch, cluster=CLUSTER, task={"type": "ps", "index": "1"}, rpc_layer="grpc", environment="cloud"
    )
    assert resolver.cluster_spec() == ClusterSpec(CLUSTER)
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("ps", 1, "grpc")
    assert (resolver.environment, TFConfigClusterResolver(environment="x").environment) == (None, "x")
    assert resolver.master() == "grpc://p1:2222"
    assert resolver.master("worker", 1, "") == "w1:2222"
    set_config(monkeypatch, cluster={"worker": ["a:1", "b:1"]}, task={"type": "worker", "index": 0})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, None)
    assert resolver.master() == "a:1"


def test_arguments_and_set_values_override_tf_config(monkeypatch: pytest.MonkeyPatch) -> None:
    set_config(monkeypatch, cluster=CLUSTER, task={"type": "ps", "index": 1}, rpc_layer="grpc")
    resolver = TFConfigClusterResolver(task_type="worker", task_id=0, rpc_layer="ab")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "ab")
    assert resolver.master() == "ab://w0:2222"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, "test"
    assert resolver.master() == "test://p0:2222"


def test_the_session_master_of_tf_config_is_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_config(monkeypatch, cluster=CLUSTER, session_master="m:1").master() == "m:1"


@pytest.mark.parametrize("text", [None, "", "{}"])
def test_a_missing_tf_config_is_a_cluster_without_jobs(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    if text is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", text)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.master() == ""


def test_a_single_task_has_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set_config(monkeypatch, cluster={"worker": ["a:1"]}).master() == ""


def test_an_incomplete_tf_config_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = set_config(monkeypatch, cluster=CLUSTER)
    with pytest.raises(ConfigError, match="lists several tasks, but does not say which one this process is"):
        resolver.master()
    assert resolver.master("worker", 1) == "w1:2222"


@pytest.mark.parametrize(
    ("fields", "ask"),
    [
        ({"cluster": ["a:1"]}, "cluster_spec"),
        ({"cluster": {"worker": "a:1"}}, "cluster_spec"),
        ({"task": 1}, "task_type"),
        ({"task": {"index": 1.5}}, "task_id"),
    ],
)
def test_an_invalid_tf_config_raises(monkeypatch: pytest.MonkeyPatch, fields: Any, ask: str) -> None:
    resolver = set_config(monkeypatch, **fields)
    with pytest.raises(ConfigError, match="TF_CONFIG has"):
        getattr(resolver, ask)()


def test_a_tf_config_that_is_not_json_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{'cluster'")
    with pytest.raises(ConfigError, match="which is not JSON"):
        TFConfigClusterResolver().cluster_spec()
