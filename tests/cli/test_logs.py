"""`lockstep logs` on jobs that run, and on runs that have ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WRITES = """
print("begins", me, flush=True)
announce("worker")
os.read(os.open(os.environ["GO"], os.O_RDONLY), 1)
os.write(1, f"ends {me}".encode())
"""


def logs(folder: Path, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    """Start the command."""
    line = [sys.executable, "-m", "lockstep", "logs", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(line, cwd=folder, **(pipes | options))


def shown(folder: Path, *arguments: str) -> tuple[int, str, str]:
    out, err = logs(folder, *arguments).communicate(timeout=300)
    return 0 if not err else 2, out.decode(), err.decode()


def begin(lockstep: Any, request: pytest.FixtureRequest) -> tuple[Any, str, int]:
    """Start a job of two workers that wait; return it, its name, and the pipe whose end lets them go on."""
    os.mkfifo(lockstep.folder / "go")
    name = f"logs-{os.getpid()}-{request.node.name[:30]}"
    running = lockstep.start("-n", "2", lockstep.script(WRITES), run=name, GO=str(lockstep.folder / "go"))
    for pidfd in running.announced(2)["worker"]:
        os.close(pidfd)
    return running, name, os.open(lockstep.folder / "go", os.O_WRONLY)


def lines(process: "subprocess.Popen[bytes]", count: int) -> set[bytes]:
    assert process.stdout is not None
    return {process.stdout.readline() for _ in range(count)}


def test_a_running_job_is_followed_to_its_end(lockstep: Any, request: pytest.FixtureRequest) -> None:
    running, name, go = begin(lockstep, request)
    everything = logs(lockstep.folder, "-f", name)
    chosen = logs(lockstep.folder, "-f", "--worker", "1", "--grep", "^ends", name[:-1])
    assert lines(everything, 2) == {b"[worker 0] begins 0\n", b"[worker 1] begins 1\n"}
    # What is there already, without waiting for more.
    assert shown(lockstep.folder, name, "--worker", "1") == (0, "begins 1\n", "")
    assert shown(lockstep.folder, name, "--worker", "7") == (
        2,
        "",
        f"lockstep: ConfigError: {lockstep.folder / name} has no log of worker 7; it has those of workers 0 "
        "and 1\n",
    )
    os.close(go)
    assert running.end().status == 0
    # Without an end of their own, the last lines still get one each.
    assert everything.communicate(timeout=300) == (b"[worker 0] ends 0\n[worker 1] ends 1\n", b"")
    assert chosen.communicate(timeout=300) == (b"ends 1\n", b"")
    assert everything.returncode == chosen.returncode == 0
    # The run has ended: following it does not wait.
    expected = "[worker 0] begins 0\n[worker 0] ends 0\n[worker 1] begins 1\n[worker 1] ends 1\n"
    assert shown(lockstep.folder, "-f", name) == (0, expected, "")
    assert shown(lockstep.folder, f"{name}/") == (0, expected, "")


def test_following_ends_with_ctrl_c_and_with_its_reader(
    lockstep: Any, request: pytest.FixtureRequest
) -> None:
    running, name, go = begin(lockstep, request)
    interrupted, cut = (logs(lockstep.folder, "-f", name) for _ in range(2))
    lines(interrupted, 2)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.communicate(timeout=300) == (b"", b"\n")
    assert interrupted.returncode == 130
    lines(cut, 2)
    assert cut.stdout is not None
    assert cut.stderr is not None
    # Nothing is written from now on.
    cut.stdout.close()
    assert cut.wait(300) == 0
    assert cut.stderr.read() == b""
    cut.stderr.close()
    os.close(go)
    assert running.end().status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--grep", "(", "kept-logs"), "'(' is not a regular expression: missing ), unterminated subpattern"),
        (("--grep", "a{99999999999999}", "kept-logs"), "is not a regular expression: "),
        (("--worker", "-1", "kept-logs"), "Invalid value for '--worker'"),
        (("other",), "'other' is neither a running job nor the folder of a run, here or in runs; "),
        (("kept-logs",), "kept-logs has no logs of workers"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "kept-logs").mkdir()
    (tmp_path / "kept-logs" / "events.jsonl").touch()
    process = logs(tmp_path, *arguments)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err.count(b"\n")) == (2, b"", 1)
    assert err.decode().startswith("lockstep: ")
    assert message in err.decode()


def test_an_output_that_is_full_or_closed(tmp_path: Path) -> None:
    (tmp_path / "kept-logs").mkdir()
    (tmp_path / "kept-logs" / "events.jsonl").touch()
    (tmp_path / "kept-logs" / "worker-0.log").write_bytes(b"\x1b[1m\xff\n" * 100_000)
    command = f"{sys.executable} -m lockstep logs kept-logs"
    for output, status, err in (
        (">/dev/full", 2, b"lockstep: stdout cannot be written: No space left on device\n"),
        (">&-", 0, b""),
        ("| head -c 7 >head", 0, b""),
    ):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} {output}"],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (status, err)
    assert (tmp_path / "head").read_bytes() == b"\x1b[1m\xff\n\x1b"
