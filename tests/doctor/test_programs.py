"""Programs that crash, hang and write: real processes."""

import os
import sys
import time
from pathlib import Path

from lockstep.doctor.programs import Ended, Program


def started(script: str) -> Program:
    return Program.start([sys.executable, "-c", script], dict(os.environ))


def after(script: str, seconds: float = 30.0) -> Ended:
    return started(script).result(time.monotonic() + seconds)


def test_what_a_program_writes_is_told() -> None:
    ended = after("import sys; print('out'); print('err', file=sys.stderr)")
    assert (ended.status, ended.output, ended.errors) == (0, "out\n", "err\n")


def test_more_than_a_pipe_holds_is_no_hindrance() -> None:
    assert len(after("print('x' * 10_000_000)").output) == 10_000_001


def test_an_exception_is_told_by_its_last_line() -> None:
    assert after("raise ValueError('broken')").how() == "ended with status 1: ValueError: broken"


def test_a_crash_is_told_by_its_signal() -> None:
    ended = after("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.status == -11
    assert ended.how() == "was ended by SIGSEGV"


def test_a_program_that_hangs_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r} + ".new", "w").write(str(child.pid))
os.rename({str(pids)!r} + ".new", {str(pids)!r})
print("halfway", flush=True)
time.sleep(600)
"""
    program = started(script)
    deadline = time.monotonic() + 30
    while not pids.exists():
        assert time.monotonic() < deadline
    child = os.pidfd_open(int(pids.read_text()))
    try:
        ended = program.result(time.monotonic())
        assert ended.status is None
        assert ended.output == "halfway\n"
        assert "had not ended after" in ended.how()
        import select

        assert select.select([child], [], [], 10)[0]
    finally:
        os.close(child)
