"""Checkpoints that nobody's job has written: a value or CheckpointError, at once, whatever lies there."""

import json
import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import sample
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.checkpoint import checkpoint_files as folder
from lockstep.checkpoint import choice
from lockstep.checkpoint.store import Contents, Store, load
from lockstep.checkpoint.values import unpack
from lockstep.errors import CheckpointError, ConfigError, LockstepError

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
texts = st.text(max_size=5) | st.sampled_from(["float32", "bool", "$tuple", "x", "job", "seed"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 2**90)
    | st.floats()
    | texts
    | st.just("7" * 400)
)
tags = st.sampled_from(["$array", "$tuple", "$dict", "$int", "$float", "$bytes", "$str", "$scalar", "$"])
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.builds(lambda tag, value: {tag: value}, tags, inner)
    ),
    max_leaves=10,
)


def deep(levels: int) -> Any:
    """A value in as many lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def seal(path: Path, body: Any, *, text: bytes | None = None) -> None:
    """Write a manifest with the right checksum."""
    text = json.dumps(body).encode()[1:] if text is None else text
    (path / "manifest.json").write_bytes(folder.sealed(text))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Store(tmp_path_factory.mktemp("kept")).write(sample(1))


def looked_at(path: Path) -> Contents | None:
    """Do with a checkpoint what all commands and jobs do; None if it is refused."""
    for entry in Store(path.parent).entries():
        assert entry.time >= 0
    try:
        contents = load(path)
        choice.newest(path.parent, lambda text: None)
    except CheckpointError:
        return None
    return contents


@settings(quick, max_examples=60)
@given(st.data())
def test_sealed_manifests_of_any_content(path: Path, data: st.DataObject) -> None:
    size = (path / "state.safetensors").stat().st_size
    whole: dict[str, Any] = {"format": 1, "step": 1, "time": 1.5, "arrays": {}, "manifest": {}, "bytes": size}
    field = data.draw(st.sampled_from([*whole, "job"]))
    value = data.draw(anything)
    if field == "job":
        whole["manifest"] = {"job": value}
    else:
        whole[field] = value
    seal(path, whole)
    looked_at(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"}",
        b"]",
        b"\xff\xfe}",
        b'"format":' + b"[" * 100_000,
        b'"format":1,"manifest":' + b'{"a":' * 100_000,
        b'"format":1,"step":' + b"9" * 5000 + b"}",
        b'"format":[1]}',
        b'"format":1}',
        b'"format":1,"step":1,"time":1e300,"arrays":{},"manifest":{},"bytes":0}',
        b'"format":1,"step":1,"time":NaN,"arrays":{},"manifest":{},"bytes":0}',
        b'"format":1,"step":1,"time":1,"arrays":{"a":["float32",[1]]},"manifest":{},"bytes":0}',
    ],
    ids=range(12),
)
def test_sealed_texts_that_are_no_manifest(path: Path, text: bytes) -> None:
    seal(path, None, text=text)
    assert looked_at(path) is None


@pytest.mark.parametrize("kind", ["F8_E4M3", "C64", "F4", "I8", "nix", ["F32"]])
def test_states_of_any_dtype(path: Path, kind: Any) -> None:
    header = json.dumps({"x": {"dtype": kind, "shape": [8], "data_offsets": [0, 8]}}).encode()
    state = struct.pack("<Q", len(header)) + header + bytes(8)
    other = path.parent.parent / f"other-{kind!s:.3}" / "step-000000000001"
    other.mkdir(parents=True)
    (other / "state.safetensors").write_bytes(state)
    body = {"format": 1, "step": 1, "time": 1, "manifest": {}, "bytes": len(state)}
    seal(other, body | {"arrays": {"x": ["complex64", [8], "00"]}})
    assert looked_at(other) is None


@quick
@given(anything | st.sampled_from([deep(500), deep(5000), {"$tuple": deep(5000)}]))
def test_packed_values_of_any_kind(packed: Any) -> None:
    with suppress(CheckpointError):
        unpack(packed, {})


@quick
@given(
    st.text() | st.from_regex(r"\d+(\.\d*)?[smhd]?", fullmatch=True) | st.sampled_from(["9" * 5000, "0" * 99])
)
def test_durations_of_any_text(text: str) -> None:
    try:
        every = choice.parse_every(text)
    except ConfigError:
        return
    assert (every.steps or every.seconds or 0) > 0


COMMANDS = """
import sys
from pathlib import Path
from lockstep.checkpoint import choice
from lockstep.checkpoint.store_lock import is_training
from lockstep.checkpoint.store import Store
folder = Path(sys.argv[1])
print([entry.fault for entry in Store(folder).entries()], choice.newest(folder, print))
try:
    print(is_training(folder))
except Exception as error:
    print(error)
"""


def test_what_is_no_file_is_never_waited_for(tmp_path: Path) -> None:
    names = ("state.safetensors", "manifest.json")
    paths = [Store(tmp_path, keep=9).write(sample(step)) for step in range(4)]
    for step, (path, name) in enumerate(zip(paths, (*names, *names), strict=True)):
        file = path / name
        file.unlink()
        file.mkdir() if step < 2 else os.mkfifo(file)
    (tmp_path / ".training").unlink(missing_ok=True)
    os.mkfifo(tmp_path / ".training")
    (tmp_path / "step-000000000007").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "step-000000000008")
    command = [sys.executable, "-c", COMMANDS, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert told.count("is not a regular file") >= 5
    assert told.endswith("cannot be read: .training is not a regular file\n")


def test_a_checkpoint_that_no_job_kept_is_refused(tmp_path: Path) -> None:
    for step, job in enumerate([None, [], {"replicas": 0, "seed": 0, "threads": 1}, {"replicas": 1}]):
        Store(tmp_path).write(Contents(step, {"job": job}, {}))
        with pytest.raises(LockstepError, match="was not written by a job: cannot read 'job' in its"):
            choice.newest(tmp_path, print)
