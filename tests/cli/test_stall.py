"""A receiver of `--notify` hears of a training that really stalls, again if it does so again."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from webhook import Webhook

PATIENCE = 600.0
SCRIPT = Path(__file__).parent / "stalling.py"
PATCHED = (
    "import lockstep.coordinator.notifications as n; n.STALL = 2.0; "
    "from lockstep.cli.main import cli; cli(prog_name='lockstep')"
)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Make a named pipe, and return a descriptor of both of its ends: nobody waits to open it."""
    made = []

    def make(name: str) -> int:
        os.mkfifo(tmp_path / name)
        made.append(os.open(tmp_path / name, os.O_RDWR))
        return made[-1]

    yield make
    for descriptor in made:
        os.close(descriptor)


def await_stop(process: psutil.Process) -> None:
    until = time.monotonic() + PATIENCE
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.ci
def test_input_that_waits_and_a_stopped_worker(
    tmp_path: Path, pipe: Callable[[str], int], lean: Callable[..., dict[str, str]]
) -> None:
    shutil.copy(SCRIPT, tmp_path)
    gate, stops = pipe("gate"), pipe("stops")
    with Webhook() as webhook:
        process = subprocess.Popen(
            [sys.executable, "-c", PATCHED, "run", "-n", "2", "--notify", "env:HOOK", "stalling.py"],
            cwd=tmp_path,
            env={
                **os.environ,
                **lean(SCRIPT, "jax"),
                "no_proxy": "*",
                "HOOK": webhook.url(),
                "KERAS_BACKEND": "jax",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            first = webhook.await_message("stalled", PATIENCE)
            webhook.received.clear()
            os.write(gate, b"x")
            assert select.select([stops], [], [], PATIENCE)[0]
            worker = psutil.Process(int(os.read(stops, 100)))
            await_stop(worker)
            second = webhook.await_message("stalled", PATIENCE)
            worker.send_signal(signal.SIGCONT)
            _, errors = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, errors
        finished = webhook.messages[-1]
    # A job on a slow machine may have stalled before.
    assert 0 < first["steps"] <= 11
    assert 0 < second["steps"] <= 27
    assert re.search(r": no step was completed for \d+ s$", first["text"])
    assert (finished["what"], finished["steps"]) == ("finished", 40)
