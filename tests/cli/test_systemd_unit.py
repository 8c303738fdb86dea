"""`lockstep export systemd`: the service contains the command, and systemd understands it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.systemd_unit import quoted, unit
from lockstep.system.child_process import command_of

ESCAPED = {"n": "\n", "t": "\t"}


def read(text: str, *, variables: bool) -> list[str]:
    """Return the words of a list, as systemd.syntax(7) and systemd.service(5) describe them."""
    words: list[str] = []
    word, at, inside, open_word = "", 0, False, False
    while at < len(text):
        sign, following = text[at], text[at + 1 : at + 2]
        if sign == "\\":
            word += ESCAPED.get(following, following)
            at += 1
        elif sign == '"':
            inside, open_word = not inside, True
        elif sign == "%" or (sign == "$" and variables):
            # A specifier, or a variable.
            assert following == sign
            word += sign
            at += 1
        elif sign in " \t\n" and not inside:
            if word or open_word:
                words.append(word)
            word, open_word = "", False
        else:
            word += sign
        at += 1
    assert not inside
    return [*words, word] if word or open_word else words


def entry(text: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"))


@given(st.lists(words, min_size=1), words)
def test_words_and_variables_arrive(arguments: list[str], value: str) -> None:
    command = ["/usr/bin/python3", *arguments]
    text = unit("lockstep run a.py", Path("/home/me"), command, {"JAX_X": value}, 20.0)
    (started,), (variable,) = entry(text, "ExecStart"), entry(text, "Environment")
    assert read(started, variables=True) == command
    assert read(variable, variables=False) == [f"JAX_X={value}"]


def test_a_plain_word_stays_plain() -> None:
    assert [quoted(word) for word in ("--checkpoint", "a/b-1.py", "", "a b", "100%", ";")] == [
        *("--checkpoint", "a/b-1.py", '""', '"a b"', '"100%%"', '";"')
    ]


def export(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "lockstep", "export", "systemd", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_service_runs_the_command_where_it_was_made(tmp_path: Path) -> None:
    folder = tmp_path / "my 100% work"
    folder.mkdir()
    (folder / "train.py").touch()
    options = ("-n", "2", "--checkpoint", "saved", "--grace", "1m", "train.py", "--epochs", "3 $x")
    done = export(folder, *options, JAX_ENABLE_X64="1", KERAS_BACKEND="jax")
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout
    (started,) = entry(text, "ExecStart")
    assert read(started, variables=True) == [
        *command_of("lockstep", "run", "--workers", "2", "--checkpoint", "saved", "--grace", "1m", "--"),
        *("train.py", "--epochs", "3 $x"),
    ]
    assert entry(text, "WorkingDirectory") == [str(folder).replace("%", "%%")]
    assert entry(text, "TimeoutStopSec") == ["75"]
    assert entry(text, "SyslogIdentifier") == ["lockstep"]
    assert {"JAX_ENABLE_X64=1", "KERAS_BACKEND=jax"} <= set(entry(text, "Environment"))
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "train.service").write_text(text)
    (tmp_path / "runtime").mkdir(mode=0o700)
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(tmp_path / "train.service")],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "runtime")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "there is no script missing.py"),
        (("--keep", "2", "train.py"), "--keep needs --checkpoint DIR"),
        (("-n", "3", "--replicas", "2", "train.py"), "3 workers cannot share 2 replicas"),
        (("--hosts", "a,b", "train.py"), "No such option"),
    ],
)
def test_what_no_job_can_have_is_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "train.py").touch()
    done = export(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_what_a_service_lacks_is_noted(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    options = ("--notify", "env:HOOK", "--env", "A", "--env", "B=1", "--run-dir", "s3://bucket/b")
    done = export(tmp_path, *options, "train.py", A="2", HOOK="x")
    assert done.returncode == 0
    assert done.stderr == (
        "lockstep: without --checkpoint, the job starts over after a reboot, unless the script resumes by "
        "itself\n"
        "lockstep: the service does not have the variable of --env A and --notify env:HOOK and --run-dir "
        "s3://bucket/b: add a line EnvironmentFile= to it\n"
    )
    assert "HOOK=" not in done.stdout
    assert entry(done.stdout, "TimeoutStopSec") == ["95"], "the rest of the run folder has 60 s"
