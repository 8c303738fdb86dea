"""How a worker whose script has succeeded ends."""

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launcher import worker_main
from lockstep.worker import job


class Client:
    """An agent's client that records what the worker reports.

    Args:
        released: what each wait returns; an error is raised.
    """

    def __init__(self, *released: bool | type[BaseException]) -> None:
        self.did: list[str] = []
        self._released = list(released)

    def finished(self) -> None:
        self.did.append("script ended")

    def awaits_last_line(self) -> None:
        self.did.append("awaits the last line")

    def wait_for_release(self, seconds: float) -> bool:
        self.did.append(f"waits {seconds:g} s")
        match self._released.pop(0):
            case bool(in_time):
                return in_time
            case error:
                raise error


def finish(client: Any, monkeypatch: pytest.MonkeyPatch, *, by_hand: bool = True) -> list[str]:
    end = SimpleNamespace(end=lambda: client.did.append("last work"))
    monkeypatch.setattr(job, "current", lambda: end)
    identity: Any = SimpleNamespace(by_hand=by_hand, worker=1)
    worker_main._finish(client, identity)
    did: list[str] = client.did
    return did


def test_the_end_of_the_script_is_reported_before_the_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop that arrives while the last checkpoint is written leaves time for it."""
    assert finish(Client(), monkeypatch, by_hand=False) == ["script ended", "last work"]
    did = finish(Client(True), monkeypatch)
    assert did == ["script ended", "last work", "awaits the last line", "waits 1 s"]


def test_a_worker_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert finish(Client(False, False), monkeypatch)[-2:] == ["waits 1 s", "waits 9 s"]
    assert capfd.readouterr().err.splitlines() == [
        "lockstep: the script of worker 1 has finished; it waits up to 10 s for the other workers "
        "(Ctrl-C ends the wait)",
        "lockstep: the script of worker 1 has finished; the others continue, and the last line of the job "
        "appears on their terminals",
    ]


@pytest.mark.parametrize("released", [(KeyboardInterrupt,), (False, KeyboardInterrupt)])
def test_ctrl_c_only_ends_the_wait(released: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(*released)
    try:
        finish(client, monkeypatch)
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C raised an error")
    assert client.did[-1].startswith("waits")
