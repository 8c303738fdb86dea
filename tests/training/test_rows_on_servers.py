"""Tables whose rows are on parameter servers only: in jobs, and in one process."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import keras
import numpy as np
import pytest

import lockstep
from lockstep.collectives.contract import WaitPolicy
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import DataError, DisagreementError, ModelError
from lockstep.keras.parameter_server import server_embedding, server_tables
from lockstep.keras.parameter_server.server_tables import ServerTable, ServerTables, rows_read_together
from lockstep.keras.parameter_server.table_rows import VALUES, TableRows, ranges_of
from lockstep.observability.bus import Bus
from lockstep.parameter_server.row_digest import digest_of_rows
from lockstep.protocol.job_spec import JobSettings
from lockstep.system.clock import SystemClock
from lockstep.topology import place
from lockstep.worker.job import Job, JobContext, by_itself
from thread_hub import Hub

Launch = Callable[..., Any]
SCRIPT, IN_FUNCTIONS = "rows_on_servers.py", "rows_in_functions.py"


def on(*quickly: str) -> pytest.MarkDecorator:
    """Run a test on the backends on which functions train tables; on others than these in slow tests only."""
    names = ["tensorflow", *(["torch"] if find_spec("torch") else [])]
    marked = [name if name in quickly else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("backend", marked)


generator = np.random.default_rng(0)
X = {
    "user": generator.integers(-101, 101, (120,)).astype("int32"),
    "words": generator.integers(0, 20, (120, 3)).astype("int32"),
}


def results(lines: list[str]) -> dict[str, Any]:
    return dict(json.loads(line.removeprefix("result ")) for line in lines if line.startswith("result "))


@pytest.mark.ci
def test_one_step_at_a_time_is_plain_keras(
    launch: Launch, plain: Callable[..., str], quickest_backend: str
) -> None:
    run = launch("-n 1 --ps 2", SCRIPT, "serial", backend=quickest_backend)
    assert run.status == 0, run.stderr
    found = [results(run.log(worker)) for worker in range(4)]
    assert found == [found[0]] * 4
    expected = results(plain(SCRIPT, "serial", backend=quickest_backend).splitlines())
    assert found[0].keys() == expected.keys()
    for name, values in expected.items():
        for one, other in zip(_flat(found[0][name]), _flat(values), strict=True):
            assert one == pytest.approx(other, rel=1e-4), name


@pytest.mark.slow
@pytest.mark.ci
def test_saved_rows_and_slots_continue_the_training(
    launch: Launch, tmp_path: Path, thorough_backend: str
) -> None:
    run = launch("-n 1 --ps 2", SCRIPT, "saved", str(tmp_path), backend=thorough_backend)
    assert run.status == 0, run.stderr
    found = [results(run.log(worker)) for worker in range(4)]
    assert found == [found[0]] * 4
    one = found[0]
    assert _flat(one["called"]) == pytest.approx(_flat(one["predicted"]), rel=1e-4)
    assert one["loaded"] == one["further"]
    assert one["evaluated again"] == one["evaluated"]
    assert one["another"] == one["further"][0]
    straight, resumed = one["resumed"]
    assert resumed == straight
    # A process on its own, on any backend.
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    assert model.predict(X, 50, verbose=0) == pytest.approx(np.array(one["predicted"]), rel=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    "lost",
    [
        "0 fit-1 push 14 sent",
        *(
            pytest.param(point, marks=pytest.mark.slow)
            for point in (
                "1 fit-1 pull 9 sent",
                "0 fit-1 read-rows 5 received",
                "1 fit-1 read 2 confirmed",
                "0 fit-1 push 8 repeated",
                "1 others read-rows 2 received",
                "1 fit-2 push 5 answered",
                "0 fit-2 end 1 received",
            )
        ),
    ],
)
def test_a_run_that_lost_a_worker_and_a_server_can_be_repeated(
    launch: Launch, repeat: Callable[..., Any], quickest_backend: str, lost: str
) -> None:
    run = launch("-n 3 --ps 2", SCRIPT, "free", *lost.split(), backend=quickest_backend)
    assert run.status == 0, run.stderr
    server = 4 + int(lost[0])
    for worker in (2, server):
        assert f"worker {worker} was killed by SIGKILL" in run.stderr
    left = {0, 1, 3, 4, 5} - {server}
    assert [len(run.marked(worker, "digest ")) for worker in left] == [1] * 4
    digests = {line for worker in left for line in run.marked(worker, "digest ")}
    assert len(digests) == 1
    assert f"equal to the last bit ({digests.pop()})" in repeat(run, (1, 3), left_out="several").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "lost"),
    [
        (2, "0 fit-1 push 1 received"),
        (2, "1 fit-1 push 7 confirmed"),
        (2, "0 fit-1 read 1 sent"),
        (2, "1 fit-1 read-rows 1 received"),
        (2, "0 fit-2 write-rows 1 sent"),
        (2, "1 fit-2 write-rows 3 confirmed"),
        (2, "0 fit-2 push 12 answered"),
        (2, "1 fit-2 write-rows 2 repeated"),
        (2, "0 fit-1 end 1 received"),
        (2, "1 others read-rows 9 received"),
        (2, "0 between"),
        (2, "1 fit-4 push 6 sent"),
        (3, "0 fit-1 push 7 sent + 1 fit-2 push 3 sent"),
        (3, "2 between + 0 fit-4 push 2 received"),
        (3, "2 fit-1 push 7 sent + 0 others read-rows 3 received"),
    ],
)
def test_lost_servers_change_no_bit(
    launch: Launch,
    undisturbed_run: Launch,
    tmp_path: Path,
    backend: str,
    servers: int,
    lost: str,
) -> None:
    """Two optimizers train the tables in turn, and rows are saved and loaded, also within `fit`."""
    options = f"-n 1 --ps {servers}"
    expected = undisturbed_run(options, SCRIPT, "lost", "{folder}", backend=backend)
    run = launch(options, SCRIPT, "lost", str(tmp_path), *lost.split(), backend=backend)
    assert run.status == 0, run.stderr
    gone = [2 + int(one.split()[0]) for one in lost.split("+")]
    for worker in set(range(2 + servers)).difference(gone):
        for mark in ("result ", "digest "):
            assert run.marked(worker, mark) == expected.marked(0, mark) != []


@pytest.mark.slow
def test_tables_without_standbys_end_the_job_with_a_server(launch: Launch, tmp_path: Path) -> None:
    for lost, *said in (
        # The worker, or the chief that has lost both, notices it first.
        (
            "0 fit-1 push 7 received",
            "parameter server 0 has ended; its log says why; no standby has its weights",
            "parameter server 0 ended, and no worker is left to compute gradients",
        ),
        ("1 between", "parameter server 1 has ended, and no other process has its rows of embedding tables"),
    ):
        run = launch("-n 1 --ps 2", SCRIPT, "lost-for-good", str(tmp_path), *lost.split())
        assert run.status == 1
        assert any(one in run.stderr for one in said)


@pytest.mark.ci
def test_what_has_no_whole_table_is_refused(launch: Launch) -> None:
    run = launch("-n 1 --ps 1", SCRIPT, "misused")
    assert run.status == 0, run.stderr
    shown = [
        "the rows of layer 'of_words' are on the parameter servers, to which this process connects in the",
        "the table of layer 'of_users' is on the parameter servers",
        "the weights of layer 'of_words' are rows on the parameter servers",
        "layer 'of_words' is a ServerEmbedding, of which workers read rows only, but Nadam has variables",
        "layer 'of_users' is a ServerEmbedding, of which workers read rows only, but it is not trainable",
        "is a ServerEmbedding, whose rows have gradients in fit and in scheduled functions only",
        "layer 'of_users' looks up row 101, but its table has 101 rows",
        "evaluate 3: only some ServerEmbedding layers of the model have standbys: give all of them the same",
        "layer 'of_users' are not those of a ServerEmbedding with 101 rows of 4 numbers",
        "predict 1: the chief has loaded the weights of layer 'of_users' more often than parameter",
        "predict 2: some processes have built more ServerEmbedding layers before layer 'of_words' than",
    ]
    for worker in range(3):
        found = run.marked(worker, "error ")
        assert len(found) == len(shown)
        for line, text in zip(found, shown, strict=True):
            assert text in line


@pytest.mark.slow
@pytest.mark.ci
@on("tensorflow", "torch")
def test_functions_train_rows_like_plain_keras(
    launch: Launch, plain: Callable[..., str], tmp_path: Path, backend: str
) -> None:
    run = launch("-n 2 --ps 2", IN_FUNCTIONS, "serial", str(tmp_path), backend=backend)
    assert run.status == 0, run.stderr
    found = [results(run.log(worker)) for worker in range(5)]
    assert found == [found[0]] * 5
    expected = results(plain(IN_FUNCTIONS, "serial", str(tmp_path), backend=backend).splitlines())
    assert found[0].keys() == expected.keys()
    for name, values in expected.items():
        assert _flat(found[0][name]) == pytest.approx(_flat(values), rel=1e-4), name
    with (
        h5py.File(tmp_path / "served.weights.h5") as served,
        h5py.File(tmp_path / "plain.weights.h5") as plainly,
    ):
        rows = "layers/server_embedding/vars/rows-0"
        assert served[rows][()] == pytest.approx(plainly[rows][()], rel=1e-4, abs=1e-6)


@pytest.mark.slow
@on("torch")
def test_functions_that_lost_a_worker_can_be_repeated(
    launch: Launch, repeat: Callable[..., Any], backend: str
) -> None:
    run = launch("-n 3 --ps 2", IN_FUNCTIONS, "free", backend=backend)
    assert run.status == 0, run.stderr
    assert "worker 2 was killed by SIGKILL" in run.stderr
    digests = {line for worker in (0, 1, 3, 4, 5) for line in run.marked(worker, "digest ")}
    assert len(digests) == 1
    assert f"equal to the last bit ({digests.pop()})" in repeat(run, (1, 3), left_out="several").stdout


@pytest.mark.slow
@on("torch")
def test_functions_whose_lost_worker_was_replaced_can_be_repeated(
    launch: Launch, repeat: Callable[..., Any], tmp_path: Path, backend: str
) -> None:
    run = launch("-n 3 --ps 2", IN_FUNCTIONS, "replaced", str(tmp_path), backend=backend)
    assert run.status == 0, run.stderr
    assert "functions 1: worker 6 replaces worker 2\n" in run.stderr
    left = (0, 1, 3, 4, 5, 6)
    assert [[len(run.marked(one, mark)) for mark in ("result ", "digest ")] for one in left] == [[1, 1]] * 6
    found = {tuple(run.marked(worker, mark)) for worker in left for mark in ("result ", "digest ")}
    assert len(found) == 2
    again = repeat(run, (1,))
    assert found == {tuple(again.marked(one, mark)) for one in range(6) for mark in ("result ", "digest ")}


@pytest.mark.slow
@on("tensorflow")
def test_functions_that_need_the_whole_table_are_refused(launch: Launch, backend: str) -> None:
    run = launch("-n 1 --ps 2", IN_FUNCTIONS, "misused", backend=backend)
    assert run.status == 0, run.stderr
    shown = [
        "reads the table of layer 'table', a ServerEmbedding, other than by lookups",
        "applies a tensor as the gradient of layer 'table'",
        *["trains layer 'table', a ServerEmbedding, applies an optimizer several times, or uses the new"] * 2,
        "layer 'table' is a ServerEmbedding, whose rows are updated independently, but Nadam has variables",
        "divides 'table/embeddings', but the optimizer has a clipnorm",
        "looks up rows of layer 'masked', a ServerEmbedding, which none trains: first schedule one that",
        "late', a ServerEmbedding, was built after functions were scheduled: build it first",
        "DataError layer 'masked' looks up row 4294967396, but its table has 101 rows",
        "the rows of layer 'table' cannot be read now, because servers may change them: call join before",
        "weights of layer 'table' are loaded while functions are scheduled",
    ]
    for worker in range(4):
        found = run.marked(worker, "error ")
        for line, text in zip(found, shown, strict=False):
            assert text in line
        assert len(found) == len(shown) + (worker > 0)
        if worker:
            assert "because the chief may have scheduled further functions" in found[-1]
        assert ("read" in results(run.log(worker))) == (worker == 0)


@pytest.mark.slow
def test_a_function_on_jax_trains_no_rows(launch: Launch) -> None:
    run = launch("-n 1 --ps 1", SCRIPT, "function")
    assert run.status == 0, run.stderr
    for worker in range(3):
        lines = run.marked(worker, "error ")
        for verb, line in zip(("calls", "reads"), lines, strict=True):
            assert f"a scheduled function {verb}" in line
            assert "a ServerEmbedding, of whose rows jax.grad returns no gradient: train it in fit" in line


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_embedding, "_BLOCK", 32)


@pytest.mark.parametrize("initializer", ["uniform", "ones", keras.initializers.RandomNormal(seed=4)])
def test_the_initial_values_do_not_depend_on_the_servers(initializer: Any) -> None:
    keras.utils.set_random_seed(1)
    layer = lockstep.ServerEmbedding(70, 3, initializer)
    rows = keras.ops.convert_to_numpy(layer(np.arange(70)))
    assert (len(np.unique(rows, axis=0)) == 1) == (initializer == "ones")
    for servers in (1, 2, 5, 80):
        parts = [layer._drawn(*one) for one in ranges_of(70, servers)]
        assert np.array_equal(np.concatenate(parts), rows)


@pytest.mark.ci
def test_a_process_on_its_own_saves_and_loads_the_same_blocks(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,), dtype="int32"), lockstep.ServerEmbedding(70, 3)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert lockstep.digest(loaded) == lockstep.digest(model)
    model.save_weights(tmp_path / "model.weights.h5")
    # In blocks of 32 rows, 97 rows have another number of blocks than 70, and 80 have the same.
    for rows, dim in ((97, 3), (80, 3), (70, 4)):
        other = keras.Sequential([keras.Input((2,), dtype="int32"), lockstep.ServerEmbedding(rows, dim)])
        refused = (
            rf"^the saved weights of layer .* are not those of a ServerEmbedding with {rows} rows of {dim}"
        )
        with pytest.raises(ModelError, match=refused):
            other.load_weights(tmp_path / "model.weights.h5")
        before = np.array(other.layers[0].embeddings)
        with pytest.warns(UserWarning, match="are not those of a ServerEmbedding"):
            other.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
        assert np.array_equal(before, other.layers[0].embeddings)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"embeddings_initializer": "glorot_uniform"}, "GlorotUniform may depend on the shape"),
        ({"embeddings_regularizer": "l2"}, "no embeddings_regularizer"),
        ({"lora_rank": 2}, "no lora_rank"),
    ],
)
def test_options_for_whole_tables_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        lockstep.ServerEmbedding(4, 2, **options)


def test_a_digest_follows_changes_of_rows_and_slots() -> None:
    """It is that of the present rows and slots, whatever order the changes had."""
    random = np.random.default_rng(5)
    optimizer: Any = type("Optimizer", (), {})()
    values = random.normal(size=(40, 3)).astype("float32")
    halves = [TableRows(0, values[:25].copy()), TableRows(25, values[25:].copy())]
    initial = {0: np.zeros((1, 3), "float32"), 2: np.full((1, 3), 0.1, "float32")}
    plain = {VALUES: values} | {nth: np.repeat(row, 40, axis=0) for nth, row in initial.items()}
    for half in halves:
        half.slots_of(optimizer, initial, begun=True)
    for step in range(60):
        numbers = np.sort(random.choice(40, random.integers(0, 9), replace=False))
        for half in halves:
            own = numbers[(numbers >= half.start) & (numbers < half.start + len(half.values))]
            slots = half.slots_of(optimizer, initial, begun=True)
            half.touch(own - half.start)
            for kind, array in {VALUES: half.values, **slots}.items():
                array[own - half.start] = plain[kind][own] = random.normal(size=(len(own), 3))
        if step % 5 == 0:
            expected = sum(
                digest_of_rows(np.arange(40), array, 1 + kind if kind >= 0 else 0)
                for kind, array in plain.items()
            )
            assert np.array_equal(halves[0].digest() + halves[1].digest(), expected)


def test_each_optimizer_has_slots_of_its_own() -> None:
    optimizers: Any = [type("Optimizer", (), {})() for _ in range(3)]
    one, other, third = optimizers
    rows, initial = TableRows(0, np.zeros((4, 2), "float32")), {0: np.ones((1, 2), "float32")}
    fresh = rows.digest() + digest_of_rows(np.arange(4), np.ones((4, 2), "float32"), 1)

    def train(optimizer: Any, slot: float, *, begun: bool = True) -> float:
        """Return a slot as it was before the training."""
        slots = rows.slots_of(optimizer, initial, begun=begun)
        rows.touch(np.array([1]))
        before, slots[0][1] = slots[0][1, 0], slot
        return float(before)

    assert train(one, 5, begun=False) == 1
    digest = rows.digest()
    assert train(other, 6, begun=False) == 1
    assert train(one, 7) == 5
    assert train(other, 8) == 6
    # Its iterations may be set to 0.
    assert train(one, 5, begun=False) == 7
    assert np.array_equal(rows.digest(), digest)
    # Loaded ones are those of an optimizer that was loaded, too, not of one that begins.
    for begun, expected in ((True, 9), (False, 1)):
        rows.write(0, np.arange(4), np.full((4, 2), 9, "float32"))
        rows.note_load()
        assert rows.slots_of(one, initial, begun=begun)[0][1, 0] == expected
    assert np.array_equal(rows.digest(), fresh)
    rows.write(0, np.arange(4), np.full((4, 2), 9, "float32"))
    rows.note_load()
    assert train(third, 2, begun=False) == 1


def test_a_worker_that_joins_has_no_rows() -> None:
    """Its id is beyond those of the tasks until it takes the place of a lost one."""
    view, settings = place(6, (6,)), JobSettings(workers=6, replicas=6, parameter_servers=2)
    context = JobContext(6, Bus(SystemClock(), 6), settings)
    joining = Job(context, (view, by_itself(view)), joins=True)
    assert ServerTables(joining).held_servers == ()


@pytest.fixture
def chief_and_server() -> Iterator[tuple[ServerTable, ServerTable]]:
    """A table of four rows in two processes, the chief and the server, that have met in a call."""
    view = place(2, (0, 1))
    hub = Hub(ReducePlan.of(view), WaitPolicy(timeout=120.0))
    contexts = [
        JobContext(
            one, Bus(SystemClock(), one), JobSettings(threads=1, workers=2, replicas=2, parameter_servers=1)
        )
        for one in (0, 1)
    ]
    jobs = [Job(context, (view, hub.member(context.worker))) for context in contexts]

    def meet(job: Job) -> ServerTable:
        tables = ServerTables(job)
        table = ServerTable(tables, "table", (4, 2), "float32", lambda *_: np.zeros((4, 2), "float32"), True)
        tables.meet([table], "fit 1")
        return table

    with ThreadPoolExecutor(2) as threads:
        chief, server = threads.map(meet, jobs)
    yield chief, server
    for job in jobs:
        job.exit()


def test_a_server_does_not_answer_with_rows_that_its_reader_has_not_loaded(
    chief_and_server: tuple[ServerTable, ServerTable],
) -> None:
    chief, server = chief_and_server
    some, loaded = np.array([1, 3]), np.ones((4, 2), "float32")
    assert np.array_equal(chief.read(some), np.zeros((2, 2)))
    server.load([(VALUES, np.arange(4), lambda: loaded)])
    with pytest.raises(DisagreementError, match="parameter server 0 no longer has the rows of layer 'table'"):
        chief.read(some)
    chief.load([(VALUES, np.arange(4), lambda: loaded)])
    assert np.array_equal(chief.read(some), loaded[some])


def test_slots_of_another_optimizer_are_not_loaded_within_fit() -> None:
    written: list[int] = []
    tables: Any = SimpleNamespace(
        servers=2,
        is_within=True,
        add=lambda table: 1,
        refuse_load=lambda table: None,
        slots=lambda table: (0,),
        write=lambda table, slot, *_: written.append(slot),
    )
    table = ServerTable(tables, "table", (4, 2), "float32", lambda *_: np.zeros((2, 2)), True)
    blocks = [(slot, np.arange(4), lambda: np.zeros((4, 2))) for slot in (VALUES, 0, 1)]
    with pytest.raises(ModelError, match="'table' have variables of another optimizer than that of this fit"):
        table.load(blocks)
    assert written == [VALUES, 0]


def test_a_digest_is_that_of_loaded_rows_and_slots() -> None:
    made, values = TableRows(3, np.zeros((4, 2), "float32")), np.arange(8, dtype="float32").reshape(4, 2)
    numbers = np.arange(3, 7)
    for kind in (VALUES, 0, 1):
        for some in (slice(0, 2), slice(2, 4)):
            made.write(kind, numbers[some], values[some] + kind)
    expected = [digest_of_rows(numbers, values + kind, 1 + kind) for kind in (VALUES, 0, 1)]
    assert np.array_equal(made.digest(), sum(expected))


@pytest.mark.parametrize("loaded", [False, True])
def test_copied_rows_are_those_of_the_other_process(loaded: bool) -> None:
    """With the slots of all optimizers, but for those that this process no longer has."""
    one, other, gone = optimizers = [type("Optimizer", (), {})() for _ in range(3)]
    rows = TableRows(5, np.arange(8, dtype="float32").reshape(4, 2))
    initial = {0: np.zeros((1, 2), "float32"), 1: np.ones((1, 1), "float32")}
    for optimizer in (gone, one, other):
        slots = rows.slots_of(optimizer, initial, begun=False)
        rows.touch(np.array([2, 3]))
        slots[0][2] = optimizers.index(optimizer) + 1
        slots[1][3] = -0.0
    if loaded:
        rows.write(0, np.array([6]), np.full((1, 2), 7, "float32"))
        rows.note_load()
    made, known = TableRows(5, np.zeros((4, 2), "float32")), {one: 0, other: 1, gone: 2}
    for numbers in np.split(np.arange(5, 9), 2):
        made.paste(numbers, *rows.copied(numbers, known), {one: 0, other: 1})
    assert np.array_equal(made.digest(), rows.digest())
    for optimizer in (one, other, one):
        pairs = [each.slots_of(optimizer, initial, begun=True) for each in (made, rows)]
        for nth in initial:
            assert pairs[0][nth].tobytes() == pairs[1][nth].tobytes()
        assert np.array_equal(made.digest(), rows.digest())
    assert np.array_equal(made.slots_of(gone, initial, begun=True)[0], np.zeros((4, 2)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_each_bit_and_each_place_of_a_row_changes_the_digest(dtype: str) -> None:
    rows, numbers = np.random.default_rng(1).normal(size=(6, 3)).astype(dtype), np.arange(6)
    whole = digest_of_rows(numbers, rows)
    assert np.array_equal(
        whole, digest_of_rows(numbers[:4], rows[:4]) + digest_of_rows(numbers[4:], rows[4:])
    )
    assert np.array_equal(whole, digest_of_rows(numbers[::-1], rows[::-1]))
    others = [digest_of_rows(numbers[::-1], rows), digest_of_rows(numbers, rows, 1)]
    for byte in range(rows.nbytes):
        changed = rows.copy()
        changed.reshape(-1).view(np.uint8)[byte] ^= 1 << byte % 8
        others.append(digest_of_rows(numbers, changed))
    assert len({one.tobytes() for one in (whole, *others)}) == 1 + len(others)


def test_only_the_failure_of_a_lookup_in_the_block_is_raised(
    job_of_one_worker: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = SimpleNamespace(failure=ModelError("an earlier lookup"), _together=False)
    monkeypatch.setattr(server_tables, "_of_jobs", {job_of_one_worker: tables})
    with pytest.raises(ValueError, match="own"), rows_read_together(job_of_one_worker):
        raise ValueError("own")

    def look_up() -> None:
        tables.failure = DataError("a lookup")
        raise ValueError("what a backend raises")

    with pytest.raises(DataError, match="a lookup"), rows_read_together(job_of_one_worker):
        look_up()


def _flat(values: Any) -> list[float]:
    return [value for one in values for value in _flat(one)] if isinstance(values, list) else [values]
