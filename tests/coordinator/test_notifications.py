"""What a notifier is told, from the events of a job."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.notifications import STALL, Notifications, notified
from lockstep.observability.bus import Bus, PublishedEvent
from lockstep.observability.events import (
    CallEnded,
    CallStarted,
    Event,
    JobFinished,
    ViewStarted,
    WorkerNotReplaced,
)
from lockstep.observability.measurements import STEP_PARTS, MetricsRecorded, StepsMeasured
from lockstep.protocol.notification import Notification, NotifierMessage, ProgressMade, decode, encode
from lockstep.system.clock import SystemClock
from lockstep.system.paths import RunPaths

Told = Callable[..., list[NotifierMessage]]


def told(replicas: int = 2) -> Told:
    """Return what takes events of worker 0 at a time."""
    notifications = Notifications("train-1", replicas, (0, 1), lambda: "compared with one process: equal")

    def take(time: float, *events: Event) -> list[NotifierMessage]:
        return [message for event in events for message in notifications.of(PublishedEvent(time, 0, event))]

    return take


def steps(trained: int) -> StepsMeasured:
    parts: Any = dict.fromkeys(STEP_PARTS, 0.1)
    measured: Any = {"call": "fit 1", "number": trained, "trained": trained, "count": 1, "began": 0.0}
    return StepsMeasured(**measured, examples=8, replicas=1, seconds=0.7, **parts)


def metrics(trained: int, **values: float | None) -> MetricsRecorded:
    return MetricsRecorded(call="fit 1", epoch=None, trained=trained, values=values)


def finished(status: int, message: str = "", **fields: Any) -> JobFinished:
    done = {"seconds": 12.0, "lost": 0, "joined": 0, "checkpoints": 2, "before": 0, "steps": 45}
    return JobFinished(status=status, message=message, model="m", digest="d1", **done | fields)


def test_the_end_has_the_last_line_and_the_newest_metrics() -> None:
    take = told()
    take(1.0, steps(40), metrics(40, loss=0.5), ViewStarted(2, (0,), "worker 1 was killed"))
    assert take(2.0, finished(0, lost=1)) == [
        Notification(
            what="finished",
            text="train-1: finished in 12 s: 45 steps on 1 worker (1 lost); compared with one process: "
            "equal; 2 checkpoints; digest d1 of model 'm'",
            status=0,
            steps=45,
            workers=1,
            metrics={"loss": 0.5},
        )
    ]


@pytest.mark.parametrize(
    ("status", "what"), [(1, "failed"), (137, "failed"), (130, "stopped"), (143, "stopped")]
)
def test_another_end_has_its_reason(status: int, what: str) -> None:
    take = told()
    take(1.0, steps(40))
    (message,) = take(2.0, finished(status, "worker 0: ValueError: x", steps=None))
    assert isinstance(message, Notification)
    assert (message.what, message.status, message.steps) == (what, status, 40)
    assert message.text == f"train-1: ended with status {status}: worker 0: ValueError: x"


def test_a_metric_that_is_not_finite_is_told_once() -> None:
    take = told()
    assert [message for message in take(1.0, metrics(3, loss=0.5)) if isinstance(message, Notification)] == []
    (message,) = [
        message
        for message in take(2.0, metrics(4, loss=None, accuracy=0.1), metrics(5, loss=None))
        if isinstance(message, Notification)
    ]
    assert (message.what, message.steps) == ("nan", 4)
    assert message.text == "train-1: loss is not a finite number after 4 training steps, in fit 1"
    assert message.metrics == {"loss": None, "accuracy": 0.1}
    assert decode(encode(message)) == message


def test_a_loss_without_replacement_is_told() -> None:
    (message,) = told()(1.0, WorkerNotReplaced(1, "worker 3 was killed; lost workers are not replaced"))
    assert isinstance(message, Notification)
    assert (message.what, message.workers) == ("not_replaced", 1)
    assert message.text == "train-1: worker 3 was killed; lost workers are not replaced"


def test_a_job_may_be_silent_for_a_multiple_of_its_longest_silence() -> None:
    take = told()
    assert take(0.0, CallStarted("fit 1")) == [ProgressMade(3 * STALL, None)]
    assert take(100.0, steps(1)) == [ProgressMade(STALL, 1)]
    # Signs of progress are sparse.
    assert take(100.5, steps(2)) == []
    assert take(101.5, steps(3)) == [ProgressMade(STALL, 3)]
    assert take(501.5, steps(4)) == [ProgressMade(2000.0, 4)]
    assert take(502.0, CallStarted("validation within fit 1"), CallEnded("validation within fit 1")) == []
    # Between calls, the script may do anything.
    assert take(503.0, CallEnded("fit 1")) == [ProgressMade(None, 4)]
    assert take(9000.0, CallStarted("fit 2")) == [ProgressMade(3 * STALL, 4)]
    assert take(9001.0, steps(5)) == [ProgressMade(2000.0, 5)]


def test_of_one_replica_the_second_epoch_is_the_first_measure() -> None:
    take = told(replicas=1)
    assert take(0.0, CallStarted("fit 1")) == take(900.0, metrics(10, loss=1.0)) == []
    assert take(1800.0, metrics(20, loss=1.0)) == [ProgressMade(4500.0, 20)]


def test_a_notifier_that_does_not_read_or_was_killed_blocks_nothing(tmp_path: Path) -> None:
    events = Bus(SystemClock(), complain=pytest.fail)
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, notified(events, own.detach(), RunPaths(tmp_path / "run"), 2, (0, 1)):
        for _ in range(5000):
            events.publish(WorkerNotReplaced(1, "x" * 1000), 0)
        assert decode(other.recv(2**16)).__class__ is Notification
        other.close()
        events.publish(finished(0))
    assert not events.has_subscribers(JobFinished)
