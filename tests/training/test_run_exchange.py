"""What the workers of a run add up and compare, without any backend: each worker is a thread."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.loopback import Hub
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DisagreementError, ModelError
from lockstep.keras.per_replica import Returned, Spec
from lockstep.keras.replica_run.results import Results
from lockstep.keras.replica_run.run_rounds import RunRounds
from lockstep.keras.synchronization import gathered_scalars, spread
from lockstep.observability.bus import Bus
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext

REPLICAS = 3


def together(act: Callable[[int, RunRounds], Any]) -> list[Any]:
    """Let two workers act, of which the first has replicas 0 and 1; return what each gives, or its error."""
    view = place(REPLICAS, (0, 1))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=20.0))
    contexts = [JobContext(worker, 0, 1, Bus(SystemClock(), worker)) for worker in (0, 1)]
    jobs = [Job(context, (view, hub.member(context.worker))) for context in contexts]

    def one(job: Job) -> Any:
        try:
            return act(job.worker, RunRounds(job, np.asarray))
        except (DisagreementError, ModelError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(one, jobs))


class Examples:
    """Values of which only the number of examples counts."""

    specs = ()

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts

    def of(self, replica: int) -> Sequence[Any]:
        return ()

    def leaf(self, position: int, replica: int) -> Any:
        return None

    def examples(self, replica: int) -> int | None:
        return self._counts[replica]

    def check(self) -> bytes:
        return b"same"


def test_a_replica_without_examples_computes_too_and_numbers_go_to_everybody() -> None:
    computed: list[int] = []

    def compute(replica: int) -> dict[str, Any]:
        computed.append(replica)
        return {"metric": np.full(2, replica % 2 + 1.0), "output/0": np.float32(replica + 0.5)}

    def act(worker: int, exchange: RunRounds) -> Any:
        total = exchange.total(exchange.round("a run", compute, [Examples([1, 1, 0])]))
        return total["metric"].tolist(), [float(n) for n in gathered_scalars(total["output/0"], "float32")]

    assert together(act) == [([4.0, 4.0], [0.5, 1.5, 2.5])] * 2
    assert sorted(computed) == [0, 1, 2]


def test_what_is_joined_has_the_rows_of_all_in_the_order_of_the_replicas() -> None:
    def act(worker: int, exchange: RunRounds) -> Any:
        counts = [2, 1, 0]
        this = exchange.round("a run", lambda r: {"gather/0/0": np.full((counts[r], 1), r)})
        return exchange.total(this)["gather/0/0"].tolist()

    assert together(act) == [[[0], [0], [1]]] * 2


def test_where_there_is_nothing_to_add_up_nobody_waits() -> None:
    def act(worker: int, exchange: RunRounds) -> Any:
        return exchange.total(exchange.round("a run", lambda r: {})) if worker == 0 else None

    assert together(act) == [{}, None]


@pytest.mark.parametrize(
    ("name", "seed"), [(lambda worker: f"metric/{worker}", 0), (lambda worker: "metric/0", None)]
)
def test_workers_that_compute_something_else_are_told_apart(name: Any, seed: int | None) -> None:
    def act(worker: int, exchange: RunRounds) -> Any:
        own = worker if seed is None else seed
        return exchange.total(exchange.round("a run", lambda r: {name(worker): np.ones(1)}, seed=own))

    for error in together(act):
        assert isinstance(error, DisagreementError)
        assert "do not compute from the same data in reduce for a run" in str(error)


def test_replicas_of_one_worker_that_compute_something_else_are_named() -> None:
    def act(worker: int, exchange: RunRounds) -> Any:
        this = exchange.round("a run", lambda r: {"metric/0": np.ones(1)} if r else {})
        return {} if worker else exchange.total(this)

    error, _ = together(act)
    assert isinstance(error, ModelError)
    assert "compute different things (metric/0)" in str(error)


def test_what_is_added_up_has_one_shape_on_all_replicas() -> None:
    def act(worker: int, exchange: RunRounds) -> Any:
        this = exchange.round("a run", lambda r: {"merge/0": np.ones(r + 1)})
        return {} if worker else exchange.total(this)

    error, _ = together(act)
    assert isinstance(error, ModelError)
    assert "values of the shapes [1] and [2] (replica 1): give them the same shape" in str(error)


def test_several_leaves_are_reduced_at_once_and_those_without_rows_do_not_count() -> None:
    rows = {0: np.array([1.0, 2.0]), 1: np.array([3.0]), 2: np.array([])}

    def act(worker: int, exchange: RunRounds) -> Any:
        own = [0, 1] if worker == 0 else [2]
        column = {replica: rows[replica] for replica in own}
        values = Returned((Spec("float64", (None,)),) * 2, (column, column))
        results = Results(exchange, np.asarray, REPLICAS)
        means = results.reduce_all("mean", [(values, 0), (values, 1)], axis=0)
        return [float(mean) for mean in means], results.gather(values, 0, 0).tolist()

    assert together(act) == [([2.0, 2.0], [1.0, 2.0, 3.0])] * 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
def test_numbers_travel_bit_by_bit(dtype: str) -> None:
    numbers = [np.array(number).astype(dtype) for number in (-0.0, 1.5, np.nan if dtype[0] == "f" else 7)]
    bits = sum(spread(number, replica, 3) for replica, number in enumerate(numbers))
    found = gathered_scalars(np.asarray(bits), dtype)
    assert [number.tobytes() for number in found] == [number.tobytes() for number in numbers]
