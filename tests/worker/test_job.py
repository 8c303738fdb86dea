"""Calls of the exchange in which workers differ: some workers continue, others exit."""

from dataclasses import FrozenInstanceError, dataclass, field
from typing import NoReturn

import pytest

from lockstep.collectives.contract import Communicator
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DisagreementError, PeerLostError, ScopeError
from lockstep.observability.bus import Bus
from lockstep.observability.events import (
    WORKER_EVENTS,
    DistributionBegan,
    Event,
    FirstStepEnded,
    TrainingPaused,
)
from lockstep.observability.measurements import StepEnded
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker import job as worker_job
from lockstep.worker.job import Job, JobContext, become_alone, by_itself
from lockstep.worker.peers import Alone, EnteredView
from thread_hub import Hub


class Ended(BaseException):
    """This worker's process has ended."""


@dataclass
class Agent(Alone):
    """Lets worker 0 continue alone; records which worker left, and why the view ended."""

    calls: list[object] = field(default_factory=list)

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        self.calls.append(str(lost))
        view = place(4, (0,), 2)
        return view, by_itself(view)

    def end_differing(self, differs: DisagreementError, advice: str = "") -> NoReturn:
        self.calls.append(differs)
        raise Ended


@dataclass
class Call:
    """A call of the exchange in which `others`, while they are members, differ from the chief."""

    others: tuple[int, ...]
    views: list[int] = field(default_factory=list)

    def __call__(self, view: View, communicator: Communicator) -> str:
        self.views.append(view.number)
        if set(self.others).intersection(view.workers):
            raise DisagreementError("they differ", self.others)
        return "done"


def job_of(worker: int, began_with: int) -> tuple[Job, Agent]:
    view, agent = place(4, (0, 1, 4, 5)), Agent()
    context = JobContext(worker, Bus(SystemClock(), worker), JobSettings(threads=1, workers=began_with))
    return Job(context, (view, by_itself(place(1, (0,)))), agent), agent


def test_a_call_is_repeated_without_joined_workers_that_differ() -> None:
    job, agent = job_of(worker=0, began_with=4)
    call = Call((4, 5))
    assert job.exchange(call) == "done"
    assert call.views == [1, 2]
    assert job.view.workers == (0,)
    assert agent.calls == ["they differ"]


def test_a_difference_that_an_earlier_view_has_settled_ends_no_other_view() -> None:
    """Over hosts, a worker may learn only in the next view, which lacks the others, how a call ended."""
    job, agent = job_of(worker=0, began_with=4)
    results = iter([PeerLostError("a connection broke"), DisagreementError("they differ", (4, 5))])
    views = []

    def call(view: View, communicator: Communicator) -> str:
        views.append(view.number)
        if (error := next(results, None)) is not None:
            raise error
        return "done"

    assert job.exchange(call) == "done"
    assert views == [1, 2, 2]
    assert agent.calls == ["a connection broke"]


def test_waits_of_earlier_views_count() -> None:
    first, agent = job_of(worker=0, began_with=4)
    hub = Hub(ReducePlan.of(place(1, (0,))))
    hub.waited[0] = 1000.0
    job = Job(first.context, (first.view, hub.member(0)), agent)
    with job.detached():
        assert job.waited == 1000.0
    assert job.waited == 1000.0
    job.exchange(Call((4, 5)))
    assert job.view.workers == (0,)
    assert 1000.0 <= job.waited < 2000.0


def test_a_pause_begins_with_the_wait_for_the_worker_that_is_lost() -> None:
    first, agent = job_of(worker=0, began_with=4)
    hub = Hub(ReducePlan.of(place(1, (0,))))
    job = Job(first.context, (first.view, hub.member(0)), agent)
    pauses: list[float] = []
    job.events.subscribe(lambda record: pauses.append(record.event.seconds), TrainingPaused)
    job.events.subscribe(lambda record: pauses.append(record.event.paused), StepEnded)
    hub.waited[0] = 500.0
    job.timer.begin("fit 1")

    def call(view: View, communicator: Communicator) -> str:
        if view.number == 1:
            hub.waited[0] += 1000.0
            raise PeerLostError("worker 1 is silent")
        return "done"

    assert job.exchange(call) == "done"
    job.timer.end(1)
    told, in_step = pauses
    assert 1000.0 <= told < 1400.0
    assert in_step == pytest.approx(told)


def test_a_joined_worker_that_differs_exits() -> None:
    job, agent = job_of(worker=4, began_with=4)
    with pytest.raises(Ended):
        job.exchange(Call((4,)))
    (differs,) = agent.calls
    assert isinstance(differs, DisagreementError)
    assert differs.workers == (4,)


@pytest.mark.parametrize(("others", "began_with"), [((1,), 4), ((1, 4), 4), ((), 4), ((4,), 6)])
@pytest.mark.parametrize("worker", [0, 4])
def test_any_other_difference_is_an_error_on_every_worker(
    others: tuple[int, ...], began_with: int, worker: int
) -> None:
    job, agent = job_of(worker, began_with)

    def call(view: View, communicator: Communicator) -> None:
        raise DisagreementError("they differ", others)

    with pytest.raises(DisagreementError, match=r"^they differ$"):
        job.exchange(call)
    assert agent.calls == []


def test_a_single_process_that_differs_raises_the_error() -> None:
    with pytest.raises(DisagreementError, match=r"^they differ$"):
        Alone().end_differing(DisagreementError("they differ", (1,)))


def test_the_context_of_a_job_is_frozen() -> None:
    job, _ = job_of(worker=0, began_with=4)
    with pytest.raises(FrozenInstanceError):
        job.context.worker = 1  # type: ignore[misc]


def test_a_process_with_the_task_of_an_evaluator_evaluates() -> None:
    job, _ = job_of(worker=0, began_with=4)
    assert not job.evaluates
    job.task = "evaluator"
    assert job.evaluates


def test_a_detached_block_owns_all_replicas_until_its_end() -> None:
    job, _ = job_of(worker=4, began_with=4)
    before = job.view, job.communicator, job.joins
    with job.detached():
        assert list(job.view.replicas_of(4)) == [0, 1, 2, 3]
        assert job.joins
    assert (job.view, job.communicator, job.joins) == before


@pytest.mark.parametrize(("worker", "done"), [(0, ["first", "second"]), (1, [])])
def test_only_the_chief_runs_the_actions_at_the_end(worker: int, done: list[str]) -> None:
    job, _ = job_of(worker, began_with=4)
    did: list[str] = []
    job.at_end(lambda: did.append("first"))
    job.at_end(lambda: did.append("second"))
    job.end()
    assert did == done


def test_first_events_are_reported_once() -> None:
    view, events, published = place(1, (0,)), Bus(SystemClock(), 0), list[Event]()
    events.subscribe(lambda entry: published.append(entry.event), *WORKER_EVENTS)
    job = Job(JobContext(0, events, JobSettings(threads=1)), (view, by_itself(view)))
    for _ in range(2):
        job.note_distribution()
        job.note_step()
    assert published == [DistributionBegan(), FirstStepEnded()]


def test_a_forked_process_takes_no_part_in_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares the memory and the connections of its worker."""
    worker, _ = job_of(worker=0, began_with=4)
    monkeypatch.setattr(worker_job, "_current", [worker])
    # In the child, Python calls it.
    become_alone()
    with pytest.raises(ScopeError, match="the script has forked, uses a strategy of its worker: create one"):
        worker.exchange(Call(()))
    assert worker_job.current() is not worker
    assert worker_job.current().exchange(Call(())) == "done"
