"""A script and its modules are edited while it runs, or before it resumes from a checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import os, pathlib, signal, sys
import keras, numpy as np
import lockstep
from lockstep.worker import job
from rates import RATE

HERE = pathlib.Path(__file__).parent

class Editing(keras.callbacks.Callback):
    def __init__(self, path, limit):
        super().__init__()
        self.path, self.limit, self.steps, self.file = path, limit, 0, ""

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps != 5 or "lose" not in sys.argv:
            return
        if job.current().worker == 1:
            for name in ("train.py", "rates.py", "later.py"):
                text = (HERE / name).read_text().replace("0.2", "0.5")
                (HERE / name).write_text("# another\\n" + text)
            os.kill(os.getpid(), signal.SIGKILL)

strategy = lockstep.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([
        keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(RATE), keras.layers.Dense(1)
    ])
    model.compile(keras.optimizers.Adam(0.01), "mse")
random = np.random.default_rng(0)
x = random.normal(size=(80, 4)).astype("float32")
slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
model.fit(x, x[:, :1], batch_size=10, epochs=2, verbose=0, callbacks=[Editing(sys.argv[1], 3), slower])
import later
print("digest", later.RATE, lockstep.digest(model))
"""


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rates.py").write_text("RATE = 0.2")
    (tmp_path / "later.py").write_text("RATE = 0.2")
    return tmp_path


@pytest.mark.ci
def test_edits_are_reported_to_a_replacement_and_to_the_next_run(
    launch: Callable[..., Any], edited: Path
) -> None:
    script, keeping = str(edited / "train.py"), f"--checkpoint {edited / 'kept'} --checkpoint-every 10"
    expected = launch("-n 1 --replicas 2", script, "out").marked(0, "digest")
    lost = launch(f"-n 2 --min-workers 2 {keeping}", script, "out", "lose")
    assert lost.status == 0, lost.stderr
    assert f"worker 2: {script} has changed; this worker uses the version" in lost.stderr
    # A module that no worker had read before the edit has its new text, on every worker.
    assert [line.replace("0.5", "0.2") for line in lost.marked(0, "digest")] == expected
    assert lost.marked(2, "digest") == lost.marked(0, "digest")

    # As after a kill of all workers before the last step was saved.
    shutil.rmtree(edited / "kept" / "step-000000000016")
    refused = launch(f"-n 1 {keeping}", script, "elsewhere")
    assert refused.status == 2
    assert "the script has different settings from the checkpoint of step 10 (train.py" in refused.stderr
    assert "layer dropout: rate was 0.2, and is 0.5. Undo the change" in refused.stderr
    assert "callback 1 (LearningRateScheduler): schedule was" not in refused.stderr
    (edited / "rates.py").write_text("RATE = 0.2  # as before")
    same = launch(f"-n 1 {keeping}", script, "elsewhere")
    assert same.status == 0, same.stderr
    assert "(train.py, rates.py changed) with the same settings" in same.stderr
    assert [line.replace("0.5", "0.2") for line in same.marked(0, "digest")] == expected
