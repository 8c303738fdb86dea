"""Runs the programs of a folder one after the other, and prints the result of each: a line of JSON.

    fuzz_worker.py [--plain] [--save FOLDER] FOLDER NUMBER...

An error ends a program on every worker; if workers may then be out of step, it ends the process. With --save,
the chief saves the arrays to a folder. The line of the chief has the parts that notes name as per replica.
"""

import argparse
import contextlib
import gc
import hashlib
import io
import json
import random
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np

from lockstep.errors import LockstepError, PeerError
from lockstep.keras import patches
from lockstep.worker import job

BACKEND = keras.backend.backend()
NAMES = "computed per replica: "
"""Begins the end of a note that names the parts of a program which replicas compute separately."""


def main() -> None:
    """Run the programs that the command line selects."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("programs", type=int, nargs="+")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.plain:
        prepare_own_strategy()
    for number in options.programs:
        line, out_of_step = run(options.folder / f"{number:07}.py", options.save)
        print("program", number, json.dumps(line), flush=True)
        # After an error, TensorFlow's own collectives fail in the programs that follow.
        broken = options.plain and BACKEND == "tensorflow" and "error" in line
        if out_of_step or broken:
            sys.exit(3)


def prepare_own_strategy() -> None:
    """Let TensorFlow's own strategy have several devices."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        (cpu,) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)


def run(path: Path, save: Path | None) -> tuple[dict[str, Any], bool]:
    """Run one program; return its result, and whether workers may be out of step."""
    begin()
    notes = io.StringIO()
    try:
        with contextlib.redirect_stderr(notes):
            names = runpy.run_path(str(path), run_name="program")
        parts = {name: leaves(value) for name, value in names["found"].items()}
    except LockstepError as error:
        return {"refused": type(error).__name__, "says": str(error)}, isinstance(error, PeerError)
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)[-1500:]}, False
    if save and job.current().is_chief:
        arrays = {f"{name}/{i}": leaf for name, found in parts.items() for i, leaf in enumerate(found)}
        np.savez(save / f"{path.stem}.npz", **arrays)
    line = {"found": {name: hashed(found) for name, found in parts.items()}}
    if job.is_worker() and job.current().is_chief:
        found = [note.partition(NAMES)[2] for note in notes.getvalue().splitlines()]
        line["named"] = "; ".join(filter(None, found))
    return line, False


def begin() -> None:
    """Reset global state so that programs do not depend on earlier ones."""
    # This collects garbage; later collections skip the remaining objects, modules and compiled functions.
    keras.utils.clear_session()
    gc.freeze()
    keras.config.set_dtype_policy("float32")
    random.seed(1)
    np.random.seed(1)
    if job.is_worker():
        # As in a job that runs one program: its models have no strategy yet, and its notes repeat nothing.
        methods = patches.install(job.current())
        methods.adopt_all()
        introductions = methods._together._introductions  # type: ignore[attr-defined]
        introductions._introduced = False
        introductions._told.clear()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        tf.config.run_functions_eagerly(False)
    if BACKEND == "torch":
        import torch

        torch.manual_seed(1)


def leaves(value: Any) -> list[np.ndarray]:
    """Return the arrays and numbers of a nest."""
    return [np.asarray(keras.ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(value)]


def hashed(arrays: list[np.ndarray]) -> str:
    """Return the SHA-256 digest of arrays, shapes and dtypes included."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
