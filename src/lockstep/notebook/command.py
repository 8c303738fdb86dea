"""The program that `lockstep.launch` starts: `lockstep run`, bound to the life of its caller.

    python -m lockstep.notebook.command CALLER CALL RESULT OPTIONS...

CALLER is a process id, CALL and RESULT are descriptors, and the options are those of `lockstep run`.
"""

import sys
from collections.abc import Sequence

import click

from lockstep.cli.main import cli
from lockstep.errors import ConfigError, LockstepError
from lockstep.notebook.transport import Giver, ResultBox
from lockstep.system.prctl import die_with


def main(arguments: Sequence[str]) -> None:
    """Run the command; its errors go to the caller instead of a result."""
    caller, call_file, result, *options = arguments
    die_with(int(caller))
    try:
        cli(
            ["run", *options, "-m", "lockstep.notebook.worker", call_file, result],
            prog_name="lockstep",
            standalone_mode=False,
            obj=(int(call_file), int(result)),
        )
    except click.ClickException as error:
        refused: LockstepError = ConfigError(error.format_message())
    except LockstepError as error:
        refused = error
    ResultBox(int(result)).put(refused, Giver.COMMAND)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
