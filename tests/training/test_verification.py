"""A second worker computes replicas again: what is drawn, who is at fault, and nothing wrong is applied."""

import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

import flips
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.values import PackError
from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.layout import Layout
from lockstep.collectives.plan import ReducePlan
from lockstep.collectives.shared.slice_reduce import SliceReduce
from lockstep.errors import DisagreementError, PeerLostError
from lockstep.keras import round_verification, state_verification, verification
from lockstep.keras.fit.global_step import GlobalStep
from lockstep.keras.host_report import HostReport
from lockstep.keras.replica_run.step_loop import StepLoops
from lockstep.keras.round_verification import TotalPart, Verifier
from lockstep.keras.rounds import Round
from lockstep.keras.verdicts import Answer, Roles, Verdict, VerificationPlan, judge, judge_again, judge_sum
from lockstep.keras.verification import StepWithdrawn
from lockstep.observability.bus import Bus
from lockstep.observability.events import VerificationFailed
from lockstep.protocol.job_spec import JobSettings, Verification
from lockstep.system.clock import SystemClock
from lockstep.topology import View, place
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.peers import Alone, EnteredView
from thread_hub import Hub

Launch = Callable[..., Any]
REPLICAS = 4


@given(some.integers(0, 2**32), some.integers(1, 9), some.integers(1, 5), some.integers(1, 500))
def test_each_cycle_draws_every_replica(seed: int, replicas: int, every: int, begin: int) -> None:
    plan = VerificationPlan(seed, replicas, Verification(every))
    first = (begin // (every * replicas)) * every * replicas
    cycle = [plan.drawn(step) for step in range(first + 1, first + every * replicas + 1)]
    assert sorted(replica for drawn in cycle for replica in drawn) == list(range(replicas))
    assert all(bool(drawn) == (step % every == 0) for step, drawn in enumerate(cycle, first + 1))
    whole = VerificationPlan(seed, replicas, Verification(every, all=True))
    assert whole.drawn(every) == tuple(range(replicas))


def test_another_seed_draws_in_another_order_and_nothing_is_drawn_without_an_interval() -> None:
    orders = {
        tuple(VerificationPlan(seed, 4, Verification(1)).drawn(step) for step in range(1, 9))
        for seed in range(20)
    }
    assert len(orders) > 10
    assert VerificationPlan(0, 4, Verification()).drawn(1) == ()


@given(some.integers(1, 6), some.integers(0, 20))
def test_each_other_worker_checks_in_its_turn(workers: int, replica: int) -> None:
    view = place(6, tuple(range(10, 10 + workers)))
    replica %= 6
    owner = view.owners[replica]
    roles = [Roles.of(view, replica, turn) for turn in range(max(1, workers - 1))]
    assert {role.owner for role in roles} == {owner}
    others = set(view.workers) - {owner}
    assert {role.checker for role in roles} == (others or {None})
    for role in roles:
        assert (role.third in others - {role.checker}) if workers > 2 else role.third is None


class NextPlace(Alone):
    """A membership with a prepared next view."""

    def __init__(self, following: EnteredView) -> None:
        self._following = following

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        return self._following


class Faulty:
    """How a worker computes: `right`, with one wrong bit always or in one attempt, or at random."""

    def __init__(self, how: str, drawn: random.Random) -> None:
        self.how, self.drawn, self.attempts = how, drawn, 0

    def attempt(self) -> bytes:
        self.attempts += 1
        wrong = self.how == "always" or self.how == f"attempt {self.attempts}"
        return self.drawn.randbytes(8) if self.how == "random" else b"wrong" if wrong else b"right"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("how", ["right", "always", "attempt 1", "attempt 2", "random"])
@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_only_the_worker_at_fault_is_named(workers: int, how: str, guilty: int) -> None:
    drawn = random.Random(1)
    kinds = [Faulty(how if number == guilty else "right", drawn) for number in range(min(workers, 3))]
    attempts = [
        tuple(one.attempt() for _ in range(2 if number < 2 else 1)) for number, one in enumerate(kinds)
    ]
    found = judge([Answer(worker, made) for worker, made in enumerate(attempts)])
    third_may_decide = workers > 2
    if how == "right" or guilty >= len(kinds) or (guilty == 2 and how == "attempt 2"):
        assert found.kind == "equal"
    elif how == "always" and not third_may_decide:
        assert (found.kind, found.workers) == ("undecided", (0, 1))
    else:
        assert (found.kind, found.workers) == ("worker", (guilty,)), found


def test_a_step_that_is_not_deterministic_accuses_no_worker() -> None:
    drawn = random.Random(2)
    noisy = [tuple(drawn.randbytes(8) for _ in range(2)) for _ in range(3)]
    two = [Answer(worker, attempts) for worker, attempts in enumerate(noisy[:2])]
    assert judge(two).kind == judge([*two, Answer(2, noisy[2][:1])]).kind == "step"
    assert judge(two[:1]).kind == "step"
    own = [Answer(worker, (attempts[0],) * 2) for worker, attempts in enumerate(noisy)]
    assert judge([*own[:2], Answer(2, noisy[2][:1])]).kind == "everyone"


@pytest.mark.parametrize(
    ("places", "third_agrees_with", "verdict"),
    [
        # Each worker, also the third one, is on the host and the GPU that these letters name.
        (("a0", "a1", "a1"), 0, ("worker", (1,))),
        (("a0", "a1", "a1"), 1, ("undecided", (0, 1))),
        (("a0", "a1", "a2"), 1, ("worker", (0,))),
        (("a0", "a0", "a0"), 1, ("worker", (0,))),
        (("a0", "b0", "b0"), 0, ("worker", (1,))),
        (("a0", "b0", "b0"), 1, ("undecided", (0, 1))),
        (("a0", "b0", "b1"), 1, ("undecided", (0, 1))),
        (("a0", "b0", "c0"), 1, ("worker", (0,))),
        (("a0", "a1", "b0"), 1, ("worker", (0,))),
    ],
)
def test_workers_of_one_host_or_gpu_do_not_outvote_another(
    places: tuple[str, ...], third_agrees_with: int, verdict: tuple[str, tuple[int, ...]]
) -> None:
    attempts = [(b"0", b"0"), (b"1", b"1"), (str(third_agrees_with).encode(),)]
    first, second, third = (
        Answer(worker, made, (f"host {place[0]}", f"GPU {place[1]} of host {place[0]}"))
        for worker, (made, place) in enumerate(zip(attempts, places, strict=True))
    )
    found = judge_again([first, third._replace(attempts=third.attempts * 2)], [first, second])
    assert found[:2] == verdict
    assert (" (workers 1 and 2 agree, but they share " in found.why) == (verdict[0] == "undecided")
    # Without an earlier step, and if a worker does not get the same bits twice, places do not matter.
    assert judge_again([first, second, third])[:2] == ("worker", (1 - third_agrees_with,))
    shaky = first._replace(attempts=(b"0", b"2"))
    assert judge_again([shaky, third._replace(attempts=(b"1",))], [second, first])[:2] == ("worker", (0,))


@pytest.mark.parametrize(
    ("readings", "first", "again", "summer", "verdict"),
    [
        # Hashes of a part, as each of workers 0, 1, ... has it; worker 1 is the checker.
        ("rrr", "w", {1: "r", 2: "r"}, 0, ("repeated", ())),
        ("rr", "w", {1: "r", 0: "r"}, 0, ("repeated", ())),
        ("r", "w", {0: "r"}, None, ("repeated", ())),
        ("rrr", "w", {1: "w", 2: "r"}, 0, ("worker", (1,))),
        ("rrr", "w", {1: "v", 2: "r"}, None, ("worker", (1,))),
        ("rr", "w", {1: "w", 0: "r"}, None, ("worker", (1,))),
        ("rr", "w", {1: "w", 0: "r"}, 1, ("worker", (1,))),
        # Worker 0 has made both sums that agree.
        ("rr", "w", {1: "w", 0: "r"}, 0, ("undecided", (0, 1))),
        ("ww", "r", {1: "r", 0: "w"}, 0, ("undecided", (0, 1))),
        ("rrr", "r", {1: "r", 2: "w"}, 0, ("undecided", (1, 2))),
        ("rrr", "r", {1: "w", 2: "r"}, 0, ("undecided", (1, 2))),
        ("rrr", "w", {1: "w", 2: "v"}, 0, ("undecided", (1, 2))),
        ("www", "r", {1: "r", 2: "r"}, 0, ("sum", ())),
        ("rrw", "r", {1: "r", 2: "r"}, 0, ("worker", (2,))),
        ("rww", "r", {1: "r", 2: "r"}, None, ("worker", (1, 2))),
    ],
)
def test_a_wrong_check_of_a_sum_accuses_its_worker_only_if_it_is_wrong_again(
    readings: str, first: str, again: dict[int, str], summer: int | None, verdict: tuple[str, tuple[int, ...]]
) -> None:
    found = judge_sum(
        {worker: letter.encode() for worker, letter in enumerate(readings)},
        (1 if len(readings) > 1 else 0, first.encode()),
        {worker: letter.encode() for worker, letter in again.items()},
        summer,
    )
    assert found[:2] == verdict


class VerifiedRound(Round):
    """A round in which a worker computes what `partial_of` returns."""

    def __init__(self, worker: int, partial_of: Callable[[int, int], dict[str, Any]]) -> None:
        super().__init__("step 1 of fit 1", worker)
        self.partial_of = partial_of

    def compute(self, replica: int) -> dict[str, Any]:
        return self.partial_of(self.worker, replica)


class Missing(Exception):
    """A graph has not computed a replica."""


class RoundOfGraph(VerifiedRound):
    """Likewise, but the partials are computed between two calls of `Verifier.sum`, as by a graph."""

    def compute(self, replica: int) -> dict[str, Any]:
        raise Missing(replica)


def summed(verifier: Verifier, round_: VerifiedRound) -> Any:
    while True:
        try:
            return verifier.sum(round_)
        except Missing as missing:
            (replica,) = missing.args
            round_.started[replica] = round_.partial_of(round_.worker, replica)


def verified(
    workers: int,
    compute: Callable[[int, int], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    of_graph: bool = False,
) -> list[Any]:
    """Verify all replicas of a round on threads; the others continue when a worker leaves.

    Args:
        workers: their number.
        compute: returns the partial of (worker, replica).
        of_graph: whether a graph computes the replicas, and the workers are on hosts that are compared.
    """
    monkeypatch.setattr(verification, "_current", [])
    view = place(REPLICAS, tuple(range(workers)))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=60.0))
    contexts = [
        JobContext(
            one,
            Bus(SystemClock(), one),
            JobSettings(workers=workers, threads=1, verification=Verification(1, not of_graph)),
            over_hosts=of_graph,
        )
        for one in range(workers)
    ]
    jobs = [Job(context, (view, hub.member(context.worker))) for context in contexts]

    def act(worker: int) -> Any:
        own = jobs[worker]
        verifications = verification.Verifications(own)
        verifications.begin(1, first=True)
        round_ = (RoundOfGraph if of_graph else VerifiedRound)(worker, compute)
        try:
            total = summed(Verifier(own.exchange, own, verifications), round_)
        except DisagreementError as differs:
            if differs.workers == (worker,):
                left = tuple(other for other in range(workers) if other != worker)
                following = place(REPLICAS, left, 2)
                others = Hub(ReducePlan.of(following), WaitPolicy(timeout=60.0))
                for position, other in enumerate(left):
                    jobs[other].membership = NextPlace((following, others.member(position)))
                own.communicator.abort(f"worker {worker} ended")
            return differs
        return {name: array.copy() for name, array in total.items()}, verifications.up_to

    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(act, range(workers)))


def gradient(replica: int) -> dict[str, Any]:
    return {"gradient/0": np.array([1e8, 0.1 * replica], "f4"), "metric/0": np.array(replica, "f4")}


def wrong(replica: int) -> dict[str, Any]:
    return {**gradient(replica), "gradient/0": np.array([1e8, 0.1 * replica + 1e-3], "f4")}


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_right_workers_are_verified_and_get_the_same_total(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for total, up_to in verified(workers, lambda worker, replica: gradient(replica), monkeypatch):
        assert total["metric/0"] == 6
        assert up_to == 1


@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize("times", [1, 100])
def test_a_worker_at_fault_leaves_and_nothing_wrong_is_summed(
    guilty: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [times]

    def compute(worker: int, replica: int) -> dict[str, Any]:
        if worker == guilty and left[0]:
            left[0] -= 1
            return wrong(replica)
        return gradient(replica)

    right, _ = verified(3, lambda worker, replica: gradient(replica), monkeypatch)[0]
    found = verified(3, compute, monkeypatch)
    error = found.pop(guilty)
    assert isinstance(error, DisagreementError)
    assert f"computed on worker {guilty}, has the wrong bits in gradient/0: " in str(error)
    for total, _ in found:
        assert {name: array.tobytes() for name, array in total.items()} == {
            name: array.tobytes() for name, array in right.items()
        }


@pytest.mark.parametrize("guilty", range(-1, 4))
def test_workers_whose_graphs_compute_make_the_same_calls_of_the_exchange(
    guilty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute(worker: int, replica: int) -> dict[str, Any]:
        return (wrong if worker == guilty else gradient)(replica)

    monkeypatch.setattr(
        round_verification, "host_report", lambda _: HostReport(0, *[""] * 3, {}, "", "", {}, {})
    )
    drawn = VerificationPlan(0, REPLICAS, Verification(1)).drawn(1)
    results = verified(4, compute, monkeypatch, of_graph=True)
    roles = Roles.of(place(REPLICAS, range(4)), *drawn, 0)
    for worker, result in enumerate(results):
        if guilty in roles[:2] and worker == guilty:
            assert f"computed on worker {guilty}, has the wrong bits in gradient/0: " in str(result)
        elif guilty not in roles[:2]:
            assert result[0]["metric/0"] == 6
    assert sum(isinstance(result, DisagreementError) for result in results) == (guilty in roles[:2])


def test_the_chief_publishes_a_verdict_before_a_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    events, knows, goes_on = list[tuple[int, str]](), threading.Event(), threading.Event()
    publish, exchange = verification.Verifications.publish, Job.exchange

    def published(self: verification.Verifications, verdict: Any, *given: Any) -> None:
        if self._job.worker == 2:
            knows.set()
        elif self._job.is_chief:
            # The worker at fault does what it can do without the chief.
            assert goes_on.wait(60.0)
            events.append((self._job.worker, verdict.kind))
        publish(self, verdict, *given)

    def exchanged(self: Job, *given: Any) -> Any:
        if self.worker == 2 and knows.is_set():
            goes_on.set()
        return exchange(self, *given)

    def end(self: Alone, differs: DisagreementError, advice: str = "") -> None:
        events.append((differs.workers[0], "ends"))
        goes_on.set()
        raise differs

    monkeypatch.setattr(verification.Verifications, "publish", published)
    monkeypatch.setattr(Job, "exchange", exchanged)
    monkeypatch.setattr(Alone, "end_differing", end)
    verified(3, lambda worker, replica: (wrong if worker == 2 else gradient)(replica), monkeypatch)
    assert events == [(0, "worker"), (2, "ends")]


def check_wrongly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all workers get wrong bits in each first check of a sum, and right ones in the second."""
    checks, first, add = threading.local(), Verifier._sum_answers, TotalPart.sum

    def answers(self: Verifier, *arguments: Any, again: bool = False) -> Any:
        checks.again, checks.count = again, getattr(checks, "count", 0) + 1
        assert checks.count < 20, "the workers check one sum again and again"
        return first(self, *arguments, again=again)

    def added(self: TotalPart, summands: Any, adder: Any) -> Any:
        return add(self, summands, adder) ^ (not checks.again)

    monkeypatch.setattr(Verifier, "_sum_answers", answers)
    monkeypatch.setattr(TotalPart, "sum", added)


def test_a_sum_whose_first_check_is_always_wrong_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    check_wrongly_once(monkeypatch)
    errors = verified(3, lambda worker, replica: gradient(replica), monkeypatch)
    assert [type(error) for error in errors] == [DisagreementError] * 3
    assert all("the same summands, added up again on workers 0, 1 and 2" in str(error) for error in errors)


def test_a_model_is_right_since_its_own_last_comparison() -> None:
    class Model:
        pass

    hub = Hub(ReducePlan.of(view := place(REPLICAS, (0,))), WaitPolicy(timeout=60.0))
    context = JobContext(0, Bus(SystemClock(), 0), JobSettings(workers=1, threads=1))
    verifications = verification.Verifications(Job(context, (view, hub.member(0))))
    first, second = Model(), Model()
    verifications.unpack([0] * REPLICAS, 3)
    assert verifications.compared([first]) == 3
    verifications.note_compared([first], 10)
    verifications.note_compared([second], 20)
    assert [verifications.compared([model]) for model in (first, second)] == [10, 20]
    assert verifications.compared([first, second]) == 10
    assert verifications.compared([second, Model()]) == 3


def of_one_worker(setting: Verification) -> verification.Verifications:
    """Return what a job of one worker has verified: nothing."""
    hub = Hub(ReducePlan.of(view := place(REPLICAS, (0,))), WaitPolicy(timeout=60.0))
    settings = JobSettings(workers=1, threads=1, verification=setting)
    context = JobContext(0, Bus(SystemClock(), 0), settings)
    return verification.Verifications(Job(context, (view, hub.member(0))))


def test_a_verified_round_says_nothing_of_a_later_one_in_earlier_steps() -> None:
    verifications = of_one_worker(Verification(2, all=True))
    verifications.begin(2)
    verifications.note(range(REPLICAS))
    verdict = Verdict("worker", (0,), "workers 1 and 2 agree")
    with pytest.raises(DisagreementError, match="the state of all workers may be wrong in any step"):
        verifications.follow(verdict, "step 2 of fit 1: replica 0", [], "gradient", lasts=True)
    verifications.can_repeat = True
    with pytest.raises(StepWithdrawn):
        verifications.withdraw_step(Verdict("undecided", (0, 1)), [], "gradient", [])
    assert verifications.packed == [0] * (REPLICAS + 1)


def test_evaluations_that_are_shorter_than_the_distance_of_verified_steps_are_verified() -> None:
    verifications, drawn = of_one_worker(Verification(10)), list[int]()
    for _ in range(10):
        for step in range(1, 5):
            verifications.begin(step, trains=False)
            drawn += verifications.drawn
    assert sorted(drawn) == list(range(REPLICAS))
    verifications.can_repeat = True
    with pytest.raises(StepWithdrawn):
        verifications.withdraw_step(Verdict("undecided", (0, 1)), [], "gradient", [])
    other = of_one_worker(Verification(10))
    other.unpack(verifications.packed, 3)
    for each in (verifications, other):
        each.begin(4, trains=False)
        assert each.drawn == (drawn[-1],)


def test_a_worker_can_join_only_in_the_first_round_of_a_step_of_a_loop() -> None:
    verifications = of_one_worker(Verification(1))
    verifications.begin(3)
    verifications.admit_within(lambda: None)
    verifications.begin_round()
    assert verifications.can_repeat
    verifications._job.exchange(lambda *_: None)
    verifications.begin_round()
    assert not verifications.can_repeat


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("dtype", "joins"), [("float32", True), ("complex64", False), ("<U1", False), (">f4", False)]
)
def test_a_worker_joins_in_a_prediction_only_if_it_can_get_weights_and_outputs(
    dtype: str, joins: bool, compiled: bool
) -> None:
    outputs = [{"a": [np.zeros(2, "float32"), np.zeros(2, dtype)]}]
    call = SimpleNamespace(at_end=False, outputs=outputs, metrics=None)
    calls = SimpleNamespace(current=call, stack=[None, call])
    step: Any = SimpleNamespace(kind="predict", calls=calls, model=SimpleNamespace(compiled=compiled))
    admits: Any = GlobalStep._admits_workers
    assert admits.fget(step) == (joins and compiled)


@pytest.mark.parametrize("error", [PackError, TypeError])
def test_only_a_result_that_cannot_be_packed_keeps_workers_out_of_a_loop(error: type[TypeError]) -> None:
    def kept(loop: Any, arrays: Any) -> Any:
        raise error

    loops: Any = SimpleNamespace(
        _verifications=of_one_worker(Verification(1)),
        _calls=SimpleNamespace(where=lambda: "step 2"),
        _states=SimpleNamespace(begin=lambda *_, **__: SimpleNamespace(arrays={})),
        _job=SimpleNamespace(view=place(REPLICAS, (0, 1))),
        _snapshots=SimpleNamespace(kept=kept),
    )
    call, loop = SimpleNamespace(steps=1), SimpleNamespace(owners=[])
    begin = partial(StepLoops._begin_step, loops, call, loop, 2)  # type: ignore[arg-type]
    if error is TypeError:
        with pytest.raises(TypeError):
            begin()
    else:
        assert begin() is not None
    assert not loops._verifications.can_repeat


def test_an_evaluation_within_a_step_does_not_count_as_the_step() -> None:
    verifications = of_one_worker(Verification(1, all=True))
    verifications.begin(3)
    with verifications.aside():
        verifications.begin(500, trains=False)
    assert (verifications.step, verifications.trains, verifications.drawn) == (3, True, (0, 1, 2, 3))


def test_a_job_that_begins_with_an_evaluation_has_nothing_to_go_back_to() -> None:
    verifications = of_one_worker(Verification(1))
    verifications.begin(1, trains=False)
    assert verifications.covers_earlier_steps
    verifications.begin(2, trains=False)
    assert not verifications.covers_earlier_steps
    verifications.unpack([0] * REPLICAS, 3)
    verifications.begin(1, trains=False)
    assert not verifications.covers_earlier_steps


def test_files_are_named_that_callbacks_have_written_since_the_last_right_state() -> None:
    hub = Hub(ReducePlan.of(view := place(REPLICAS, (0,))), WaitPolicy(timeout=60.0))
    context = JobContext(0, Bus(SystemClock(), 0), JobSettings(workers=1, threads=1))
    verifications = verification.Verifications(Job(context, (view, hub.member(0))))
    verifications.note_files(["first.csv", "both.csv"])
    verifications.begin(3)
    verifications.begin(9, trains=False)
    verifications.end_call()
    verifications.note_files(["both.csv", "second.csv"])
    verifications.begin(4)
    with pytest.raises(
        DisagreementError, match=r"callbacks have written since \(both.csv, second.csv\), and"
    ):
        verifications.roll_back("", (0,), 3)


def test_a_worker_without_others_that_gets_other_bits_may_be_at_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = itertools.count()
    (error,) = verified(1, lambda worker, replica: gradient(next(numbers)), monkeypatch)
    assert isinstance(error, DisagreementError)
    assert "the processor, the memory or a library of its host is at fault, or the step is not det" in str(
        error
    )


def test_workers_that_add_up_differently_need_not_get_the_same_bits_twice() -> None:
    hub = Hub(ReducePlan.of(view := place(REPLICAS, (0, 1))), WaitPolicy(timeout=60.0))
    context = JobContext(0, Bus(SystemClock(), 0), JobSettings(workers=2, threads=1))
    verifications = verification.Verifications(Job(context, (view, hub.member(0))))
    verdict = judge_sum({0: b"r", 1: b"r"}, (0, b"x"), {0: b"y", 1: b"z"})
    with pytest.raises(
        DisagreementError, match="again on workers 0 and 1, gave different bits in loss, and nothing"
    ):
        verifications.follow(verdict, "step 1 of fit 1: the sum over all replicas", ["loss"], "sum")


def test_of_two_workers_that_always_differ_both_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(worker: int, replica: int) -> dict[str, Any]:
        return wrong(replica) if worker else gradient(replica)

    for error in verified(2, compute, monkeypatch):
        assert isinstance(error, DisagreementError)
        assert "workers 0 and 1 get different bits in gradient/0" in str(error)
        assert error.workers == ()


@dataclass
class RepeatedStep:
    """A step of threads that verify replicas, one of which always computes a wrong gradient.

    Attributes:
        guilty: that worker.
        hosts: the host of each worker, one letter each.
        step: its number.
        repeating: the workers that can repeat it with another worker.
        failed: the verifications that have failed.
    """

    guilty: int
    hosts: str = "aaaaa"
    step: int = 1
    repeating: Sequence[int] = range(5)
    failed: list[VerificationFailed] = field(default_factory=list)

    def take(self, view: View, doubt: bytes = b"") -> list[Any]:
        """Verify the step: return what each worker gets, its error or its doubt."""
        hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=60.0))
        settings = JobSettings(workers=2, threads=1, verification=Verification(1, True))

        def act(worker: int) -> Any:
            events = Bus(SystemClock(), worker)
            events.subscribe(lambda published: self.failed.append(published.event), VerificationFailed)
            context = JobContext(worker, events, settings, host=self.hosts[worker])
            job = Job(context, (view, hub.member(view.workers.index(worker))))
            job.membership = NextPlace((alone := place(REPLICAS, (2,), 3), by_itself(alone)))
            verifications = verification.Verifications(job)
            verifications.unpack_doubt(doubt)
            verifications.begin(self.step)
            verifications.can_repeat = worker in self.repeating
            made = wrong if worker == self.guilty else gradient
            try:
                round_ = VerifiedRound(worker, lambda _, replica: made(replica))
                total = Verifier(job.exchange, job, verifications).sum(round_)
            except StepWithdrawn:
                return verifications.packed_doubt
            except DisagreementError as differs:
                job.communicator.abort("it ended")
                return differs
            return total["gradient/0"].tobytes()

        with ThreadPoolExecutor(len(view.workers)) as threads:
            return list(threads.map(act, view.workers))

    @property
    def verdicts(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(event.verdict, event.workers) for event in self.failed]


def test_a_fault_that_lasts_goes_back_also_if_its_worker_decides_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification, "_current", [])
    repeated = RepeatedStep(guilty=1, step=2)
    first, _ = repeated.take(place(REPLICAS, (0, 1)))
    # Now worker 2 is the checker of the replica in doubt, and worker 1 computes it once.
    for error in repeated.take(place(REPLICAS, (0, 1, 2), 2), first):
        assert "computed on worker 1, has the wrong bits in gradient/0: workers 0 and 2 agree" in str(error)
        assert "the state of all workers may be wrong in any step" in str(error)
    assert repeated.verdicts == [("third", (0, 1)), ("worker", (1,))]


@pytest.mark.parametrize(("guilty", "hosts"), [(0, "aaa"), (1, "aaa"), (0, "abb"), (1, "abb")])
def test_a_third_worker_decides_between_two(guilty: int, hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_current", [])
    repeated = RepeatedStep(guilty, f"{hosts}bb")
    (right,) = set(repeated.take(place(REPLICAS, (2, 3))))
    first, second = repeated.take(place(REPLICAS, (0, 1)))
    assert first == second != b""
    results = repeated.take(place(REPLICAS, (0, 2), 2), first)
    verdicts = repeated.verdicts
    if (guilty, hosts) == (0, "abb"):
        # Perhaps the host of workers 1 and 2 is at fault.
        assert verdicts == [("third", (0, 1)), ("undecided", (0, 1))]
        for error in results:
            assert "no third worker can decide which are right (workers 1 and 2 agree, but they share" in str(
                error
            )
            assert error.workers == ()
        return
    assert verdicts == [("third", (0, 1)), ("worker", (guilty,))]
    if guilty == 0:
        assert "workers 1 and 2 agree" in str(results[0])
    else:
        assert results[0] == right
    assert results[1] == right


def test_checks_that_are_wrong_once_start_no_other_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_current", [])
    check_wrongly_once(monkeypatch)
    repeated = RepeatedStep(-1)
    for error in repeated.take(place(REPLICAS, (0, 1))):
        assert "the same summands, added up again on workers 0 and 1, gave different bits" in str(error)
    assert repeated.verdicts == [*[("repeated", ())] * 3, ("undecided", (0, 1))]


def add_wrongly(guilty: int, monkeypatch: pytest.MonkeyPatch, parts: Sequence[int] = range(REPLICAS)) -> None:
    """Let a worker always get another bit in a total, as it has it, and in each sum of some parts."""
    monkeypatch.setattr(verification, "_current", [])
    adding, answers, add = threading.local(), Verifier._sum_answers, TotalPart.sum

    def checked(self: Verifier, round_: Round, total: Any, *given: Any, **options: Any) -> Any:
        adding.wrongly = self._job.worker == guilty
        if adding.wrongly:
            total.memory[:1] ^= not getattr(total, "is_wrong", False)
            total.is_wrong = True
        return answers(self, round_, total, *given, **options)

    monkeypatch.setattr(Verifier, "_sum_answers", checked)

    def added(self: TotalPart, *given: Any) -> Any:
        return add(self, *given) ^ (adding.wrongly and self.number in parts)

    monkeypatch.setattr(TotalPart, "sum", added)


@pytest.mark.parametrize("guilty", [0, 1])
def test_another_worker_decides_about_a_part_of_a_sum_that_is_not_drawn(
    guilty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wrongly(guilty, monkeypatch, [0])
    monkeypatch.setattr(VerificationPlan, "drawn", lambda *_: (3,))
    repeated = RepeatedStep(-1)
    (right,) = set(repeated.take(place(REPLICAS, (2, 3))))
    first, _ = repeated.take(place(REPLICAS, (0, 1)))
    results = repeated.take(place(REPLICAS, (0, 2), 2), first)
    assert repeated.verdicts == [("third", (0, 1)), ("worker", (guilty,))]
    assert results[1] == right
    assert results[0] == right or guilty == 0


def test_the_only_worker_left_names_one_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_current", [])
    verdict = Verdict("worker", (1,), "workers 0 and 2 agree")
    faults = iter(
        [round_verification._Fault(verdict, "step 1 of fit 1: replica 0", ["scaled/0"], "gradient", 0)]
    )
    monkeypatch.setattr(Verifier, "_fault", lambda *_: next(faults, None))
    repeated = RepeatedStep(-1)
    repeated.take(place(REPLICAS, (2,)))
    assert repeated.verdicts == [("worker", (1,))]


def test_no_worker_repeats_a_step_that_another_one_cannot_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_current", [])
    repeated = RepeatedStep(1, repeating=[1])
    for error in repeated.take(place(REPLICAS, (0, 1))):
        assert "no third worker can decide which are right" in str(error)
    assert repeated.verdicts == [("undecided", (0, 1))]


@pytest.mark.parametrize("guilty", [0, 1])
def test_another_worker_decides_which_of_two_always_adds_wrongly(
    guilty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_wrongly(guilty, monkeypatch)
    repeated = RepeatedStep(-1)
    (right,) = set(repeated.take(place(REPLICAS, (2, 3))))
    first, second = repeated.take(place(REPLICAS, (0, 1)))
    assert first == second != b""
    results = repeated.take(place(REPLICAS, (0, 2), 2), first)
    assert repeated.verdicts == [("third", (0, 1)), ("worker", (guilty,))]
    assert results[1] == right
    if guilty == 0:
        assert "workers 1 and 2 agree" in str(results[0])
    else:
        assert results[0] == right


def test_a_worker_that_always_adds_wrongly_goes_back_before_what_it_has_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_wrongly(1, monkeypatch)
    repeated = RepeatedStep(-1, step=2)
    first, _ = repeated.take(place(REPLICAS, (0, 1)))
    for error in repeated.take(place(REPLICAS, (0, 2), 2), first):
        assert "computed on worker 1, has the wrong bits in " in str(error)
        assert "the state of all workers may be wrong in any step" in str(error)
    assert repeated.verdicts == [("third", (0, 1)), ("worker", (1,))]


@pytest.mark.parametrize("every", [1, 2])
def test_a_worker_that_always_sums_wrongly_leaves_no_wrong_state(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, here = flips.undisturbed()[flips.SIZES[1]], threading.local()
    train, add = flips.Training._train, SliceReduce.sum

    def trained(self: flips.Training, worker: int) -> None:
        here.worker = worker
        train(self, worker)

    def summed(self: SliceReduce, *given: Any) -> None:
        add(self, *given)
        largest = max(self.total, key=lambda slot: slot.out.nbytes, default=None)
        if here.worker == 1 and largest is not None:
            largest.out.reshape(-1).view(np.uint8)[:1] ^= 1

    monkeypatch.setattr(flips.Training, "_train", trained)
    monkeypatch.setattr(SliceReduce, "sum", summed)
    training = flips.Training(3, flips.SIZES[1], Verification(every, all=True))
    training.run()
    verdicts = [(failed.step, failed.part, failed.verdict, failed.workers) for failed in training.failed]
    assert verdicts == [(every, "sum", "repeated", (1,)), (every, "sum", "worker", (1,))]
    if every == 1:
        assert (training.states, training.has_stopped) == ({right}, False)
    else:
        assert (training.states, len(training.ended)) == (set(), 3)
        assert "the state of all workers may be wrong in any step" in str(training.ended[0])


def test_a_worker_that_always_checks_a_sum_wrongly_may_have_summed_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, train, add = threading.local(), flips.Training._train, TotalPart.sum

    def trained(self: flips.Training, worker: int) -> None:
        here.worker = worker
        train(self, worker)

    monkeypatch.setattr(flips.Training, "_train", trained)
    monkeypatch.setattr(TotalPart, "sum", lambda *given: add(*given) ^ (here.worker == 1))
    training = flips.Training(3, flips.SIZES[1], Verification(2, all=True))
    training.run()
    ((failed, *_), (error, *_)) = training.failed, training.ended
    assert (failed.step, failed.part, failed.verdict, failed.workers) == (2, "sum", "worker", (1,))
    assert "the state of all workers may be wrong in any step" in str(error)
    assert (training.states, len(training.ended)) == (set(), 3)


one_backend = pytest.mark.parametrize(
    "backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)], indirect=True
)
"""For endings of a job, which no backend decides."""


def figures(run: Any, worker: int) -> list[str]:
    assert run.status == 0, run.stderr
    return run.marked(worker, "digest: ")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("once", "replica "),
        pytest.param("sum", "the sum over all replicas", marks=pytest.mark.slow),
        pytest.param("update", "the state after the update", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_bit_changes_no_result(
    launch: Launch, undisturbed_run: Launch, thorough_backend: str, how: str, what: str
) -> None:
    backend = thorough_backend
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", backend=backend)
    options = "-n 2 --replicas 4 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", how, "1", "3", backend=backend)
    assert f"step 3 of fit 1: {what}" in run.stderr
    assert ", computed on worker 1, has the wrong bits in " in run.stderr
    assert figures(run, 0) == figures(right, 0) != []
    assert " computations verified; digest " in run.stderr
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    (failed,) = [json.loads(line) for line in lines if '"verification failed"' in line]
    assert (failed["step"], failed["workers"], failed["verdict"]) == (3, [1], "worker")
    assert len(failed["arrays"]) == 1


@pytest.mark.ci
def test_a_worker_with_a_wrong_bit_in_an_example_is_named(
    launch: Launch, undisturbed_run: Launch, quickest_backend: str
) -> None:
    backend = quickest_backend
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", backend=backend)
    options = "-n 3 --replicas 4 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", "row", "1", "3", backend=backend)
    assert ", computed on worker 1, has the wrong bits in sequential/hidden/kernel, " in run.stderr
    assert ": workers 0 and 2 agree; " in run.stderr
    assert figures(run, 0) == figures(right, 0) != []


@pytest.mark.parametrize(
    ("how", "what", "guilty", "replicas", "local"),
    [
        pytest.param("flip", "replica ", 1, 2, "", marks=pytest.mark.ci),
        pytest.param("flip", "replica ", 0, 4, "", marks=pytest.mark.slow),
        pytest.param("updates", "the state after the update", 1, 4, "", marks=pytest.mark.slow),
        pytest.param("updates", "the state after the update", 0, 2, "", marks=pytest.mark.slow),
        pytest.param("adding", "the sum over all replicas", 1, 4, "", marks=pytest.mark.slow),
        pytest.param("adding", "the sum over all replicas", 0, 2, "", marks=pytest.mark.slow),
        pytest.param("flip", "replica ", 1, 2, "--local-steps 2", marks=pytest.mark.slow),
        pytest.param("rounding", "replica ", 0, 4, "--local-steps 2,int8", marks=pytest.mark.slow),
        pytest.param("rounding", "replica ", 1, 2, "--local-steps 2,int8,reset", marks=pytest.mark.slow),
        pytest.param(
            "updates", "the state after the update", 1, 2, "--local-steps 1", marks=pytest.mark.slow
        ),
    ],
)
def test_another_worker_decides_which_of_two_always_computes_wrongly(
    launch: Launch,
    undisturbed_run: Launch,
    thorough_backend: str,
    how: str,
    what: str,
    guilty: int,
    replicas: int,
    local: str,
) -> None:
    # Step 7 is the first one of an epoch, before which callbacks have run.
    backend, step = thorough_backend, 7 if how == "updates" else 3
    right = undisturbed_run(f"-n 1 --replicas {replicas} {local}", "verified.py", backend=backend)
    options = f"-n 2 --replicas {replicas} --verify-every 1 --verify-replicas all {local}"
    run = launch(options, "verified.py", how, str(guilty), str(step), backend=backend)
    asked = f"workers 0 and 1 computed different bits in step {step}, each the same bits every time; another"
    assert f"{asked} worker starts in place of worker 1, and decides" in run.stderr
    assert "worker 2 joined and worker 1 left (2 workers)" in run.stderr
    assert f"step {step} of fit 1: {what}" in run.stderr
    assert f", computed on worker {guilty}, has the wrong bits in " in run.stderr
    assert f": workers {1 - guilty} and 2 agree" in run.stderr
    assert figures(run, 2) == figures(right, 0) != []
    if how == "updates" and backend != "jax" and not local:
        assert run.marked(2, "counted: ") == ["counted: 12"]
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    failed = [json.loads(line) for line in lines if '"verification failed"' in line]
    verdicts = [(each["verdict"], each["workers"]) for each in failed]
    assert verdicts == [("third", [0, 1]), ("worker", [guilty])]


@pytest.mark.parametrize(
    ("how", "guilty", "step", "modes", "what"),
    [
        pytest.param("flip", 1, 5, "batches", "step 1 of train_on_batch 5: replica ", marks=pytest.mark.ci),
        pytest.param("flip", 0, 1, "batches", "step 1 of train_on_batch 1: replica ", marks=pytest.mark.slow),
        pytest.param(
            "adding", 1, 5, "batches", "step 1 of train_on_batch 5: the sum over all ", marks=pytest.mark.slow
        ),
        pytest.param(
            "updates", 0, 7, "batches", "step 1 of train_on_batch 7: the state after ", marks=pytest.mark.slow
        ),
        # The script has just evaluated, and reads weights.
        pytest.param(
            "flip", 1, 10, "batches", "step 1 of train_on_batch 10: replica ", marks=pytest.mark.slow
        ),
        # The other model was trained last, and this one is not built.
        pytest.param(
            "flip", 1, 5, "batches pair", "step 1 of train_on_batch 5: replica ", marks=pytest.mark.slow
        ),
        # `fit` was the last call, and the script reads weights.
        pytest.param(
            "flip", 1, 11, "batches fit", "step 1 of train_on_batch 6: replica ", marks=pytest.mark.slow
        ),
        pytest.param(
            "evaluations", 1, 2, "batches", "step 1 of test_on_batch 2: replica ", marks=pytest.mark.ci
        ),
        pytest.param(
            *("evaluations", 1, 3, "validation"),
            "step 3 of validation 2 within fit 1: replica ",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            *("evaluations", 0, 1, "validation dataset"),
            "step 1 of validation 2 within fit 1: replica ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("adding", 0, 5, "validation"),
            "step 5 of validation 2 within fit 1: the sum over all ",
            marks=pytest.mark.slow,
        ),
        pytest.param("flip", 1, 5, "loop", " of step: replica ", marks=pytest.mark.ci),
        pytest.param("flip", 0, 2, "loop", " of step: replica ", marks=pytest.mark.slow),
        pytest.param("adding", 0, 6, "loop", " of step: the sum over all ", marks=pytest.mark.slow),
    ],
)
def test_another_worker_decides_also_where_a_call_of_the_script_resumes(
    launch: Launch,
    undisturbed_run: Launch,
    thorough_backend: str,
    how: str,
    guilty: int,
    step: int,
    modes: str,
    what: str,
) -> None:
    backend = thorough_backend
    right = undisturbed_run(
        "-n 1 --replicas 2", "verified.py", "", "-1", "0", *modes.split(), backend=backend
    )
    options = "-n 2 --replicas 2 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", how, str(guilty), str(step), *modes.split(), backend=backend)
    if (how, modes, backend) == ("adding", "validation", "torch"):
        # There, worker 0 also checks a part wrongly of which both have the right total, and is named at once.
        assert f"{what}replicas, computed on worker 0" in run.stderr
        assert figures(run, 1) == figures(right, 0) != []
        return
    assert f"workers 0 and 1 computed different bits in step {step}, each the same bits every " in run.stderr
    assert what in run.stderr
    assert f", computed on worker {guilty}, has the wrong bits in " in run.stderr
    assert f": workers {1 - guilty} and 2 agree" in run.stderr
    assert figures(run, 2) == figures(right, 0) != []


@pytest.mark.slow
def test_two_workers_that_differ_in_the_first_step_of_a_loop_stop_the_job(launch: Launch) -> None:
    options = "-n 2 --replicas 2 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", "flip", "1", "1", "loop")
    assert run.status == 1
    assert (
        "strategy.run of step: replica 0: workers 0 and 1 get different bits in merge/0, each time the"
        in (run.stderr)
    )


@pytest.mark.ci
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_job_with_a_wrong_state_starts_again_from_a_checkpoint_before(
    launch: Launch, undisturbed_run: Launch, quickest_backend: str, workers: int, tmp_path: Path
) -> None:
    backend, saved = quickest_backend, tmp_path / "saved"
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", backend=backend)
    options = f"-n {workers} --replicas 4 --verify-every 3 --checkpoint {saved} --checkpoint-every 1 --keep 9"
    run = launch(options, "verified.py", "memory", "1", "5", backend=backend)
    assert "step 6 of fit 1: the state before the step" in run.stderr
    if workers == 3:
        assert (
            "computed on worker 1, has the wrong bits in sequential/out/kernel: workers 0 and 2 agree"
            in run.stderr
        )
    assert f"that callbacks have written since ({run.folder}/log.csv); later checkpoints are" in run.stderr
    assert "and the job continues from that of step 3" in run.stderr
    assert "starts again" in run.stderr
    assert figures(run, 0)[-1] == figures(right, 0)[0]


@pytest.mark.slow
def test_a_wrong_state_that_another_comparison_finds_is_not_kept_either(
    launch: Launch, undisturbed_run: Launch, thorough_backend: str, tmp_path: Path
) -> None:
    backend, saved = thorough_backend, tmp_path / "saved"
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", backend=backend)
    options = f"-n 2 --replicas 4 --verify-every 10 --checkpoint {saved} --checkpoint-every 1 --keep 9"
    run = launch(options, "verified.py", "memory", "1", "11", backend=backend)
    assert "WrongStateError: the end of fit 1: worker 0 has variable " in run.stderr
    assert "wrong after step 10, the last one after which it was found right" in run.stderr
    assert "and the job continues from that of step 10" in run.stderr
    events = "".join(path.read_text() for path in run.folder.rglob("events*.jsonl"))
    assert events.count('"verification failed"') == 1
    assert figures(run, 0)[-1] == figures(right, 0)[0]


@pytest.mark.slow
def test_a_wrong_bit_of_an_evaluation_is_found(launch: Launch, undisturbed_run: Launch) -> None:
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", "evaluated")
    options = "-n 2 --replicas 4 --verify-every 2 --verify-replicas all"
    run = launch(options, "verified.py", "evaluation", "1", "4")
    assert "step 4 of evaluate 1: replica " in run.stderr
    assert ", computed on worker 1, has the wrong bits in metric " in run.stderr
    assert figures(run, 0) == figures(right, 0) != []


@pytest.mark.ci
@pytest.mark.parametrize("guilty", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(
    ("how", "undisturbed", "what", "lines"),
    [("evaluations", "evaluated", "metric ", 2), ("predictions", "predicted", "output: ", 1)],
)
def test_another_worker_decides_in_an_evaluation_and_a_prediction(
    launch: Launch,
    undisturbed_run: Launch,
    thorough_backend: str,
    how: str,
    undisturbed: str,
    what: str,
    lines: int,
    guilty: int,
) -> None:
    backend = thorough_backend
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", undisturbed, backend=backend)
    options = "-n 2 --replicas 4 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", how, str(guilty), "4", backend=backend)
    assert "workers 0 and 1 computed different bits in step 4, each the same bits every time; " in run.stderr
    assert f", computed on worker {guilty}, has the wrong bits in {what}" in run.stderr
    assert f": workers {1 - guilty} and 2 agree" in run.stderr
    assert figures(run, 2)[-lines:] == figures(right, 0)[-lines:] != []


@pytest.mark.ci
@one_backend
def test_a_validation_that_cannot_be_read_again_stops_the_job(launch: Launch, backend: str) -> None:
    options = "-n 2 --replicas 2 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", "evaluations", "1", "3", "validation", "generator", backend=backend)
    assert run.status == 1
    assert "workers 0 and 1 computed different bits in step 3, each the same bits every time" in run.stderr
    assert (
        "step 3 of validation 2 within fit 1: replica 0: workers 0, 1 and 2 get different bits in metric "
        in run.stderr
    )
    assert "cannot read from the beginning, such as those of a generator" in run.stderr


@pytest.mark.ci
@one_backend
def test_a_worker_that_joins_in_the_last_validation_writes_the_last_checkpoint(
    launch: Launch, backend: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    options = f"-n 2 --replicas 2 --verify-every 1 --verify-replicas all --checkpoint {saved}"
    run = launch(options, "verified.py", "evaluations", "0", "3", "validation", "last", backend=backend)
    assert (run.status, Store(saved).finished()) == (0, 12), run.stderr


@pytest.mark.ci
def test_another_worker_decides_where_workers_divide_the_reading(
    launch: Launch, undisturbed_run: Launch, quickest_backend: str
) -> None:
    backend = quickest_backend
    right = undisturbed_run("-n 1 --replicas 2", "verified.py", "", "-1", "0", "dataset", backend=backend)
    options = "-n 2 --replicas 2 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", "flip", "1", "4", "dataset", backend=backend)
    assert ": workers 0 and 2 agree" in run.stderr
    assert figures(run, 2) == figures(right, 0) != []


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "workers"), [("prediction", 2), pytest.param("predictions", 3, marks=pytest.mark.slow)]
)
def test_a_wrong_bit_of_a_prediction_is_found(
    launch: Launch, undisturbed_run: Launch, quickest_backend: str, how: str, workers: int
) -> None:
    backend = quickest_backend
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", "predicted", backend=backend)
    options = f"-n {workers} --replicas 4 --verify-every 1 --verify-replicas all"
    run = launch(options, "verified.py", how, "1", "4", backend=backend)
    assert "step 4 of predict 1: replica " in run.stderr
    assert ", computed on worker 1, has the wrong bits in output: " in run.stderr
    assert figures(run, 0) == figures(right, 0) != []


@pytest.mark.ci
@one_backend
def test_an_evaluation_with_a_fault_that_lasts_is_not_right_since_its_last_verification(
    launch: Launch, backend: str
) -> None:
    options = "-n 3 --replicas 4 --verify-every 2 --verify-replicas all"
    run = launch(options, "verified.py", "evaluations", "1", "3", backend=backend)
    assert run.status == 1
    assert "step 4 of evaluate 1: replica " in run.stderr
    assert ", computed on worker 1, has the wrong bits in metric " in run.stderr
    wrong = "may be wrong after step 12, the last one after which it was found right"
    assert f"{wrong}, and there is no earlier checkpoint; start over" in run.stderr


@pytest.mark.ci
@one_backend
def test_a_job_with_a_wrong_state_and_no_checkpoint_stops(launch: Launch, backend: str) -> None:
    run = launch("-n 2 --replicas 2 --verify-every 3", "verified.py", "memory", "1", "5", backend=backend)
    assert run.status == 1
    assert "wrong after step 3, the last one after which it was found right" in run.stderr
    assert ", and there is no earlier checkpoint; start over" in run.stderr


FLIPS = {"found", "stopped", "harmless", "unseen"}
STOPPING = {"input", "gradient", "partial", "total", "update", "state", "hash", "scales"}
"""Places where a wrong bit may stop the job: two workers are left, or one, or nothing to go back to.

`scales` are computed from verified limits once more, for the total that an update applies, as it has it.
"""
SEEDS = range(156, 171)
"""Of flips at all places."""


def test_no_wrong_bit_survives() -> None:
    assert_none_survives(SEEDS)


@pytest.mark.slow
def test_no_wrong_bit_of_200_survives() -> None:
    assert_none_survives(range(1000, 1200))


@pytest.mark.slow
def test_no_wrong_bit_of_200_survives_on_a_backend(backend: str, lean: Callable[..., dict[str, str]]) -> None:
    script = Path(flips.__file__)
    environment = {**os.environ, **lean(script, backend), "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "--keras", "--flips", "200"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout + result.stderr[-5000:]
    assert "gradient" in result.stdout


def assert_none_survives(seeds: Sequence[int]) -> None:
    for where, became in flips.count(seeds, 1).items():
        assert became, where
        assert became.keys() <= FLIPS, (where, became)
        assert not became["stopped"] or where in STOPPING, (where, became)


def test_a_wrong_bit_in_the_head_of_a_summand_is_no_summand() -> None:
    sizes, replicas = {0: 8, 1: 3}, 4
    summands = {
        (part, r): np.full(size, r, np.uint8) for part, size in sizes.items() for r in range(replicas)
    }
    heads = [np.array(key, np.int64).view(np.uint8) for key in summands]
    sent = np.concatenate([piece for pair in zip(heads, summands.values(), strict=True) for piece in pair])
    assert len(list(round_verification.summands_in(sent, sizes, replicas))) == len(summands)
    end = 0
    for head, summand in zip(heads, summands.values(), strict=True):
        for bit in range(8 * head.size):
            wrong_bit = sent.copy()
            wrong_bit[end + bit // 8] ^= 1 << bit % 8
            received = round_verification.summands_in(wrong_bit, sizes, replicas)
            keys = {(part, replica) for part, replica, array in received if array.size == sizes[part]}
            assert keys < summands.keys()
        end += head.size + summand.size


def test_a_total_is_made_of_what_was_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flips.undisturbed()[flips.SIZES[0]]
    original = Verifier._fault

    def fault(self: Verifier, round_: Round, *given: Any) -> Any:
        found = original(self, round_, *given)
        round_.limits[0][0] *= 2
        return found

    monkeypatch.setattr(Verifier, "_fault", fault)
    training = flips.Training(1, flips.SIZES[0], Verification(1, all=True))
    training.run()
    assert (training.states, training.failed) == ({right}, [])


def train_with_a_wrong_total(step: int, part: int, monkeypatch: pytest.MonkeyPatch) -> flips.Training:
    """Train on hosts with the workers 0 and 2, and 1: the first has a wrong part of a total in a step."""
    original, done = Round.sum, set[int]()

    def sum_wrongly(self: Round, *given: Any) -> Any:
        total = original(self, *given)
        if self.label != f"step {step} of fit 1" or self.worker not in {0, 2} - done:
            return total
        done.add(self.worker)
        self.sums = [array.copy() for array in self.sums]
        piece = TotalPart(Layout.of([*self.limits, *self.sums]), REPLICAS, part).pieces[-1]
        array = self.sums[piece.leaf - len(self.limits)]
        array.reshape(-1)[piece.start : piece.stop].view(np.uint8)[-1] ^= 1
        return self.total_of(self.sums, self.limits, REPLICAS)

    monkeypatch.setattr(Round, "sum", sum_wrongly)
    training = flips.Training(3, flips.SIZES[1], Verification(2), hosts=2)
    training.run()
    assert done == {0, 2}
    return training


@pytest.mark.parametrize("part", range(REPLICAS))
def test_a_wrong_total_of_a_host_does_not_outvote_another_host(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = flips.undisturbed()[flips.SIZES[1]]
    training = train_with_a_wrong_total(2, part, monkeypatch)
    (failed,) = training.failed
    assert (failed.part, failed.replica, failed.verdict, failed.workers) == ("sum", part, "worker", (0, 2))
    assert (training.states, len(training.ended), training.has_stopped) == ({right}, 2, False)


def test_a_wrong_total_in_a_step_that_is_not_verified_accuses_no_other_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = train_with_a_wrong_total(3, 0, monkeypatch)
    (failed,) = training.failed
    assert (failed.step, failed.part, failed.verdict) == (4, "memory", "undecided")
    assert "right (workers 0 and 2 agree, but they share host h0); the processor" in str(training.ended[0])
    assert (training.states, training.has_stopped) == (set(), True)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", ["summands", "limits_of"])
def test_a_worker_that_always_rounds_wrongly_is_found(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, original = flips.undisturbed()[flips.SIZES[0]], getattr(Round, name)

    def wrongly(self: Round, *given: Any) -> Any:
        of_replicas = original(self, *given)
        for arrays in of_replicas.values() if self.worker == 1 else ():
            array = arrays[self.summed.index("scaled/0") if name == "summands" else 0]
            array[:1] += 1
        return of_replicas

    monkeypatch.setattr(Round, name, wrongly)
    training = flips.Training(workers, flips.SIZES[0], Verification(1, all=True))
    training.run()
    (failed,) = training.failed
    assert (failed.step, failed.part, failed.arrays[:1]) == (1, "gradient", ("scaled/0",))
    if workers == 2:
        assert (failed.verdict, training.has_stopped) == ("undecided", True)
    else:
        assert (failed.verdict, failed.workers, training.states) == ("worker", (1,), {right})


def test_a_rounding_whose_first_check_is_always_wrong_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    checks, rounded = threading.local(), Verifier._rounded

    def rounded_wrongly_once(self: Verifier, round_: Round, replica: int, number: int) -> list[bytes]:
        checks.count = getattr(checks, "count", 0) + 1
        assert checks.count < 50, "the workers round one sum again and again"
        hashes = rounded(self, round_, replica, number)
        return [b"wrong..."] if number == 1 and self._job.worker == 1 else hashes

    monkeypatch.setattr(Verifier, "_rounded", rounded_wrongly_once)
    training = flips.Training(2, flips.SIZES[0], Verification(1, all=True))
    training.run()
    assert [failed.verdict for failed in training.failed] == ["repeated"] * 3 + ["step"]
    assert len(training.ended) == 2
    assert all("the step is not deterministic: computed again " in str(error) for error in training.ended)


def test_workers_that_differ_in_what_is_zero_sum_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flips.undisturbed()[flips.SIZES[0]]
    original, done = Round.summands, list[str]()

    def summands(self: Round, *given: Any) -> Any:
        if self.worker == 1 and not done:
            done.append(self.label)
            self._zeros = frozenset()
        return original(self, *given)

    monkeypatch.setattr(Round, "summands", summands)
    training = flips.Training(2, flips.SIZES[0], Verification(1, all=True))
    training.run()
    assert (training.states, training.ended, len(done)) == ({right}, [], 1)


def test_a_state_with_a_wrong_hash_is_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    right, numbers = flips.undisturbed()[flips.SIZES[0]], itertools.count()

    def digest(array: Any, original: Any = state_verification.digest_array) -> bytes:
        return original(array) if next(numbers) else b"wrong..."

    monkeypatch.setattr(state_verification, "digest_array", digest)
    training = flips.Training(3, flips.SIZES[0], Verification(1, all=True))
    training.run()
    assert (training.states, training.ended) == ({right}, [])
    (failed,) = training.failed
    assert (failed.step, failed.part, failed.verdict) == (1, "memory", "repeated")


def test_what_is_not_verified_is_not_called_right_or_blamed_on_others() -> None:
    for where, became in flips.count(SEEDS, 2).items():
        assert became["wrong"] == 0, (where, became)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["flip", "once"])
@pytest.mark.parametrize("guilty", [0, 1, 2, 3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_each_worker_with_a_fault_is_found(
    launch: Launch, undisturbed_run: Launch, backend: str, workers: int, guilty: int, how: str
) -> None:
    if guilty >= workers:
        pytest.skip("there is no such worker")
    options = f"-n {workers} --replicas 4 --verify-every 1 --verify-replicas all --max-restarts 1"
    run = launch(options, "verified.py", how, str(guilty), "5", backend=backend)
    right = undisturbed_run("-n 1 --replicas 4", "verified.py", backend=backend)
    assert f", computed on worker {guilty}, has the wrong bits in " in run.stderr
    last = 2 if workers == 2 and how == "flip" else (guilty + 1) % workers
    assert figures(run, last) == figures(right, 0) != []


@pytest.mark.slow
def test_a_worker_that_is_found_late_and_again_leaves_only_verified_checkpoints(
    launch: Launch, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    options = f"-n 2 --replicas 2 --verify-every 2 --checkpoint {saved} --checkpoint-every 1 --keep 9"
    run = launch(options, "verified.py", "flip", "1", "7")
    # In each start of the job, its worker 1 has the fault.
    assert run.status == 70
    assert run.stderr.count("starts again") == 3
    assert run.stderr.count("and the job continues from that of step 4") == 4
    assert "computed on worker 1, has the wrong bits in " in run.stderr
    # Replicas take turns: one was verified in step 6, the other in step 4.
    entries = Store(saved).entries()
    assert entries[-1].step == 4
    assert [entry.verified for entry in entries] == [max(0, entry.step // 2 * 2 - 2) for entry in entries]


@pytest.mark.slow
def test_a_worker_that_always_sums_wrongly_is_named_and_the_job_goes_back(
    launch: Launch, undisturbed_run: Launch, backend: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    right = undisturbed_run("-n 1 --replicas 3", "verified.py", "large", backend=backend)
    options = "-n 3 --replicas 3 --verify-every 2 --verify-replicas all"
    options += f" --checkpoint {saved} --checkpoint-every 1 --keep 9"
    run = launch(options, "verified.py", "summing", "1", "5", backend=backend)
    assert (
        "step 6 of fit 1: the sum over all replicas, computed on worker 1, has the wrong bits" in run.stderr
    )
    assert "and the job continues from that of step 4" in run.stderr
    assert run.stderr.count("starts again") == 1
    assert figures(run, 0) == figures(right, 0) != []
    assert [entry.step for entry in Store(saved).entries()][-1] == 12


@pytest.mark.ci
@one_backend
def test_a_step_that_is_not_deterministic_is_named(launch: Launch, backend: str) -> None:
    run = launch("-n 2 --replicas 2 --verify-every 3", "verified.py", "random", backend=backend)
    assert run.status == 1
    assert "step 3 of fit 1: replica " in run.stderr
    assert ": the step is not deterministic: " in run.stderr
    assert "sequential/out/kernel" in run.stderr or " other arrays; " in run.stderr


@pytest.mark.slow
def test_no_false_alarm_in_10_000_steps(launch: Launch, backend: str) -> None:
    run = launch("-n 2 --replicas 4 --verify-every 1", "verified.py", "long", backend=backend)
    assert run.status == 0, run.stderr
    assert "; 10002 computations verified; " in run.stderr


@pytest.mark.ci
def test_a_verification_of_one_replica_is_refused(launch: Launch) -> None:
    run = launch("-n 1 --verify-every 3", "verified.py")
    assert run.status == 2
    assert run.stderr.splitlines()[-1].startswith(
        "lockstep: ConfigError: --verify-every needs at least 2 replicas"
    )
    run = launch("-n 2 --verify-replicas all", "verified.py")
    expected = "lockstep: ConfigError: --verify-replicas all needs --verify-every K"
    assert run.stderr.splitlines()[-1] == expected
