"""Folders of any content are read at once, or raise CheckpointError."""

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

from lockstep.checkpoint import checkpoint_files, resume
from lockstep.checkpoint.checkpoint_files import Contents, load
from lockstep.checkpoint.scheduler import parse_every
from lockstep.checkpoint.store import Store
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
    """Return a value nested in `levels` lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def seal(path: Path, body: Any, *, text: bytes | None = None) -> None:
    """Write a manifest with a correct checksum."""
    text = json.dumps(body).encode()[1:] if text is None else text
    (path / "manifest.json").write_bytes(checkpoint_files.sealed(text))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Store(tmp_path_factory.mktemp("kept")).write(sample(1))


def examine(path: Path) -> Contents | None:
    """Read a checkpoint as commands and jobs do; return None if it is refused."""
    for entry in Store(path.parent).entries():
        assert entry.time >= 0
    try:
        contents = load(path)
        resume.newest(path.parent, lambda text: None)
    except CheckpointError:
        return None
    return contents


@settings(quick, max_examples=60)
@given(st.data())
def test_manifests_of_any_content(path: Path, data: st.DataObject) -> None:
    size = (path / "state.safetensors").stat().st_size
    whole: dict[str, Any] = {"format": 1, "step": 1, "time": 1.5, "arrays": {}, "manifest": {}, "bytes": size}
    field = data.draw(st.sampled_from([*whole, "job"]))
    value = data.draw(anything)
    if field == "job":
        whole["manifest"] = {"job": value}
    else:
        whole[field] = value
    seal(path, whole)
    examine(path)


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
def test_texts_that_are_not_manifests_are_refused(path: Path, text: bytes) -> None:
    seal(path, None, text=text)
    assert examine(path) is None


@pytest.mark.parametrize("kind", ["F8_E4M3", "C64", "F4", "I8", "nix", ["F32"]])
def test_states_of_unsupported_dtypes_are_refused(path: Path, kind: Any) -> None:
    header = json.dumps({"x": {"dtype": kind, "shape": [8], "data_offsets": [0, 8]}}).encode()
    state = struct.pack("<Q", len(header)) + header + bytes(8)
    other = path.parent.parent / f"other-{kind!s:.3}" / "step-000000000001"
    other.mkdir(parents=True)
    (other / "state.safetensors").write_bytes(state)
    body = {"format": 1, "step": 1, "time": 1, "manifest": {}, "bytes": len(state)}
    seal(other, body | {"arrays": {"x": ["complex64", [8], "00"]}})
    assert examine(other) is None


@quick
@given(anything | st.sampled_from([deep(500), deep(5000), {"$tuple": deep(5000)}]))
def test_packed_values_of_any_kind(packed: Any) -> None:
    with suppress(CheckpointError):
        unpack(packed, {})


@quick
@given(
    st.text() | st.from_regex(r"\d+(\.\d*)?[smhd]?", fullmatch=True) | st.sampled_from(["9" * 5000, "0" * 99])
)
def test_intervals_of_any_text(text: str) -> None:
    try:
        every = parse_every(text)
    except ConfigError:
        return
    assert (every.steps or every.seconds or 0) > 0


@pytest.mark.parametrize("text", ["1\u0663", "1" + 15 * "0", "\u0663"])
def test_a_number_of_steps_has_up_to_15_digits_from_0_to_9(text: str) -> None:
    assert parse_every("1" + 14 * "0").steps == 10**14
    with pytest.raises(ConfigError):
        parse_every(text)


COMMANDS = """
import sys
from pathlib import Path
from lockstep.checkpoint import resume
from lockstep.checkpoint.store_lock import is_training
from lockstep.checkpoint.store import Store
folder = Path(sys.argv[1])
print([entry.fault for entry in Store(folder).entries()], resume.newest(folder, print))
try:
    print(is_training(folder))
except Exception as error:
    print(error)
"""


def test_pipes_and_folders_in_place_of_files_do_not_block(tmp_path: Path) -> None:
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
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    assert output.count("is not a regular file") >= 5
    assert output.endswith("cannot be read: .training is not a regular file\n")


def test_a_checkpoint_without_facts_about_a_job_is_refused(tmp_path: Path) -> None:
    for step, job in enumerate([None, [], {"replicas": 0, "seed": 0, "threads": 1}, {"replicas": 1}]):
        Store(tmp_path).write(Contents(step, {"job": job}, {}))
        with pytest.raises(LockstepError, match="was not written by a job: cannot read 'job' in its"):
            resume.newest(tmp_path, print)
