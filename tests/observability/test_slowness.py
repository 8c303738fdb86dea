"""The line about where a call's time went."""

from collections.abc import Mapping

import msgspec
import pytest

from lockstep.observability import slowness
from lockstep.observability.bus import PublishedEvent
from lockstep.observability.events import CallEnded
from lockstep.observability.growth import GrowingMap
from lockstep.observability.measurements import STEP_PARTS, LoadMeasured, StepsMeasured, WorkerLoad
from lockstep.observability.run_state import RunState
from lockstep.observability.slowness import advise
from lockstep.observability.step_parts import CallTimes, WorkerTimes, scores


def measured(
    call: str = "fit 1", number: int = 100, count: int = 50, replicas: int = 1, **parts: float
) -> StepsMeasured:
    found = dict.fromkeys(STEP_PARTS, 0.0) | parts
    return StepsMeasured(
        call=call,
        number=number,
        trained=number,
        count=count,
        began=0.0,
        examples=64 * count,
        replicas=replicas,
        seconds=sum(found.values()),
        **found,
    )


def times(*several: StepsMeasured) -> WorkerTimes:
    sums = WorkerTimes()
    for one in several:
        sums = sums.plus(one)
    return sums


def call_of(workers: Mapping[int, WorkerTimes], call: str = "fit 1") -> CallTimes:
    """Return the times of a call with these times of its workers."""
    times: GrowingMap[WorkerTimes] = GrowingMap()
    for worker, sums in workers.items():
        times = times.plus(worker, sums)
    return CallTimes(call, times)


def describe(call: str, workers: Mapping[int, WorkerTimes]) -> str:
    return slowness.describe(call_of(workers, call))


class Call:
    """The state of a run that takes measurements, and the lines about its calls."""

    def __init__(self) -> None:
        self.state = RunState(keeps_history=False)

    def measured(self, worker: int, measured: StepsMeasured) -> None:
        self.state = self.state.after(PublishedEvent(0.0, worker, measured))

    def loaded(self, load: LoadMeasured) -> None:
        self.state = self.state.after(PublishedEvent(0.0, None, load))

    def ended(self, call: str, worker: int, members: tuple[int, ...]) -> str:
        before = msgspec.structs.replace(self.state, members=members)
        self.state = before.after(PublishedEvent(0.0, worker, CallEnded(call)))
        ended = self.state.ended_call
        return "" if ended is None or ended is before.ended_call else slowness.describe(ended.of(members))


def test_a_line_is_due_when_all_members_have_ended_the_call() -> None:
    call = Call()
    for worker in (0, 1):
        # The first step compiles, and does not count.
        call.measured(worker, measured(number=1, count=1, compute=100.0))
        call.measured(worker, measured(number=51, input=1.2, compute=0.6))
        call.measured(worker, measured(number=101, wait=0.12, exchange=0.04, update=0.02, other=0.02))
    assert call.ended("fit 1", 1, (0, 1)) == ""
    assert call.ended("fit 1", 0, (0, 1)) == (
        "fit 1: 3,200 examples/s with 2 workers; input 60 %, compute 30 %, wait 6 %, exchange 2 %, "
        "update 1 %, other 1 %; reading takes 60 % of the time: cache or prefetch the data, or do less work "
        "per example (see 'input' in the documentation)"
    )
    assert call.ended("fit 1", 0, (0, 1)) == ""


def test_a_lost_worker_does_not_delay_the_line() -> None:
    call = Call()
    for worker in (0, 1, 2):
        call.measured(worker, measured(compute=2.0))
    assert call.ended("fit 1", 2, (0, 2)) == ""
    assert call.ended("fit 1", 0, (0, 2)).startswith("fit 1: 1,600 examples/s with 2 workers; input 0 %")


@pytest.mark.parametrize("seconds", [0.0, 0.4, 0.99])
def test_short_calls_have_no_line(seconds: float) -> None:
    call = Call()
    call.measured(0, measured(number=1, count=1, compute=100.0))
    call.measured(0, measured(compute=seconds))
    assert call.ended("fit 1", 0, (0,)) == ""


def test_only_the_times_of_the_last_call_count() -> None:
    call = Call()
    call.measured(0, measured(call="fit 1", input=50.0))
    call.measured(0, measured(call="validation within fit 1", input=50.0))
    call.measured(0, measured(call="fit 2", compute=2.0))
    assert call.ended("fit 1", 0, (0,)) == ""
    assert "compute 100 %" in call.ended("fit 2", 0, (0,))


@pytest.mark.parametrize("slow", ["input", "compute"])
def test_the_slowest_worker_and_what_is_slow_are_named(slow: str) -> None:
    fast = {"input": 0.5, "compute": 0.5}
    workers = {
        0: times(measured(**fast, wait=9.0)),
        1: times(measured(**fast | {slow: 9.0}, wait=0.0)),
        2: times(measured(**fast, wait=9.0)),
    }
    assert describe("fit 1", workers).endswith(
        f"; worker 1 is slow (0.11): slow {slow}: 180 ms per replica, 10 ms on worker 0"
    )


def test_one_worker_that_reads_slowly_is_named_where_reading_takes_the_most_time() -> None:
    workers = {
        0: times(measured(input=0.5, compute=0.5, wait=2.0)),
        1: times(measured(input=2.5, compute=0.5)),
    }
    assert "worker 1 is slow (0.33): slow input: 50 ms per replica, 10 ms on worker 0" in describe(
        "fit 1", workers
    )


def test_what_takes_more_time_than_a_slow_worker_costs_comes_first() -> None:
    workers = {
        worker: times(
            msgspec.structs.replace(measured(compute=1.0 + worker, nested=20.0), calls={"predict": 20.0})
        )
        for worker in (0, 1)
    }
    said = advise(call_of(workers))
    assert [text.partition(":")[0] for text in said] == [
        "predict in a callback takes 93 % of the time",
        "worker 1 is slow (0.50)",
    ]
    workers = {worker: times(measured(compute=1.0 + worker, input=0.1)) for worker in (0, 1)}
    assert [text.partition(":")[0] for text in advise(call_of(workers))] == ["worker 1 is slow (0.52)"]


def test_of_several_slow_workers_the_slowest_one_is_explained() -> None:
    workers = {worker: times(measured(compute=1.0 + worker)) for worker in range(4)}
    assert advise(call_of(workers)) == (
        "worker 3 is slow (0.25): slow compute: 80 ms per replica, 20 ms on worker 0; workers 1 and 2 are "
        "slow, too",
    )


def test_three_causes_are_named_the_costliest_first() -> None:
    nested = msgspec.structs.replace(measured(input=3.0, nested=14.0), calls={"a": 5.0, "b": 9.0})
    assert [text.partition(":")[0] for text in advise(call_of({0: times(nested)}))] == [
        "b in a callback takes 53 % of the time",
        "reading takes 18 % of the time",
    ]
    nested = msgspec.structs.replace(measured(input=3.0, nested=16.0), calls={"a": 7.0, "b": 9.0})
    assert len(advise(call_of({0: times(nested)}))) == 3


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"compute": 0.3, "update": 0.3, "other": 0.4}, True),
        # Computing takes the time; a step takes long; a batch is large enough.
        ({"compute": 0.8, "update": 0.1, "other": 0.1}, False),
        ({"compute": 6.0, "update": 7.0, "other": 5.0}, False),
        ({"compute": 0.3, "update": 0.3, "other": 0.4, "examples": 64}, False),
    ],
)
def test_a_small_batch_is_named_if_its_steps_are_mostly_overhead(
    parts: dict[str, float], named: bool
) -> None:
    seconds = {name: value for name, value in parts.items() if name != "examples"}
    steps = measured(count=100, replicas=2, **seconds)
    small = msgspec.structs.replace(steps, examples=100 * int(parts.get("examples", 1)))
    said = advise(call_of({0: times(small)}))
    expected = "a step has one example, and takes 10 ms without waiting: use larger batches"
    assert (expected in said) == named
    assert not any("--replicas" in text for text in said)


def test_short_steps_blame_no_worker() -> None:
    for slower in (0, 1):
        # 0.3 and 0.5 ms without waiting.
        paces = {slower: 0.5, 1 - slower: 0.3}
        workers = {
            worker: times(measured(count=5000, compute=seconds, wait=9.0))
            for worker, seconds in paces.items()
        }
        assert describe("fit 1", workers) == (
            "fit 1: 33,684 examples/s with 2 workers; input 0 %, compute 4 %, wait 96 %, exchange 0 %, "
            "update 0 %; steps are short (0.1 ms without waiting): use larger batches, or -n 1 --replicas 2, "
            "which computes the same bits"
        )


def test_uneven_numbers_of_replicas_are_the_cause_of_waiting() -> None:
    workers = {
        0: times(measured(replicas=2, compute=2.0)),
        1: times(measured(replicas=1, compute=1.0, wait=1.0)),
    }
    assert describe("fit 1", workers).endswith(
        "; worker 0 computes 2 of 3 replicas, and others wait for it: use a number of replicas that "
        "is a multiple of the number of workers"
    )
    # Waiting has another cause where the numbers are almost even.
    workers = {worker: times(measured(replicas=8 - worker, compute=2.0, wait=1.0)) for worker in (0, 1)}
    assert "multiple" not in describe("fit 1", workers)


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        ({"input": 4.0, "compute": 1.3, "wait": 4.7}, "reading takes 40 % of the time: cache"),
        ({"input": 5.0, "compute": 1.3, "wait": 3.7}, "reading takes 50 % of the time: cache"),
        (
            {"other": 3.4, "compute": 3.1, "wait": 3.5},
            "callbacks and the loop itself take 34 % of the",
        ),
        ({"other": 1.0, "compute": 0.9, "wait": 8.1}, "waiting takes 81 % of the time, although no worker"),
        ({"compute": 4.0, "wait": 6.0}, "waiting takes 60 % of the time, although no worker"),
        # Reading could go on while the workers compute, so it counts below the largest part, too.
        ({"compute": 6.4, "input": 3.6}, "reading takes 36 % of the time: cache"),
        ({"compute": 7.6, "input": 2.4}, ""),
        ({"compute": 6.1, "other": 3.9}, ""),
    ],
)
def test_the_largest_part_is_blamed_and_waiting_only_without_another(
    parts: dict[str, float], advice: str
) -> None:
    found = times(measured(**parts))
    said = advise(call_of({0: found, 1: found}))
    assert [text[: len(advice)] for text in said] == ([advice] if advice else [])


def test_a_chief_of_parameter_servers_is_no_worker_that_waits() -> None:
    chief = measured(replicas=0, count=100, wait=9.0, update=0.5, nested=0.5)
    workers = {
        0: times(msgspec.structs.replace(chief, calls={"validation": 0.5})),
        1: times(measured(compute=6.0, exchange=2.0)),
        2: times(measured(compute=6.2, exchange=2.0)),
    }
    assert describe("fit 1", workers) == (
        "fit 1: 640 examples/s with a chief and 2 workers; input 0 %, compute 75 %, wait 0 %, exchange 25 %, "
        "update 0 %, validation 5 % of the chief's time"
    )
    waiting = {
        0: workers[0],
        1: times(measured(compute=3.0, wait=5.0)),
        2: times(measured(compute=3.0, wait=5.0)),
    }
    assert describe("fit 1", waiting).endswith("; waiting for the chief takes 62 % of the time")


def test_a_worker_with_more_replicas_is_not_slower() -> None:
    workers = {
        0: times(measured(replicas=2, compute=2.0)),
        1: times(measured(replicas=1, compute=1.0, wait=1.0)),
    }
    assert scores(workers) == {0: 1.0, 1: 1.0}
    assert "wait 25 %" in describe("fit 1", workers)


def test_scores_are_relative_to_the_fastest() -> None:
    workers = {0: times(measured(compute=2.0)), 1: times(measured(compute=1.0, wait=1.0)), 2: WorkerTimes()}
    assert scores(workers) == {0: 0.5, 1: 1.0}


def test_a_wait_without_a_slow_worker_has_other_causes() -> None:
    waits = times(measured(compute=1.0, wait=9.0))
    assert describe("fit 1", {0: waits}).endswith(
        "; waiting for workers that were lost, or have left, takes 90 % of the time"
    )
    assert describe("fit 1", {0: waits, 1: waits}).endswith("may use the cores, or workers were lost")


def test_calls_within_a_call_are_named_and_their_time_counts_for_the_rate() -> None:
    call = Call()
    for worker in (0, 1):
        call.measured(worker, measured(compute=1.0))
        validation = {"calls": {"validation": 2.0, "predict": 1.0}}
        call.measured(
            worker, msgspec.structs.replace(measured(number=101, count=0, nested=3.0), **validation)
        )
    call.ended("fit 1", 1, (0, 1))
    assert call.ended("fit 1", 0, (0, 1)) == (
        "fit 1: 800 examples/s with 2 workers; input 0 %, compute 25 %, wait 0 %, exchange 0 %, update 0 %, "
        "validation 50 %, predict 25 %; validation takes 50 % of the time: validate on less data, or less "
        "often (validation_freq)"
    )


def test_a_prediction_in_a_callback_is_blamed() -> None:
    found = times(msgspec.structs.replace(measured(compute=1.0, nested=3.0), calls={"predict": 3.0}))
    assert describe("fit 1", {0: found}).endswith(
        "predict 75 %; predict in a callback takes 75 % of the time: call it at the end of epochs, "
        "or on less data"
    )


def test_a_call_of_one_step_has_no_line() -> None:
    assert describe("fit 1", {0: times(measured(number=1, count=0, nested=9.0))}) == ""


def test_scheduled_functions_are_counted_by_the_chief() -> None:
    call = Call()
    for worker in (1, 2):
        call.measured(worker, measured("functions 1", count=25, compute=1.5, exchange=0.5))
    call.measured(0, measured("functions 1", replicas=0, wait=2.0))
    # A server updates for other functions, but computes none.
    call.measured(3, measured("updates within functions 1", replicas=0, update=2.0))
    for worker in (0, 1, 2):
        assert call.ended("functions 1", worker, (0, 1, 2, 3)) == ""
    assert call.ended("functions 1", 3, (0, 1, 2, 3)) == (
        "functions 1: 25 functions/s with a chief and 2 workers; input 0 %, compute 75 %, wait 0 %, "
        "exchange 25 %, update 0 %"
    )


def loaded(busy: float, delayed: float, cores: float = 0.5) -> LoadMeasured:
    workers = tuple(
        WorkerLoad(worker=one, cores=cores, delayed=delayed, memory=0, faults=0.0) for one in (0, 1)
    )
    figures = {"memory_used": 0, "memory_total": 0, "swapping": 0.0, "throttled": 0.0}
    return LoadMeasured(host="box", cores=2, busy=busy, workers=workers, **figures)


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        ([loaded(0.5, 0.0), loaded(1.8, 0.4), loaded(2.0, 0.8)], True),
        # The job itself uses the cores; no thread waits; nothing but what began before the call.
        ([loaded(0.5, 0.0), loaded(2.0, 0.6, cores=0.9)], False),
        ([loaded(0.5, 0.0), loaded(2.0, 0.1)], False),
        ([loaded(2.0, 0.8)], False),
    ],
)
def test_a_host_that_other_programs_overload_is_named(loads: list[LoadMeasured], told: bool) -> None:
    call = Call()
    call.loaded(loaded(2.0, 9.0))
    call.measured(0, measured(compute=2.0))
    for load in loads:
        call.loaded(load)
    line = call.ended("fit 1", 0, (0,))
    text = (
        "; box: other processes use 0.9 of 2 cores: each second, the threads of a worker together wait up to "
        "0.6 s for a core"
    )
    assert line.partition("update 0 %")[2] == (text if told else "")
    # A call without a line says nothing of its hosts.
    for load in loads:
        call.loaded(load)
    assert call.ended("fit 2", 0, (0,)) == ""


def test_batches_of_new_shapes_are_counted_where_compiling_takes_long() -> None:
    new = {"compiled": 7, "compiling": 3.0}
    slow = {0: times(msgspec.structs.replace(measured(compute=4.0, wait=1.0), **new))}
    assert describe("fit 1", slow).endswith(
        "; 7 of 50 steps had batches of new shapes, and compiling them took 3 s; pad to a few lengths"
    )
    quick = {0: times(msgspec.structs.replace(measured(compute=4.0, input=12.0), **new))}
    assert "new shapes" not in describe("fit 1", quick)


def test_a_change_of_membership_is_not_called_uneven() -> None:
    # Worker 0 computed both replicas until worker 2 joined.
    workers = {
        0: times(measured(replicas=2, count=40, compute=2.0), measured(replicas=1, count=10, wait=2.0)),
        2: times(measured(replicas=1, count=10, compute=2.0)),
    }
    assert not any("multiple" in text for text in advise(call_of(workers)))


def test_a_worker_that_has_just_joined_is_not_called_slow() -> None:
    workers = {0: times(measured(compute=2.0, wait=8.0)), 1: times(measured(count=3, compute=0.9))}
    assert not any("slow (" in text for text in advise(call_of(workers)))
