"""The rounds of `strategy.run` without a backend: each worker is a thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.data.batch import GlobalBatch
from lockstep.errors import DataError, DisagreementError, ModelError
from lockstep.keras.input.sources import BatchValues
from lockstep.keras.per_replica import ReturnedValues, Spec
from lockstep.keras.replica_run.results import ResultCombiner
from lockstep.keras.replica_run.run_rounds import FunctionRound, RunRounds
from lockstep.keras.rounds import gathered_scalars, spread
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext
from thread_hub import Hub

REPLICAS = 3


def together(act: Callable[[int, RunRounds], Any]) -> list[Any]:
    """Run `act` on two workers, of which the first owns replicas 0 and 1; return their results or errors."""
    view = place(REPLICAS, (0, 1))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=60.0))
    contexts = [
        JobContext(worker, Bus(SystemClock(), worker), JobSettings(workers=2, threads=1)) for worker in (0, 1)
    ]
    jobs = [Job(context, (view, hub.member(context.worker))) for context in contexts]

    def one(job: Job) -> Any:
        try:
            return act(job.worker, RunRounds(job, np.asarray, lambda: 0))
        except (DisagreementError, ModelError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, jobs))


class MadeRound(FunctionRound):
    """A round in which a replica computes what `partial_of` returns."""

    def __init__(
        self, rounds: RunRounds, partial_of: Callable[[int], Any], sources: Any = (), seed: int = 0
    ) -> None:
        super().__init__(rounds, "a run", sources, seed)
        self.partial_of = partial_of

    def compute(self, replica: int) -> Any:
        return self.partial_of(replica)


class Examples:
    """Values with only a number of examples."""

    anywhere = True

    specs = ()

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def of(self, replica: int) -> Sequence[Any]:
        return ()

    def is_here(self, replica: int) -> bool:
        return True

    def leaf(self, position: int, replica: int) -> Any:
        return None

    def examples(self, replica: int) -> int | None:
        return self._counts[replica]

    def check(self) -> bytes:
        return b"same"


def test_a_replica_without_examples_computes_and_every_worker_gets_all_numbers() -> None:
    computed: list[int] = []

    def compute(replica: int) -> dict[str, Any]:
        computed.append(replica)
        return {"metric": np.full(2, replica % 2 + 1.0), "output/0": np.float32(replica + 0.5)}

    def act(worker: int, rounds: RunRounds) -> Any:
        total = rounds.total(MadeRound(rounds, compute, [Examples([1, 1, 0])]))
        return total["metric"].tolist(), [float(n) for n in gathered_scalars(total["output/0"], "float32")]

    assert together(act) == [([4.0, 4.0], [0.5, 1.5, 2.5])] * 2
    assert sorted(computed) == [0, 1, 2]


def test_gathered_arrays_have_the_rows_of_all_replicas_in_order() -> None:
    def act(worker: int, rounds: RunRounds) -> Any:
        counts = [2, 1, 0]
        round_ = MadeRound(rounds, lambda r: {"gather/0/0": np.full((counts[r], 1), r)})
        return rounds.total(round_)["gather/0/0"].tolist()

    assert together(act) == [[[0], [0], [1]]] * 2


def test_without_contributions_no_worker_waits_for_another() -> None:
    def act(worker: int, rounds: RunRounds) -> Any:
        return rounds.total(MadeRound(rounds, lambda r: {})) if worker == 0 else None

    assert together(act) == [{}, None]


@pytest.mark.parametrize(
    ("name", "seed"), [(lambda worker: f"metric/{worker}", 0), (lambda worker: "metric/0", None)]
)
def test_workers_that_compute_different_things_disagree(name: Any, seed: int | None) -> None:
    def act(worker: int, rounds: RunRounds) -> Any:
        own = worker if seed is None else seed
        return rounds.total(MadeRound(rounds, lambda r: {name(worker): np.ones(1)}, seed=own))

    for error in together(act):
        assert isinstance(error, DisagreementError)
        assert "do not compute from the same data in reduce for a run" in str(error)


def test_replicas_of_one_worker_that_compute_different_things_are_refused() -> None:
    def act(worker: int, rounds: RunRounds) -> Any:
        round_ = MadeRound(rounds, lambda r: {"metric/0": np.ones(1)} if r else {})
        return {} if worker else rounds.total(round_)

    error, _ = together(act)
    assert isinstance(error, ModelError)
    assert "compute different things in one step (metric/0)" in str(error)


def test_arrays_to_sum_must_have_one_shape() -> None:
    def act(worker: int, rounds: RunRounds) -> Any:
        round_ = MadeRound(rounds, lambda r: {"merge/0": np.ones(r + 1)})
        return {} if worker else rounds.total(round_)

    error, _ = together(act)
    assert isinstance(error, ModelError)
    assert "values of the shapes [1] and [2] (replica 1): give them the same shape" in str(error)


def test_several_leaves_share_a_reduce_and_empty_ones_have_no_weight() -> None:
    rows = {0: np.array([1.0, 2.0]), 1: np.array([3.0]), 2: np.array([])}

    def act(worker: int, rounds: RunRounds) -> Any:
        own = [0, 1] if worker == 0 else [2]
        column = {replica: rows[replica] for replica in own}
        values = ReturnedValues((Spec("float64", (None,)),) * 2, (column, column))
        results = ResultCombiner(rounds, np.asarray, REPLICAS)
        means = results.reduce_all("mean", [(values, 0), (values, 1)], axis=0)
        return [float(mean) for mean in means], results.gather(values, 0, 0).tolist()

    assert together(act) == [([2.0, 2.0], [1.0, 2.0, 3.0])] * 2


def test_rows_that_cannot_be_read_end_a_gather_with_their_own_error() -> None:
    def read(rows: slice) -> Any:
        raise DataError("a map of a tf.data pipeline failed")

    def act(worker: int, rounds: RunRounds) -> Any:
        batch = GlobalBatch(REPLICAS, REPLICAS, read, lambda: b"")
        values = BatchValues(batch, 0, (Spec("float64", (None,)),), {0: [np.zeros(1)]})
        with pytest.raises(DataError, match=r"a map of a tf\.data pipeline failed"):
            ResultCombiner(rounds, np.asarray, REPLICAS).gather(values, 0, 0)

    assert together(act) == [None, None]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_numbers_are_transferred_exactly(dtype: str) -> None:
    numbers = [np.array(number).astype(dtype) for number in (-0.0, 1.5, np.nan if dtype[0] == "f" else 7)]
    bits = sum(spread(number, replica, 3) for replica, number in enumerate(numbers))
    found = gathered_scalars(np.asarray(bits), dtype)
    assert [number.tobytes() for number in found] == [number.tobytes() for number in numbers]
