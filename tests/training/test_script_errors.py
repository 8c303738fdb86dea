"""An error that the script raises on one worker ends the job, and is shown as by `python`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import keras
import numpy as np

import lockstep


class Plot(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if lockstep.is_chief() or {all_fail}:
            self.draw()

    def draw(self):
        raise RuntimeError("no display")


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.zeros((12, 4), "float32")
model.fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0, callbacks=[Plot()])
"""
SHOWN = """Traceback (most recent call last):
  File "{file}", line 20, in <module>
    model.fit(x, x[:, 0], batch_size=4, epochs=2, verbose=0, callbacks=[Plot()])
  File "{file}", line 11, in on_epoch_end
    self.draw()
  File "{file}", line 14, in draw
    raise RuntimeError("no display")
RuntimeError: no display
"""


@pytest.mark.ci
@pytest.mark.parametrize("all_fail", [False, True])
def test_the_traceback_is_that_of_the_script_and_shown_once(
    launch: Callable[..., Any], tmp_path: Path, all_fail: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(all_fail=all_fail))
    run = launch("-n 2 --witness off", str(script))
    assert run.status == 1
    assert SHOWN.format(file=script) in run.stderr
    assert run.stderr.count("Traceback") == run.stderr.count('raise RuntimeError("no display")') == 1
    (last,) = (line for line in run.stderr.splitlines() if "exited with status" in line)
    assert last.endswith(" exited with status 1: RuntimeError: no display")
    events = [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert [event["worker"] for event in events if event["event"] == "started"] == [0, 1]
    assert [event["status"] for event in events if event["event"] == "exited"] == [1, 1]
    failed = next(event for event in events if event["event"] == "failed" and event["worker"] == 0)
    assert "model_methods.py" in failed["traceback"]
