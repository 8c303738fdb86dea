"""Following jobs whose coordinators answer, hang and end."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.coordinator.comparison import save_verdict
from lockstep.errors import ConfigError
from lockstep.monitoring.followed_job import FollowedJob, JobContact, open_job
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.top_text import as_text
from lockstep.protocol.admin import (
    AdminRequest,
    Refused,
    Reply,
    StackReply,
    StackRequest,
    Status,
    StatusRequest,
)
from lockstep.system.locks import try_lock
from lockstep.system.paths import RunPaths
from virtual_clock import VirtualClock

from .recorded import event, job, record, started, steps

STATUS = Status("a", "train.py", 5, "/r", 1000.0, 4, (0, 1), (), 2, "fit 1")
Call = Callable[[str, AdminRequest, float], Reply | None]


def hangs(name: str, request: AdminRequest, patience: float) -> Reply | None:
    raise TimeoutError


def followed(folder: Path, clock: VirtualClock, call: Call) -> tuple[FollowedJob, JobContact]:
    contact = JobContact("train-1", clock, 3600.0, call)
    return FollowedJob("train-1", RunFolder(folder), clock, contact), contact


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1021.0)


def test_a_silent_coordinator_is_told_with_the_data_so_far(tmp_path: Path, clock: VirtualClock) -> None:
    record(tmp_path, job(), started(0), steps(0, 1020.0, 20, compute=1.0))
    replies: list[Call] = [lambda *asked: STATUS, hangs, hangs, lambda *asked: STATUS]
    one, contact = followed(tmp_path, clock, lambda *asked: replies.pop(0)(*asked))
    contact.look()
    assert one.look().silent_since is None
    clock.advance(3.0)
    contact.look()
    clock.advance(4.0)
    contact.look()
    view = one.look()
    assert view.silent_since == 1021.0
    assert (view.time, view.wanted, view.step) == (1028.0, 2, 20)
    contact.look()
    assert one.look().silent_since is None


def test_the_end_of_a_job(tmp_path: Path, clock: VirtualClock) -> None:
    record(tmp_path, job(), started(0))
    one, contact = followed(tmp_path, clock, lambda *asked: STATUS)
    contact.look()
    assert one.look().end == ""
    done = {"status": 0, "message": "", "workers": [], "seconds": 72.0, "lost": 1, "joined": 0}
    more = {"checkpoints": 2, "before": 0, "steps": 40, "model": "m", "digest": "ab"}
    record(tmp_path, event(1072.0, "finished", **done, **more))
    assert one.look().end == (
        "train-1 finished in 1 min 12 s: 40 steps on 2 workers (1 lost); 2 checkpoints; "
        "digest ab of model 'm'"
    )


def test_the_verdict_of_a_comparison_is_told_once(tmp_path: Path, clock: VirtualClock) -> None:
    record(tmp_path, job(), started(0))
    one, _ = followed(tmp_path, clock, lambda *asked: STATUS)
    assert "one process" not in as_text(one.look())
    save_verdict(RunPaths(tmp_path), "compared with one process: equal")
    assert as_text(one.look()).splitlines()[1] == "compared with one process: equal"
    record(tmp_path, event(1072.0, "finished", status=0, message="", seconds=72.0, steps=40))
    assert one.look().end.endswith(": 40 steps on 2 workers; compared with one process: equal")
    assert as_text(one.look()).count("one process") == 1


def test_a_failure_is_told_with_its_status(tmp_path: Path, clock: VirtualClock) -> None:
    record(tmp_path, job(), event(1072.0, "finished", status=3, message="worker 1 failed", seconds=5.0))
    one, _ = followed(tmp_path, clock, hangs)
    assert one.look().end == "train-1 ended with status 3: worker 1 failed"


def test_a_killed_job_has_an_end(tmp_path: Path, clock: VirtualClock) -> None:
    record(tmp_path, job(), started(0))
    one, contact = followed(tmp_path, clock, lambda *asked: None)
    contact.look()
    assert one.look().end == "the end of train-1 is not recorded: its processes were killed"


def test_a_job_that_ends_while_its_folder_is_read_has_its_last_event(
    tmp_path: Path, clock: VirtualClock
) -> None:
    """It is told with the next look: this one has read the folder before the event was there."""
    record(tmp_path, job(), started(0))
    replies: list[Reply | None] = [STATUS, None]
    one, contact = followed(tmp_path, clock, lambda *asked: replies.pop(0))
    contact.look()

    class Ending(RunFolder):
        def update(self) -> bool:
            found = super().update()
            if replies:
                record(tmp_path, event(1072.0, "finished", status=3, message="worker 1 failed", seconds=5.0))
                contact.look()
            return found

    one.folder = Ending(tmp_path)
    assert one.look().end == ""
    assert contact.gone
    assert one.look().end == "train-1 ended with status 3: worker 1 failed"


def test_the_end_of_an_earlier_run_in_the_folder_is_not_that_of_the_job(
    tmp_path: Path, clock: VirtualClock
) -> None:
    record(tmp_path, job(500.0), event(600.0, "finished", status=0, message="", seconds=100.0))
    one, contact = followed(tmp_path, clock, lambda *asked: STATUS)
    contact.look()
    assert one.look().end == ""


def test_requests_are_sent_in_a_thread(tmp_path: Path, clock: VirtualClock) -> None:
    held, answered = threading.Event(), threading.Event()
    stack = StackReply(1, ("f",))

    def call(name: str, request: AdminRequest, patience: float) -> Reply | None:
        assert held.wait(120)
        return {StatusRequest(): STATUS, StackRequest(1): stack}.get(request, Refused("no"))

    _, contact = followed(tmp_path, clock, call)
    contact.start()
    replies: list[Reply | str] = []

    def take(reply: Reply | str) -> None:
        replies.append(reply)
        if len(replies) == 2:
            answered.set()

    contact.ask(StackRequest(1), take)
    contact.ask(StackRequest(2), take)
    assert replies == []
    held.set()
    assert answered.wait(120)
    assert replies == [stack, Refused("no")]
    contact.close()


def test_the_folder_of_a_run_that_has_ended(tmp_path: Path, clock: VirtualClock) -> None:
    folder = record(tmp_path / "train-7", job(), started(0), started(1), steps(0, 1020.0, 20, compute=1.0))
    one = open_job(str(folder), clock, 2.0)
    view = one.look()
    assert one.contact is None
    assert (view.job, view.averages, view.time) == ("train-7", True, 1020.0)
    assert (
        view.end
        == "the end of train-7 is not recorded: its processes were killed, or it runs on another machine"
    )
    assert view.remedies == ("the same command begins again, because no checkpoint was written",)
    lock = try_lock(folder / "lock")
    assert lock is not None
    view = one.look()
    os.close(lock)
    assert view.remedies == ()
    assert view.end == "train-7 runs in another container: the figures are averages of the whole run so far"


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, clock: VirtualClock) -> None:
    folder = record(tmp_path / "train-7", job())
    one = open_job(str(folder), clock, 2.0)
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()
    with pytest.raises(OSError, match=r"events\.jsonl"):
        one.look()


def test_what_is_no_job_is_refused(tmp_path: Path, clock: VirtualClock) -> None:
    for one in (str(tmp_path), "no-such-job"):
        with pytest.raises(ConfigError, match="is neither a running job nor the folder of a run"):
            open_job(one, clock, 2.0)
