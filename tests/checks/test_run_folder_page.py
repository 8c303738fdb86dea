"""docs/run-folder.md names every event of `events.jsonl` with its fields, and no other."""

import re
from pathlib import Path

import msgspec

from lockstep.coordinator.job_report import fields_of_end
from lockstep.coordinator.provenance import provenance
from lockstep.observability.digest_records import DIGEST_FORMAT, WORKER_DIGESTS, StepDigests
from lockstep.observability.events import (
    FORMAT,
    RUN_EVENTS,
    WORKER_EVENTS,
    JobFinished,
    JobStarted,
    JobTotals,
)
from lockstep.observability.measurements import MEASUREMENTS
from lockstep.protocol.job_spec import JobSpec
from lockstep.worker.script import Script

PAGE = Path(__file__).parents[2] / "docs" / "run-folder.md"


def described(part: str) -> dict[str, set[str]]:
    """Return the fields of each event in the tables of a part of the page."""
    rows = re.findall(r"^\| `([a-z ]+)` \| ?([a-z_, ]*) \|", part, re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows)
    return {name: set(re.findall(r"\w+", names)) for name, names in rows}


def defined(kinds: tuple[type, ...]) -> dict[str, set[str]]:
    """Return the fields of each event class."""
    infos = [msgspec.inspect.type_info(kind) for kind in kinds]
    return {str(info.tag): {field.encode_name for field in info.fields} for info in infos}


def test_every_event_is_described_with_its_fields() -> None:
    of_agents, rest = PAGE.read_text().split("Workers report these events;")
    of_workers, measured = rest.split("## measurements.jsonl")
    measured, digests = measured.split("## digests")
    run_events = defined(tuple(kind for kind in RUN_EVENTS if kind not in WORKER_EVENTS))
    run_events["job"].remove("job")
    run_events["job"].update(JobSpec(target="a.py", run_dir=Path("run")).recorded())
    assert described(of_agents) == run_events
    assert described(of_workers) == defined(WORKER_EVENTS)
    assert described(measured) == defined(MEASUREMENTS)
    assert described(digests.split("A step has the fields")[0]) == defined(WORKER_DIGESTS)


def test_every_field_of_a_recorded_step_is_described() -> None:
    _, rows = PAGE.read_text().split("| field | meaning |")
    cells = re.findall(r"^\| (`[^|]*`) \|", rows, re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(StepDigests.__struct_fields__)


def test_the_first_and_the_last_event_describe_the_whole_job() -> None:
    assert set(JobStarted.__struct_fields__) == {"format", "job"} | set(provenance(Script("a.py", False)))
    ended = fields_of_end(JobTotals(), 0.0).keys() | {"status", "message", "workers"}
    assert set(JobFinished.__struct_fields__) == ended


def test_the_format_is_the_one_that_the_page_describes() -> None:
    assert f"this page describes format {FORMAT}." in PAGE.read_text()
    assert f"this page describes format {DIGEST_FORMAT}, with" in PAGE.read_text()
