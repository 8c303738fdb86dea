"""What rounds promise, also in a new view; each worker is a thread."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DisagreementError, LockstepError, ModelError, PeerLostError
from lockstep.keras.backends.contract import Total
from lockstep.keras.backends.packing import Packing
from lockstep.keras.replica_run.results import tree_sum
from lockstep.keras.rounds import Round, gathered_scalars
from lockstep.keras.scaled_sums import limits_of, scales_of, sum_of, summand_of
from lockstep.observability.bus import Bus
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext
from lockstep.worker.peers import Alone, EnteredView
from thread_hub import Hub

REPLICAS = 5


def jobs(workers: int) -> list[Job]:
    view = place(REPLICAS, tuple(range(workers)))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=60.0))
    contexts = [
        JobContext(worker, Bus(SystemClock(), worker), JobSettings(workers=workers, threads=1))
        for worker in range(workers)
    ]
    return [Job(context, (view, hub.member(context.worker))) for context in contexts]


def together(members: list[Job], act: Callable[[Job], Any]) -> list[Any]:
    """Run `act` on all workers at once; return their results or errors."""

    def result_of(job: Job) -> Any:
        try:
            return act(job)
        except LockstepError as error:
            return error

    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(result_of, members))


class MadeRound(Round):
    """A round in which a replica computes what `partial_of` returns; options replace other methods."""

    def __init__(self, partial_of: Callable[[int], Any], worker: int = 0, **options: Any) -> None:
        super().__init__("step 1 of fit 1", worker, layouts=options.pop("layouts", None))
        self.partial_of = partial_of
        vars(self).update(options)

    def compute(self, replica: int) -> Any:
        return self.partial_of(replica)


def total_of(job: Job, partial_of: Callable[[int], Any], **options: Any) -> Total:
    round_ = MadeRound(partial_of, job.worker, **options)
    return job.exchange(round_.sum, round_.catching_up)


NUMBERS = [1e8, 1.0, -1e8, 0.1, 3e-5]
"""Their sum in float32 depends on the order."""


def gradients(replica: int) -> dict[str, Any]:
    return {"b": np.float32([NUMBERS[replica], replica]), "a": np.full((2, 2), NUMBERS[replica], "float64")}


def with_bytes(total: Total) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in total.items()}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_totals_have_the_bits_of_the_tree_on_any_number_of_workers(workers: int) -> None:
    computed: list[int] = []

    def compute(replica: int) -> dict[str, Any]:
        computed.append(replica)
        return gradients(replica)

    def act(job: Job) -> Any:
        return with_bytes(total_of(job, compute))

    wanted = {name: tree_sum([gradients(r)[name] for r in range(REPLICAS)]).tobytes() for name in "ab"}
    assert together(jobs(workers), act) == [wanted] * workers
    assert sorted(computed) == list(range(REPLICAS))


def test_a_replica_that_contributes_nothing_counts_as_zeros_of_the_layout() -> None:
    def act(job: Job) -> Any:
        # A worker without a replica that contributes computes replica 0 as a sample.
        round_ = MadeRound(
            lambda replica: {"b": np.float32([1, 2])},
            job.worker,
            contributes=lambda replica: replica == 0,
        )
        return job.exchange(round_.sum)["b"].tolist(), sorted(round_.started)

    first, *others = together(jobs(3), act)
    assert first == ([1, 2], [0])
    assert others == [([1, 2], [])] * 2


def test_numbers_and_rows_reach_every_worker_in_the_order_of_replicas() -> None:
    def compute(replica: int) -> dict[str, Any]:
        return {"output/0": np.float32(replica / 3), "gather/1/0": np.full((2, replica % 2 + 1), replica)}

    def act(job: Job) -> Any:
        total = total_of(job, compute)
        numbers = gathered_scalars(total["output/0"], "float32")
        return [number.tobytes() for number in numbers], total["gather/1/0"].tolist()

    row = [0, 1, 1, 2, 3, 3, 4]
    wanted = [np.float32(replica / 3).tobytes() for replica in range(REPLICAS)], [row, row]
    assert together(jobs(2), act) == [wanted] * 2


def test_a_difference_of_the_data_is_an_error_on_all_workers() -> None:
    def act(job: Job) -> Any:
        return total_of(job, gradients, digest_of_inputs=lambda: bytes([job.worker]))

    errors = together(jobs(2), act)
    assert [type(error) for error in errors] == [DisagreementError] * 2


def test_a_sum_begins_when_nothing_reads_the_last_total() -> None:
    def act(job: Job) -> Any:
        calls: list[str] = []

        def compute(replica: int) -> dict[str, Any]:
            calls.append(f"compute {replica}")
            return gradients(replica)

        class Watched(MadeRound):
            def _reduce(self, *arguments: Any) -> None:
                calls.append("reduce")
                super()._reduce(*arguments)

        settle = partial(calls.append, "settle")
        round_ = Watched(compute, job.worker, _settle=settle, _lap=calls.append)
        job.exchange(round_.sum)
        return calls

    assert together(jobs(1), act) == [
        ["wait", *(f"compute {replica}" for replica in range(REPLICAS)), "settle", "compute", "reduce"]
    ]


def test_the_check_depends_on_the_inputs_the_names_and_the_form() -> None:
    def check(names: str, inputs: bytes = b"", form: str | None = None) -> bytes:
        round_ = MadeRound(
            lambda replica: {name: np.ones(1) for name in names},
            digest_of_inputs=lambda: inputs,
            form=lambda: form,
        )
        round_.begin([0])
        return round_.check()

    others = [check("ac"), check("ab", inputs=b"x"), check("ab", form="x")]
    assert len({check("ab"), *others}) == 4
    assert check("ab") == check("ba")


def test_partials_are_kept_after_an_error_of_another_replica() -> None:
    (job,) = jobs(1)
    computed: list[int] = []

    def compute(replica: int) -> dict[str, Any]:
        if replica == 3 and computed.count(3) == 0:
            computed.append(replica)
            raise ModelError("not yet")
        computed.append(replica)
        return gradients(replica)

    round_ = MadeRound(compute)
    with pytest.raises(ModelError, match="not yet"):
        job.exchange(round_.sum)
    assert job.exchange(round_.sum)["b"][1] == 10
    assert computed == [*range(REPLICAS - 1), 3, 4]


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (
            lambda r: {"a": np.ones(1), **({"b": np.ones(1)} if r else {})},
            r"different things in one step \(b\): do not",
        ),
        (lambda r: {"a": np.ones(r + 1)}, r"the shapes \[1\] and \[2\] \(replica 1\)"),
    ],
)
def test_replicas_of_one_worker_that_differ_are_refused_by_name(compute: Any, said: str) -> None:
    (job,) = jobs(1)
    with pytest.raises(ModelError, match="step 1 of fit 1: .*" + said):
        total_of(job, compute, advice="do not")


@pytest.mark.parametrize(
    ("names", "forms", "said"),
    [
        (lambda r: ["a", "b"] if r else ["a"], lambda r: "", r"in one step \(b\): do not"),
        (
            lambda r: ["a"],
            lambda r: "sgd updates w" if r else "nothing",
            r"in one step \(nothing, sgd updates w\): do not",
        ),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_replicas_that_take_different_paths_are_refused_by_name_on_all_workers(
    names: Any, forms: Any, said: str, workers: int
) -> None:
    def act(job: Job) -> Any:
        computed = [0]

        def compute(replica: int) -> dict[str, Any]:
            computed[0] = replica // 3
            return {name: np.ones(2) for name in names(computed[0])}

        def form() -> str:
            return forms(computed[0])

        return total_of(job, compute, form=form, advice="do not")

    for error in together(jobs(workers), act):
        assert isinstance(error, ModelError)
        assert re.search("step 1 of fit 1: replicas compute different things " + said, str(error))


def test_values_that_all_replicas_have_are_not_summed() -> None:
    """One replica has no examples, and another contributes nothing."""
    values = {
        "equal/0/a": np.array([[2**40, -1], [3, -(2**62)]], "int64"),
        "equal/1/b": np.array([True, False]),
        "equal/2/c": np.array(7, "uint32"),
        "other": np.ones(2),
    }

    def act(job: Job) -> Any:
        return total_of(
            job,
            lambda replica: values | ({"equal/2/c": np.array(8, "uint32")} if replica == 3 else {}),
            contributes=lambda replica: replica != 2,
            counts=lambda replica: replica != 3,
        )

    for total in together(jobs(3), act):
        assert {name: array.tolist() for name, array in total.items()} == {
            name: (array * (4 if name == "other" else 1)).tolist() for name, array in values.items()
        }
        assert [total[name].dtype for name in values] == [array.dtype for array in values.values()]


def test_sums_of_small_integers_have_equal_bits_on_any_number_of_workers() -> None:
    """Their errors are within the bound; a block with a number that is not finite has none."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(7, 100)).astype("float32") * 10.0**r for r in range(REPLICAS)]
    arrays[1][0, 0], arrays[2][6, 99] = np.inf, np.nan
    wanted = np.sum(arrays, axis=0, dtype="float64").ravel()

    def act(job: Job) -> Any:
        return with_bytes(total_of(job, lambda r: {"scaled/a": arrays[r], "b": np.ones(2, "float32")}))

    (alone,) = together(jobs(1), act)
    for workers in (2, 3, 5):
        assert together(jobs(workers), act) == [alone] * workers
    found = np.frombuffer(alone["scaled/a"], "float32")
    assert np.isnan(np.concatenate([found[:256], found[512:]])).all()
    scale = np.sum([np.abs(array.ravel()[256:512]).max() for array in arrays]) / (127 - REPLICAS / 2)
    errors = np.abs(found - wanted)[256:512]
    assert 0 < np.max(errors) <= scale * REPLICAS / 2
    assert len(set(np.rint(found[256:512] / np.float32(scale)))) > 20


@pytest.mark.parametrize("changing", [None, 3])
def test_rare_arrays_that_are_zeros_on_all_replicas_are_not_sent(changing: int | None) -> None:
    """A replica that has another number in one of them is noticed by all, also if that is not a number."""

    def act(job: Job) -> Any:
        round_ = MadeRound(
            lambda r: {
                "rare/a": np.full((2, 3), np.nan if r == changing else 0, "float32"),
                "rare/b": np.zeros(4, "float16"),
                "c": np.ones(2, "float32"),
            },
            job.worker,
        )
        total = job.exchange(round_.sum)
        return round_.summed, with_bytes(total)

    (alone,) = together(jobs(1), act)
    assert together(jobs(3), act) == [alone] * 3
    names, total = alone
    assert names == ["c"] + (["rare/a"] if changing else [])
    assert total["rare/b"] == bytes(8)
    assert np.isnan(np.frombuffer(total["rare/a"], "float32")).all() == bool(changing)
    assert len(total["rare/a"]) == 24


@given(st.integers(1, 70), st.sampled_from([1e-45, 1e-38, 1e-30, 1.0, 1e30]), st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_sums_of_small_integers_never_overflow(replicas: int, size: float, seed: int) -> None:
    rows = np.random.default_rng(seed).choice([-1.0, -0.5, 0.0, 0.49, 1.0], size=(replicas, 300)) * size
    rows[:, 0] = size
    arrays = list(rows.astype("float32"))
    scales = scales_of(tree_sum([limits_of(array) for array in arrays]), replicas)
    summands = [summand_of(array, scales, replicas) for array in arrays]
    total = tree_sum(summands)
    np.testing.assert_array_equal(total, np.sum(summands, axis=0, dtype="int64"))
    errors = np.abs(sum_of(total, scales, "float64") - np.sum(arrays, axis=0, dtype="float64"))
    assert np.all(errors <= np.repeat(scales, 256)[:300] * (replicas / 2 + 0.01) + 1e-35)


@pytest.mark.parametrize("values", [[6, 6, 6, 6, 6], [1, 3, 2, 2, 2], [0, 0, 0, 0, 256], [-1, -1, -1, -1, 1]])
def test_values_that_differ_are_refused_on_all_workers(values: list[int]) -> None:
    """Also if their sum is that of equal ones."""

    def act(job: Job) -> Any:
        return total_of(job, lambda replica: {"equal/0/layer/bits": np.array([values[replica]], "int16")})

    for found in together(jobs(2), act):
        if len(set(values)) == 1:
            assert found["equal/0/layer/bits"].tolist() == values[:1]
        else:
            assert "replicas set the int16 variable 'layer/bits' to different values" in str(found)


def test_each_round_has_the_layout_of_its_own_arrays() -> None:
    """A replica without examples contributes zeros like the others in this round, not in an earlier one."""
    (job,) = jobs(1)
    layouts: dict[Any, Any] = {}
    for name, size in (("a", 2), ("b", 3), ("a", 2)):
        computed = {0: {name: np.ones(size)}}
        total = total_of(
            job,
            computed.__getitem__,
            contributes=computed.__contains__,
            form=lambda: "",
            layouts=layouts,
        )
        assert {n: array.tolist() for n, array in total.items()} == {name: [1.0] * size}
    assert len(layouts) == 2


class NextPlace(Alone):
    """A membership with a prepared next view."""

    def __init__(self, following: EnteredView) -> None:
        self._following = following

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        return self._following


def test_in_the_next_view_a_worker_computes_only_the_replicas_of_the_lost_worker() -> None:
    survivor, other = jobs(2)
    alone = place(REPLICAS, (0,))
    survivor.membership = NextPlace((alone, Hub(ReducePlan.of(alone)).member(0)))
    computed: list[int] = []

    def compute(replica: int) -> dict[str, Any]:
        computed.append(replica)
        if len(computed) == 3:
            other.communicator.abort("worker 1 ended")
        return gradients(replica)

    total = total_of(survivor, compute)
    assert total["b"][1] == 10
    assert computed == list(range(REPLICAS))


def test_arrays_that_only_some_replicas_compute_are_named_also_if_others_are_packed() -> None:
    packing = Packing.of({name: ((3,), np.dtype("float32")) for name in "abc"})
    packed = packing.packed({name: np.zeros(3, "float32") for name in "abc"}, _joined)

    def begin(**other: tuple[int, ...]) -> None:
        computed = [packed, {name: np.zeros(shape, "float32") for name, shape in other.items()}]
        MadeRound(computed.__getitem__, parts=packing.unpacked).begin([0, 1])

    with pytest.raises(
        ModelError, match=r"step 1 of fit 1: replicas compute different things in one step \(b, d\): "
    ):
        begin(a=(3,), c=(3,), d=(3,))
    with pytest.raises(ModelError, match=r"replicas compute different things in one step \(b\): "):
        begin(a=(3,), b=(4,), c=(3,))


def _joined(parts: Any) -> Any:
    return np.concatenate([np.pad(array, (0, zeros)) for array, zeros in parts])
