"""The command `lockstep`, started to run a function. The function's caller gets its errors.

    python -m lockstep.notebook.command CALLER INHERITED RESULT WORDS...

CALLER is the id of the process with which this one ends, or 0. INHERITED are descriptors for the workers,
with commas between them, and RESULT is a descriptor for errors. WORDS are the arguments of `lockstep`.
"""

import sys
from collections.abc import Sequence

import click

from lockstep.cli.main import cli
from lockstep.errors import ConfigError, LockstepError
from lockstep.functions.transport import Giver, ResultBox
from lockstep.system.prctl import die_with


def main(arguments: Sequence[str]) -> None:
    """Run the command. Its errors go to the caller instead of a result."""
    caller, inherited, result, *words = arguments
    if int(caller):
        die_with(int(caller))
    descriptors = tuple(map(int, filter(None, inherited.split(","))))
    try:
        cli(words, prog_name="lockstep", standalone_mode=False, obj=descriptors)
    except click.ClickException as error:
        refused: LockstepError = ConfigError(error.format_message())
    except LockstepError as error:
        refused = error
    ResultBox(int(result)).put(refused, Giver.COMMAND)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
