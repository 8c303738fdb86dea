"""The program of a process, from the command line of its interpreter."""

import pytest

from lockstep.system.invocation import Invocation, parse


@pytest.mark.parametrize(
    ("original", "options", "command"),
    [
        ("python train.py", "", "train.py"),
        ("python train.py -m x -c", "", "train.py -m x -c"),
        ("python -u -Werror -X dev -Bs train.py a", "-u -W error -X dev -Bs", "train.py a"),
        (
            "python -uW error --check-hash-based-pycs never train.py",
            "-uW error --check-hash-based-pycs never",
            "train.py",
        ),
        ("python -m package.train -n 3", "", "-m package.train -n 3"),
        ("python -um package.train", "-u", "-m package.train"),
        ("python -mpackage.train x", "", "-m package.train x"),
    ],
)
def test_the_program_of_a_process(original: str, options: str, command: str) -> None:
    assert parse(original.split()) == Invocation(tuple(options.split()), tuple(command.split()))


@pytest.mark.parametrize(
    "original",
    ["python -c pass", "python -uc pass train.py", "python -", "python", "python -i", "python -m", ""],
)
def test_a_process_without_a_program(original: str) -> None:
    assert parse(original.split()) is None
