"""How far a run is, and how long the rest takes."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.monitoring.overview import overview
from lockstep.monitoring.progress import BetterEpoch, TrainingProgress, better_epochs, progress
from lockstep.monitoring.run_folder import RunFolder
from lockstep.monitoring.top_text import heading

from .recorded import event, job, record, started, steps


def seen(folder: Path, *lines: dict[str, Any]) -> TrainingProgress | None:
    record(folder, job(), started(0), started(1), *lines)
    run = RunFolder(folder)
    run.update()
    return progress(run.state)


def begins(**extent: int | None) -> dict[str, Any]:
    return event(1001.0, "call", worker=0, name="fit 1", **extent)


def epoch_end(time: float, epoch: int, trained: int) -> dict[str, Any]:
    values = {"loss": 0.5}
    return event(time, "metrics", worker=0, call="fit 1", epoch=epoch, trained=trained, values=values)


def test_nothing_is_known_before_the_first_call(tmp_path: Path) -> None:
    assert seen(tmp_path) is None


def test_the_rest_takes_as_long_as_the_last_steps_took(tmp_path: Path) -> None:
    # Ten steps per second after the first step, which compiles for eight seconds.
    measured = [steps(0, 1010.0, 1, count=1), *(steps(0, 1010.0 + at, 10 * at) for at in (1, 2, 3))]
    known = begins(initial_epoch=0, epochs=5, steps_per_epoch=20)
    found = seen(tmp_path, known, *measured, epoch_end(1012.0, 1, 20))
    assert found == TrainingProgress("fit 1", 30, 100, 2, 5, pytest.approx(7.0))


def test_only_the_newer_half_of_many_measurements_counts(tmp_path: Path) -> None:
    slow = [steps(0, 1010.0 + at, at) for at in range(1, 9)]
    fast = [steps(0, 1018.0 + at, 8 + 10 * at) for at in range(1, 11)]
    found = seen(tmp_path, begins(initial_epoch=0, epochs=1, steps_per_epoch=208), *slow, *fast)
    assert found is not None
    assert found.left == pytest.approx(10.0)


def test_the_first_epoch_says_how_long_the_others_are(tmp_path: Path) -> None:
    unknown = begins(initial_epoch=2, epochs=6, steps_per_epoch=None)
    measured = [steps(0, 1010.0 + at, 10 * at) for at in (1, 2, 3)]
    before = seen(tmp_path / "before", unknown, *measured)
    assert before == TrainingProgress("fit 1", 30, None, 3, 6, None)
    # The third epoch had 25 steps.
    found = seen(tmp_path / "after", unknown, *measured, epoch_end(1012.5, 3, 25))
    assert found == TrainingProgress("fit 1", 30, 100, 4, 6, pytest.approx(7.0))


def test_a_loop_without_epochs_and_a_call_that_has_ended_have_no_rest(tmp_path: Path) -> None:
    loop = event(1001.0, "call", worker=0, name="steps 1")
    taken = [steps(0, 1010.0 + at, 10 * at) | {"call": "steps 1"} for at in (1, 2, 3)]
    assert seen(tmp_path / "loop", loop, *taken) == TrainingProgress("steps 1", 30, None, None, None, None)
    known = begins(initial_epoch=0, epochs=5, steps_per_epoch=20)
    measured = [steps(0, 1010.0 + at, 10 * at) for at in (1, 2, 3)]
    ended = [epoch_end(1012.0, 1, 20), event(1014.0, "call ended", worker=0, name="fit 1")]
    assert seen(tmp_path / "ended", known, *measured, *ended) == TrainingProgress(
        "fit 1", 30, 100, 1, 5, None
    )


@pytest.mark.parametrize("extent", [{"epochs": "x"}, {"epochs": -5, "steps_per_epoch": 10**30}, {}])
def test_anything_may_stand_in_a_file(tmp_path: Path, extent: dict[str, Any]) -> None:
    found = seen(tmp_path, begins(**extent), *(steps(0, 1010.0 + at, 10 * at) for at in (1, 2, 3)))
    assert found is not None
    assert found.step == 30


def test_without_measured_steps_the_rest_follows_from_the_epochs(tmp_path: Path) -> None:
    known = begins(initial_epoch=0, epochs=9, steps_per_epoch=20)
    ended = [epoch_end(1010.0 + 5 * at, at, 20 * at) for at in (1, 2, 3)]
    assert seen(tmp_path / "one", known, ended[0]) == TrainingProgress("fit 1", None, 180, 2, 9, None)
    found = seen(tmp_path / "three", known, *ended)
    assert found == TrainingProgress("fit 1", None, 180, 4, 9, pytest.approx(30.0))


def test_epochs_of_the_last_fit_that_were_better_are_named(tmp_path: Path) -> None:
    rows = [
        {"loss": 0.1, "val_loss": 0.9, "val_accuracy": 0.5, "val_AUC": 0.7, "gain": 3.0},
        {"loss": 0.2, "val_loss": 0.3, "val_accuracy": 0.8, "val_AUC": None, "gain": 1.0},
        {"loss": 0.3, "val_loss": 0.3, "val_accuracy": 0.7, "val_AUC": 0.9, "gain": 2.0},
        {"loss": 0.1, "val_loss": 0.4, "val_accuracy": 0.8, "val_AUC": None, "gain": 0.0},
    ]
    ends = [epoch_end(1010.0 + at, at, 20 * at) | {"values": row} for at, row in enumerate(rows, 1)]
    earlier = {"call": "fit 1", "values": {"gain": 0.0, "val_loss": 0.0, "loss": 0.0}}
    record(tmp_path, job(), started(0), begins(), epoch_end(1002.0, 1, 5) | earlier)
    record(
        tmp_path, event(1005.0, "call", worker=0, name="fit 2"), *(end | {"call": "fit 2"} for end in ends)
    )
    run = RunFolder(tmp_path)
    run.update()
    assert better_epochs(run.state) == {"val_loss": BetterEpoch(0.3, 2), "val_AUC": BetterEpoch(0.9, 3)}
    (shown,) = [line for line in heading(overview(run.state, "a", 1030.0)) if "val_loss" in line]
    # Of many metrics, only some are shown, the losses first.
    assert shown.startswith("loss 0.1  val_loss 0.4 (best 0.3 in epoch 2)  gain 0  val_accuracy 0.8")


def test_epochs_before_a_restart_count_and_those_of_another_run_do_not(tmp_path: Path) -> None:
    def best(name: str, *starts: tuple[int, tuple[float, ...]]) -> BetterEpoch | None:
        folder = tmp_path / name
        for number, (first, losses) in enumerate(starts):
            time = 1000.0 + 100 * number
            call = event(time + 1, "call", worker=0, name="fit 1", initial_epoch=0, epochs=20)
            ends = [
                epoch_end(time + 2 + at, first + at, first + at) | {"values": {"loss": loss}}
                for at, loss in enumerate(losses)
            ]
            record(folder, job(time), started(0, time), call, *ends)
        run = RunFolder(folder)
        run.update()
        return better_epochs(run.state).get("loss")

    before, later = (1, (0.5, 0.2, 0.4, 0.1)), (4, (0.6, 0.35, 0.4))
    assert best("resumed", before, later) == BetterEpoch(0.2, 2)
    assert best("resumed twice", before, (4, ()), later) == BetterEpoch(0.2, 2)
    assert best("another run", before, (1, (0.6, 0.35, 0.4))) == BetterEpoch(0.35, 2)
    assert best("no epoch yet", before, (1, ())) is None


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("val_error_accuracy", 0.9),
        ("loss_head_acc", 0.9),
        ("recall_at_10", 0.9),
        ("top_k_accuracy", 0.9),
        ("accuracy_loss", 0.1),
        ("brier_score", 0.1),
        ("word_error_rate_2", 0.1),
        ("loss_head_gain", None),
    ],
)
def test_the_end_of_a_name_says_what_is_better(tmp_path: Path, name: str, best: float | None) -> None:
    ends = [
        epoch_end(1010.0 + at, at, at) | {"values": {name: value}}
        for at, value in enumerate((0.1, 0.9, 0.5), 1)
    ]
    record(tmp_path, job(), started(0), begins(), *ends)
    run = RunFolder(tmp_path)
    run.update()
    found = better_epochs(run.state)
    assert {key: better.value for key, better in found.items()} == ({} if best is None else {name: best})


def test_no_epoch_is_best_beside_a_better_value(tmp_path: Path) -> None:
    ends = [
        epoch_end(1010.0 + at, at, at) | {"values": {"loss": loss}} for at, loss in enumerate((0.3, 0.4), 1)
    ]
    record(tmp_path, job(), started(0), begins(), *ends)
    run = RunFolder(tmp_path)
    run.update()
    assert better_epochs(run.state) == {"loss": BetterEpoch(0.3, 1)}
    within = epoch_end(1020.0, 3, 3) | {"epoch": None}
    for loss, expected in ((0.35, {"loss": BetterEpoch(0.3, 1)}), (0.25, {})):
        record(tmp_path, within | {"values": {"loss": loss}})
        run.update()
        assert better_epochs(run.state) == expected


def test_a_run_of_hours_says_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", time.gmtime)
    measured = [steps(0, 1010.0 + at, 10 * at) for at in (1, 2, 3)]
    for number, words in ((900, "8 min 57 s left"), (12_000, "2 h 0 min left, until about 02:16")):
        folder = tmp_path / str(number)
        record(
            folder, job(), started(0), begins(initial_epoch=0, epochs=6, steps_per_epoch=number), *measured
        )
        run = RunFolder(folder)
        run.update()
        assert f", {words}" in heading(overview(run.state, "a", 1014.0))[1]
    view = overview(run.state, "a", 1014.0)
    assert view.left is not None
    assert ", until about Fri 02:16" in heading(replace(view, left=view.left + 86400.0))[1]
