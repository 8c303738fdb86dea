"""The metrics that callbacks report: the last ones, also those of another worker."""

from typing import Any

import numpy as np
import pytest

from lockstep.checkpoint.values import pack, unpack
from lockstep.keras.state.callback_states import attribute_hashes, callback_states, set_callback_states
from lockstep.ray import ReportCallback
from lockstep.worker import reports


@pytest.fixture(autouse=True)
def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_reporters", [])


def states(callbacks: list[Any], before: Any) -> Any:
    """The states of callbacks, as they arrive in another process."""
    return unpack(*pack(callback_states(callbacks, before), "callbacks"))


def test_the_last_report_counts() -> None:
    assert reports.latest() == {}
    first, second = ReportCallback(), ReportCallback()
    assert reports.latest() == {}
    second.on_epoch_end(0, {"loss": np.float32(0.5), "accuracy": 1})
    assert reports.latest() == {"loss": 0.5, "accuracy": 1.0}
    assert [type(value) for value in reports.latest().values()] == [float, float]
    first.on_epoch_end(0, {"loss": 0.25})
    assert reports.latest() == {"loss": 0.25}
    second.on_epoch_end(1, None)
    assert reports.latest() == {}


def test_reports_of_another_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attribute_hashes([first := ReportCallback()])
    first.on_epoch_end(0, {"loss": 1.0})
    first.on_epoch_end(1, {"loss": 2.0})
    given = states([first], [before])
    monkeypatch.setattr(reports, "_reporters", [])
    # The calls of the first callback have finished; the second one's are in progress.
    replayed, own = ReportCallback(), ReportCallback()
    set_callback_states([replayed], given)
    assert (reports.latest(), reports.count()) == ({"loss": 2.0}, 2)
    own.on_epoch_end(0, {"loss": 3.0})
    assert (reports.latest(), reports.count()) == ({"loss": 3.0}, 3)
