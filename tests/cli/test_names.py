"""The name of a file or an argument does not control the terminal, whichever command shows it."""

import sys
from pathlib import Path

import pytest

from lockstep.cli.main import main

NAME = "odd\x1b[2J\x1b]0;title\x07\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("report", f"runs/{NAME}", "-o", f"{NAME}.html"), 0),
        (("top", "--once", f"runs/{NAME}"), 0),
        (("runs",), 0),
        (("checkpoints", f"runs/{NAME}"), 0),
        (("trace", f"runs/{NAME}"), 2),
        (("rerun", f"runs/{NAME}"), 2),
        (("diff", f"runs/{NAME}", f"runs/{NAME}"), 2),
        *(((command, f"no{NAME}"), 2) for command in ("attach", "logs", "report", "run", "stop", "top")),
        (("scale", NAME, "2"), 2),
        ((NAME,), 2),
    ],
)
def test_no_command_writes_the_control_characters_of_a_name(
    arguments: tuple[str, ...],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / NAME
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    (folder / "worker-0.log").touch()
    monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
    ended = 0
    try:
        main()
    except SystemExit as end:
        ended = int(end.code or 0)
    output = "".join(capfd.readouterr())
    assert (ended, "\x1b" in output, "\x07" in output) == (status, False, False), output
    assert output
