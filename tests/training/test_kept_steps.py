"""Steps that a check keeps for its jobs on other backends."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.keras.fit.kept_steps import KeptStep, LayerRows, StepOutcome


def step(batch: list[np.ndarray | None]) -> KeptStep:
    rows, half = np.arange(6.0).reshape(3, 2), np.ones(2, "float16")
    return KeptStep(
        backend="jax",
        shapes={"dense/kernel": [2, 1]},
        batch=batch,
        before={"dense/kernel": rows[:2, :1]},
        outcome=StepOutcome({"loss": np.array(3.0)}, {(0, 1): half}, {"iteration": np.array(4)}),
        layers=[LayerRows("dense", [rows], []), LayerRows("relu", [], [rows, half])],
    )


def test_a_kept_step_is_the_same_afterwards(tmp_path: Path) -> None:
    kept = step([np.array([["a"], ["bc"]]), None, np.array([1, 2])])
    kept.save(tmp_path / "fit 1 train.npz")
    loaded = KeptStep.load(tmp_path / "fit 1 train.npz")
    assert repr(loaded) == repr(kept)
    assert loaded.outcome.gradients[0, 1].dtype == "float16"


def test_nothing_is_pickled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Python objects"):
        step([np.array([object()])]).save(tmp_path / "step.npz")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any, *arrays: Any) -> None:
        file.write(b"PK")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        step([np.array([1, 2])]).save(tmp_path / "step.npz")
    assert list(tmp_path.iterdir()) == []
