"""Lines of `events.jsonl`."""

import json
from pathlib import Path

import msgspec
import pytest

from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.event_log import EventLog
from lockstep.observability.events import (
    RUN_EVENTS,
    CallStarted,
    Event,
    JobStarted,
    StopRequested,
    StrategyInstalled,
    WorkerLost,
    WorkerStarted,
)
from virtual_clock import VirtualClock


def test_each_event_appends_a_line(tmp_path: Path) -> None:
    path, clock = tmp_path / "events.jsonl", VirtualClock(5.0)
    path.write_bytes(b'{"unfinished": ')
    for _ in range(2):
        with EventLog.open(path, pytest.fail) as log:
            bus = Bus(clock)
            bus.subscribe(log.append, *RUN_EVENTS)
            bus.publish(WorkerStarted(1, 77))
            bus.publish(StrategyInstalled("jax", {"keras": "3"}), worker=1)
        clock.advance(1.5)
    lines = path.read_text().splitlines()
    assert lines[0] == '{"unfinished": '
    assert lines[1:] == [
        line
        for time in ("5.0", "6.5")
        for line in (
            f'{{"time":{time},"event":"started","worker":1,"pid":77}}',
            f'{{"time":{time},"event":"strategy","backend":"jax","libraries":{{"keras":"3"}},"worker":1}}',
        )
    ]


def test_times_have_milliseconds(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log", pytest.fail) as log:
        log.append(PublishedEvent(1234567.89123, None, StopRequested(2)))
    assert (tmp_path / "log").read_text() == '{"time":1234567.891,"event":"stop","signal":2,"waited":0.0}\n'


@pytest.mark.parametrize("event", [CallStarted("ä\n\udc80"), WorkerLost(0, "ä\n\udc80")])
def test_names_with_invalid_unicode_are_kept(tmp_path: Path, event: CallStarted | WorkerLost) -> None:
    with EventLog.open(tmp_path / "log", pytest.fail) as log:
        log.append(PublishedEvent(0.0, None, event))
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "ä\n\udc80" in json.loads(line).values()


SAMPLES: dict[type, object] = {
    msgspec.inspect.BoolType: True,
    msgspec.inspect.IntType: 7,
    msgspec.inspect.FloatType: 1.5,
    msgspec.inspect.StrType: "ä",
    msgspec.inspect.VarTupleType: (),
    msgspec.inspect.DictType: {},
    msgspec.inspect.UnionType: None,
}


@pytest.mark.parametrize("kind", [kind for kind in RUN_EVENTS if kind is not JobStarted])
def test_a_line_reads_back_as_its_event(tmp_path: Path, kind: type[Event]) -> None:
    fields = msgspec.inspect.type_info(kind).fields
    event = kind(**{field.name: SAMPLES[type(field.type)] for field in fields})
    with EventLog.open(tmp_path / "log", pytest.fail) as log:
        log.append(PublishedEvent(0.0, None, event))
    (line,) = (tmp_path / "log").read_bytes().splitlines()
    assert msgspec.json.decode(line, type=kind) == event
    assert json.loads(line).keys() == {"time", "event", *kind.__struct_fields__}


def test_the_fields_of_a_job_are_in_the_line_itself(tmp_path: Path) -> None:
    job = {"workers": 2, "verify_every": 3}
    with EventLog.open(tmp_path / "log", pytest.fail) as log:
        log.append(
            PublishedEvent(
                0.0, None, JobStarted(versions={}, script=None, cores=1, host="a", directory="/", job=job)
            )
        )
    line = json.loads((tmp_path / "log").read_text())
    assert line.keys() == {"time", "event", *JobStarted.__struct_fields__} - {"job"} | job.keys()
