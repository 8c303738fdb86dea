"""Parsing `TF_CONFIG`, and the errors for invalid values."""

import json
from typing import Any

import pytest

from lockstep.cluster.spec import ClusterSpec
from lockstep.cluster.tf_config import TaskConfig, parse, training_tasks
from lockstep.errors import ConfigError

TASK = {"type": "worker", "index": 0}
TWO = {"worker": ["a:1", "b:1"]}


def config(cluster: Any = TWO, task: Any = TASK, **more: Any) -> str:
    return json.dumps({"cluster": cluster, "task": task, **more})


def test_all_fields_are_parsed() -> None:
    cluster = {
        "chief": ["c:22"],
        "worker": ["a:1", "A:2", "[fd00::1]:65535"],
        "ps": {"1": "p1:3", "0": "p0:3"},
        "evaluator": ["e:4"],
    }
    text = config(cluster, {"type": "ps", "index": 1}, rpc_layer="grpc", environment="cloud", model_dir="/m")
    listed = cluster | {"ps": ["p0:3", "p1:3"]}
    assert parse(text) == TaskConfig(ClusterSpec(listed), "ps", 1, "grpc", "cloud")
    assert training_tasks(parse(text).cluster) == (
        ("chief", 0, "c:22"),
        ("worker", 0, "a:1"),
        ("worker", 1, "A:2"),
        ("worker", 2, "[fd00::1]:65535"),
    )


def test_the_minimal_value_is_parsed() -> None:
    assert parse(config()) == TaskConfig(ClusterSpec(TWO), "worker", 0, None, None)


def test_an_index_may_be_in_quotes() -> None:
    assert parse(config(task={"type": "worker", "index": "1"})).task_id == 1


def test_an_evaluator_need_not_be_in_the_cluster() -> None:
    assert parse(config(task={"type": "evaluator", "index": 3})).task_id == 3


def test_a_job_may_have_no_tasks() -> None:
    cluster = parse(config({"chief": [], "worker": ["a:1"], "ps": {}})).cluster
    assert training_tasks(cluster) == (("worker", 0, "a:1"),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is '', which is not JSON (Expecting value"),
        ("{'cluster': 1}", "which is not JSON (Expecting property name"),
        ("[1]", "is '[1]', which is JSON, but not an object"),
        ("{}", "has no 'cluster'; it has nothing"),
        ('{"task": {}}', "has no 'cluster'; it has 'task'"),
        (config({}), "has an empty 'cluster', expected the address of at least one task"),
        (config({"worker": [], "ps": {}}), "has an empty 'cluster'"),
        (config(["a:1"]), "has ['a:1'] for 'cluster', expected an object from types of task to addresses"),
        (config({"worker": "a:1"}), "the tasks of job 'worker' are 'a:1', expected a list of addresses"),
        (config({"worker": ["a:1", None]}), "an address in job 'worker' is None, expected a str"),
        (config({"worker": {"one": "a:1"}}), "an index in job 'worker' is 'one', expected a whole number"),
        (config({"worker": {"0": "a:1", "2": "b:1"}}), "has the worker tasks [0, 2] in 'cluster'"),
        (config({"boss": ["a:1"]}), "has the type 'boss' in 'cluster', expected one of 'chief', 'worker'"),
        (config({"master": ["a:1"]} | TWO), "has the type 'master' in 'cluster', expected 'chief'"),
        (
            config({"chief": ["c:1", "d:1"]} | TWO),
            "has 2 tasks of type 'chief' in 'cluster', expected at most one",
        ),
        (config({"evaluator": ["c:1", "d:1"]} | TWO), "has 2 tasks of type 'evaluator' in 'cluster'"),
        (
            '{"cluster": {"worker": ["a:1"]}}',
            "has no 'task', which identifies this process; it has 'cluster'",
        ),
        (config(task=None), "has None for 'task', expected an object with a 'type' and an 'index'"),
        (config(task={"type": "worker"}), "has {'type': 'worker'} for 'task', expected an object"),
        (config(task={"index": 0}), "has {'index': 0} for 'task', expected an object"),
        (config(task={"type": "boss", "index": 0}), "has the type 'boss' in 'task', expected one of"),
        (config(task={"type": ["worker"], "index": 0}), "has the type ['worker'] in 'task'"),
        (config(task={"type": "master", "index": 0}), "has the type 'master' in 'task', expected 'chief'"),
        (config(task={"type": "chief", "index": 0}), "of type 'chief', but only 'worker' in 'cluster'"),
        (config(task={"type": "worker", "index": 2}), "has 2 for the 'index' of 'task', but 'cluster' has 2"),
        (config({"ps": []} | TWO, {"type": "ps", "index": 0}), "but 'cluster' has 0 of type 'ps'"),
        (config(rpc_layer=1), "has 1 for 'rpc_layer', expected a string"),
        (config(environment=[]), "has [] for 'environment', expected a string"),
    ],
)
def test_faults_are_named(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("TF_CONFIG ")
    assert expected in message
    assert message.endswith(
        'Write it as {"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
        + ('"task": {"type": "worker", "index": 0}}')
    )


@pytest.mark.parametrize("index", [-1, 1.0, True, None, "", "x", "-1", "²", [0], "1" * 5000])
def test_an_index_must_be_a_whole_number(index: Any) -> None:
    with pytest.raises(ConfigError, match="for the 'index' of 'task', expected a whole number, 0 or more"):
        parse(config(task={"type": "worker", "index": index}))


@pytest.mark.parametrize("address", ["a", "", ":1", "fd00::1:2222", "grpc://a:1", "a b:1", "[]:1", "[::1]"])
def test_an_address_must_have_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config({"worker": ["a:1", address]}))
    assert f"gives the address {address!r} to worker 1, expected a host and a port" in str(caught.value)


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "x", "1" * 5000])
def test_a_port_must_be_in_range(port: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config({"ps": ["b:1"], "worker": [f"a:{port}"]}))
    assert f"gives the port {port!r} to worker 0, in 'a:{port}', expected 1 to 65535" in str(caught.value)


@pytest.mark.parametrize(("first", "second"), [("a:1", "a:1"), ("a:1", "A:1"), ("a:1", "a:01")])
def test_an_address_must_be_unique(first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(config({"chief": [first], "worker": ["b:1", second]}))
    assert f"gives {second!r} to chief 0 and to worker 1" in str(caught.value)


def test_a_long_text_is_shortened() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("x" * 100_000)
    assert len(str(caught.value)) < 500


def test_a_value_that_is_nested_too_deeply_raises() -> None:
    with pytest.raises(ConfigError, match="which is not JSON"):
        parse("[" * 100_000)
