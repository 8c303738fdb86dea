"""`lockstep top` beside a real training: however it ends, the training is the same."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.coordinator.admin_client import send
from lockstep.protocol.admin import Status, StatusRequest

PROGRAM = """
import os, sys
import numpy as np
import keras

class Reports(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        if epoch == 0 and lockstep_chief():
            with open(sys.argv[1], "w") as pipe:
                pipe.write("x")
            # Until top has looked.
            with open(sys.argv[2]) as pipe:
                pipe.read()

def lockstep_chief():
    import lockstep
    return lockstep.is_chief()

x = np.arange(512, dtype="float32").reshape(128, 4) / 512
y = x.sum(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[Reports()] if sys.argv[1:] else [])
"""


def digest_and_changes(folder: Path) -> tuple[str, list[Any]]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert events[-1]["status"] == 0
    return events[-1]["digest"], [
        one["event"] for one in events if one["event"] in ("view", "lost", "decision")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "is killed"])
def test_top_does_not_affect_a_training(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    name = f"watched-{os.getpid()}-{how.name}"
    run = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir"]
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    alone = subprocess.run([*run, "alone", "program.py"], cwd=tmp_path, env=environment, timeout=600)
    assert alone.returncode == 0
    for pipe in ("reached", "looked"):
        os.mkfifo(tmp_path / pipe)
    command = [*run, name, "program.py", str(tmp_path / "reached"), str(tmp_path / "looked")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as watched:
        assert (tmp_path / "reached").read_text() == "x"
        top = [sys.executable, "-m", "lockstep", "top", name, "--json", "-i", "0.1"]
        with subprocess.Popen(top, stdout=subprocess.PIPE) as looking:
            assert looking.stdout is not None
            seen = json.loads(looking.stdout.readline())
            looking.send_signal(how)
            # Others are answered meanwhile.
            assert isinstance(send(name, StatusRequest()), Status)
            (tmp_path / "looked").write_text("")
            assert watched.wait(600) == 0
            looking.kill()
    assert seen["call"] == "fit 1"
    assert digest_and_changes(tmp_path / name) == digest_and_changes(tmp_path / "alone")
