"""Random numbers follow from seeds, step and replica: never from the worker that draws them."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of one grey pixel, whose values are their numbers."""
    folder = tmp_path_factory.mktemp("images")
    for value in range(24):
        head = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(bytes([0, value]))), (b"IEND", b""))
        body = b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
        (folder / f"{value:02}.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return folder


def results(run: Any, *workers: int) -> list[str]:
    """Check that these workers agree, and that one warning names the equal draws; return their results."""
    assert run.status == 0, run.stderr
    lines = [run.marked(worker, "result ") for worker in workers]
    assert lines == [lines[0]] * len(workers)
    assert run.stderr.count("the first batches of replicas") == 1
    assert "the first batches of replicas 0 and 1 are equal" in run.stderr
    return lines[0]


@pytest.mark.slow
def test_workers_that_join_and_leave_draw_the_same_numbers(launch: Launch, images: Path) -> None:
    pytest.importorskip("tensorflow")
    program = ("random_numbers.py", str(images))
    one = results(launch("-n 1 --replicas 3", *program, backend="tensorflow"), 0)
    assert len(one) == 12
    two = launch("-n 2 --replicas 3 --max-restarts 0", *program, "fit", backend="tensorflow")
    assert "worker 1 was killed by SIGKILL" in two.stderr
    assert results(two, 0) == one
    three = launch("-n 3 --min-workers 3", *program, "driven", backend="tensorflow")
    assert three.status == 0, three.stderr
    assert "worker 3 joined" in three.stderr
    assert [three.marked(worker, "result ") for worker in (0, 2, 3)] == [one[:1]] * 3


@pytest.mark.slow
def test_pipelines_shuffle_alike_on_every_backend(launch: Launch, backend: str, images: Path) -> None:
    pytest.importorskip("tensorflow")
    if backend == "tensorflow":
        pytest.skip("draws more: see above")
    one, two = (
        launch(f"-n {workers} --replicas 3", "random_numbers.py", str(images), backend=backend)
        for workers in (1, 2)
    )
    assert results(one, 0) == results(two, 0, 1)
