"""Checkpoints are restored bit for bit, or reported as damaged."""

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from checkpoint_samples import DTYPES, FLOATS, equal, is_sample, sample, steps
from safetensors.numpy import load_file

from lockstep.checkpoint.checkpoint_files import Contents, load, sealed
from lockstep.checkpoint.store import Store
from lockstep.errors import CheckpointError, UnknownFormatError


def silent(text: str) -> None:
    raise AssertionError(text)


def newest(folder: Path) -> Contents:
    found = Store(folder).newest(silent)
    assert found is not None
    path, contents = found
    assert path == folder / f"step-{contents.step:012}"
    return contents


def test_all_dtypes_and_shapes_are_restored(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (2, 0, 4), (4, 3, 2)]:
            bits = random.integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{dtype.name}/{shape}"] = bits.view(dtype).reshape(shape)
    for dtype in FLOATS:
        arrays[f"{dtype.name}/special"] = np.array([math.nan, -math.nan, math.inf, -0.0, 1e-7]).astype(dtype)
    written = Contents(1, {}, arrays)
    assert equal(load(Store(tmp_path).write(written)), written)


def test_strided_arrays_are_restored(tmp_path: Path) -> None:
    base = np.arange(24.0).reshape(4, 6)
    arrays = {"rows": base[::2], "columns": base.T, "repeated": np.broadcast_to(np.float32(3), (2, 3))}
    read = load(Store(tmp_path).write(Contents(1, {}, arrays))).arrays
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())
    assert all(array.flags.writeable for array in read.values())


def test_the_manifest_is_restored(tmp_path: Path) -> None:
    manifest = {
        "none": None,
        "list": [1, -0.0, 0.1, math.nan, math.inf, -math.inf, True, 2**200],
        "text": "ü \n \" \\ \0 ' \ud800",
        "nested": {"": [], "b": {}},
    }
    written = Contents(10**12, manifest, {})
    Store(tmp_path).write(written)
    assert equal(newest(tmp_path), written)


def test_other_programs_can_read_the_arrays_with_safetensors(tmp_path: Path) -> None:
    path = Store(tmp_path).write(sample(5))
    arrays = load_file(path / "state.safetensors")
    assert np.array_equal(arrays["weights"], sample(5).arrays["weights"])
    facts = json.loads((path / "manifest.json").read_bytes())
    assert (facts["format"], facts["step"], facts["manifest"]) == (1, 5, sample(5).manifest)
    text = (path / "manifest.json").read_bytes().split(b"\n", 1)[1]
    assert facts["checksum"] == xxhash.xxh3_128_hexdigest(text)
    assert facts["arrays"]["weights"] == [
        "float32",
        [12],
        xxhash.xxh3_128_hexdigest(arrays["weights"].tobytes()),
    ]


def test_files_are_readable_for_users_who_can_read_the_folder(tmp_path: Path) -> None:
    path = Store(tmp_path / "new" / "folder").write(sample(5))
    modes = [stat.S_IMODE(file.stat().st_mode) for file in sorted(path.iterdir())]
    assert modes == [path.stat().st_mode & 0o666] * 2


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert Store(folder).newest(silent) is None
        assert Store(folder).entries() == []


def test_entries_are_sorted_and_name_faults(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [store.write(sample(step)) for step in (7, 5, 6)]
    (paths[2] / "manifest.json").unlink()
    (tmp_path / "step-of-another-kind").mkdir()
    entries = store.entries()
    assert [entry.path for entry in entries] == [paths[1], paths[2], paths[0]]
    assert [entry.step for entry in entries] == [5, 6, 7]
    assert [entry.fault is None for entry in entries] == [True, False, True]
    assert entries[0].time >= entries[2].time > 0
    assert entries[0].bytes == sum(file.stat().st_size for file in paths[1].iterdir())


def test_older_checkpoints_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        store.write(sample(step))
    assert steps(tmp_path) == [3, 10]
    Store(tmp_path, keep=1).write(sample(11))
    assert steps(tmp_path) == [11]


def test_the_newest_verified_checkpoint_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step, verified in ((2, 0), (4, 0), (5, 4), (6, 4), (7, 4), (8, 4), (9, 7), (10, 9), (11, 9), (12, 9)):
        written = sample(step)
        store.write(replace(written, manifest={**written.manifest, "verified": verified}))
        if step == 8:
            assert steps(tmp_path) == [4, 7, 8]
    assert steps(tmp_path) == [9, 11, 12]


def test_a_checkpoint_from_another_host_leaves_the_newest_verified_one(tmp_path: Path) -> None:
    store, other = Store(tmp_path, keep=1), Store(tmp_path / "other")
    store.write(sample(4))
    written = sample(8)
    whole = other.write(replace(written, manifest={**written.manifest, "verified": 4}))
    store.adopt(whole, 8)
    assert steps(tmp_path) == [4, 8]


def test_later_checkpoints_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=9)
    store.remove_after(3)
    for step in (1, 3, 4, 10):
        store.write(sample(step))
    store.remove_after(3)
    assert steps(tmp_path) == [1, 3]
    store.remove_after(0)
    assert steps(tmp_path) == []
    assert {path.name for path in tmp_path.glob("s*")} == {
        "suspect-step-000000000001",
        "suspect-step-000000000003",
    }
    store.write(sample(1))
    store.remove_after(0)
    assert steps(tmp_path) == []


def test_the_checkpoint_just_written_is_kept_even_if_it_is_old(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (100, 200, 1, 2):
        path = store.write(sample(step))
        assert is_sample(load(path))
    assert steps(tmp_path) == [2, 100, 200]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    store.write(sample(1))
    (store.write(sample(2)) / "state.safetensors").write_bytes(b"short")
    store.write(sample(3))
    assert [entry.step for entry in store.entries() if entry.fault is None] == [1, 3]
    store.write(sample(4))
    assert steps(tmp_path) == [3, 4]


def test_a_checkpoint_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for size in (3, 5):
        store.write(sample(1, size))
    assert newest(tmp_path).arrays["weights"].size == 5
    (store.write(sample(2)) / "manifest.json").unlink()
    store.write(sample(2))
    assert steps(tmp_path) == [1, 2]


def test_unsupported_arrays_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "never")
    for name, array in [("a", np.ones(2, complex)), ("b", np.ones(2, ">f4")), ("__metadata__", np.ones(2))]:
        with pytest.raises(CheckpointError, match=f"cannot hold .*{name}"):
            store.write(Contents(1, {}, {name: array}))
    with pytest.raises(CheckpointError, match="cannot hold"):
        store.write(Contents(1, {}, {"\ud800": np.ones(2)}))
    assert not (tmp_path / "never").exists()


def test_a_manifest_that_json_cannot_represent_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Store(tmp_path).write(Contents(1, {"a": object()}, {}))
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_every_damaged_byte_is_detected(name: str, tmp_path: Path) -> None:
    path = Store(tmp_path).write(sample(1))
    descriptor = os.open(path / name, os.O_RDWR)
    for position, byte in enumerate((path / name).read_bytes()):
        for bits in (0x01, 0xFF):
            os.pwrite(descriptor, bytes([byte ^ bits]), position)
            with pytest.raises(CheckpointError) as caught:
                load(path)
            assert str(path / name) in str(caught.value)
        os.pwrite(descriptor, bytes([byte]), position)
    os.close(descriptor)
    assert is_sample(load(path))


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_every_truncation_is_detected(name: str, tmp_path: Path) -> None:
    path = Store(tmp_path).write(sample(1))
    size = (path / name).stat().st_size
    for end in [size + 1, *range(size - 1, -1, -1)]:
        os.truncate(path / name, end)
        with pytest.raises(CheckpointError, match=name):
            load(path)


def test_the_damaged_array_is_named(tmp_path: Path) -> None:
    path = Store(tmp_path).write(sample(1))
    state = path / "state.safetensors"
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{state} is damaged: the array 'weights'"):
        load(path)


def test_arrays_of_another_checkpoint_are_detected(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = store.write(sample(1)), store.write(sample(2))
    (second / "state.safetensors").replace(first / "state.safetensors")
    with pytest.raises(CheckpointError, match="the array"):
        load(first)
    with pytest.raises(CheckpointError, match=r"state.safetensors cannot be read: No such file"):
        load(second)


def test_an_unknown_format_is_named(tmp_path: Path) -> None:
    path = Store(tmp_path).write(sample(1))
    text = (path / "manifest.json").read_bytes().split(b"\n", 1)[1].replace(b'"format":1', b'"format":2')
    seal = f'{{"checksum": "{xxhash.xxh3_128_hexdigest(text)}",\n'.encode()
    (path / "manifest.json").write_bytes(seal + text)
    with pytest.raises(CheckpointError, match="has the format 2, but this Lockstep reads 1"):
        load(path)


@pytest.mark.parametrize("damaged", [False, True])
def test_newest_never_skips_a_checkpoint_of_another_format(tmp_path: Path, damaged: bool) -> None:
    store = Store(tmp_path)
    store.write(sample(1))
    manifest = store.write(sample(2)) / "manifest.json"
    text = manifest.read_bytes().partition(b"\n")[2].replace(b'"format":1,', b'"format":2,')
    manifest.write_bytes(sealed(text) + (b"x" if damaged else b""))
    reported: list[str] = []
    if damaged:
        found = store.newest(reported.append)
        assert found is not None
        assert found[1].step == 1
        assert "does not match its checksum" in reported[0]
    else:
        with pytest.raises(UnknownFormatError, match="has the format 2, but this Lockstep reads 1; use the"):
            store.newest(reported.append)
        assert reported == []


def test_newest_skips_and_reports_damaged_checkpoints(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=9)
    paths = [store.write(sample(step)) for step in (1, 2, 3, 4)]
    (paths[1] / "manifest.json").unlink()
    (paths[2] / "state.safetensors").write_bytes(b"")
    (paths[3] / "manifest.json").write_bytes(b"{}")
    reports: list[str] = []
    found = store.newest(reports.append)
    assert found is not None
    _, contents = found
    assert is_sample(contents)
    assert contents.step == 1
    expected = [
        (paths[3] / "manifest.json", "is damaged"),
        (paths[2] / "state.safetensors", "has 0 bytes"),
        (paths[1] / "manifest.json", "is missing"),
    ]
    assert len(reports) == 3
    assert all(
        str(path) in text and what in text for text, (path, what) in zip(reports, expected, strict=True)
    )


def test_finished_returns_the_last_step(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.finished() is None
    for step in (3, 5):
        store.write(sample(step))
        store.finish(step)
        assert store.finished() == step
    assert steps(tmp_path) == [3, 5]
    (tmp_path / "finished.json").write_text("[]")
    assert store.finished() is None
