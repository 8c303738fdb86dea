import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.topology import place, split_evenly


@given(st.integers(1, 16).flatmap(lambda r: st.tuples(st.just(r), st.integers(1, r))))
def test_every_replica_has_one_owner_and_ranges_are_contiguous_and_balanced(sizes: tuple[int, int]) -> None:
    replicas, count = sizes
    workers = tuple(range(10, 10 + count))
    view = place(replicas, workers)
    ranges = [view.replicas_of(worker) for worker in workers]
    assert [replica for owned in ranges for replica in owned] == list(range(replicas))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert view.chief == 10
    assert view.replicas == replicas


def test_a_worker_that_owns_nothing_has_an_empty_range() -> None:
    assert list(place(2, (0, 1)).replicas_of(7)) == []


def test_more_workers_than_replicas_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"3 workers cannot share 2 replicas.*ask for 2 workers or fewer"):
        place(2, (0, 1, 2))


@pytest.mark.parametrize(("replicas", "workers"), [(0, (0,)), (1, ())])
def test_a_job_needs_a_worker_and_a_replica(replicas: int, workers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="at least one worker and one replica"):
        place(replicas, workers)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_split_evenly(total: int, parts: int) -> None:
    counts = split_evenly(total, parts)
    assert sum(counts) == total
    assert sorted(counts, reverse=True) == list(counts)
    assert counts[0] - counts[-1] <= 1
