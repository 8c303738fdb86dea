"""Takes the picture in this folder: trains with two workers, kills one of them, and opens the page.

Run it from the root of the repository, in an environment with Lockstep and JAX, where Chromium is installed:
python docs/images/take_picture.py
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "monitoring"))

from browser import Browser, chromium  # noqa: E402

PROGRAM = """
import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(20_000, 64)).astype("float32")
y = (np.sin(x[:, 0]) + x[:, 1] * x[:, 2] > 0).astype("int32")
model = keras.Sequential([
    keras.Input((64,)),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.Dense(2),
])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=12, validation_split=0.1, verbose=2)
"""
COMMAND = (sys.executable, "-m", "lockstep")
DRAWN = (
    "[...charts.values()].every((one) => !one.shown || one.spec.kind === 'bars'"
    " || (one.loaded && !one.drawing))"
)


def take(browser: Browser, address: str, name: str) -> None:
    """Write a picture of the top of a page."""
    browser.size(1280, 1150)
    browser.open(address)
    browser.wait(f"charts.get('metric:loss')?.loaded && charts.size > 6 && {DRAWN}")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    browser.picture(HERE / name)


def main() -> None:
    """Take the picture."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(PROGRAM)
        words = ("run", "-n", "2", "--backend", "jax", "--run-dir", "train-1", "train.py")
        with (
            chromium(folder / "profile") as browser,
            subprocess.Popen([*COMMAND, *words], cwd=folder) as job,
        ):
            log = folder / "train-1" / "worker-0.log"
            while job.poll() is None and not (log.exists() and "Epoch 5/" in log.read_text()):
                pass
            events = (folder / "train-1" / "events.jsonl").read_text()
            (pid,) = re.findall(r'"event":"started","worker":1,"pid":(\d+)', events)
            os.kill(int(pid), signal.SIGKILL)
            job.wait()
            page = subprocess.Popen(
                [*COMMAND, "ui", "train-1"], cwd=folder, stderr=subprocess.PIPE, text=True
            )
            assert page.stderr is not None
            take(browser, re.findall(r"http://\S+", page.stderr.readline())[0].rstrip(";"), "page.png")
            page.terminate()
            page.communicate()


if __name__ == "__main__":
    main()
