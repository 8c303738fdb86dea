"""The state of callbacks that another process receives: what changes in training, never settings or paths."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.collectives.plan import ReducePlan
from lockstep.errors import InputError, PeerLostError
from lockstep.keras.fit import callbacks as fit_callbacks
from lockstep.keras.fit.callbacks import different_paths, paths_of, writing_once
from lockstep.keras.state.callback_states import attribute_hashes, callback_states, set_callback_states
from lockstep.protocol.job_spec import JobSettings
from lockstep.topology import place
from lockstep.worker import job
from lockstep.worker.job import Job, JobContext, by_itself
from lockstep.worker.peers import Alone, EnteredView
from thread_hub import Hub

callbacks = keras.callbacks


class Noting(callbacks.Callback):  # type: ignore[misc]
    def __init__(self, path: str, every: int) -> None:
        super().__init__()
        self.path, self.every = path, every
        self.seen, self.left, self.start, self.phase = {"loss": [1.0]}, 3, None, "warm"

    def on_train_begin(self, logs: Any = None) -> None:
        self.start, self.left = np.ones(2), 5


class Stopping(callbacks.EarlyStopping):  # type: ignore[misc]
    def __init__(self, path: str, **options: Any) -> None:
        super().__init__(**options)
        self.path, self.stops = path, 0


def given(folder: str, number: int) -> list[Any]:
    """The callbacks of one program, with other settings and paths."""
    return [
        callbacks.ModelCheckpoint(f"{folder}/best.keras", save_freq=number),
        callbacks.CSVLogger(f"{folder}/log.csv"),
        callbacks.BackupAndRestore(f"{folder}/backup", save_freq=number),
        callbacks.EarlyStopping(patience=number),
        callbacks.ReduceLROnPlateau(patience=number, cooldown=number),
        callbacks.TensorBoard(f"{folder}/logs"),
        Stopping(f"{folder}/stops", patience=number),
        Noting(f"{folder}/notes", number),
    ]


def begun(folder: str, number: int) -> tuple[list[Any], list[Any]]:
    made = writing_once(given(folder, number), 0, resumes=True)
    before = [attribute_hashes(made)]
    made[-1].on_train_begin()
    return made, [*before, attribute_hashes(made)]


def travelled(states: Any) -> Any:
    return unpack(*pack(states, "callbacks"))


def test_settings_and_paths_are_those_of_the_resuming_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, before = begun(str(tmp_path / "old"), 1)
    saving, table, backup, stopping, slower, _, mine, noting = first
    saving.best, saving._batches_seen_since_last_saving, table.rows = 0.25, 3, 7
    backup._current_epoch, backup._last_batch_seen = 4, 2
    stopping.best, stopping.wait, stopping.best_weights = 0.5, 2, [np.arange(3.0)]
    slower.cooldown_counter, mine.stops, mine.wait = 1, 9, 1
    noting.seen["loss"].append(0.5)
    noting.left, noting.phase = 3, "cold"

    second, _ = begun(str(tmp_path / "new"), 2)
    fresh = given(str(tmp_path / "new"), 2)
    changed = {
        0: {"best": 0.25, "_batches_seen_since_last_saving": 3},
        1: {"rows": 7},
        2: {"_current_epoch": 4, "_last_batch_seen": 2},
        3: {"best": 0.5, "wait": 2, "best_weights": stopping.best_weights},
        4: {"cooldown_counter": 1},
        6: {"stops": 9, "wait": 1},
        7: {"seen": {"loss": [1.0, 0.5]}, "left": 3, "start": noting.start},
    }
    set_callback_states(second, travelled(callback_states(first, before)))
    for number, callback in enumerate(second):
        expected = vars(fresh[number]) | changed.get(number, {}) if number != 5 else vars(callback)
        found = {name: vars(callback).get(name) for name in expected}
        assert repr(found) == repr(expected | {name: found[name] for name in _own(found)})
    said = capsys.readouterr().err
    assert said.count("lockstep: ") == 1
    assert "Noting.phase changed during training, but text" in said


def _own(found: dict[str, Any]) -> list[str]:
    """The names of attributes whose values cannot be compared."""
    return [name for name, value in found.items() if callable(value) or hasattr(value, "__enter__")]


def test_a_checkpoint_chooses_no_file(tmp_path: Path) -> None:
    made, _ = begun(str(tmp_path), 2)
    paths = [{k: v for k, v in vars(one).items() if isinstance(v, str)} for one in made]
    crafted = {name: f"{tmp_path}/victim" for one in paths for name in one}
    everything = crafted | {"save_freq": 7, "patience": 7, "append": True, "seen": {"loss": ["victim"]}}
    set_callback_states(made, [(type(one).__name__, everything) for one in made])
    assert [{k: v for k, v in vars(one).items() if isinstance(v, str)} for one in made] == paths
    assert (made[0].save_freq, made[3].patience, made[1].append) == (2, 2, False)
    assert made[-1].seen == {"loss": [1.0]}


def test_states_of_earlier_versions_are_restored() -> None:
    stopping = callbacks.EarlyStopping(patience=3)
    noting = Noting("new", 2)
    old = [("EarlyStopping", {"patience": 1, "wait": 1}), ("Noting", {"path": "old", "left": 1})]
    set_callback_states([stopping, noting], old)
    assert (stopping.patience, stopping.wait, noting.path, noting.left) == (3, 1, "new", 1)


def test_paths_that_differ_between_workers_are_described_once_for_each_callback() -> None:
    own = [*given("a", 2), Noting("a", 1), callbacks.TensorBoard("a/logs")]
    paths = paths_of(own)
    assert list(paths.items())[:2] == [("0 ModelCheckpoint", "a/best.keras"), ("1 CSVLogger", "a/log.csv")]
    assert [path for path in paths.values() if not path.startswith("a/")] == []
    assert paths_of(None) == paths_of([callbacks.EarlyStopping()]) == {}
    other = paths | {"0 ModelCheckpoint": "b/best.keras"}
    assert different_paths([(0, paths), (1, paths)]) == different_paths([(0, paths), (1, {})]) == []
    (text,) = different_paths([(3, paths), (4, paths), (5, other), (6, other)])
    assert text.startswith(
        "the path of ModelCheckpoint is a/best.keras on worker 3, which writes it, and b/best.keras on "
        "worker 5, "
    )


class Survivor(Alone):
    """The membership of worker 1, which continues alone."""

    def next_view(self, lost: PeerLostError, *, expected: bool = False) -> EnteredView:
        view = place(2, (1,), 2)
        return view, by_itself(view)


@pytest.fixture
def hub_of_two(job_of_one_worker: Job) -> Iterator[Hub]:
    """The exchange of two workers, of which this process is the one that is not the chief."""
    view = place(2, (0, 1))
    hub = Hub(ReducePlan.of(view))
    job.enter(
        Job(
            JobContext(1, job_of_one_worker.events, JobSettings(workers=2, threads=1)),
            (view, hub.member(1)),
            Survivor(),
        )
    )
    yield hub
    job.enter(job_of_one_worker)


def test_the_next_chief_writes_the_row_that_the_lost_one_wrote(hub_of_two: Hub, tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    (table,) = writing_once([callbacks.CSVLogger(path)], 0, resumes=False)
    table.set_model(keras.Model())
    table.on_train_begin()
    logs = {"loss": 0.5, "val_loss": 0.7}
    table.on_epoch_end(0, logs)
    # As a later callback does, such as ReduceLROnPlateau.
    logs["learning_rate"] = 0.1
    assert not path.exists()
    hub_of_two.abort("worker 0 is lost")
    job.current().exchange(lambda _, exchange: exchange.barrier())
    table.on_epoch_end(1, {"loss": 0.25, "val_loss": 0.4, "learning_rate": 0.1})
    table.on_train_end()
    assert path.read_text().split() == ["epoch,loss,val_loss", "0,0.5,0.7", "1,0.25,0.4"]


def test_tensorboard_without_tensorflow_is_refused_with_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_callbacks, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="give lockstep run --tensorboard DIR"):
        writing_once([callbacks.TensorBoard(tmp_path)], 0, resumes=False)
