"""The names of workers in messages, and the meaning of a status."""

import pytest

from lockstep.system.exit_status import describe_exit, shell_status
from lockstep.system.prose import name_workers


@pytest.mark.parametrize(
    ("workers", "name"),
    [((3,), "worker 3"), ((1, 2), "workers 1 and 2"), ((0, 1, 2), "workers 0, 1 and 2")],
)
def test_names(workers: tuple[int, ...], name: str) -> None:
    assert name_workers(workers) == name


@pytest.mark.parametrize(
    ("status", "shell", "text"),
    [
        (0, 0, "exited with status 0"),
        (3, 3, "exited with status 3"),
        (-9, 137, "was killed by SIGKILL"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_statuses(status: int, shell: int, text: str) -> None:
    assert shell_status(status) == shell
    assert describe_exit(status) == text
