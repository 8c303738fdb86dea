"""`lockstep key`."""

import datetime
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.transport.keys import JobKey

DAY = datetime.timedelta(days=1)


def command(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "lockstep", "key", *arguments]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(("options", "days"), [((), 30), (("--days", "1"), 1)])
def test_a_key_is_written_and_the_next_step_is_named(
    tmp_path: Path, options: tuple[str, ...], days: int
) -> None:
    start = datetime.datetime.now(datetime.UTC)
    done = command("job.key", *options, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    key = JobKey.read(tmp_path / "job.key")
    lives = datetime.datetime.fromtimestamp(key.expires, datetime.UTC) - start
    assert days * DAY - datetime.timedelta(seconds=1) <= lives <= days * DAY + datetime.timedelta(minutes=10)
    assert stat.S_IMODE((tmp_path / "job.key").stat().st_mode) == 0o600
    assert done.stdout == (
        f"job.key contains a key that expires on {key.expiry}; copy it to each host, readable only for you "
        "(mode 600), and set LOCKSTEP_KEY_FILE to its path there\n"
    )
    assert key.secret.hex() not in done.stdout


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "job.key").write_text("precious")
    done = command("job.key", folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    expected = "job.key exists; give the name of a new file, or delete this one first"
    assert done.stderr == f"lockstep: ConfigError: {expected}\n"
    assert (tmp_path / "job.key").read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("nix/job.key",), "ConfigError: the key file nix/job.key cannot be written: No such file"),
        (("job.key", "--days", "0"), "Invalid value for '--days'"),
        ((), "Missing argument 'FILE'"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lockstep: {why}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_not_utf_8_is_shown(tmp_path: Path) -> None:
    done = command("j\udcff.key", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("j\ufffd.key contains a key")
