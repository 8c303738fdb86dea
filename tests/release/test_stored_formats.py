"""Files of an earlier version stay readable: checkpoints, events, measurements, digest logs, orders.

The files in `golden` were written by version 0.1.0.dev0 and do not change: a version with other formats reads
them too, and adds its own files.
"""

import hashlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lockstep.checkpoint.resume import newest
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.values import unpack
from lockstep.diff.recording import Key, read_recording
from lockstep.monitoring.run_folder import RunFolder
from lockstep.observability.measurements import STEP_PARTS
from lockstep.observability.run_state import METRIC_COLUMNS
from lockstep.parameter_server.order import RecordKind, read_order

GOLDEN = Path(__file__).parent / "golden"
SAVED, RUN, KINDS = GOLDEN / "saved", GOLDEN / "run", GOLDEN / "kinds"
FILES = "ae8946936150515a"
"""The first digits of the SHA-256 of all of them together."""
DIGEST = "45be74b16910ea1d9ad2ea5a8279deadaf00b1d7373a5e0928be9ac5d56e12aa"
SCRIPT = "10b431db7a730f4b61e075bd98671e8d9ee16d3c72879d906cabccbd9c825361"

STATE = {
    "dense/kernel": (
        *("-0x1.4e6988p-6", "-0x1.03d462p-1", "0x1.18e0dep-2", "0x1.48983cp-1", "-0x1.8cba9cp-2"),
        *("0x1.c2264cp-1", "0x1.19647ep-1", "0x1.5e9a52p-1", "-0x1.a0bfe6p-4", "-0x1.cd1718p-1"),
        *("0x1.7fec6ep-2", "-0x1.d68018p-1"),
    ),
    "dense/bias": ("0x1.32eafep-11", "0x1.8fdcc0p-9", "0x1.2e1242p-9"),
    "dense_1/kernel": (
        *("-0x1.489888p-4", "0x1.f6456ap-2", "0x1.ce4f62p-1", "0x1.6f73eap-3", "-0x1.7e2228p-3"),
        "0x1.24656cp-1",
    ),
    "dense_1/bias": ("0x1.ade7dcp-14", "-0x1.ade6fap-14"),
}
"""The weights of the stored training after its four steps."""

VALUE = {
    "constants": [None, True, -5, 0.1, "ä"],
    "integer": -(2**80),
    "floats": [math.inf, -math.inf, math.nan],
    "signed nan": math.copysign(math.nan, -1),
    "lone surrogate": "\ud800",
    "bytes": b"\x00\xff",
    "tuple": (1, (2.5,)),
    "other keys": {3: "three", "$x": 1},
    "scalar": np.float32(0.5),
    "array": np.array([[1, 2], [3, 4]], "int16"),
}
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16"),
)


def exact(value: Any) -> Any:
    """A form of nested values in which equal means the same types and bits."""
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, dict):
        return dict, [(exact(key), exact(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact(part) for part in value]
    return type(value), struct.pack(">d", value) if isinstance(value, float) else value


def plain_arrays(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file as docs/checkpoints.md describes it."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    names = {"F64": "f8", "F32": "f4", "I32": "i4", "U32": "u4"}
    return {
        name: np.frombuffer(data[start:][slice(*found["data_offsets"])], names[found["dtype"]]).reshape(
            found["shape"]
        )
        for name, found in header.items()
    }


def test_the_files_are_those_of_the_version_that_wrote_them() -> None:
    paths = sorted(path for path in GOLDEN.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.relative_to(GOLDEN)}\n".encode() + path.read_bytes())
    assert total.hexdigest()[:16] == FILES
    assert hashlib.sha256((GOLDEN / "training.py").read_bytes()).hexdigest() == SCRIPT


def test_a_checkpoint_of_every_type() -> None:
    arrays = {
        name: np.array([0, 1, 3]).astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
        for name in DTYPES
    }
    arrays |= {"empty": np.zeros((2, 0), "float32"), "number": np.array(7, "int64")}
    ((path, contents),) = [Store(KINDS).newest(pytest.fail)]
    assert (path.name, contents.step) == ("step-000000000007", 7)
    assert exact(unpack(contents.manifest["value"], contents.arrays)) == exact(VALUE)
    assert exact(dict(contents.arrays)) == exact(arrays | {"value/array": VALUE["array"]})


def test_a_checkpoint_of_a_job() -> None:
    path, facts, note = newest(SAVED, pytest.fail)
    assert facts == {
        "replicas": 2,
        "seed": 0,
        "threads": 1,
        "input": "divided",
        "backend": "jax",
        "libraries": {
            "keras": "3.15.1",
            "jax": "0.10.2",
            "jaxlib": "0.10.2",
            "numpy": "2.4.6",
            "lockstep": "0.1.0.dev0",
        },
    }
    assert "is finished after 4 steps" in note
    _, contents = Store(SAVED).newest(pytest.fail)
    assert (contents.step, Store(SAVED).finished()) == (4, 4)
    for name, digits in STATE.items():
        kept = contents.arrays[f"current/sequential/{name}"]
        assert kept.dtype == np.float32
        assert kept.ravel().tolist() == [*map(float.fromhex, digits)]
    assert exact(dict(contents.arrays)) == exact(
        {name: plain_arrays(path / "state.safetensors")[name] for name in contents.arrays}
    )
    _, text = (path / "manifest.json").read_text().split("\n", 1)
    assert contents.manifest == json.loads("{" + text)["manifest"]
    training = unpack(contents.manifest["training"], contents.arrays)
    assert (training["steps"], training["taken"], training["call"]) == (4, 4, "fit 1")
    assert training["sources"] == {"training.py": SCRIPT}
    history = {"history": {"accuracy": [0.75], "loss": [0.6639465093612671]}, "epoch": [0]}
    assert training["callbacks"] == [("History", history, [])]
    assert training["settings"]["optimizer: beta_1"] == "0.9"


def test_the_events_and_measurements_of_a_run() -> None:
    run = RunFolder(RUN)
    assert run.update()
    data = run.state
    assert data.skipped == 0
    assert [(one.event, one.worker) for one in data.events] == [
        *(("job", None), ("started", 0), ("started", 1), ("ready", 0), ("ready", 1)),
        *(("strategy", 1), ("distributes", 1), ("strategy", 0), ("distributes", 0)),
        *(("call", 1), ("call", 0), ("first step", 0), ("first step", 1), ("checkpoint", 0)),
        *(("call ended", 0), ("done", 0), ("call ended", 1), ("done", 1), ("checkpoint", 0)),
        *(("trained", 0), ("exited", 1), ("exited", 0), ("decision", None), ("finished", None)),
    ]
    assert data.job["format"] == 1
    assert (data.job["target"], data.job["arguments"], data.job["seed"]) == ("training.py", ["2"], 0)
    assert data.job["script"] == {"path": "/srv/train/training.py", "sha256": SCRIPT}
    assert (data.began, data.last) == (1795748045.615, 1795748051.017)
    ended = {"status": 0, "message": "", "workers": [], "seconds": 5.419, "lost": 0, "joined": 0}
    trained = {"checkpoints": 2, "verified": 0, "before": 0, "steps": 4, "model": "sequential"}
    assert data.finished == {**ended, **trained, "digest": DIGEST}
    steps = {worker: (info.phase, info.pid, info.status) for worker, info in data.workers.items()}
    assert steps == {0: ("finished", 1043, 0), 1: ("finished", 1045, 0)}
    assert [(call.name, call.began, call.ended) for call in data.calls] == [
        ("fit 1", 1795748049.436, 1795748050.43)
    ]
    parts = dict(
        zip(STEP_PARTS, (0.00272, 0.001878, 0.000175, 0.004836, 0.000777, 0.074509, 0.0), strict=True)
    )
    numbers = {
        "call": 0,
        "number": 4,
        "trained": 4,
        "count": 3,
        "examples": 12,
        "replicas": 1,
        "compiled": 0,
        "compiling": 0.0,
    }
    times = {"time": 1795748050.428, "began": 1795748050.338384}
    measured = data.workers[0].steps.last()
    # Later fields, which the run does not have.
    assert all(math.isnan(measured.pop(name)) for name in ("staleness", "largest_staleness"))
    assert measured == {**times, **numbers, **parts}
    loss = data.metrics["loss"]
    assert [loss.column(name).tolist() for name in METRIC_COLUMNS] == [
        [1795748050.405, 1795748050.427],
        [2.0, 4.0],
        [0.6639465093612671, 0.6646054983139038],
        [1.0, 2.0],
    ]
    assert data.hosts["node1"].load.last()["memory_used"] == 2577707008
    assert data.workers[1].load.last()["memory"] == 245555200
    assert [one.fields["step"] for one in data.checkpoints] == [2, 4]


def test_the_digest_log_of_a_run() -> None:
    recording = read_recording(RUN)
    assert (recording.replicas, recording.first, recording.last, recording.lost) == (2, 1, 4, 0)
    assert recording.succeeded
    assert recording.program["sources"] == {"training.py": SCRIPT}
    assert recording.settings["fit 1"]["setting optimizer: beta_1"] == "0.9"
    ends = [Key(4, True, f"the end of {what}") for what in ("fit 1", "the script")]
    assert sorted(recording.steps) == [*(Key(step, tests=False) for step in (1, 2, 3, 4)), *ends]
    first = recording.steps[Key(1, tests=False)]
    assert first.names[:2] == ("sequential/dense/kernel", "sequential/dense/bias")
    assert first.variables[-1] == "adam/sequential_dense_1_bias_velocity"
    assert first.examples == {0: 2, 1: 2}
    assert first.inputs == {0: "fa725387773cdadc", 1: "3fdc14a842b72c7d"}
    assert first.rows == {0: "d2ca5ccccdc049b8", 1: "d8322444d6778acb"}
    assert first.partials == {0: "6331dd6c4cc9e105", 1: "44aa5c01f35176e0"}
    assert (first.total, first.total_parts[:16]) == ("e8815c8921744f4e", "d1e4742fff9dfe5b")
    assert (first.before, first.after) == ("91c2fedf863f6720", "7d1789e0f9a05a99")
    assert [recording.steps[end].before for end in ends] == ["298158b9d7a8c632"] * 2


def test_the_orders_of_arrival_of_a_run() -> None:
    assert read_order(RUN / "order" / "chief", 1) == [
        (RecordKind.ASSIGN, 2, 0, 0),
        (RecordKind.ASSIGN, 1, 1, 0),
        (RecordKind.DONE, 2, 0, 0),
        (RecordKind.ASSIGN, 2, 2, 0),
        (RecordKind.DONE, 1, 1, 0),
        (RecordKind.ASSIGN, 1, 3, 0),
    ]
    assert read_order(RUN / "order" / "ps-0", 1) == [
        (RecordKind.PULL, 2, 0, 0),
        (RecordKind.PUSH, 2, 0, 0),
        (RecordKind.PULL, 1, 1, 0),
        (RecordKind.PUSH, 1, 1, 0),
        (RecordKind.READ, 0, 2, 0),
    ]


@pytest.mark.slow
def test_a_job_resumes_from_the_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    # A newer Keras may give layers other settings.
    options = ["-n", "1", "--backend", "jax", "--checkpoint", "saved", "--run-dir", "resumed"]
    program = ["--accept-changes", "training.py", "3"]
    command = [sys.executable, "-m", "lockstep", "run", *options, *program]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "resumed")
    run.update()
    assert run.state.finished is not None
    assert (run.state.finished["before"], run.state.finished["steps"]) == (4, 6)
