"""Which nodes of a cluster run how many workers."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.main import cli
from lockstep.errors import ConfigError
from lockstep.ray.placement import WorkerNeeds, parse_resources, places, worker_needs

ROOM = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 6))


def test_workers_that_fit_on_a_node() -> None:
    needs = WorkerNeeds({"CPU": 2.0, "GPU": 0.5, "tpu": 0.0})
    assert needs.fit({"CPU": 9.0, "GPU": 1.0}) == 2
    assert needs.fit({"CPU": 9.0, "GPU": 4.0, "memory": 1e9}) == 4
    assert needs.fit({"CPU": 9.0}) == 0
    assert needs.of(3) == {"CPU": 6.0, "GPU": 1.5}
    # Sums of fractions are not exact.
    assert WorkerNeeds({"CPU": 0.1}).fit({"CPU": 0.3}) == 3


def test_workers_are_divided_evenly() -> None:
    assert places(4, {"a": 8, "b": 8}, {}) == {"a": 2, "b": 2}
    assert places(5, {"a": 1, "b": 8, "c": 8}, {}) == {"a": 1, "b": 2, "c": 2}
    assert places(2, {"a": 0, "b": 1}, {}) == {"b": 1}
    assert places(4, {"a": 2, "b": 2}, {"a": 2}) == {"b": 2}
    assert places(4, {"a": 2, "b": 2}, {"a": 4}) == {}


@given(st.integers(1, 20), ROOM, ROOM)
def test_no_node_gets_more_than_fits_and_no_job_more_than_it_wants(
    wanted: int, room: dict[str, int], there: dict[str, int]
) -> None:
    given_ = places(wanted, room, there)
    assert all(0 < count <= room[node] for node, count in given_.items())
    assert not set(given_) & set(there)
    left = max(0, wanted - sum(there.values()))
    free = sum(count for node, count in room.items() if node not in there)
    assert sum(given_.values()) == min(left, free)
    lowest = min(
        (given_.get(node, 0) for node in room if node not in there and given_.get(node, 0) < room[node]),
        default=99,
    )
    assert all(count <= lowest + 1 for count in given_.values())


def test_what_workers_need() -> None:
    assert worker_needs(2, 0.5, parse_resources(["tpu=4", "fast disk=0.1"])) == {
        "CPU": 2,
        "GPU": 0.5,
        "tpu": 4.0,
        "fast disk": 0.1,
    }
    assert worker_needs(0, 0, {"tpu": 1}) == {"CPU": 0, "GPU": 0, "tpu": 1}


@pytest.mark.parametrize(
    ("cpus", "custom", "error"),
    [
        (-1, {}, "resources per worker: -1 is not an amount of CPU"),
        ("one", {}, "resources per worker: 'one' is not an amount of CPU"),
        (1, {"tpu": float("nan")}, "resources per worker: nan is not an amount of tpu"),
        (1, {"GPU": 1}, "GPU is not a custom resource; give cpus or gpus per worker"),
        (0, {"tpu": 0}, "resources per worker: a worker must reserve something; give it a CPU"),
    ],
)
def test_needs_that_are_refused(cpus: Any, custom: dict[str, float], error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}$"):
        worker_needs(cpus, 0, custom)


@pytest.mark.parametrize("text", ["tpu", "tpu=", "=1", "tpu=many"])
def test_resources_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^--resource-per-worker {text}: give NAME=AMOUNT, such as tpu=2$"):
        cli(["run", "--on", "ray", "-n", "1", "--resource-per-worker", text, __file__], standalone_mode=False)


def test_resources_without_an_engine_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--resource-per-worker applies to workers on an engine; give --on too$"
    ):
        cli(["run", "--resource-per-worker", "tpu=1", __file__], standalone_mode=False)
