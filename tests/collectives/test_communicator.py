"""The contract `Communicator`, tested for every implementation."""

import re

import pytest
from collective_members import Control, Outcome, Processes, Settings, Threads, plan_of
from collective_scripts import (
    AllToAll,
    Barrier,
    Gather,
    Operation,
    Reduce,
    abort_after_close_of_one,
    abort_twice_then_call,
    call,
    call_after_close,
    different_calls,
    expected,
    keep_total,
    leave_early,
    notices,
    perform_all,
    properties_of_total,
    reduce_strided,
    wait_for_the_last,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_sums import DTYPES, blob_of

from lockstep.collectives.call import CallWait, CollectiveCall
from lockstep.collectives.contract import PeerWait, WaitPolicy
from lockstep.errors import InternalError, ModelError, PeerLostError, PeerStuckError
from virtual_clock import VirtualClock

World = Threads | Processes
SMALL = Reduce(1, ((3,),), ("float32",))
CNN = ((3, 3, 1, 32), (32,), (21632, 128), (128,), (128, 10), (10,))
CALLS = [
    ("reduce", {"case": SMALL}),
    ("gather", {"blob": b"x"}),
    ("all_to_all", {}),
    ("barrier", {}),
]


def values(outcomes: list[Outcome]) -> list[object]:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def check(world: World, replicas: int, workers: int, operations: list[Operation]) -> None:
    plan = plan_of(replicas, workers)
    want = [expected(plan, operation) for operation in operations]
    assert values(world.run(plan, perform_all, operations)) == [want] * workers


shapes = st.lists(st.integers(0, 70), max_size=3).map(tuple)
leaves = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5)
seeds = st.integers(0, 2**32 - 1)
styles = st.sampled_from(["replicas", "merged", "mixed"])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, list[Operation]]:
    replicas = draw(st.integers(1, 8))
    workers = draw(st.integers(1, replicas))
    reduces = st.builds(
        lambda seed, each, given: Reduce(seed, tuple(a for a, _ in each), tuple(b for _, b in each), given),
        seeds,
        leaves,
        styles,
    )
    sizes = st.lists(st.integers(0, 5000), min_size=workers, max_size=workers).map(tuple)
    others = st.one_of(
        st.builds(Gather, seeds, sizes),
        st.builds(AllToAll, seeds, sizes),
        st.builds(Barrier),
    )
    return replicas, workers, draw(st.lists(reduces | others, min_size=1, max_size=6))


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(job=jobs())
def test_random_sequences_of_calls(world: World, job: tuple[int, int, list[Operation]]) -> None:
    check(world, *job)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_supports_every_dtype_in_many_blocks(world: World, dtype: str) -> None:
    check(world, 5, 3, [Reduce(7, ((300, 333), (3, 5), (), (0, 4)), (dtype,) * 4, "replicas")])


@pytest.mark.ci(1, 2, 4, 6, 7)
@pytest.mark.parametrize("workers", range(1, 9))
def test_the_tutorial_model_with_any_number_of_workers(world: World, workers: int) -> None:
    check(world, 8, workers, [Reduce(3, CNN, ("float32",) * 6, "merged")])


@pytest.mark.ci
@pytest.mark.ci("loopback", "hosts, TLS")
def test_reduce_of_100_megabytes(world: World) -> None:
    big = Reduce(4, ((25_000_000,), (10,)), ("float32",) * 2)
    check(world, 2, 2, [Reduce(5, ((11,),), ("int8",)), big, Reduce(6, ((12,),), ("int64",))])


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_small_and_large_totals_in_any_order(world: World, workers: int) -> None:
    small = Reduce(5, ((11,), (0,), (40, 7)), ("float32", "float32", "int8"), "mixed")
    large = Reduce(6, ((70_000,), (3,)), ("float32", "float16"), "mixed")
    parts = AllToAll(1, (300_001, *range(1, workers)))
    cases = [small, small, large, parts, small, Barrier(), small, large, large, Gather(1, (9,) * workers)]
    cases += [small, parts, large, small]
    seeded = [case._replace(seed=seed) if "seed" in case._fields else case for seed, case in enumerate(cases)]
    check(world, 5, workers, seeded)


def test_blobs_larger_than_a_mailbox(world: World) -> None:
    edge = 1 << 19
    check(
        world,
        3,
        3,
        [
            Gather(1, (0, 3_500_000, 7)),
            Gather(2, (edge, edge - 1, edge + 1)),
            Gather(5, (0, 0, 0)),
        ],
    )


def test_reduce_without_elements(world: World) -> None:
    check(world, 3, 2, [Reduce(1, (), ()), Reduce(1, ((0,), (2, 0)), ("float32", "int8"))])


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_partials_may_be_strided(world: World, workers: int) -> None:
    case = Reduce(9, ((33, 5), (4,), ()), ("float32", "bfloat16", "float64"))
    plan = plan_of(3, workers)
    assert values(world.run(plan, reduce_strided, case)) == [expected(plan, case)] * workers


@pytest.mark.parametrize(("replicas", "workers"), [(1, 1), (4, 1), (3, 2)])
def test_a_total_is_read_only_and_aligned(world: World, replicas: int, workers: int) -> None:
    case = Reduce(9, ((33, 5), (4,), (2, 2)), ("float32", "bfloat16", "float64"))
    for leaves in values(world.run(plan_of(replicas, workers), properties_of_total, case)):
        for writeable, contiguous, misaligned in leaves:
            assert not writeable
            assert contiguous
            # With one replica, the total is the partial itself.
            assert misaligned == 0 or replicas == 1


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("size", [1000, 200_000])
def test_a_total_is_valid_until_the_next_call(world: World, workers: int, size: int) -> None:
    # The second call has another layout, so its partials have other places.
    first = Reduce(1, ((size,), (5,)), ("float32",) * 2)
    second = Reduce(2, ((7,), (size,)), ("float32",) * 2)
    plan = plan_of(workers, workers)
    waiting = set()

    def listen(control: Control, rank: int, report: PeerWait) -> None:
        if rank != 0 and rank not in waiting and 0 in report.workers:
            waiting.add(rank)
            control.release(0)

    outcomes = world.run(plan, keep_total, first, second, settings=Settings(quick_reports()), listen=listen)
    one, two = expected(plan, first), expected(plan, second)
    assert values(outcomes) == [[one, one, two]] + [[one, two]] * (workers - 1)


def quick_reports(timeout: float = 60.0) -> WaitPolicy:
    return WaitPolicy(report_every=0.01, timeout=timeout)


def test_a_surplus_release_is_an_error(world: World) -> None:
    """The worlds detect a message that a member would read as its next task."""

    def listen(control: Control, rank: int, _: PeerWait) -> None:
        for _ in range(2):
            control.release(1)

    with pytest.raises(AssertionError, match=r"member 1 was released \d+ times, but waited 1 times"):
        world.run(plan_of(2, 2), wait_for_the_last, settings=Settings(quick_reports()), listen=listen)


# Disagreement.

LEAVES = Reduce(1, ((3,), (4, 5)), ("float32", "int32"))
OTHER_SHAPE = LEAVES._replace(shapes=((3,), (4, 6)))
OTHER_DTYPE = LEAVES._replace(dtypes=("float32", "uint32"))
FEWER = LEAVES._replace(shapes=((3,),), dtypes=("float32",))
MUCH_BIGGER = LEAVES._replace(shapes=((3,), (4, 500_000)))


@pytest.mark.parametrize(
    ("calls", "workers", "others", "message"),
    [
        (
            [
                ("reduce", {"case": LEAVES, "what": "step 3 of fit 1"}),
                ("gather", {"blob": b"", "what": "evaluate 1"}),
            ],
            [4, 7],
            (7,),
            "worker 4 calls reduce for step 3 of fit 1 while worker 7 calls gather for evaluate 1",
        ),
        (
            [("barrier", {}), ("gather", {"blob": b"x"}), ("barrier", {})],
            [0, 1, 2],
            (1,),
            "workers 0 and 2 call barrier while worker 1 calls gather",
        ),
        (
            [("barrier", {}), ("gather", {"blob": b"a" * 2_000_000})],
            [5, 6],
            (6,),
            "worker 5 calls barrier while worker 6 calls gather",
        ),
        (
            [("reduce", {"case": LEAVES, "check": bytes([1, last])}) for last in (2, 3, 2, 3)],
            [0, 1, 2, 3],
            (1, 3),
            "workers 0 and 2 from 0102 while workers 1 and 3 from 0103",
        ),
        (
            [("reduce", {"case": LEAVES, "check": b"\0" * length}) for length in (64, 63)],
            [0, 1],
            (1,),
            f"worker 0 from {'00' * 64} while worker 1 from {'00' * 63}",
        ),
        (
            [("reduce", {"case": LEAVES}), ("reduce", {"case": OTHER_SHAPE}), ("reduce", {"case": LEAVES})],
            [0, 1, 2],
            (1,),
            "array 1 is int32 (4, 5) on workers 0 and 2 while int32 (4, 6) on worker 1",
        ),
        (
            [("reduce", {"case": LEAVES}), ("reduce", {"case": OTHER_DTYPE, "check": b"1"})],
            [0, 1],
            (1,),
            "array 1 is int32 (4, 5) on worker 0 while uint32 (4, 5) on worker 1",
        ),
        (
            [("reduce", {"case": FEWER}), ("reduce", {"case": LEAVES})],
            [0, 1],
            (1,),
            "array 1 is missing on worker 0 while int32 (4, 5) on worker 1",
        ),
        (
            [("reduce", {"case": MUCH_BIGGER}), ("reduce", {"case": LEAVES})],
            [0, 1],
            (1,),
            "array 1 is int32 (4, 500000) on worker 0 while int32 (4, 5) on worker 1",
        ),
    ],
)
def test_disagreement(
    world: World, calls: list[object], workers: list[int], others: tuple[int, ...], message: str
) -> None:
    texts = values(world.run(plan_of(len(workers), workers), different_calls, calls))
    assert len(set(texts)) == 1
    assert str(texts[0]).startswith(f"{others} differ: ")
    assert message in str(texts[0])


def test_calls_are_possible_after_a_disagreement(world: World) -> None:
    grown = ("reduce", {"case": LEAVES})
    for calls in ([grown, ("reduce", {"case": OTHER_SHAPE})], [("barrier", {}), grown]):
        for text in values(world.run(plan_of(2, 2), different_calls, calls)):
            assert str(text).startswith("(1,) differ: ")


def test_names_of_calls_are_not_compared(world: World) -> None:
    calls = [("gather", {"blob": blob_of(1, at, at), "what": f"call of {at}"}) for at in range(3)]
    assert values(world.run(plan_of(3, 3), call, calls)) == [None] * 3


# The notice.


def test_all_members_see_a_notice_after_the_same_call(world: World) -> None:
    waiting = set()

    def listen(control: Control, rank: int, wait: PeerWait) -> None:
        # Before this call, a member may wait for one that starts later.
        if "call 3" in wait.what:
            waiting.add(rank)
        if waiting == {0, 1}:
            # The first member is already in the call, so it has read the old notice.
            waiting.add(2)
            control.post_notice(7)
            control.release(2)

    seen = values(world.run(plan_of(3, 3), notices, 6, settings=Settings(quick_reports()), listen=listen))
    assert seen == [[0, 0, 0, 0, 0, 7, 7]] * 3


# The end of a view.


@pytest.mark.parametrize(("kind", "options"), CALLS)
@pytest.mark.parametrize("workers", [1, 3])
def test_abort_before_a_call(world: World, workers: int, kind: str, options: dict[str, object]) -> None:
    calls = [(kind, options)] * workers
    for outcome in world.run(plan_of(workers, workers), abort_twice_then_call, calls):
        assert outcome.error is PeerLostError
        assert outcome.message == "the first reason: ä"


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_abort_from_outside_while_members_wait(world: World, kind: str, options: dict[str, object]) -> None:
    waiting = set()

    def listen(control: Control, rank: int, wait: PeerWait) -> None:
        # Before, one of the two may wait for the other one, too.
        if wait.workers == (2,):
            waiting.add(rank)
        if waiting == {0, 1}:
            control.abort("worker 2 exited with status 1")

    calls = [(kind, {**options, "what": "step 4"})] * 2
    outcomes = world.run(
        plan_of(3, 3), call, [*calls, None], settings=Settings(quick_reports()), listen=listen, absent=[2]
    )
    assert outcomes[2].error is None
    for outcome in outcomes[:2]:
        assert outcome.error is PeerLostError
        assert outcome.message == "worker 2 exited with status 1"
        assert {(wait.what, wait.workers) for wait in outcome.waits} >= {(f"{kind} for step 4", (2,))}


def test_a_closed_member_can_abort_the_view(world: World) -> None:
    outcomes = world.run(plan_of(2, 2), abort_after_close_of_one, absent=[1])
    assert outcomes[0].error is None
    assert outcomes[1].error is PeerLostError
    assert outcomes[1].message == "closed first"


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_calls_of_a_closed_member_raise(world: World, kind: str, options: dict[str, object]) -> None:
    (outcome,) = world.run(plan_of(1, 1), call_after_close, kind, options)
    assert outcome.error is InternalError
    assert "closed" in outcome.message


def test_members_do_not_wait_for_a_closed_member(world: World) -> None:
    outcomes = world.run(plan_of(3, [8, 5, 6]), leave_early)
    assert outcomes[0].error is None
    for outcome in outcomes[1:]:
        assert outcome.error is PeerLostError
        assert "worker 8 has left while others wait in gather for evaluate 1" in outcome.message


@pytest.mark.parametrize(("kind", "options"), CALLS)
def test_a_wait_ends_at_the_timeout(world: World, kind: str, options: dict[str, object]) -> None:
    settings = Settings(WaitPolicy(report_every=5.0, timeout=20.0), clock_step=6.0)
    calls = [(kind, {**options, "what": "step 5"}), None]
    stuck, other = world.run(plan_of(2, [3, 9]), call, calls, settings=settings, absent=[1])
    assert other.error is None
    assert stuck.error is PeerStuckError
    assert stuck.message.startswith(f"waited 24.0 s for worker 9 in {kind} for step 5. ")
    assert stuck.waits == tuple(
        PeerWait(f"{kind} for step 5", (9,), seconds) for seconds in (6.0, 12.0, 18.0)
    )


def test_waiting_time_is_counted(world: World) -> None:
    reported = 0.0

    def listen(control: Control, rank: int, wait: PeerWait) -> None:
        nonlocal reported
        if rank == 0 and not reported:
            reported = wait.seconds
            control.release(1)

    settings = Settings(WaitPolicy(timeout=600.0, report_every=0.3))
    outcomes = world.run(plan_of(2, 2), wait_for_the_last, settings=settings, listen=listen)
    (before, waited), (before_last, waited_last) = values(outcomes)
    assert before == before_last == 0
    assert reported >= 0.3
    assert waited >= reported
    assert waited_last < waited


def test_a_timeout_may_be_lowered_to_less_than_a_wait_has_lasted() -> None:
    clock, policy = VirtualClock(), WaitPolicy(timeout=600.0, report_every=2.0)

    def lower(wait: PeerWait) -> None:
        policy.timeout = 1.0

    wait = CallWait(CollectiveCall("barrier", "step 5"), policy, lower, clock)
    clock.advance(3.0)
    assert wait.check((2,)) == 0
    with pytest.raises(PeerStuckError):
        wait.check((2,))


@pytest.mark.ci("loopback", "hosts, TLS")
def test_a_timeout_ends_the_view_for_all_members(world: World) -> None:
    calls = [("barrier", {"what": "step 5"})] * 2 + [None]
    # The time is limited once the others have arrived, however long that takes on a busy machine.
    settings = Settings(WaitPolicy(report_every=0.02, timeout=600.0), timeout_without=((2,), 1.0))
    outcomes = world.run(plan_of(3, 3), call, calls, settings=settings, absent=[2])
    assert outcomes[2].error is None
    assert PeerStuckError in (outcomes[0].error, outcomes[1].error)
    for outcome in outcomes[:2]:
        assert outcome.error in (PeerStuckError, PeerLostError)
        assert re.search(r"waited \d+\.\d s for worker 2 in barrier for step 5", outcome.message)


# Invalid arguments.


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        ("reduce", {"case": SMALL, "check": b"x" * 65}, InternalError, "65 bytes"),
        ("reduce", {"case": SMALL._replace(dtypes=("bool",))}, ModelError, "array 0 .* dtype bool"),
        ("reduce", {"case": SMALL._replace(dtypes=("complex64",))}, ModelError, "dtype complex64"),
        ("reduce", {"case": SMALL._replace(dtypes=(">f4",))}, ModelError, "dtype >f4"),
        ("all_to_all", {"parts": [[], []]}, InternalError, "2 parts for 1 members"),
    ],
)
def test_invalid_arguments_raise(
    world: World, kind: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    (outcome,) = world.run(plan_of(1, 1), call, [(kind, options)])
    assert outcome.error is error
    assert re.search(message, outcome.message)
