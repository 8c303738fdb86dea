"""Jobs that lose a GPU, with a stand-in for NVIDIA's driver: backends compute on the CPU, as always here."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEAN = ROOT / "tests" / "lean" / "sitecustomize.py"
Lean = Callable[..., dict[str, str]]
DRIVER = f"""
import os, sys
from pathlib import Path
from lockstep.system import nvml

def load():
    sys.path.append({str(ROOT)!r})
    from tests.system.fake_nvml import LOST, FakeNvml, h100
    sys.path.remove({str(ROOT)!r})
    gpus = [h100(number) for number in range(int(os.environ["GPUS"]))]
    gpus[1] = LOST if Path(os.environ["LOST"]).exists() else gpus[1]
    return FakeNvml(*gpus)

nvml._DEVICES, nvml.load = (Path("/"),), load
"""
SCRIPT = """
import os, time
from pathlib import Path
gpu = os.environ["CUDA_VISIBLE_DEVICES"]
Path(f"started-{gpu}").touch()
import jax, keras, numpy

class Loses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and gpu == "1":
            Path(os.environ["LOST"]).touch()
            if os.environ["HOW"] == "abort":
                os.abort()
            raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")
        if batch == 20 and gpu == "0":
            while os.environ["UNTIL"] not in f"{os.listdir()} {Path('run/events.jsonl').read_text()}":
                time.sleep(0.02)

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(numpy.ones((400, 4)), numpy.ones(400), batch_size=8, epochs=1, verbose=0, callbacks=[Loses()])
"""
FAULT = "GPU 1: it has fallen off the bus"


def lose(lockstep: Any, lean: Lean, gpus: int, how: str, until: str) -> Any:
    (lockstep.folder / "driver").mkdir()
    (lockstep.folder / "driver" / "sitecustomize.py").write_text(f"{LEAN.read_text()}{DRIVER}")
    script = lockstep.folder / "script.py"
    script.write_text(SCRIPT)
    path = f"{lockstep.folder / 'driver'}:{os.environ.get('PYTHONPATH', '')}"
    variables = lean(script, "jax") | {
        "PYTHONPATH": path,
        "GPUS": str(gpus),
        "HOW": how,
        "UNTIL": until,
        "LOST": str(lockstep.folder / "lost"),
    }
    options = ("-n", "2", "--backend", "jax", "script.py")
    done = lockstep.run(*options, **variables)
    assert done.status == 0, done.err
    assert [each["fault"] for each in done.events() if each["event"] == "gpu lost"] == [FAULT]
    assert f"lockstep: {FAULT}; no other worker gets it" in done.err
    return done


def test_a_gpu_that_is_lost_is_named_and_no_other_worker_gets_it(lockstep: Any, lean: Lean) -> None:
    """Its worker is aborted, as JAX does after an error of CUDA. All other GPUs are in use."""
    done = lose(lockstep, lean, 2, "abort", "cannot start worker 2")
    assert f"worker 1 was killed by SIGABRT, {FAULT}; worker 0 continues" in done.err
    assert f"cannot start worker 2: {FAULT}; no other GPU is free" in done.err
    assert not (done.folder / "worker-2.log").exists()
    (last,) = re.findall("lockstep: (finished in .*)", done.err)
    assert re.search(rf"on 1 worker \(1 lost\); {FAULT}; digest ", last), last


@pytest.mark.ci
def test_the_replacement_gets_a_gpu_that_no_worker_uses(lockstep: Any, lean: Lean) -> None:
    """Its worker raises an error of its backend."""
    done = lose(lockstep, lean, 3, "raise", "started-2")
    assert re.search(rf"worker 1 .*unspecified launch failure; {FAULT} \(sudo dmesg", done.err), done.err
    assert f"; {FAULT}; digest " in done.err
