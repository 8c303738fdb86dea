"""Recorded orders of arrival are followed: the same messages give the same bits, in processes and in one.

The orders in `recorded` do not change. If their format does, its reader reads them too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.ci
def test_a_recorded_run_is_followed_to_the_last_message(
    launch: Callable[..., Any], quickest_backend: str
) -> None:
    options = f"-n 2 --ps 2 --max-restarts 0 --threads-per-worker 1 --order {RECORDED}"
    found = []
    for more, processes in (("", 5), ("--one-process", 1)):
        run = launch(f"{options} {more}", "recorded.py", backend=quickest_backend)
        assert run.status == 0, run.stderr
        for name in ("chief", "ps-0", "ps-1"):
            recorded = (RECORDED / "order" / name).read_bytes()
            assert (run.folder / "order" / name).read_bytes() == recorded, name
        found += [
            tuple(run.marked(worker, mark)) for worker in range(processes) for mark in ("result", "digest")
        ]
    assert set(found) == set(found[:2])
    assert [len(lines) for lines in found] == [1] * 12
