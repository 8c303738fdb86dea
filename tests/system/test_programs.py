"""Programs that crash, hang and write, as real processes."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import lockstep.system.programs
from lockstep.system.programs import ProbeProgram, ProgramResult, results


def started(script: str) -> ProbeProgram:
    return ProbeProgram.start([sys.executable, "-c", script], dict(os.environ))


def after(script: str, seconds: float = 30.0) -> ProgramResult:
    return started(script).result(time.monotonic() + seconds)


def test_output_is_returned() -> None:
    ended = after("import sys; print('out'); print('err', file=sys.stderr)")
    assert (ended.status, ended.output, ended.errors) == (0, "out\n", "err\n")


def test_output_larger_than_a_pipe_does_not_block() -> None:
    ended = after("print('first' + 'x' * 10_000_000 + 'last')")
    assert ended.status == 0
    assert ended.output.startswith("firstx")
    assert ended.output.endswith("xlast\n")
    assert len(ended.output) < 4_000_000


@pytest.mark.ci
def test_endless_output_does_not_fill_the_memory() -> None:
    ended = after("import os\nwhile True: os.write(1, b'x' * 2**20); os.write(2, b'y' * 2**20)", 1.0)
    assert ended.status is None
    assert len(ended.output) + len(ended.errors) < 8_000_000


def test_the_deadline_is_common_to_all_programs() -> None:
    ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    begun = time.monotonic()
    programs = [started(ignoring) for _ in range(3)]
    ended = results([*programs, started("print('done')")], begun + 2.0)
    assert [each.status for each in ended] == [None, None, None, 0]
    # Each program could have another two seconds.
    assert ended[2].seconds - ended[0].seconds < 2.0


def test_the_time_of_waiting_for_a_core_does_not_count(tmp_path: Path) -> None:
    """A chosen delay, and then the measured one of programs that share a core."""
    spinning = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})\nwhile True: pass"
    first, second = started(spinning), started(spinning)
    try:
        deadline = time.monotonic() + 300
        while not (first.delay() and second.delay()):
            assert time.monotonic() < deadline
    finally:
        for program in (first, second):
            program.end()
            program.collect(None, 0.0)
    mark = tmp_path / "mark"
    program = started(f"import os\nwhile not os.path.exists({str(mark)!r}): pass")

    def delay() -> float:
        mark.touch()
        return 300.0

    program.delay = delay  # type: ignore[method-assign]
    assert program.result(time.monotonic()).status == 0


def test_the_time_of_waiting_for_a_core_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose threads take the cores from each other also waits for a core."""
    monkeypatch.setattr(lockstep.system.programs, "_MOST_DELAY", 0.0)
    program = started("import time; time.sleep(600)")
    program.delay = lambda: 300.0  # type: ignore[method-assign]
    assert program.result(time.monotonic()).status is None


def test_running_programs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.system.programs, "_REPORT_SECONDS", 0.0)
    reports: list[list[int]] = []
    hanging, ending = started("import time; time.sleep(600)"), started("import sys; sys.stdin.read()")

    def say(places: Sequence[int], seconds: float) -> None:
        reports.append(list(places))
        if reports[-1] == [0]:
            hanging.end()

    ended = results([hanging, ending], time.monotonic() + 300.0, say)
    assert ended[1].status == 0
    assert (reports[0], reports[-1]) == ([0, 1], [0])


@pytest.mark.parametrize(("number", "status"), [("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -9)])
def test_a_program_ends_with_its_parent(number: str, status: int) -> None:
    script = """
import os, sys, time
from lockstep.system.programs import ProbeProgram, ending_descendants
hangs = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
with ending_descendants():
    program = ProbeProgram.start([sys.executable, "-c", hangs], dict(os.environ))
    print(program._process.pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        left = os.pidfd_open(int(command.stdout.readline()))
        try:
            command.send_signal(signal.Signals[number])
            assert command.wait(300) == status
            assert select.select([left], [], [], 300)[0]
        finally:
            os.close(left)


def test_processes_in_other_sessions_are_ended() -> None:
    script = """
import os, sys, time
from lockstep.system.programs import ProbeProgram, ending_descendants
child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
leaves = (
    "import subprocess, sys\\n"
    f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True).poll()\\n"
    "import time; time.sleep(1)"
)
with ending_descendants():
    program = ProbeProgram.start([sys.executable, "-c", leaves], dict(os.environ))
    print(program.result(time.monotonic() + 300).output)
"""
    result = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=600, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.stdout), 0)


def test_an_exception_is_described_by_its_last_line() -> None:
    assert after("raise ValueError('broken')").how() == "exited with status 1: ValueError: broken"


def test_a_crash_is_described_by_its_signal() -> None:
    ended = after("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert ended.status == -11
    assert ended.how() == "was killed by SIGSEGV"


def test_a_signal_without_a_name_is_described_by_its_number() -> None:
    assert after("import os; os.kill(os.getpid(), 40)").how() == "was killed by signal 40"


def test_a_hanging_program_is_ended_with_its_children(tmp_path: Path) -> None:
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
    deadline = time.monotonic() + 300
    while not pids.exists():
        assert time.monotonic() < deadline
    child = os.pidfd_open(int(pids.read_text()))
    try:
        ended = program.result(time.monotonic())
        assert ended.status is None
        assert ended.output == "halfway\n"
        assert "was still running after" in ended.how()
        assert select.select([child], [], [], 300)[0]
    finally:
        os.close(child)
