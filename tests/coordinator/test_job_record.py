"""What another coordinator needs of a job: it survives the way to the agents and back."""

from pathlib import Path

import pytest

from lockstep.coordinator.job_record import HostRecord, JobRecord, decode_record, encode_record, newest
from lockstep.observability.events import JobTotals, ScriptFailed
from lockstep.protocol.host import (
    HostMembers,
    KeepRecord,
    PeerAddress,
    SignalWorker,
    StartView,
    StartWorker,
)
from lockstep.protocol.job_spec import Checkpoints, JobHost, JobSpec, Verification
from lockstep.protocol.worker import FailureReport
from lockstep.supervisor.actions import Evidence, JobOutcome
from lockstep.supervisor.decide import decide
from lockstep.supervisor.events import (
    Event,
    HostGone,
    HostJoined,
    StrategyInstalled,
    WorkerExited,
)
from lockstep.supervisor.state import JobSize, State, TimeLimits

SPEC = JobSpec(
    target="train.py",
    arguments=("--epochs", "3"),
    workers=4,
    replicas=8,
    threads=2,
    seed=7,
    run_dir=Path("runs/a"),
    verification=Verification(5, all=True),
    checkpoints=Checkpoints(Path("saved"), None, 3.0, 2, given="saved"),
    hosts=(JobHost("node1", 2), JobHost("node2", 2)),
)


def later() -> State:
    """The state of a job in which something has happened."""
    state = State.of(SPEC.view, TimeLimits(), JobSize.of(4, 1, 3), keeps=True, cores=(2, 4))
    events: tuple[Event, ...] = (
        StrategyInstalled("jax"),
        HostGone(1, "was lost"),
        HostJoined("node3", 2, 8),
        WorkerExited(1, -9),
        FailureReport(ScriptFailed(0, "KeyError: 'x'", "Traceback"), 1, False),
    )
    for seconds, event in enumerate(events):
        state = decide(state, event, float(seconds)).state
    return state


def test_a_record_comes_back_as_it_was() -> None:
    members = HostMembers(0, (0, 1), "node1", "10.0.0.1", 4000, 2**63)
    instructions = (StartView(2, (members,), "lost"), StartWorker(4, True, (1,)), SignalWorker(1, 15))
    peer = PeerAddress("10.0.0.1", 4000, 2**63)
    first = HostRecord("node1", peer, received=5, sent=9, outbox=instructions)
    record = JobRecord(
        SPEC,
        later(),
        (first, HostRecord("node2", None, lost=True)),
        StartView(2, (members,), "lost", (1,), 1, 3),
        JobTotals(lost=2, steps=7, digest="d"),
        "fit 1",
        ("log.csv",),
        True,
        1,
        JobOutcome(1, "worker 0 failed", (0,), Evidence.LOG),
        12.5,
        3.25,
        1.75e9,
        frozenset({"c/step-1"}),
    )
    again = decode_record(encode_record(record))
    assert again == record
    assert again.state.view.workers == record.state.view.workers


def test_the_newest_record_counts() -> None:
    kept = [KeepRecord(1, 9, b"a"), None, KeepRecord(2, 3, b"b"), KeepRecord(2, 2, b"c")]
    assert newest(kept) == KeepRecord(2, 3, b"b")
    assert newest([None]) is None


def test_anything_else_is_no_record() -> None:
    with pytest.raises(ValueError, match="no record of a job"):
        decode_record(b"\x80")
