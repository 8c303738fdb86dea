"""`lockstep explain` finds classes and messages on the page of errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import errors
from lockstep.cli.explain import explanation
from lockstep.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("form", ["{}", "lockstep.errors.{}"])
def test_a_class_is_explained(name: str, form: str) -> None:
    shown = explanation(PAGE, form.format(name))
    assert shown.startswith(f"{name}\n\n")
    assert "\n## " not in shown
    assert shown == explanation(PAGE, name.lower())


@pytest.mark.parametrize(
    ("message", "error", "advice"),
    [
        (
            "worker 1: PeerLostError: parameter server 3 has ended; its log says why; "
            "no standby has its weights (train.py:7)",
            "PeerLostError",
            "keras.callbacks.BackupAndRestore",
        ),
        (
            "layer 'words' looks up row 12, but its table has 10 rows: negative ids",
            "DataError",
            "check the ids",
        ),
        ("lockstep: there is no job 'x9'", "ConfigError", "take a name of `lockstep list`"),
        ("OneDeviceStrategy trains one replica, but this job has 4", "ConfigError", "MirroredStrategy"),
        (
            "cannot connect to 192.168.7.1:99: Connection refused; tried again for 3 s",
            "UnreachableError",
            "firewalls",
        ),
    ],
)
def test_a_message_is_found_whatever_its_names_and_numbers(message: str, error: str, advice: str) -> None:
    shown = explanation(PAGE, message)
    assert shown.startswith(f"{error}: ")
    assert advice in shown


@pytest.mark.parametrize("message", ["xyz", "the worker", "this is not a message of Lockstep at all"])
def test_an_unknown_message_is_refused(message: str) -> None:
    with pytest.raises(ConfigError, match="no message like this is known"):
        explanation(PAGE, message)


def test_every_message_of_the_page_finds_itself() -> None:
    rows = [line.split("` | ") for line in PAGE.splitlines() if line.startswith("| `")]
    # The last one is of a program.
    rows = [row for row in rows if "MissingShard" not in row[0]]
    assert len(rows) > 50
    for message, advice in rows:
        shown = explanation(PAGE, message.removeprefix("| `"))
        assert message.removeprefix("| `") in shown or advice[:20] in shown


def test_the_command_lists_the_classes_and_refuses_in_one_line() -> None:
    command = [sys.executable, "-m", "lockstep", "explain"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()] == CLASSES
    refused = subprocess.run([*command, "no", "such", "thing"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
