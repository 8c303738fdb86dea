"""The program of `resuming` in a job whose workers leave and join while it runs.

    joining.py FOLDER HOW WHERE

HOW selects what happens, at the place WHERE:

    lost0, lost1    that worker is lost; with --min-workers the others wait there
    overtaken       worker 1 is lost; the others have finished the first `fit` when its replacement is ready
    killed          all workers are lost, as in `resuming`
    scaled          the chief asks for four workers, and later, in the second `fit`, for one
"""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import resuming

from lockstep.worker import job
from lockstep.worker.membership import AgentMembership

HOW, WHERE = sys.argv[1], " ".join(sys.argv[2:])
kill_at = resuming.kill_at
ENTERED = job.current()


def until(*texts: str) -> None:
    """Wait until the run's event log has all of `texts`."""
    assert ENTERED.context.folder is not None
    events = ENTERED.context.folder / "events.jsonl"
    while not all(text in events.read_text() for text in texts):
        time.sleep(0.01)


def asks(worker: int, *, whole: bool) -> str:
    """Return the events with which a worker requests the position or asks to join."""
    return f'"event":"asks","worker":{worker},"whole":{str(whole).lower()}'


def scale(workers: int) -> None:
    assert ENTERED.context.folder is not None
    command = [sys.executable, "-m", "lockstep", "scale", ENTERED.context.folder.name, str(workers)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def at(where: str) -> None:
    """Cause what HOW selects, at this place."""
    if HOW == "killed":
        kill_at(where)
    if where == WHERE and ENTERED.worker == {"lost0": 0, "lost1": 1, "overtaken": 1}.get(HOW):
        os.kill(os.getpid(), signal.SIGKILL)
    if ENTERED.is_chief and HOW == "overtaken":
        if where == "fit 1 step 9":
            until(asks(2, whole=False))
        if where == "fit 2 step 2":
            until(asks(2, whole=True))
    if ENTERED.is_chief and HOW == "scaled":
        if where == WHERE:
            scale(4)
            until(asks(2, whole=False), asks(3, whole=False))
        if where == "fit 1 step 12":
            until(asks(2, whole=True), asks(3, whole=True))
        if where == "fit 2 step 6":
            scale(1)


def overtaken(self: AgentMembership, join: Any = AgentMembership.join) -> Any:
    """Ask to join only when the others are in the second `fit`."""
    until('"name":"fit 2"')
    return join(self)


if HOW == "overtaken":
    AgentMembership.join = overtaken  # type: ignore[method-assign]
resuming.kill_at = at

if __name__ == "__main__":
    resuming.main()
